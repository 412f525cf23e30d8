"""Tests of the feed that sends tasks to a listener's process. The process works, fails, dies and restarts. The tests do
not use Ray: the actor handle of the process is a fake."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import count

import pytest
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    ActorUnschedulableError,
    RaySystemError,
    RuntimeEnvSetupError,
)

from actors.core.access.meter import ReadLimit
from actors.core.consume.records_in_place import TaskRecords
from actors.pull import listener_feed as pull_feed, tasks_in_flight
from actors.pull.instance_state import InstanceState
from actors.pull.listener_feed import FeedThread, ListenerFeed
from raymq.client.consumer.push import feed_client
from raymq.client.consumer.push.feed_client import FeedClient, PullDescription, read_task_batch
from raymq.client.consumer.push.settings import PushSettings
from raymq.client.consumer.push.task_feed import TaskFeed
from raymq.client.consumer.subscription import Subscription
from raymq.common.errors import ServiceNotAvailableError
from raymq.common.message import Message, MessageQueue
from raymq.common.protocol.consume_result import TaskBatch
from raymq.common.protocol.group import QueueOffset
from raymq.records.format.encode import encode_batch
from raymq.records.format.memory_records import MemoryRecords
from raymq.records.kernels.stamp import stamp
from raymq.remoting import actor_ref
from raymq.remoting.actor_ref import HandleRef
from raymq.remoting.lane.address import LaneAddress
from raymq.remoting.lane.calls import encode_call
from raymq.remoting.lane.client import Lane
from raymq.remoting.lane.frames import FrameKind
from tests.support.clients.fakes import WAIT_S, main_thread_has_finished
from tests.support.clients.tasks import located, store_records
from tests.support.history.waiting import eventually

Q = MessageQueue("orders", "broker-a", 0)


class Reference:
    def __init__(self, future: Future) -> None:
        self._future = future

    def future(self) -> Future:
        return self._future


class Process:
    """Simulated listener process inside the test's process. It polls for tasks and reports results until it is
    killed."""

    def __init__(self, scene: Scene, handle, life: str) -> None:
        self.dead = False
        self.scene, self.life = scene, life
        self.feed: ListenerFeed | None = None
        """The ListenerFeed from which this simulated listener process requests tasks; None until its first
        call."""
        self.lose_next = 0
        """Number of task batches to lose in transit, starting with the next batch."""
        self.tasks = TaskFeed(handle, scene.instance.settings, takes_batch=False)
        self.tasks.start(self, lambda wait_s: self.feed is not None or time.sleep(0.01))
        self.kept: object = None

    def end(self) -> None:
        self.dead = True
        self.tasks.close()

    def next_tasks(self, epoch, got) -> TaskBatch:
        answer: Future[bytes] = Future()
        self._living().asked(self.life, epoch, got, answer.set_result)
        batch = read_task_batch(answer.result(WAIT_S))
        if self.lose_next and batch.tasks:
            self.lose_next -= 1
            raise ServiceNotAvailableError("the lane broke")
        self._living()
        return batch

    def report(self, epoch, reports) -> None:
        self._living().reported(self.life, epoch, reports)

    def _living(self) -> ListenerFeed:
        if self.dead:
            raise ServiceNotAvailableError("the process is dead")
        assert self.feed is not None
        return self.feed


class Handle:
    """Fake handle of a Listener actor. `kill` ends the actor's process and starts a new one."""

    def __init__(self, scene: Scene, handle) -> None:
        self.scene, self.handle = scene, handle
        self.lives = 0
        self.loaded = ""
        self._start()

    def _start(self) -> None:
        self.lives += 1
        self.process = Process(self.scene, self.handle, str(self.lives))

    def kill(self) -> None:
        before = self.process
        before.end()
        self._start()
        self.scene.feed.lane_closed(before.life)

    def __getattr__(self, name: str):
        return Method(self, name)


class Method:
    """A fake actor method, `ready` or `keep`. Calling it on a killed process fails, as a Ray call does."""

    def __init__(self, handle: Handle, name: str) -> None:
        self._handle, self._name = handle, name

    def remote(self, *args) -> Reference:
        answer: Future = Future()
        if self._name == "keep":
            self._handle.process.kept = args[0]
            answer.set_result(None)
        elif self._handle.process.feed is None:
            answer.set_exception(ActorUnavailableError("killed", None))
        else:
            answer.set_result(self._handle.loaded)
        return Reference(answer)


class Scene:
    def __init__(self, handle, **settings) -> None:
        self.instance = InstanceState(
            "pull-billing-0", PushSettings("billing", (Subscription.parse("orders"),), **settings)
        )
        self.sent: list[tuple[str, int, int]] = []
        self.refuse = False
        self.thread, self.senders = FeedThread("127.0.0.1"), ThreadPoolExecutor(2)
        self.gone = threading.Event()
        self.epochs = count(1)
        self.feed = self.make_feed(self.instance)
        self.handle = Handle(self, handle)
        core = self.instance.core
        core.hold([Q], 0.0)
        core.started(core.starting("broker-a")[0], QueueOffset(0))
        self.call()

    def make_feed(self, instance: InstanceState) -> ListenerFeed:
        feed = ListenerFeed(
            instance,
            send_back=self._send_back,
            senders=self.senders,
            before_delivery=lambda: None,
            on_gone=self.gone.set,
            wake=self.thread.wake,
            epoch=next(self.epochs),
        )
        self.thread.add(feed)
        return feed

    def call(self, feed: ListenerFeed | None = None) -> None:
        """Make the call that a Listener makes to its Pull actor every few seconds, to show that the Listener's process
        runs."""
        feed, process = feed or self.feed, self.handle.process
        keep = feed.heard(
            HandleRef("pull-billing-0", self.handle, None), process.life, self.handle.loaded, process.kept
        )
        if keep is not None:
            process.kept = keep
        process.feed = feed

    def close(self) -> None:
        self.handle.process.end()
        self.feed.close()
        self.thread.close()
        self.senders.shutdown(wait=False)

    def _send_back(self, broker_name: str, records: bytes, level: int, most: int, reason: str, failure: str) -> None:
        if self.refuse:
            raise ServiceNotAvailableError("the broker is away")
        self.sent += [(broker_name, offset, level) for offset in MemoryRecords.read(records).offsets]

    def fetch(self, count: int, first: int = 0, records: TaskRecords | None = None) -> None:
        with self.instance.lock:
            self.instance.core.fetched(Q, first, records or real_run(first, count), first + count, 0.0)
        self.feed.wake()

    @property
    def commit_offset(self) -> int:
        with self.instance.lock:
            [process_queue] = self.instance.core.process_queues()
            return process_queue.commit_offset


def real_run(first: int, count: int) -> MemoryRecords:
    messages = [Message("orders", b"%d" % number) for number in range(first, first + count)]
    batch = encode_batch(messages, 0, born_host=("127.0.0.1", 1), born_timestamp_ms=1, message_ids=["A"] * count)
    records = bytearray(batch.records)
    stamp(records, batch.sizes, first_queue_offset=first, first_physical_offset=0, store_timestamp_ms=1,
          store_host=bytes(8))  # fmt: skip
    return MemoryRecords.read(bytes(records))


@pytest.fixture
def scenes(monkeypatch):
    monkeypatch.setattr(actor_ref, "resolve", lambda reference, what, timeout_s: reference.future().result(timeout_s))
    made: list[Scene] = []

    def make(handle, **settings) -> Scene:
        made.append(Scene(handle, **settings))
        return made[-1]

    yield make
    for scene in made:
        scene.close()


@pytest.mark.parametrize("orderly", [False, True])
def test_fetched_messages_reach_the_listener_and_can_be_committed(scenes, orderly):
    heard = []
    scene = scenes(lambda message: heard.append(int(message.body)), orderly=orderly)
    scene.fetch(100)
    eventually(lambda: scene.feed.consumed == 100, "all is counted", WAIT_S)
    assert scene.commit_offset == 100
    assert sorted(heard) == list(range(100))
    assert scene.feed.failures == 0


def test_a_failed_message_is_sent_back_and_counts_as_done(scenes):
    def handle(message):
        if message.body == b"3":
            raise ValueError("no")

    scene = scenes(handle)
    scene.fetch(10)
    eventually(lambda: scene.commit_offset == 10, "the commit point", WAIT_S)
    assert scene.sent == [("broker-a", 3, 0)]
    assert (scene.feed.consumed, scene.feed.failures) == (9, 1)


def test_a_failed_message_is_sent_back_after_the_main_thread_has_finished(scenes):
    def handle(message):
        raise ValueError("no")

    scene = scenes(handle)
    with main_thread_has_finished():
        scene.fetch(1)
        eventually(lambda: scene.commit_offset == 1, "the commit point", WAIT_S)
    assert scene.sent == [("broker-a", 0, 0)]


def test_a_message_that_the_broker_does_not_accept_back_is_kept(scenes):
    def handle(message):
        raise ValueError("no")

    scene = scenes(handle)
    scene.refuse = True
    scene.fetch(1)
    eventually(lambda: scene.instance.core.process_queues()[0].again, "the message to wait here", WAIT_S)
    assert scene.commit_offset == 0


@pytest.mark.parametrize("orderly", [False, True])
def test_after_a_listener_death_only_unfinished_messages_are_redelivered(scenes, orderly):
    gate = threading.Event()
    heard = []

    def handle(message):
        number = int(message.body)
        heard.append(number)
        if number == 5 and heard.count(5) == 1:
            gate.set()
            # The first listener process never finishes its call for message 5. The process that replaces it does.
            threading.Event().wait(WAIT_S)

    scene = scenes(handle, orderly=orderly, threads=1)
    scene.fetch(10)
    assert gate.wait(WAIT_S)
    eventually(lambda: scene.commit_offset == 5, "the report of the first five", WAIT_S)
    scene.handle.kill()
    eventually(lambda: scene.feed.away_because, "the death to be noticed", WAIT_S)
    scene.call()
    eventually(lambda: scene.commit_offset == 10, "the rest", WAIT_S)
    assert (scene.feed.deaths, scene.handle.lives, scene.feed.away_because) == (1, 2, "")
    assert [heard.count(number) for number in range(5)] == [1] * 5
    assert set(heard) == set(range(10))


def test_a_listener_that_cannot_be_loaded_gets_no_tasks_and_has_a_reason(scenes):
    scene = scenes(print)
    scene.handle.loaded = "Traceback: no such module"
    scene.handle.kill()
    scene.call()
    scene.fetch(1)
    eventually(lambda: "no such module" in scene.feed.away_because, "the reason", WAIT_S)
    assert "no such module" in scene.feed.broken
    assert scene.instance.core.listener_away


def test_a_suspension_survives_a_restart(scenes):
    scene = scenes(lambda message: None)
    assert not scene.instance.core.listener_away
    scene.feed.keep((True, frozenset({Q})))
    assert scene.handle.process.kept == (True, frozenset({Q}))
    after = InstanceState("pull-billing-0", scene.instance.settings)
    feed = scene.make_feed(after)
    scene.call(feed)
    assert not after.core.listener_away
    feed.close()
    assert after.core.suspended
    assert after.core.paused == {Q}


def test_a_feed_that_is_closed_and_still_there_keeps_no_other_waiting(scenes):
    scene = scenes(lambda message: None)
    feed = scene.make_feed(InstanceState("pull-billing-1", scene.instance.settings))
    feed.close()
    feed.wake()
    called = threading.Event()
    scene.thread._loop.call_soon(lambda: scene.thread._loop.call_soon(called.set))
    assert called.wait(WAIT_S)
    scene.fetch(10)
    eventually(lambda: scene.feed.consumed == 10, "the other feed goes on", WAIT_S)


def test_a_restarted_listener_receives_the_suspended_state(scenes):
    scene = scenes(lambda message: None)
    scene.feed.keep((True, frozenset({Q})))
    scene.handle.kill()
    scene.call()
    assert scene.instance.core.suspended
    assert scene.handle.process.kept == (True, frozenset({Q}))
    assert scene.feed.deaths == 1


@pytest.mark.parametrize(
    "error",
    [ActorDiedError(), ActorUnschedulableError("its node is gone"), RuntimeEnvSetupError("pip failed")],
    ids=lambda error: type(error).__name__,
)
def test_a_silent_dead_listener_is_detected(scenes, monkeypatch, error):
    scene = scenes(lambda message: None)
    monkeypatch.setattr(pull_feed, "SILENT_AFTER_S", 0.0)
    scene.feed.look()
    assert not scene.gone.is_set()  # the listener's process has answered, so it does not count as ended
    monkeypatch.setattr(Method, "remote", lambda self: Reference(failed(error)))
    eventually(lambda: scene.feed.look() or scene.gone.is_set(), "its end", WAIT_S)


def test_a_question_that_ray_does_not_start_is_asked_again(scenes, monkeypatch):
    scene = scenes(lambda message: None)
    monkeypatch.setattr(pull_feed, "SILENT_AFTER_S", 0.0)
    errors = [RaySystemError("no connection to Ray")]

    def remote(method):
        if errors:
            raise errors.pop()
        return Reference(failed(ActorDiedError()))

    monkeypatch.setattr(Method, "remote", remote)
    scene.feed.look()
    assert errors == []
    eventually(lambda: scene.feed.look() or scene.gone.is_set(), "the listener's end", WAIT_S)


def failed(error: Exception) -> Future:
    future: Future = Future()
    future.set_exception(error)
    return future


def test_a_feed_that_fails_keeps_no_other_from_its_turns(scenes, monkeypatch):
    heard = []
    scene = scenes(heard.append)
    bad = scene.make_feed(InstanceState("pull-bad-0", scene.instance.settings))
    monkeypatch.setattr(bad, "_turn", lambda: 1 / 0)
    bad.wake()
    scene.fetch(10)
    eventually(lambda: len(heard) == 10, "the other's messages", WAIT_S)


def test_a_feed_without_work_has_no_turns_one_after_the_other(scenes):
    scene = scenes(lambda message: None)
    with scene.instance.lock:  # complete the only fetch of this test
        scene.instance.core.fetched(Q, 0, real_run(0, 10), 10, time.monotonic())
    scene.feed.wake()
    eventually(lambda: scene.feed.consumed == 10, "all is counted", WAIT_S)
    scene.feed.take_turn()
    assert scene.feed.next_turn_s > time.monotonic()


# Tests of the connection between a ListenerFeed, which sends tasks, and its Listener


def number_of(message) -> int:
    return int(message.body.split()[0])


def test_a_lost_task_batch_is_sent_again(scenes):
    heard = []
    scene = scenes(lambda message: heard.append(int(message.body)))
    scene.handle.process.lose_next = 2
    scene.fetch(10)
    eventually(lambda: scene.commit_offset == 10, "the commit point", WAIT_S)
    assert sorted(heard) == list(range(10))


def test_a_repeated_report_counts_once(scenes):
    scene = scenes(lambda message: None)
    process, real = scene.handle.process, scene.handle.process.report

    def report_twice(epoch, reports):
        real(epoch, reports)
        real(epoch, reports)

    process.report = report_twice
    scene.fetch(10)
    eventually(lambda: scene.commit_offset == 10, "the commit point", WAIT_S)
    assert scene.feed.consumed == 10


def test_a_process_that_has_not_called_gets_nothing_and_changes_nothing(scenes):
    scene = scenes(lambda message: None)
    with pytest.raises(ServiceNotAvailableError, match="waits for its listener"):
        scene.feed.asked("another", 0, 0, print)
    scene.feed.reported("another", scene.feed._epoch, [(1, None)])


def test_records_in_the_stores_files_reach_the_listener(scenes, tmp_path):
    store_records(tmp_path, 150)
    heard = []
    scene = scenes(lambda message: heard.append(number_of(message)))
    scene.fetch(100, records=located(tmp_path, 0, 100))
    scene.fetch(50, first=100, records=located(tmp_path, 100, 50))
    eventually(lambda: scene.commit_offset == 150, "the commit point", WAIT_S)
    assert sorted(heard) == list(range(150))


@pytest.mark.parametrize("bytes_for_s", [tasks_in_flight.BYTES_FOR_S, 0.0])
def test_records_that_the_listener_cannot_map_are_sent_as_bytes(scenes, tmp_path, monkeypatch, bytes_for_s):
    """If a listener reports that it cannot read records in the store's files, the feed sends it these records as bytes.
    A repeated report has the same result, even after the time BYTES_FOR_S for which the feed sends bytes."""
    monkeypatch.setattr(tasks_in_flight, "BYTES_FOR_S", bytes_for_s)
    store_records(tmp_path, 20)
    records = located(tmp_path, 0, 20)
    (tmp_path / "commitlog" / f"{0:020d}").unlink()
    heard = []
    scene = scenes(lambda message: heard.append(number_of(message)))
    process, real = scene.handle.process, scene.handle.process.report

    handed_again = []

    def report_twice(epoch, reports):
        real(epoch, reports)
        tasks = process.feed._tasks
        eventually(lambda: not tasks._ready, "the hand-over of the bytes", WAIT_S)
        batches = tasks._number
        real(epoch, reports)
        handed_again.append(len(tasks._ready) + tasks._number - batches)

    process.report = report_twice
    scene.fetch(20, records=records)
    eventually(lambda: scene.commit_offset == 20, "the commit point", WAIT_S)
    assert sorted(heard) == list(range(20))
    assert not any(handed_again)


def test_a_task_that_cannot_be_shipped_now_is_shipped_later(scenes, monkeypatch):
    heard, real, failures = [], tasks_in_flight.ship_task, [ValueError("torn")]

    def ship_late(task, *, in_place):
        if failures:
            raise failures.pop()
        return real(task, in_place=in_place)

    monkeypatch.setattr(tasks_in_flight, "ship_task", ship_late)
    scene = scenes(lambda message: heard.append(int(message.body)))
    scene.fetch(10)
    eventually(lambda: scene.commit_offset == 10, "the commit point", WAIT_S)
    assert sorted(heard) == list(range(10))


def test_a_failed_message_in_mapped_files_is_sent_back(scenes, tmp_path):
    store_records(tmp_path, 20)

    def handle(message):
        if number_of(message) in (3, 11):
            raise ValueError("no")

    scene = scenes(handle)
    scene.fetch(20, records=located(tmp_path, 0, 20))
    eventually(lambda: scene.commit_offset == 20, "the commit point", WAIT_S)
    assert sorted(scene.sent) == [("broker-a", 3, 0), ("broker-a", 11, 0)]


class PullRef:
    """Fake reference to a Pull actor. The actor's description contains the address of its lane (direct socket
    connection). `change` computes this address from the real address and the number of calls so far."""

    def __init__(self, thread: FeedThread, change: Callable[[LaneAddress, int], LaneAddress]) -> None:
        self.thread, self.change = thread, change
        self.calls = 0

    def call(self, method, *, timeout_s):
        assert method == "describe"
        self.calls += 1
        return PullDescription(self.change(self.thread.address, self.calls))


NOBODY = "\0nobody-is-there"
PULL_ADDRESSES: dict[str, Callable[[LaneAddress, int], LaneAddress]] = {
    "here": lambda address, calls: address,
    "another node": lambda address, calls: replace(address, name=NOBODY),
    "refused first": lambda address, calls: replace(address, name=NOBODY, port=0) if calls < 3 else address,
    "wrong secret first": lambda address, calls: replace(address, secret=b"x" * 32) if calls < 3 else address,
}


@pytest.mark.parametrize("change", PULL_ADDRESSES.values(), ids=PULL_ADDRESSES)
def test_a_listener_asks_and_reports_over_a_lane_as_soon_as_one_opens(scenes, monkeypatch, change):
    heard = []
    scene = scenes(lambda message: None)
    monkeypatch.setattr(feed_client, "ActorRef", lambda name: PullRef(scene.thread, change))
    scene.feed.heard(HandleRef("pull-billing-0", scene.handle, None), "over there", "", None)
    tasks = TaskFeed(lambda message: heard.append(int(message.body)), scene.instance.settings, takes_batch=False)
    tasks.start(FeedClient("pull-here", scene.instance.name, "over there"), lambda wait_s: True)
    scene.fetch(100)
    eventually(lambda: scene.commit_offset == 100, "the commit point", WAIT_S)
    assert sorted(heard) == list(range(100))
    tasks.close()


def test_a_lane_that_breaks_has_its_listener_looked_for(scenes, monkeypatch):
    scene = scenes(lambda message: None)
    looked = threading.Event()
    monkeypatch.setattr(Method, "remote", lambda self: looked.set() or Reference(failed(ActorDiedError())))
    scene.feed.heard(HandleRef("pull-billing-0", scene.handle, None), "over there", "", None)
    lane = Lane(scene.thread.address)
    lane.send(
        FrameKind.CALL, (encode_call("next_tasks", (scene.instance.name, "over there", 0, 0)),), time.monotonic() + 5
    )
    eventually(lambda: scene.feed._question is not None, "the question", WAIT_S)
    lane.close()
    assert looked.wait(WAIT_S)
    assert scene.gone.wait(WAIT_S)


@pytest.mark.parametrize(
    ("portion", "handed"),
    [(None, 128), (ReadLimit(0, 70), 64), (ReadLimit(1, 0), 32), (ReadLimit(1 << 20, 128), 128)],
    ids=str,
)
def test_a_listener_gets_the_tasks_of_a_portion_but_one_at_least(scenes, portion, handed):
    scene = scenes(lambda message: None)
    eventually(lambda: scene.feed._question is not None, "the process asks", WAIT_S)
    scene.handle.process.tasks.close()
    answers: list[bytes] = []
    told: list[tuple[int, int]] = []
    with scene.instance.lock:
        scene.instance.core.fetched(Q, 0, real_run(0, 128), 128, 0.0)
    scene.feed.asked(
        *(scene.handle.process.life, 0, 0, answers.append, portion),
        lambda size, messages: told.append((size, messages)),
    )
    tasks = read_task_batch(answers[0]).tasks
    assert sum(one.count for one in tasks) == handed
    assert told == [(sum(one.size_bytes for one in tasks), handed)]


def test_the_fetching_thread_delivers_messages_to_a_waiting_listener(scenes):
    scene, woken = scenes(lambda message: None), []
    eventually(lambda: scene.feed._question is not None, "the process asks", WAIT_S)
    # Close the connection over which the listener's process requests tasks, so that it sends no further request. The
    # test then sends such a request itself.
    scene.handle.process.tasks.close()
    answers: list[tuple[int, threading.Thread]] = []

    def answer(payload: bytes) -> None:
        answers.append((len(read_task_batch(payload).tasks), threading.current_thread()))

    scene.feed._wake = woken.append
    scene.feed.asked(scene.handle.process.life, 0, 0, answer)
    with scene.instance.lock:
        scene.instance.core.fetched(Q, 0, real_run(0, 1), 1, 0.0)
    scene.feed.deliver()
    assert answers == [(1, threading.current_thread())]
    assert not woken
    scene.feed.deliver()
    assert woken == [scene.feed]
