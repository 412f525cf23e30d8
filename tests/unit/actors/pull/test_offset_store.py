"""Start offsets and commits, at each broker by itself, and in a file for broadcasting."""

from __future__ import annotations

import threading

import pytest

from actors.pull.instance_state import InstanceState
from actors.pull.offset_store import CommitThreads, LocalFileOffsetStore, OffsetCommitter
from raymq.consumer.push.settings import PushSettings
from raymq.consumer.subscription import Subscription
from raymq.errors import NoPermissionError, ServiceNotAvailableError, TopicNotExistError
from raymq.message import MessageModel, MessageQueue
from raymq.protocol.consume_result import ConsumeReport
from raymq.protocol.group import CommitAnswer, QueueOffset
from raymq.record.memory_records import MemoryRecords
from tests.support.clients.fakes import WAIT_S
from tests.support.clients.records import records_of
from tests.support.history.waiting import eventually

A, B = MessageQueue("orders", "broker-a", 0), MessageQueue("orders", "broker-b", 0)


class Broker:
    """An OffsetStore that notes what it is asked."""

    def __init__(self) -> None:
        self.prepared = 0
        self.commits: list[dict] = []
        self.gate = threading.Event()
        self.gate.set()
        self.failures: list[Exception] = []
        self.answer = CommitAnswer()
        self.gone: set[MessageQueue] = set()

    def prepare(self) -> None:
        self.prepared += 1

    def start_offset(self, process_queue) -> QueueOffset:
        if process_queue.queue in self.gone:
            raise TopicNotExistError(process_queue.queue.topic)
        return QueueOffset(10)

    def commit_offsets(self, commits) -> CommitAnswer:
        assert self.gate.wait(WAIT_S)
        if self.failures:
            raise self.failures.pop()
        self.commits.append({queue: commit.queue_offset for queue, commit in commits.items()})
        answer, self.answer = self.answer, CommitAnswer()
        return answer


class Scene:
    def __init__(self) -> None:
        self.instance = InstanceState("pull-billing-0", PushSettings("billing", (Subscription.parse("orders"),)))
        self.instance.core.listener_back()
        self.brokers = {"broker-a": Broker(), "broker-b": Broker()}
        self.threads = CommitThreads()
        self.committers = OffsetCommitter(self.instance, self.brokers.__getitem__, self.threads)
        self.instance.on_committable = self.committers.wake_committers
        self.released = threading.Event()
        self.instance.on_released = self.released.set

    def begin(self, *queues: MessageQueue) -> None:
        self.instance.hold(queues)
        eventually(lambda: set(self.wanted()) == set(queues), "their start", WAIT_S)

    def wanted(self) -> dict[MessageQueue, int]:
        with self.instance.lock:
            return self.instance.core.wanted(0.0)

    def consume(self, queue: MessageQueue, *offsets: int) -> None:
        with self.instance.lock:
            core = self.instance.core
            core.fetched(queue, core.wanted(0.0)[queue], records_of(offsets), offsets[-1] + 1, 0.0)
            for task in core.deliverable(0.0):
                core.reported(task, ConsumeReport(), 0.0)
        self.committers.wake_committers()


@pytest.fixture
def scene():
    made = Scene()
    yield made
    for broker in made.brokers.values():
        broker.gate.set()
    made.committers.close()
    made.threads.close()


def test_granted_queues_begin_where_the_broker_says(scene):
    scene.begin(A, B)
    assert scene.wanted() == {A: 10, B: 10}
    assert [broker.prepared for broker in scene.brokers.values()] == [1, 1]


def test_a_broker_that_does_not_answer_keeps_no_other_waiting(scene):
    scene.begin(A, B)
    scene.brokers["broker-a"].gate.clear()
    scene.consume(A, 10)
    scene.consume(B, 10)
    eventually(lambda: scene.brokers["broker-b"].commits == [{B: 11}], "the other's commit", WAIT_S)
    scene.brokers["broker-a"].gate.set()
    eventually(lambda: scene.brokers["broker-a"].commits == [{A: 11}], "its commit", WAIT_S)


def test_a_commit_that_failed_is_tried_again(scene):
    scene.begin(A)
    scene.brokers["broker-a"].failures = [ServiceNotAvailableError("restarting")] * 2
    scene.consume(A, 10)
    eventually(lambda: scene.brokers["broker-a"].commits == [{A: 11}], "the commit", WAIT_S)


def test_a_revoked_queue_is_let_go_after_its_last_commit(scene):
    scene.begin(A)
    scene.brokers["broker-a"].gate.clear()
    scene.consume(A, 10)
    scene.instance.hold([])
    assert not scene.released.wait(0.2)
    scene.brokers["broker-a"].gate.set()
    assert scene.released.wait(WAIT_S)
    assert scene.instance.holding() == frozenset()
    assert scene.brokers["broker-a"].commits == [{A: 11}]


def test_when_offsets_were_reset_all_queues_are_asked_about_and_go_on_there(scene):
    scene.begin(A, B)
    scene.brokers["broker-a"].answer = CommitAnswer(reset={A: QueueOffset(3, 1)})
    scene.committers.ask_about_resets()
    eventually(lambda: scene.wanted() == {A: 3, B: 10}, "the jump", WAIT_S)
    assert scene.brokers["broker-a"].commits == [{A: None}]
    eventually(lambda: scene.brokers["broker-b"].commits == [{B: None}], "the question", WAIT_S)


def test_queues_of_a_deleted_topic_are_let_go(scene):
    scene.brokers["broker-a"].gone = {A}
    scene.instance.hold([A, B])
    eventually(lambda: scene.instance.holding() == {B}, "the end of the other", WAIT_S)


def test_in_broadcasting_offsets_come_from_the_file_or_else_from_the_settings(tmp_path):
    class Brokers:
        refusal: Exception | None = None

        def check_broadcast(self, broker_name, timeout_s):
            if self.refusal is not None:
                raise self.refusal

        def ensure_group(self, broker_name, timeout_s):
            pass

        def start_offset(self, queue, query, generation, timeout_s):
            assert generation == 0
            return QueueOffset(99)

    settings = PushSettings(
        "billing", (Subscription.parse("orders"),), message_model=MessageModel.BROADCASTING, offsets_dir=str(tmp_path)
    )
    instance = InstanceState("pull-billing-0", settings)
    before = LocalFileOffsetStore(instance, Brokers())
    committers = OffsetCommitter(instance, lambda name: before, CommitThreads())
    instance.on_committable = committers.wake_committers
    instance.hold([A])
    eventually(lambda: instance.core.wanted(0.0) == {A: 99}, "the start", WAIT_S)
    with instance.lock:
        instance.core.fetched(A, 99, MemoryRecords.read(b""), 120, 0.0)
    committers.wake_committers()
    file = tmp_path / "billing" / "pull-billing-0" / "offsets.json"
    eventually(file.exists, "the file", WAIT_S)
    committers.close()
    again = InstanceState("pull-billing-0", settings)
    brokers = Brokers()
    files = LocalFileOffsetStore(again, brokers)
    files.prepare()
    again.hold([A])
    assert files.start_offset(again.core.process_queues()[0]) == QueueOffset(120)
    brokers.refusal = NoPermissionError("consume_broadcast_enable is off")
    with pytest.raises(NoPermissionError):
        files.start_offset(again.core.process_queues()[0])
