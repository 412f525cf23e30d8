"""Tests that a consumer reads start offsets from each broker separately, and commits offsets at each broker
separately."""

from __future__ import annotations

import threading
from dataclasses import replace
from unittest.mock import Mock

import pytest

from raymq.client.consumer.assignment import offset_committer
from raymq.client.consumer.assignment.offset_committer import OffsetCommitter
from raymq.client.consumer.pull.settings import PullSettings
from raymq.client.consumer.pull.subscription_state import SubscriptionState
from raymq.client.consumer.subscription import Subscription
from raymq.common.errors import GroupNotExistError, NoPermissionError, ServiceNotAvailableError, TopicNotExistError
from raymq.common.message import MessageQueue
from raymq.common.protocol.group import CommitAnswer, QueueOffset
from raymq.common.protocol.membership import GroupAssignment
from tests.support.clients.fakes import WAIT_S, no_thread_starts
from tests.support.clients.records import fetched_of
from tests.support.history.waiting import eventually

A, B = MessageQueue("orders", "broker-a", 0), MessageQueue("orders", "broker-b", 0)
AWAY = ServiceNotAvailableError("restarting")


class Broker:
    """Fake broker group that records its calls."""

    def __init__(self) -> None:
        self.prepared = 0
        self.commits: list[dict] = []
        self.gate = threading.Event()
        self.gate.set()
        self.failures: list[Exception] = []
        self.answer = CommitAnswer()
        self.stopped: dict[MessageQueue, str] = {}
        self.left_out: dict[MessageQueue, Exception | None] = {}
        self.asked_alone: list[MessageQueue] = []

    def start_offsets(self, generations) -> dict[MessageQueue, QueueOffset]:
        return {queue: QueueOffset(10) for queue in generations if queue not in self.left_out}

    def start_offset(self, queue, generation) -> QueueOffset:
        self.asked_alone.append(queue)
        failure = self.left_out.get(queue)
        if failure is not None:
            raise failure
        return QueueOffset(20)

    def commit_offsets(self, commits) -> CommitAnswer:
        assert self.gate.wait(WAIT_S)
        if self.failures:
            raise self.failures.pop()
        self.commits.append({queue: commit.queue_offset for queue, commit in commits.items()})
        answer, self.answer = self.answer, CommitAnswer()
        return replace(answer, stopped=dict(self.stopped))


class Store:
    """Fake OffsetStore that keeps offsets at the fake brokers."""

    may_be_reset = True

    def __init__(self) -> None:
        self.brokers = {"broker-a": Broker(), "broker-b": Broker()}

    def prepare(self, broker_name, timeout_s) -> None:
        self.brokers[broker_name].prepared += 1

    def start_offsets(self, generations) -> dict[MessageQueue, QueueOffset]:
        [broker_name] = {queue.broker_name for queue in generations}
        return self.brokers[broker_name].start_offsets(generations)

    def start_offset(self, queue, generation) -> QueueOffset:
        return self.brokers[queue.broker_name].start_offset(queue, generation)

    def commit_offsets(self, commits, timeout_s) -> CommitAnswer:
        answers = [
            broker.commit_offsets({queue: commit for queue, commit in commits.items() if queue.broker_name == name})
            for name, broker in self.brokers.items()
            if any(queue.broker_name == name for queue in commits)
        ]
        return answers[0] if len(answers) == 1 else CommitAnswer()


class Scene:
    def __init__(self, commits, interval_s: float | None = 0.01) -> None:
        self.lock = threading.Lock()
        self.core = SubscriptionState(PullSettings("billing", auto_commit=interval_s is not None), 0.0)
        self.core.subscribe(Subscription.parse("orders"))
        self.store = Store()
        self.brokers = self.store.brokers
        self.on_started, self.on_committed = Mock(), Mock()
        self.committer = OffsetCommitter(
            self.core,
            self.lock,
            name="billing-0",
            store=self.store,
            threads=commits,
            interval_s=interval_s,
            on_started=self.on_started,
            on_committed=self.on_committed,
        )

    def grant(self, *queues: MessageQueue, generation: int = 7) -> None:
        with self.lock:
            self.core.assignment_received(GroupAssignment(generation, frozenset(queues), 1), 0.0)
        self.committer.wake()

    def begin(self, *queues: MessageQueue) -> None:
        self.grant(*queues)
        eventually(lambda: set(self.wanted()) == set(queues), "their start", WAIT_S)

    def wanted(self) -> dict[MessageQueue, int]:
        with self.lock:
            return self.core.wanted()

    def consume(self, queue: MessageQueue, *offsets: int) -> None:
        with self.lock:
            at = self.core.wanted()[queue]
            self.core.request(queue, at)
            self.core.fetched(queue, at, fetched_of(offsets))
            for part in self.core.peek(500):
                self.core.taken(part)
            self.core.finish_all()
        self.committer.wake()

    def commits(self, name: str, *commits: dict[MessageQueue, int | None]) -> None:
        """Wait until the list of commits that a broker has received equals `commits`."""
        eventually(lambda: self.brokers[name].commits == list(commits), f"{commits} at {name}", WAIT_S)


@pytest.fixture
def make_scene(commits):
    made: list[Scene] = []

    def make(interval_s: float | None = 0.01) -> Scene:
        made.append(Scene(commits, interval_s))
        return made[-1]

    yield make
    for scene in made:
        for broker in scene.brokers.values():
            broker.gate.set()
        scene.committer.close()


@pytest.fixture
def scene(make_scene):
    return make_scene()


def test_granted_queues_begin_at_the_offsets_of_the_broker(scene):
    scene.begin(A, B)
    assert scene.wanted() == {A: 10, B: 10}
    assert [broker.prepared for broker in scene.brokers.values()] == [1, 1]
    assert scene.on_started.called


def test_a_consumer_can_prepare_and_commit_at_the_exit_where_no_thread_starts(make_scene):
    scene = make_scene(None)
    with no_thread_starts():
        scene.grant(A)
        scene.committer.prepare(["broker-a"], WAIT_S)
    with scene.lock:
        [starting] = scene.core.starting("broker-a", forbidden=False)
        scene.core.started(starting, QueueOffset(10))
    scene.consume(A, 10, 11)
    assert scene.committer.commit(WAIT_S) == {A: 12}
    assert scene.brokers["broker-a"].prepared == 1


def test_a_queue_that_the_answer_for_many_leaves_out_is_asked_for_by_itself(scene):
    scene.brokers["broker-a"].left_out = {A: None}
    scene.begin(A)
    assert scene.wanted() == {A: 20}


def test_a_queue_without_permission_holds_up_no_other_and_is_asked_for_again(scene):
    other = MessageQueue("orders", "broker-a", 1)
    scene.brokers["broker-a"].left_out = {other: NoPermissionError("no")}
    scene.grant(A, other)
    eventually(lambda: scene.wanted() == {A: 10}, "the other's start", WAIT_S)
    scene.brokers["broker-a"].left_out = {}
    eventually(lambda: scene.wanted() == {A: 10, other: 10}, "its start", WAIT_S)


def test_a_topic_without_permission_is_asked_for_once_and_holds_up_no_other_topic(scene, monkeypatch, caplog):
    monkeypatch.setattr(offset_committer, "FORBIDDEN_INTERVAL_S", 0.02)
    scene.core.subscribe(Subscription.parse("bills"))
    forbidden = [MessageQueue("bills", "broker-a", number) for number in range(5)]
    broker = scene.brokers["broker-a"]
    broker.left_out = dict.fromkeys(forbidden, NoPermissionError("forbidden to read bills"))
    scene.grant(*forbidden, A)
    eventually(lambda: scene.wanted() == {A: 10}, "the other topic's start", WAIT_S)
    eventually(lambda: broker.asked_alone[:2] == forbidden[:1] * 2, "one question each time", WAIT_S)
    scene.consume(A, 10)
    scene.commits("broker-a", {A: 11})
    # The consumer repeats its requests for the start offsets of the five forbidden queues, but logs the refusal only
    # once per queue.
    assert caplog.text.count("cannot read") == 5
    broker.left_out = {}
    eventually(lambda: set(scene.wanted()) == {*forbidden, A}, "all starts", WAIT_S)


def test_a_forbidden_queue_continues_once_it_is_allowed(scene, monkeypatch):
    monkeypatch.setattr(offset_committer, "FORBIDDEN_INTERVAL_S", 0.02)
    scene.begin(A)
    broker = scene.brokers["broker-a"]
    broker.left_out = {A: NoPermissionError("no")}
    broker.stopped = {A: "no"}
    scene.committer.ask_about_resets()
    eventually(lambda: scene.core.all_forbidden, "the stop", WAIT_S)
    assert scene.wanted() == {}
    scene.grant(A)  # the group grants queue A again, in the same generation as before
    broker.stopped, broker.left_out = {}, {}
    eventually(lambda: scene.wanted() == {A: 10}, "its start", WAIT_S)


def test_an_administrators_word_has_forbidden_queues_asked_for_at_once(scene, monkeypatch):
    monkeypatch.setattr(offset_committer, "FORBIDDEN_INTERVAL_S", 3600.0)
    broker = scene.brokers["broker-a"]
    broker.left_out = {A: NoPermissionError("no")}
    scene.grant(A)
    eventually(lambda: scene.core.all_forbidden, "the refusal", WAIT_S)
    broker.left_out = {}
    scene.committer.ask_about_resets()
    eventually(lambda: scene.wanted() == {A: 10}, "its start", WAIT_S)


def test_a_broker_that_does_not_answer_keeps_no_other_waiting(scene):
    scene.begin(A, B)
    scene.brokers["broker-a"].gate.clear()
    scene.consume(A, 10)
    scene.consume(B, 10)
    scene.commits("broker-b", {B: 11})
    scene.brokers["broker-a"].gate.set()
    scene.commits("broker-a", {A: 11})


def test_finished_messages_are_committed_together_once_the_interval_is_over(make_scene):
    scene = make_scene(3600.0)
    scene.begin(A, B)
    scene.consume(A, 10)
    scene.consume(A, 11, 12)
    with scene.lock:
        assert scene.core.has_uncommitted
    work = scene.committer._work("broker-a")
    assert work.schedule() == work.commit_at_s
    work.commit_at_s = 0.0
    work.schedule()
    scene.commits("broker-a", {A: 13})
    assert scene.brokers["broker-b"].commits == []


def test_a_queue_that_the_group_waits_for_is_committed_at_once(make_scene):
    scene = make_scene(3600.0)
    scene.begin(A)
    scene.consume(A, 10)
    scene.grant(generation=8)
    scene.commits("broker-a", {A: 11})
    eventually(lambda: scene.on_committed.called, "the word of it", WAIT_S)
    with scene.lock:
        assert scene.core.release(0.0) == [A]


def test_without_an_interval_only_the_program_commits(make_scene):
    scene = make_scene(None)
    scene.begin(A, B)
    scene.consume(A, 10)
    scene.consume(B, 10)
    scene.grant(A, B, generation=8)
    assert [broker.commits for broker in scene.brokers.values()] == [[], []]
    assert scene.committer.commit(1.0) == {A: 11, B: 11}
    assert scene.committer.commit(1.0) == {}
    assert [broker.commits for broker in scene.brokers.values()] == [[{A: 11}], [{B: 11}]]


def test_a_commit_that_failed_is_tried_again(scene):
    scene.begin(A)
    scene.brokers["broker-a"].failures = [AWAY] * 2
    scene.consume(A, 10)
    scene.commits("broker-a", {A: 11})
    scene.committer.raise_refusal()


def test_a_deleted_group_is_registered_again_and_raises_once(scene):
    scene.begin(A)
    scene.brokers["broker-a"].failures = [GroupNotExistError("billing")]
    scene.consume(A, 10)
    scene.commits("broker-a", {A: 11})
    assert scene.brokers["broker-a"].prepared == 2
    with pytest.raises(GroupNotExistError):
        scene.committer.raise_refusal()
    scene.committer.raise_refusal()


def test_after_a_reset_all_queues_continue_at_the_reset_offsets(scene):
    scene.begin(A, B)
    scene.brokers["broker-a"].answer = CommitAnswer(reset={A: QueueOffset(3, 1)})
    scene.brokers["broker-a"].failures = [AWAY]
    scene.committer.ask_about_resets()
    eventually(lambda: scene.wanted() == {A: 3, B: 10}, "the jump", WAIT_S)
    scene.commits("broker-a", {A: None})
    scene.commits("broker-b", {B: None})


def test_without_a_group_brokers_are_asked_about_resets_now_and_then(make_scene, monkeypatch):
    monkeypatch.setattr(offset_committer, "RESET_QUERY_INTERVAL_S", 0.01)
    scene = make_scene(None)
    with scene.lock:
        scene.core.assign({"orders": Subscription.parse("orders")}, {A: QueueOffset(10)}, 0.0)
    scene.committer.wake()
    eventually(lambda: scene.brokers["broker-a"].commits[:2] == [{A: None}] * 2, "questions", WAIT_S)


def test_queues_of_a_deleted_topic_are_let_go(scene):
    scene.brokers["broker-a"].left_out = {A: TopicNotExistError("orders")}
    scene.grant(A, B)

    def holding() -> frozenset[MessageQueue]:
        with scene.lock:
            return scene.core.holding

    eventually(lambda: holding() == {B}, "the end of the other", WAIT_S)


def test_after_close_nothing_is_committed(scene):
    scene.begin(A)
    scene.committer.close()
    scene.consume(A, 10)
    scene.committer.ask_about_resets()
    assert scene.brokers["broker-a"].commits == []


def test_the_threads_end_when_they_are_closed(scene, commits):
    scene.begin(A)
    commits.close()
    eventually(
        lambda: not any(thread.name == "offsets-broker-a" for thread in threading.enumerate()), "their end", WAIT_S
    )
