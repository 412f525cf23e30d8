"""Tests of following the newest messages of a topic (its tail) over two broker groups of four queues each. A tail needs
few calls, is bounded, and counts every lost message.

The tests also describe all queues, with equally few calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from raymq.client.admin import messages as module
from raymq.client.admin.admin import Admin
from raymq.common.errors import InvalidArgumentError, ServiceNotAvailableError
from raymq.common.message import Message, MessageQueue
from raymq.common.protocol.route import BrokerData, QueueData, TopicRoute
from raymq.records.format.encode import encode_batch
from storage.message_store import MessageStore
from tests.support.stores.stores import small_settings

BROKERS = ("broker-a", "broker-b")


class Cluster:
    """Two stores in this process, and the Admin that reads them. `calls`: names of the stores that were called."""

    def __init__(self, stores: dict[str, MessageStore]) -> None:
        self.stores, self.calls = stores, []
        self.away: set[str] = set()
        data = {name: BrokerData("c", name, {0: f"storage-{name}-0"}) for name in BROKERS}
        route = TopicRoute("orders", data, tuple(QueueData(name, 4, 4, 6) for name in BROKERS))
        routes = SimpleNamespace(
            get=lambda topic: route, wait=lambda topic, timeout_s: route, invalidate=lambda topic: None
        )
        self.admin = Admin(routes, SimpleNamespace(get=self.storage))  # type: ignore[arg-type]  # fakes

    def storage(self, name: str) -> SimpleNamespace:
        broker_name = name.removeprefix("storage-").removesuffix("-0")

        def fetch(requests, max_bytes, wait_s, timeout_s):
            self.calls.append(broker_name)
            if broker_name in self.away:
                raise ServiceNotAvailableError("it is away")
            return self.stores[broker_name].fetch(requests, max_bytes=max_bytes, wait_s=wait_s)

        def bounds_of_queues(queues, timeout_s):
            self.calls.append(f"bounds {broker_name}")
            return [self.stores[broker_name].queues.bounds(*queue) for queue in queues]

        def stored_times(positions, timeout_s):
            self.calls.append(f"times {broker_name}")
            return self.stores[broker_name].queues.stored_times(positions)

        return SimpleNamespace(fetch=fetch, bounds_of_queues=bounds_of_queues, stored_times=stored_times)

    def put(self, broker_name: str, queue_id: int, *bodies: bytes) -> None:
        for body in bodies:
            batch = encode_batch([Message("orders", body)], queue_id, born_host=("127.0.0.1", 1),
                                 born_timestamp_ms=1, message_ids=[""])  # fmt: skip
            self.stores[broker_name].append([batch])


@pytest.fixture
def cluster(tmp_path, monkeypatch) -> Iterator[Cluster]:
    # With a timeout of zero, each call of `tail` asks a broker group only once.
    monkeypatch.setattr(module, "TAIL_TIMEOUT_S", 0.0)
    times = iter(range(1_700_000_000_000, 1_800_000_000_000, 1000))
    stores = {
        name: MessageStore.open(
            small_settings(tmp_path / name), broker_name=name, store_host=("127.0.0.1", port),
            clock_ms=lambda: next(times),
        )
        for port, name in enumerate(BROKERS)
    }  # fmt: skip
    yield Cluster(stores)
    for store in stores.values():
        store.close()


def bodies(messages) -> list[bytes]:
    return [message.body for message in messages]


def test_one_busy_queue_among_eight_may_take_the_whole_rate(cluster):
    cluster.put("broker-a", 2, b"before")
    at = cluster.admin.tail("orders")
    assert (at.messages, at.skipped, len(at.positions)) == ((), 0, 8)
    cluster.put("broker-a", 2, *(b"m%d" % number for number in range(5)))
    found = cluster.admin.tail("orders", at.positions, max_messages=5)
    assert bodies(found.messages) == [b"m%d" % number for number in range(5)]
    assert found.skipped == 0
    assert sorted(cluster.calls) == ["broker-a", "broker-a", "broker-b", "broker-b"]
    assert cluster.admin.tail("orders", found.positions).messages == ()


def test_messages_over_the_limit_are_skipped_and_counted(cluster):
    at = cluster.admin.tail("orders")
    for broker_name in BROKERS:
        cluster.put(broker_name, 0, *(b"%d" % number for number in range(7)))
    found = cluster.admin.tail("orders", at.positions, max_messages=4)
    assert len(found.messages) == 4
    assert found.skipped == 10
    assert found.positions[MessageQueue("orders", "broker-b", 0)] == 7
    after = cluster.admin.tail("orders", found.positions)
    assert (after.messages, after.skipped) == ((), 0)


def test_bytes_are_bounded(cluster, monkeypatch):
    monkeypatch.setattr(module, "TAIL_MAX_BYTES", 1000)
    at = cluster.admin.tail("orders")
    cluster.put("broker-a", 0, *(bytes(600) for _ in range(4)))
    found = cluster.admin.tail("orders", at.positions)
    assert len(found.messages) + found.skipped == 4
    assert 1 <= len(found.messages) <= 2


def test_a_broker_group_that_is_away_keeps_its_positions(cluster):
    at = cluster.admin.tail("orders")
    cluster.put("broker-a", 0, b"a")
    cluster.put("broker-b", 0, b"b")
    cluster.away.add("broker-b")
    found = cluster.admin.tail("orders", at.positions)
    assert bodies(found.messages) == [b"a"]
    cluster.away.clear()
    assert bodies(cluster.admin.tail("orders", found.positions).messages) == [b"b"]


def test_a_tail_that_nobody_answers_fails(cluster):
    at = cluster.admin.tail("orders")
    cluster.away.add("broker-b")
    with pytest.raises(ServiceNotAvailableError):
        cluster.admin.tail("orders")  # a live tail begins at the end offsets of all queues, so every broker must answer
    cluster.away.add("broker-a")
    with pytest.raises(ServiceNotAvailableError):
        cluster.admin.tail("orders", at.positions)
    with pytest.raises(InvalidArgumentError):
        cluster.admin.tail("orders", max_messages=0)


def test_positions_after_the_end_restart_at_the_end(cluster):
    cluster.put("broker-a", 0, b"a")
    at = cluster.admin.tail("orders")
    queue = MessageQueue("orders", "broker-a", 0)
    found = cluster.admin.tail("orders", {**at.positions, queue: 99})
    assert (found.messages, found.skipped, found.positions[queue]) == ((), 0, 1)


def test_all_queues_are_described_in_one_call_for_each_broker_group(cluster):
    cluster.put("broker-b", 3, b"first", b"second")
    described = {one.queue: one.messages for one in cluster.admin.describe_topic("orders")}
    queue = MessageQueue("orders", "broker-b", 3)
    assert len(described) == 8
    assert {one: count for one, count in described.items() if count} == {queue: 2}
    assert cluster.calls == ["bounds broker-a", "bounds broker-b"]
    since = cluster.admin.kept_since("orders")
    assert {one: at_ms for one, at_ms in since.items() if at_ms is not None} == {queue: 1_700_000_000_000}
    assert len(since) == 8
    assert cluster.calls[2:] == ["bounds broker-a", "bounds broker-b", "times broker-b"]
