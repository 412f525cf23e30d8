"""The queues of a topic and the offsets they hold, asked of the cluster, as the plan of a scan needs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from raymq.message import MessageQueue
from raymq.protocol.store import QueueBounds
from raymq.remoting.master_locator import RouteSource
from raymq.remoting.route_cache import RouteCache
from raymq.remoting.storage_clients import StorageClients, call_master
from raymq.scan.ranges import QueueBoundsSource

BOUNDS_CALL_TIMEOUT_S: Final = 5.0
BOUNDS_TIMEOUT_S: Final = 20.0
"""The timeout for reading a queue's bounds, over a restart of its storage actor."""


class ClusterQueues(QueueBoundsSource):
    """The queues and bounds of the cluster that `routes` and `storages` connect to."""

    def __init__(self, routes: RouteCache, storages: StorageClients) -> None:
        self._routes, self._storages = routes, storages

    def queues(self, topic: str) -> Sequence[MessageQueue]:
        self._routes.invalidate(topic)  # queues may have been added a moment ago
        return self._routes.wait(topic, BOUNDS_TIMEOUT_S).subscribe_queues

    def bounds(self, queue: MessageQueue) -> QueueBounds:
        return bounds_of(self._routes, self._storages, queue)


def bounds_of(routes: RouteSource, storages: StorageClients, queue: MessageQueue) -> QueueBounds:
    """The offsets that can be read from a queue now, asked of the storage actor that leads its broker group."""
    return call_master(
        routes,
        storages,
        queue,
        BOUNDS_TIMEOUT_S,
        lambda storage, left_s: storage.queue_bounds(queue.topic, queue.queue_id, min(left_s, BOUNDS_CALL_TIMEOUT_S)),
    )
