"""Tests of the calls that the planner of a read makes to the cluster: one call to each broker group, repeated if
another replica has become master."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from raymq.client.scan import queue_bounds
from raymq.client.scan.queue_bounds import ClusterQueues
from raymq.client.scan.ranges import OffsetRange
from raymq.common.errors import NotMasterError
from raymq.common.message import MessageQueue
from raymq.common.protocol.store import QueueBounds, QueueSpan
from tests.support.clients.fakes import FakeRoutes, topic_route


class Storage:
    """Fake storage actor that computes its results from the numbers in the names of queues, and records the
    calls."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: list[tuple[str, int]] = []
        self.failures: list[Exception] = []

    def _called(self, method: str, items: int) -> None:
        if self.failures:
            raise self.failures.pop(0)
        self.calls.append((method, items))

    def bounds_of_queues(self, queues: list[tuple[str, int]], timeout_s: float) -> list[QueueBounds]:
        self._called("bounds", len(queues))
        return [QueueBounds(queue_id, len(topic), 0) for topic, queue_id in queues]

    def bytes_of_spans(self, spans: list[QueueSpan], timeout_s: float) -> list[list[int]]:
        self._called("bytes", len(spans))
        return [[span.queue_id, span.end_offset - span.start_offset] for span in spans]

    def offset_by_time(self, topic: str, queue_id: int, timestamp_ms: int, timeout_s: float) -> int:
        return timestamp_ms // 1000 + queue_id


@pytest.fixture
def storages() -> dict[str, Storage]:
    return {name: Storage(name) for name in ("storage-a-0", "storage-b-0")}


@pytest.fixture
def cluster(storages: dict[str, Storage]) -> ClusterQueues:
    routes: Any = FakeRoutes(topic_route("orders", b=1, a=2), topic_route("payments", a=1))
    clients: Any = SimpleNamespace(get=lambda name: storages[name])
    return ClusterQueues(routes, clients)


ORDERS = [MessageQueue("orders", "b", 0), MessageQueue("orders", "a", 0), MessageQueue("orders", "a", 1)]
ALL = [*ORDERS, MessageQueue("payments", "a", 0)]


def test_the_bounds_of_all_queues_take_one_call_to_each_broker_group(
    cluster: ClusterQueues, storages: dict[str, Storage]
) -> None:
    assert sorted(cluster.queues("orders")) == sorted(ORDERS)
    found = cluster.bounds(ALL)
    assert found == {queue: QueueBounds(queue.queue_id, len(queue.topic), 0) for queue in ALL}
    assert [storage.calls for storage in storages.values()] == [[("bounds", 3)], [("bounds", 1)]]


def test_a_broker_group_of_the_layout_that_the_route_lacks_is_absent(storages: dict[str, Storage]) -> None:
    routes: Any = FakeRoutes(replace(topic_route("orders", a=2), layout="a:2;b:1"), topic_route("payments", a=1))
    cluster = ClusterQueues(routes, Any)
    assert cluster.absent_brokers("orders") == ["b"]
    assert cluster.absent_brokers("payments") == []


def test_so_do_the_bytes_of_all_ranges_which_come_in_order(
    cluster: ClusterQueues, storages: dict[str, Storage]
) -> None:
    ranges = [
        OffsetRange(queue.topic, queue.broker_name, queue.queue_id, 5, 5 + number)
        for number, queue in enumerate(ALL, start=1)
    ]
    assert cluster.range_bytes(ranges) == [[0, 1], [0, 2], [1, 3], [0, 4]]
    assert [storage.calls for storage in storages.values()] == [[("bytes", 3)], [("bytes", 1)]]


def test_a_store_that_leads_no_more_is_asked_again_by_a_new_route(
    cluster: ClusterQueues, storages: dict[str, Storage]
) -> None:
    storages["storage-a-0"].failures = [NotMasterError("a", 2)]
    assert len(cluster.bounds(ALL)) == 4
    assert storages["storage-a-0"].calls == [("bounds", 3)]


def test_times_are_looked_up_in_each_queue(cluster: ClusterQueues) -> None:
    assert cluster.offsets_by_time({ALL[0]: 7000, ALL[2]: 9000}) == {ALL[0]: 7, ALL[2]: 10}


def test_committed_offsets_are_the_groups(cluster: ClusterQueues, monkeypatch: pytest.MonkeyPatch) -> None:
    class Offsets:
        def __init__(self, group: str) -> None:
            self.group = group

        def committed_offsets(self, queues: Any, timeout_s: float) -> dict[MessageQueue, int]:
            return {queues[0]: len(self.group)}

    monkeypatch.setattr(queue_bounds, "GroupOffsets", Offsets)
    assert cluster.committed_offsets("billing", ALL) == {ALL[0]: 7}
