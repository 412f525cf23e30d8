"""Base of the administration classes: calls to brokers and stores, which are retried while these servers
restart."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final

from raymq.client.consumer.repair_wait import wait_at_masters
from raymq.common.closing import OfProcess
from raymq.common.errors import GroupNotExistError, InvalidArgumentError, RaymqError, not_found
from raymq.common.message import MessageQueue
from raymq.common.namespaces import nearest_names
from raymq.common.protocol.store import QueueBounds
from raymq.common.retry import persist_until
from raymq.remoting.broker_client import broker_client
from raymq.remoting.route_cache import RouteCache
from raymq.remoting.storage_clients import StorageClients, call_master

ADMIN_TIMEOUT_S: Final = 20.0
"""Timeout in seconds of one step of an administration call, including retries while the called server restarts."""
ADMIN_BROKER_CALL_TIMEOUT_S: Final = 15.0
"""Timeout in seconds of one call to a broker for administration. The call is retried until ADMIN_TIMEOUT_S has
passed."""
ADMIN_SHORT_CALL_TIMEOUT_S: Final = 5.0
"""Timeout in seconds of one administration call that writes nothing to disk."""


class AdminBase(OfProcess):
    """Base of all administration classes: calls brokers and stores, and retries the calls."""

    def __init__(self, routes: RouteCache, storages: StorageClients) -> None:
        self._routes = routes
        self._storages = storages
        self._repairs = wait_at_masters(routes, storages)
        """The damaged records that this object's calls have met."""

    def _queue_bounds(self, queue: MessageQueue) -> QueueBounds:
        """Return the offset range that a queue holds."""
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
        """Return the names of all live broker groups. Waits for NameServers that have just restarted, because their
        first answers may miss brokers, and the caller would skip these brokers."""
        return list(persist_until(time.monotonic() + ADMIN_TIMEOUT_S, lambda left_s: self._routes.all_brokers()))

    def _group_not_exist(self, group: str) -> GroupNotExistError:
        """Return the error for a group that does not exist on any broker. The error lists existing groups with similar
        names that the user may see, unless a broker does not return its groups."""
        groups = set[str]()
        with suppress(RaymqError):
            for broker_name in self._broker_names():
                groups.update(self._call_broker(broker_name, "groups"))
        return GroupNotExistError(group, nearest_names(group, sorted(groups)))

    def _call_broker(self, broker_name: str, method: str, *args: Any) -> Any:
        """Call a method of a broker, and retry while the broker restarts. The method must be safe to repeat."""
        broker = broker_client(broker_name)
        return persist_until(
            time.monotonic() + ADMIN_TIMEOUT_S,
            lambda left_s: broker.call(method, *args, timeout_s=min(left_s, ADMIN_BROKER_CALL_TIMEOUT_S)),
        )


def unknown_broker(name: str, known: Iterable[str]) -> InvalidArgumentError:
    """Return the error for the name of a broker group that does not exist. It names the nearest broker group, and all
    broker groups that run."""
    groups = sorted(known)
    advice = f"choose one of the broker groups that run: {', '.join(groups)}" if groups else "see `raymq status`"
    return InvalidArgumentError(
        not_found(f"broker group {name[:200]!r} does not exist", nearest_names(name, groups), advice)
    )
