"""Administration: calls to brokers and stores, repeated while these restart."""

from __future__ import annotations

import time
from typing import Any, Final

from raymq.common.closing import OfProcess
from raymq.common.message import MessageQueue
from raymq.common.protocol.store import QueueBounds
from raymq.common.retry import persist_until
from raymq.remoting.broker_client import broker_client
from raymq.remoting.route_cache import RouteCache
from raymq.remoting.storage_clients import StorageClients, call_master

ADMIN_TIMEOUT_S: Final = 20.0
"""Bounds a step of administration, over the restart of the server that it calls."""
ADMIN_BROKER_CALL_TIMEOUT_S: Final = 15.0
"""Bounds one call to a broker, which is repeated until ADMIN_TIMEOUT_S is over."""
ADMIN_SHORT_CALL_TIMEOUT_S: Final = 5.0
"""The time limit in s of a call that writes nothing to a disk."""


class AdminBase(OfProcess):
    """The calls that are safe to repeat, which all parts of the admin use."""

    def __init__(self, routes: RouteCache, storages: StorageClients) -> None:
        self._routes = routes
        self._storages = storages

    def _queue_bounds(self, queue: MessageQueue) -> QueueBounds:
        """The offsets that a queue holds."""
        return call_master(
            self._routes,
            self._storages,
            queue,
            ADMIN_TIMEOUT_S,
            lambda storage, left_s: storage.queue_bounds(
                queue.topic, queue.queue_id, min(left_s, ADMIN_SHORT_CALL_TIMEOUT_S)
            ),
        )

    def _broker_names(self) -> list[str]:
        """Every live broker group. NameServers that were just restarted are waited for: a broker that is missing in
        this answer would be left out for good."""
        return list(persist_until(time.monotonic() + ADMIN_TIMEOUT_S, lambda left_s: self._routes.all_brokers()))

    def _call_broker(self, broker_name: str, method: str, *args: Any) -> Any:
        """Call a method of a broker, again while the broker restarts. Only for methods that are safe to repeat."""
        broker = broker_client(broker_name)
        return persist_until(
            time.monotonic() + ADMIN_TIMEOUT_S,
            lambda left_s: broker.call(method, *args, timeout_s=min(left_s, ADMIN_BROKER_CALL_TIMEOUT_S)),
        )
