"""The pull consumer against a group and a store of its own."""

from __future__ import annotations

import os
import pickle
import threading
from types import SimpleNamespace

import pytest

from raymq import fetcher
from raymq import pull_consumer as module
from raymq.errors import (
    ClientStateError,
    IllegalNameError,
    InvalidArgumentError,
    OffsetOutOfRangeError,
    ServiceNotAvailableError,
    TopicNotExistError,
)
from raymq.group_info import StartOffsetQuery
from raymq.membership import GroupAssignment
from raymq.message import MessageQueue, PullStatus
from raymq.pull_consumer import PullConsumer
from raymq.store_api import FetchResult
from tests.support.fakes import WAIT_S, FakeRoutes, topic_route
from tests.support.stores import make_batch, open_store
from tests.support.waiting import eventually

Q0, Q1 = MessageQueue("orders", "a", 0), MessageQueue("orders", "a", 1)
AWAY = ServiceNotAvailableError("restarting")


class Group:
    """The group's Rebalance actor and its offsets at the broker, as one member sees them."""

    def __init__(self) -> None:
        self.granted: set[MessageQueue] = {Q0, Q1}
        self.heartbeats: list = []
        self.committed: dict[MessageQueue, int] = {}
        self.commits: list[dict[MessageQueue, int]] = []
        self.failure: Exception | None = None
        self.commit_failure: Exception | None = None
        self.start_failures: list[Exception] = []

    # RebalanceClient

    def heartbeat(self, heartbeat) -> GroupAssignment:
        self.heartbeats.append(heartbeat)
        if self.failure is not None:
            raise self.failure
        return GroupAssignment(1, frozenset(self.granted), 1)

    # GroupOffsets

    def ensure_group(self, broker_name, timeout_s=20.0) -> None:
        pass

    def start_offset(self, queue, query, timeout_s=20.0) -> int:
        if self.start_failures:
            raise self.start_failures.pop()
        return self.committed.get(queue, 0)

    def commit(self, offsets, timeout_s=20.0) -> None:
        if self.commit_failure is not None:
            raise self.commit_failure
        self.commits.append(dict(offsets))
        self.committed.update(offsets)

    def holds(self, *queues: MessageQueue) -> None:
        """Wait until the member says that it holds these."""
        count = len(self.heartbeats)
        eventually(
            lambda: any(beat.holding == frozenset(queues) for beat in self.heartbeats[count:]),
            f"holding {queues}",
            WAIT_S,
        )


@pytest.fixture
def group(monkeypatch):
    group = Group()
    monkeypatch.setattr(module, "RebalanceClient", lambda name, routes: group)
    monkeypatch.setattr(module, "GroupOffsets", lambda name: group)
    monkeypatch.setattr(module, "HEARTBEAT_INTERVAL_S", 0.005)
    monkeypatch.setattr(module, "AUTO_COMMIT_INTERVAL_S", 0.0)
    monkeypatch.setattr(fetcher, "LONG_POLL_S", 0.02)
    return group


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: None)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    store = open_store(tmp_path / "store")
    store.append([make_batch([b"%d" % number for number in range(5)])])
    yield store
    store.close()


@pytest.fixture
def consume(group, store):
    consumers = []
    storage = SimpleNamespace(
        fetch=lambda requests, max_bytes, wait_s, timeout_s: store.fetch(requests, max_bytes=max_bytes, wait_s=wait_s),
        queue_bounds=lambda topic, queue_id, timeout_s: store.queue_bounds(topic, queue_id),
    )

    def consume(
        *, auto_commit: bool = True, expression: str | None = "*", on_close=lambda consumer: None
    ) -> PullConsumer:
        consumers.append(
            PullConsumer(
                "billing",
                routes=FakeRoutes(topic_route(a=2)),
                storages=SimpleNamespace(get=lambda name: storage),
                start=StartOffsetQuery(),
                auto_commit=auto_commit,
                on_close=on_close,
            )
        )
        if expression is not None:
            consumers[-1].subscribe("orders", expression)
        return consumers[-1]

    yield consume
    group.commit_failure = None
    for consumer in consumers:
        consumer.close()


def poll(consumer: PullConsumer, count: int = 1, max_messages: int = 500) -> list[bytes]:
    """The bodies of `count` messages; polls until they are there."""
    bodies: list[bytes] = []
    while len(bodies) < count:
        messages = consumer.poll(max_messages, timeout_s=WAIT_S)
        assert messages, f"only {bodies} came"
        bodies += [message.body for message in messages]
    return bodies


def test_messages_come_in_the_order_of_their_queue_and_as_many_as_asked_for(consume, store):
    consumer = consume()
    assert poll(consumer, 5, max_messages=2) == [b"0", b"1", b"2", b"3", b"4"]
    assert consumer.position(Q0) == 5
    assert consumer.assignment() == [Q0, Q1]
    store.append([make_batch([b"5"])])
    assert poll(consumer) == [b"5"]


def test_queues_take_turns(consume, store):
    store.append([make_batch([b"a", b"b"], queue_id=1)])
    assert sorted(poll(consume(), 7)) == [b"0", b"1", b"2", b"3", b"4", b"a", b"b"]


def test_only_messages_with_a_wanted_tag_come_and_the_position_passes_the_others(consume, store):
    store.append([make_batch([b"collides"], tags="BBBB"), make_batch([b"wanted"], tags="AaAa"), make_batch([b"none"])])
    consumer = consume(expression="AaAa")
    assert poll(consumer) == [b"wanted"]
    eventually(lambda: consumer.position(Q0) in (7, 8), "passing the others", WAIT_S)


def test_without_messages_poll_returns_an_empty_list_in_time(consume, group):
    group.granted = {Q1}
    consumer = consume()
    group.holds(Q1)
    assert consumer.poll(timeout_s=0.0) == []


def test_what_a_poll_returned_is_committed_by_the_next_one(consume, group):
    consumer = consume()
    assert poll(consumer, 2, max_messages=2) == [b"0", b"1"]
    assert group.commits == []
    poll(consumer, 1, max_messages=1)
    assert group.commits == [{Q0: 2}]


def test_without_auto_commit_only_commit_commits(consume, group):
    consumer = consume(auto_commit=False)
    poll(consumer, 5, max_messages=1)
    assert group.commits == []
    consumer.commit()
    assert group.committed == {Q0: 5}
    consumer.commit()
    assert len(group.commits) == 1
    assert consumer._auto_commit is False


def test_a_commit_that_fails_is_said_so_and_may_be_repeated(consume, group):
    consumer = consume(auto_commit=False)
    poll(consumer, 5)
    group.commit_failure = AWAY
    with pytest.raises(ServiceNotAvailableError):
        consumer.commit()
    group.commit_failure = None
    consumer.commit()
    assert group.committed == {Q0: 5}


def test_an_auto_commit_that_fails_for_now_does_not_disturb_polling(consume, group):
    consumer = consume()
    poll(consumer, 1, max_messages=1)
    group.commit_failure = AWAY
    assert poll(consumer, 2, max_messages=1) == [b"1", b"2"]
    group.commit_failure = None
    poll(consumer, 1, max_messages=1)
    assert group.committed == {Q0: 3}


def test_a_revoked_queue_is_held_until_the_next_poll_and_committed_before_it_is_let_go(consume, group):
    consumer = consume()
    poll(consumer, 2, max_messages=2)
    group.granted = {Q1}
    group.holds(Q0, Q1)
    eventually(lambda: consumer._queues[Q0].revoked, "revoked", WAIT_S)
    group.holds(Q0, Q1)
    assert consumer.poll(timeout_s=0.0) == []  # nothing of it is returned any more
    assert group.committed == {Q0: 2}
    group.holds(Q1)
    group.granted = {Q0, Q1}
    assert poll(consumer, 3) == [b"2", b"3", b"4"]


def test_a_poll_that_waits_returns_when_a_queue_is_revoked_so_that_it_can_be_let_go(consume, group):
    consumer = consume()
    poll(consumer, 5)
    answers = []
    thread = threading.Thread(target=lambda: answers.append(consumer.poll(timeout_s=3600.0)))
    thread.start()
    group.granted = {Q1}
    thread.join(WAIT_S)
    assert answers == [[]]


def test_a_revoked_queue_is_not_let_go_while_its_offset_cannot_be_committed(consume, group):
    consumer = consume()
    poll(consumer, 2, max_messages=2)
    group.commit_failure = AWAY
    group.granted = {Q1}
    eventually(lambda: consumer._queues[Q0].revoked, "revoked", WAIT_S)
    consumer.poll(timeout_s=0.0)
    group.holds(Q0, Q1)
    group.commit_failure = None
    consumer.poll(timeout_s=0.0)
    group.holds(Q1)
    assert group.committed == {Q0: 2}


def test_a_member_its_group_has_not_answered_for_too_long_returns_and_commits_nothing(consume, group):
    consumer = consume()
    poll(consumer, 2, max_messages=2)
    group.failure = AWAY
    eventually(lambda: consumer._failure is AWAY, "the group is away", WAIT_S)
    consumer._lease_until_s = 0.0
    assert consumer.poll(timeout_s=0.0) == []
    assert consumer.assignment() == []
    assert group.commits == []
    group.failure = None
    assert poll(consumer, 5) == [b"0", b"1", b"2", b"3", b"4"]


def test_a_lease_counts_from_the_sending_of_the_heartbeat_that_was_answered(consume, group):
    consumer = consume()
    poll(consumer, 1, max_messages=1)
    now_s = [1000.0]
    answer, answered = group.heartbeat, []

    def slow_once(heartbeat):
        if answered:
            raise AWAY
        answered.append(heartbeat)
        now_s[0] += 5.0
        return answer(heartbeat)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.time, "monotonic", lambda: now_s[0])
        group.heartbeat = slow_once
        assert failed(consumer)
    assert consumer._lease_until_s == 1000.0 + module.FENCE_AFTER_S


def failed(consumer: PullConsumer) -> bool:
    """Wait for a heartbeat to fail, on a clock that stands still."""
    pause = threading.Event()
    return any(consumer._failure is AWAY or pause.wait(0.01) for _ in range(int(WAIT_S / 0.01)))


def test_a_group_that_cannot_be_joined_is_said_so_by_poll(consume, group):
    group.failure = AWAY
    consumer = consume()
    eventually(lambda: group.heartbeats, "a heartbeat", WAIT_S)
    with pytest.raises(ServiceNotAvailableError, match="restarting"):
        consumer.poll(timeout_s=0.05)
    group.failure = None
    assert poll(consumer, 5)


def test_a_queue_whose_start_is_not_known_yet_is_taken_at_a_later_heartbeat(consume, group):
    group.start_failures = [AWAY, AWAY, AWAY]
    assert poll(consume(), 5) == [b"0", b"1", b"2", b"3", b"4"]


def test_a_program_that_does_not_poll_leaves_its_group_and_comes_back(consume, group, monkeypatch):
    consumer = consume()
    poll(consumer, 2, max_messages=2)
    monkeypatch.setattr(module, "POLL_INTERVAL_MAX_S", 0.0)
    eventually(lambda: group.heartbeats[-1].leaving, "leaving", WAIT_S)
    assert consumer.assignment() == []
    monkeypatch.setattr(module, "POLL_INTERVAL_MAX_S", 300.0)
    assert poll(consumer, 5) == [b"0", b"1", b"2", b"3", b"4"]  # nothing was committed


# Places


def test_seek_goes_on_elsewhere_in_a_held_queue(consume):
    consumer = consume()
    poll(consumer, 5)
    consumer.seek(Q0, 3)
    assert consumer.position(Q0) == 3
    assert poll(consumer, 2) == [b"3", b"4"]


@pytest.mark.parametrize("offset", [-1, 6])
def test_seek_stays_within_what_the_queue_holds(consume, offset):
    consumer = consume()
    poll(consumer, 5)
    with pytest.raises(OffsetOutOfRangeError):
        consumer.seek(Q0, offset)
    assert consumer.position(Q0) == 5


def test_a_queue_that_is_not_held_has_no_position(consume, group):
    group.granted = {Q0}
    consumer = consume()
    poll(consumer, 5)
    for call in (lambda: consumer.seek(Q1, 0), lambda: consumer.position(Q1)):
        with pytest.raises(ClientStateError, match="does not hold orders@a:1"):
            call()


def test_messages_that_were_read_before_their_place_was_gone_are_still_returned(consume, group):
    consumer = consume(auto_commit=False)
    group.holds(Q0, Q1)
    eventually(lambda: consumer._queues[Q0].fetch_offset == 5, "reading ahead", WAIT_S)
    consumer._fetcher.stop()
    gone = FetchResult(PullStatus.OFFSET_ILLEGAL, 100, 100, 200, b"", 0)
    consumer._deliver(Q0, 5, gone)
    assert consumer._wanted()[Q0] == 100
    assert poll(consumer, 5) == [b"0", b"1", b"2", b"3", b"4"]
    consumer._deliver(Q0, 100, FetchResult(PullStatus.OFFSET_ILLEGAL, 150, 150, 200, b"", 0))
    assert consumer.position(Q0) == 150


def test_an_answer_to_a_question_of_before_a_seek_is_dropped(consume, group, store):
    consumer = consume()
    poll(consumer, 5)
    consumer._fetcher.stop()
    consumer.seek(Q0, 2)
    [late] = store.fetch([consumer._request(Q0, 0)], max_bytes=1 << 20, wait_s=0.0)
    consumer._deliver(Q0, 0, late)
    assert not consumer._queues[Q0].runs


def test_reading_ahead_is_bounded(consume, monkeypatch):
    monkeypatch.setattr(module, "BUFFER_MAX_BYTES", 2)
    consumer = consume()
    eventually(lambda: Q0 not in consumer._wanted() and consumer._queues, "full", WAIT_S)
    assert poll(consumer, 5) == [b"0", b"1", b"2", b"3", b"4"]
    assert Q0 in consumer._wanted()


# Life


def test_close_commits_what_was_finished_and_leaves_the_group(consume, group):
    closed = []
    consumer = consume(on_close=closed.append)
    poll(consumer, 2, max_messages=2)
    poll(consumer, 1, max_messages=1)
    consumer.close()
    consumer.close()
    assert group.committed == {Q0: 3}
    assert group.heartbeats[-1].leaving
    assert closed == [consumer]
    assert not consumer._thread.is_alive()
    for call in (consumer.poll, consumer.commit, lambda: consumer.seek(Q0, 0), lambda: consumer.subscribe("orders")):
        with pytest.raises(ClientStateError, match="closed"):
            call()


def test_an_exception_in_a_with_leaves_the_last_polls_messages_uncommitted(consume, group):
    consumer = consume()
    poll(consumer, 2, max_messages=2)
    poll(consumer, 1, max_messages=1)
    with pytest.raises(ZeroDivisionError), consumer:
        raise ZeroDivisionError
    assert group.committed == {Q0: 2}


def test_a_close_that_cannot_commit_says_so_and_is_closed_all_the_same(consume, group):
    consumer = consume()
    poll(consumer, 2, max_messages=2)
    consumer._queues[Q0].done = 2
    group.commit_failure = AWAY
    with pytest.raises(ServiceNotAvailableError):
        consumer.close()
    assert group.heartbeats[-1].leaving
    consumer.close()


def test_iteration_goes_on_until_the_consumer_is_closed(consume):
    consumer = consume()
    bodies = []
    for message in consumer:
        bodies.append(message.body)
        if len(bodies) == 5:
            consumer.close()
    assert bodies == [b"0", b"1", b"2", b"3", b"4"]


def test_bad_arguments_are_refused(consume):
    consumer = consume(expression=None)
    with pytest.raises(ClientStateError, match="no subscription"):
        consumer.poll()
    with pytest.raises(IllegalNameError):
        consumer.subscribe("a.b")
    with pytest.raises(InvalidArgumentError, match="names no tag"):
        consumer.subscribe("orders", "||")
    consumer._routes.get = lambda topic: (_ for _ in ()).throw(TopicNotExistError(topic))
    with pytest.raises(TopicNotExistError):
        consumer.subscribe("nothing")
    consumer._subscriptions["orders"] = None
    for arguments in ({"max_messages": 0}, {"timeout_s": -1.0}):
        with pytest.raises(InvalidArgumentError, match="poll needs"):
            consumer.poll(**arguments)


def test_a_consumer_cannot_be_pickled(consume):
    with pytest.raises(TypeError, match="where it is used"):
        pickle.dumps(consume(expression=None))
