"""Tests of how a streaming query accesses its cluster: it finds queues, tolerates broker groups that do not answer, and
commits offsets for a group."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from raydp_jobs.stream import cluster as stream_cluster
from raydp_jobs.stream.cluster import (
    COMMIT_PAUSE_S,
    DELETED_AFTER_S,
    DISCOVERY_INTERVAL_S,
    GroupCommits,
    TopicChoice,
    TopicCluster,
)
from raymq.client.scan.offsets import EARLIEST, LATEST
from raymq.common.errors import InvalidArgumentError, ServiceNotAvailableError, TopicNotExistError
from raymq.common.message import MessageQueue
from raymq.common.namespaces import NO_NAMESPACE
from raymq.common.protocol.group import CommitAnswer, OffsetCommit, QueueOffset
from raymq.common.protocol.store import QueueBounds
from tests.support.clients.fakes import main_thread_has_finished
from tests.support.clients.scan_source import T0_MS, Queues
from tests.support.history.waiting import eventually

A0, B0 = MessageQueue("orders", "a", 0), MessageQueue("orders", "b", 0)
PAID = MessageQueue("payments", "a", 0)


class Cluster(Queues):
    """Fake cluster: each topic has one queue of ten messages in each of the broker groups a and b.

    `fails`: broker groups that raise an error. `hangs`: broker groups that do not answer until the event is set.
    """

    def __init__(self, *topics: str) -> None:
        super().__init__({("a", 0): (0, 10), ("b", 0): (0, 10)}, topics=topics)
        self.fails: set[str] = set()
        self.hangs: dict[str, threading.Event] = {}

    def set_topics(self, *topics: str) -> None:
        self._topics = topics

    def bounds(self, queues: Sequence[MessageQueue]) -> Mapping[MessageQueue, QueueBounds]:
        for queue in queues:
            if queue.broker_name in self.hangs:
                assert self.hangs[queue.broker_name].wait(60)
            if queue.broker_name in self.fails:
                raise ServiceNotAvailableError(f"{queue.broker_name} is away")
        return super().bounds(queues)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class NoClient:
    names = NO_NAMESPACE
    routes = storages = None


def joined(monkeypatch: pytest.MonkeyPatch, cluster: Cluster, choice: TopicChoice, **starting: Any) -> TopicCluster:
    """Return a TopicCluster on the fake `cluster`. The test sets the TopicCluster's clock through the attribute
    `_clock`."""
    monkeypatch.setattr(stream_cluster, "ClusterQueues", lambda routes, storages, names: cluster)
    monkeypatch.setattr(stream_cluster, "ANSWER_TIMEOUT_S", 0.05)
    client: Any = NoClient()
    return TopicCluster(choice, starting, client=client, clock=Clock())


def later(topics: TopicCluster, seconds: float) -> None:
    """Advance the clock by `seconds`, and run the search for new queues that is then due."""
    clock: Any = topics._clock
    clock.now_s += seconds
    topics.queues()
    eventually(lambda: topics._search is None or topics._search.done(), "the search for queues")
    topics.queues()


def test_new_topics_of_a_pattern_are_found_and_deleted_ones_are_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster("orders", "logs")
    topics = joined(monkeypatch, cluster, TopicChoice(pattern="orders|pay.*"))
    assert topics.queues() == [A0, B0]
    cluster.set_topics("orders", "logs", "payments")
    assert topics.queues() == [A0, B0]
    later(topics, DISCOVERY_INTERVAL_S)
    assert PAID in topics.queues()
    assert topics.deleted([PAID]) == []
    cluster.set_topics("orders")
    later(topics, DISCOVERY_INTERVAL_S)
    assert topics.deleted([PAID]) == []
    later(topics, DELETED_AFTER_S)
    assert topics.deleted([A0, PAID]) == [PAID]
    cluster.set_topics("orders", "payments")
    later(topics, DISCOVERY_INTERVAL_S)
    assert topics.deleted([PAID]) == []
    assert topics.deleted([MessageQueue("logs", "a", 0)]) == [MessageQueue("logs", "a", 0)]


def test_queues_and_bounds_are_found_after_the_main_thread_has_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster("orders")
    topics = joined(monkeypatch, cluster, TopicChoice(pattern="orders|pay.*"))
    with main_thread_has_finished():
        assert topics.queues() == [A0, B0]
        cluster.set_topics("orders", "payments")
        later(topics, DISCOVERY_INTERVAL_S)
        assert PAID in topics.queues()
        assert topics.bounds([A0, B0], all_of_them=True)[A0].max_offset == 10


def test_a_pattern_may_match_nothing_yet_and_a_name_must_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster("logs")
    assert joined(monkeypatch, cluster, TopicChoice(pattern="orders.*")).queues() == []
    with pytest.raises(TopicNotExistError):
        joined(monkeypatch, cluster, TopicChoice(["logs", "orders"])).queues()
    with pytest.raises(InvalidArgumentError, match="exactly one"):
        joined(monkeypatch, cluster, TopicChoice("logs", "orders.*")).queues()


def test_a_broker_group_that_hangs_or_fails_delays_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster("orders")
    topics = joined(monkeypatch, cluster, TopicChoice("orders"))
    answer = cluster.hangs["b"] = threading.Event()
    for _ in range(3):
        assert list(topics.bounds([A0, B0], all_of_them=False)) == [A0]
    cluster.hangs.clear()
    answer.set()
    eventually(lambda: B0 in topics.bounds([A0, B0], all_of_them=False), "the late answer")
    cluster.fails.add("a")
    assert list(topics.bounds([A0, B0], all_of_them=False)) == [B0]
    with pytest.raises(ServiceNotAvailableError):
        topics.bounds([A0, B0], all_of_them=True)
    cluster.fails.clear()
    assert list(topics.bounds([A0, B0], all_of_them=True)) == [A0, B0]


@pytest.mark.parametrize(
    ("starting", "expected"),
    [
        ({}, {A0: LATEST, B0: LATEST}),
        ({"starting_offsets": "earliest"}, {A0: EARLIEST, B0: EARLIEST}),
        ({"starting_offsets": {"a": {"0": 3}, "b": {"0": -1}}}, {A0: 3, B0: LATEST}),
        ({"starting_timestamp": T0_MS + 4_000}, {A0: 4, B0: 4}),
        ({"starting_timestamp": T0_MS + 99_000, "starting_offsets_by_timestamp_strategy": "latest"}, {A0: 10, B0: 10}),
        ({"starting_offsets": "group:billing"}, {A0: LATEST, B0: LATEST}),
    ],
)
def test_a_new_query_begins_at_the_offsets_of_its_options(
    monkeypatch: pytest.MonkeyPatch, starting: dict[str, Any], expected: dict[MessageQueue, int]
) -> None:
    topics = joined(monkeypatch, Cluster("orders"), TopicChoice("orders"), **starting)
    assert topics.starts(topics.queues()) == expected


def test_a_start_that_no_message_is_as_late_as_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    topics = joined(monkeypatch, Cluster("orders"), TopicChoice("orders"), starting_timestamp=T0_MS + 99_000)
    with pytest.raises(InvalidArgumentError, match="starting_timestamp"):
        topics.starts(topics.queues())


class FakeGroup:
    """Fake of a group's committed offsets. `down`: names of the brokers that do not answer."""

    def __init__(self, group: str) -> None:
        self.group, self.down = group, False
        self.known: set[str] = set()
        self.offsets: dict[MessageQueue, QueueOffset] = {}

    def ensure_group(self, broker_name: str, timeout_s: float) -> None:
        if self.down:
            raise ServiceNotAvailableError("the broker is away")
        self.known.add(broker_name)

    def start_offsets(self, generations: Mapping[MessageQueue, int], query: Any, timeout_s: float) -> Any:
        assert {queue.broker_name for queue in generations} <= self.known
        return {queue: self.offsets.setdefault(queue, QueueOffset(0)) for queue in generations}

    def commit_offsets(self, commits: Mapping[MessageQueue, OffsetCommit], timeout_s: float) -> CommitAnswer:
        if self.down:
            raise ServiceNotAvailableError("the broker is away")
        reset = {}
        for queue, commit in commits.items():
            version = self.offsets[queue].reset_version
            if commit.reset_version < version:
                reset[queue] = self.offsets[queue]
            else:
                assert commit.queue_offset is not None
                self.offsets[queue] = QueueOffset(commit.queue_offset, version)
        return CommitAnswer(reset)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> FakeGroup:
    fake = FakeGroup("billing")
    monkeypatch.setattr(stream_cluster, "GroupOffsets", lambda name: fake)
    return fake


def test_a_group_is_made_and_has_the_querys_offsets_also_after_a_reset(group: FakeGroup) -> None:
    commits = GroupCommits("billing")
    assert commits.commit({A0: 5, B0: 7})
    assert commits.commit({A0: 6, B0: 7, PAID: 1})
    assert {queue: one.queue_offset for queue, one in group.offsets.items()} == {A0: 6, B0: 7, PAID: 1}
    group.offsets[A0] = QueueOffset(0, 1)
    assert commits.commit({A0: 8, B0: 7, PAID: 1})
    assert group.offsets[A0] == QueueOffset(8, 1)


def test_a_commit_that_fails_is_no_error_and_is_not_tried_again_at_once(group: FakeGroup) -> None:
    clock = Clock()
    commits = GroupCommits("billing", clock)
    group.down = True
    assert not commits.commit({A0: 5})
    group.down = False
    assert not commits.commit({A0: 5})
    clock.now_s += COMMIT_PAUSE_S
    assert commits.commit({A0: 5})
    assert group.offsets == {A0: QueueOffset(5)}
