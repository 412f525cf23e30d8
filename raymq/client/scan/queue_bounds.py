"""ClusterQueues reads the topics, queues and offsets that the plan of a scan needs, from brokers and stores.

One call to each broker group returns the bounds of all queues of the group, and another call returns the bytes of all
its ranges. A lookup by time needs one call for each queue.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, TypeVar

from raymq.client.consumer.group_offsets import GroupOffsets
from raymq.client.scan.ranges import Creations, OffsetRange, ScanSource
from raymq.common.message import MessageQueue
from raymq.common.names import is_internal_topic
from raymq.common.namespaces import NO_NAMESPACE, Namespace
from raymq.common.protocol.store import QueueBounds, QueueSpan
from raymq.common.retry import persist_until
from raymq.remoting.master_locator import RouteSource
from raymq.remoting.route_cache import RouteCache
from raymq.remoting.storage_client import StorageClient
from raymq.remoting.storage_clients import StorageClients, call_master

BOUNDS_CALL_TIMEOUT_S: Final = 5.0
BOUNDS_TIMEOUT_S: Final = 20.0
"""Timeout in seconds for reading the bounds of a broker group's queues. The timeout allows for a restart of the group's
storage actor."""

T = TypeVar("T")
K = TypeVar("K")


class ClusterQueues(ScanSource):
    """The topics and queues of the cluster that `routes` and `storages` connect to. If a server restarts, calls are
    retried for up to BOUNDS_TIMEOUT_S. After that they raise ServiceNotAvailableError or RequestTimeoutError."""

    def __init__(self, routes: RouteCache, storages: StorageClients, names: Namespace = NO_NAMESPACE) -> None:
        """`names`: the namespace. Arguments and results contain the names of topics, groups and queues without the
        namespace's prefix."""
        self._routes, self._storages, self._names = routes, storages, names

    def topics(self) -> Sequence[str]:
        deadline_s = time.monotonic() + BOUNDS_TIMEOUT_S
        stored = persist_until(deadline_s, lambda left_s: self._routes.topics())
        return [self._names.unwrap(name) for name in stored if not is_internal_topic(name) and self._names.has(name)]

    def queues(self, topic: str) -> Sequence[MessageQueue]:
        stored = self._names.wrap(topic)
        # ask for the topic's route again, because queues may have been added since it was cached
        self._routes.invalidate(stored)
        return self._names.shown_queues(self._routes.wait(stored, BOUNDS_TIMEOUT_S).subscribe_queues)

    def absent_brokers(self, topic: str) -> Sequence[str]:
        """Return the names of the broker groups that hold queues of `topic` according to its layout, but that the
        current route lacks. Empty if the route has no layout. Raises ServiceNotAvailableError or RequestTimeoutError if
        no NameServer answers."""
        stored = self._names.wrap(topic)
        self._routes.invalidate(stored)
        route = self._routes.wait(stored, BOUNDS_TIMEOUT_S)
        return sorted(route.queue_counts().keys() - {data.broker_name for data in route.queues})

    def creations(self, topics: Iterable[str]) -> Creations:
        """Return the creation ids of topics (raymq.common.protocol.route.TopicConfig) by topic and broker group, from
        the current routes of one NameServer. Topics without a route are omitted. Raises ServiceNotAvailableError or
        RequestTimeoutError if no NameServer answers."""
        stored = {self._names.wrap(topic): topic for topic in topics}
        return {
            stored[name]: {data.broker_name: data.creation_id for data in route.queues}
            for name, route in self._routes.read(list(stored)).items()
        }

    def bounds(self, queues: Sequence[MessageQueue]) -> Mapping[MessageQueue, QueueBounds]:
        def ask(storage: StorageClient, some: list[MessageQueue], timeout_s: float) -> list[QueueBounds]:
            return storage.bounds_of_queues([(self._names.wrap(one.topic), one.queue_id) for one in some], timeout_s)

        return dict(zip(queues, self._ask_masters(queues, lambda queue: queue, ask), strict=True))

    def range_bytes(self, ranges: Sequence[OffsetRange]) -> Sequence[Sequence[int]]:
        def ask(storage: StorageClient, some: list[OffsetRange], timeout_s: float) -> list[list[int]]:
            spans = [
                QueueSpan(self._names.wrap(one.topic), one.queue_id, one.start_offset, one.end_offset) for one in some
            ]
            return storage.bytes_of_spans(spans, timeout_s)

        return self._ask_masters(ranges, lambda one: one.queue, ask)

    def offsets_by_time(self, times: Mapping[MessageQueue, int]) -> Mapping[MessageQueue, int]:
        def ask(storage: StorageClient, some: list[MessageQueue], timeout_s: float) -> list[int]:
            return [
                storage.offset_by_time(self._names.wrap(one.topic), one.queue_id, times[one], timeout_s) for one in some
            ]

        queues = sorted(times)
        return dict(zip(queues, self._ask_masters(queues, lambda queue: queue, ask), strict=True))

    def committed_offsets(self, group: str, queues: Sequence[MessageQueue]) -> Mapping[MessageQueue, int]:
        stored = {self._names.queue(queue): queue for queue in queues}
        found = GroupOffsets(self._names.wrap(group)).committed_offsets(list(stored), BOUNDS_TIMEOUT_S)
        return {stored[queue]: offset for queue, offset in found.items()}

    def _ask_masters(
        self,
        items: Sequence[K],
        queue_of: Callable[[K], MessageQueue],
        ask: Callable[[StorageClient, list[K], float], Sequence[T]],
    ) -> list[T]:
        """Return the stores' answers for `items`, in the order of `items`. The master of each broker group is called
        once, with all items of the group's queues."""
        by_broker: dict[str, list[int]] = defaultdict(list)
        for index, item in enumerate(items):
            by_broker[queue_of(item).broker_name].append(index)
        answers: dict[int, T] = {}
        for indices in by_broker.values():
            some = [items[index] for index in indices]

            def call(storage: StorageClient, left_s: float, some: list[K] = some) -> Sequence[T]:
                return ask(storage, some, min(left_s, BOUNDS_CALL_TIMEOUT_S))

            queue = self._names.queue(queue_of(some[0]))
            found = call_master(self._routes, self._storages, queue, BOUNDS_TIMEOUT_S, call)
            answers |= zip(indices, found, strict=True)
        return [answers[index] for index in range(len(items))]


def bounds_of(routes: RouteSource, storages: StorageClients, queue: MessageQueue) -> QueueBounds:
    """Return the bounds of the offsets that can be read from a queue now. Calls the master of the queue's
    broker group."""
    return call_master(
        routes,
        storages,
        queue,
        BOUNDS_TIMEOUT_S,
        lambda storage, left_s: storage.queue_bounds(queue.topic, queue.queue_id, min(left_s, BOUNDS_CALL_TIMEOUT_S)),
    )
