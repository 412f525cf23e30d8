"""What all of administration needs: brokers and stores that may be restarting."""

from __future__ import annotations

import time
from typing import Any, Final

from raymq.message import MessageQueue
from raymq.protocol.store import QueueBounds
from raymq.remoting.actor_ref import ActorRef
from raymq.remoting.route_cache import RouteCache
from raymq.remoting.storage_clients import StorageClients, call_master
from raymq.retry import persist_until

ADMIN_TIMEOUT_S: Final = 20.0


class AdminBase:
    """Calls that are safe to repeat, over restarts."""

    def __init__(self, routes: RouteCache, storages: StorageClients) -> None:
        self._routes = routes
        self._storages = storages

    def _bounds(self, queue: MessageQueue) -> QueueBounds:
        return call_master(
            self._routes,
            self._storages,
            queue,
            ADMIN_TIMEOUT_S,
            lambda storage, left_s: storage.queue_bounds(queue.topic, queue.queue_id, min(left_s, 5.0)),
        )

    def _broker_names(self) -> list[str]:
        """Every live broker group, over a restart of the NameServers: what was left out would be left out for good."""
        return list(persist_until(time.monotonic() + ADMIN_TIMEOUT_S, lambda left_s: self._routes.all_brokers()))

    def _persist(self, broker_name: str, method: str, *args: Any) -> Any:
        """A broker call that is safe to repeat, over a restart of the broker."""
        broker = ActorRef(broker_name)
        return persist_until(
            time.monotonic() + ADMIN_TIMEOUT_S, lambda left_s: broker.call(method, *args, timeout_s=min(left_s, 15.0))
        )
