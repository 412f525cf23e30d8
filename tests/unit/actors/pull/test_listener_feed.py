"""The feed of a listener's process that works, fails, dies and comes back, without Ray: its handle is a stand-in."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from actors.pull import listener_feed as pull_feed
from actors.pull.instance_state import InstanceState
from actors.pull.listener_feed import FeedThread, ListenerFeed
from raymq.consumer.push.listener import Listener, ship
from raymq.consumer.push.settings import PushSettings
from raymq.consumer.subscription import Subscription
from raymq.errors import ServiceNotAvailableError
from raymq.kernels.stamp import stamp
from raymq.message import Message, MessageQueue
from raymq.protocol.group import QueueOffset
from raymq.record.encode import encode_batch
from raymq.record.memory_records import MemoryRecords
from tests.support.clients.fakes import WAIT_S
from tests.support.history.waiting import eventually

Q = MessageQueue("orders", "broker-a", 0)


class Reference:
    def __init__(self, future: Future) -> None:
        self._future = future

    def future(self) -> Future:
        return self._future


class Handle:
    """An actor handle whose process runs here. `kill` ends it: calls under way fail, and the next ones find a new
    Listener."""

    def __init__(self, handle, settings: PushSettings) -> None:
        self._settings = settings
        self._handle = handle
        self._threads = ThreadPoolExecutor(16)
        self._under_way: set[Future] = set()
        self.lives = 0
        self._start()

    def _start(self) -> None:
        self.lives += 1
        self.listener = Listener(ship(print, takes_batch=False), self._settings)
        self.listener._pool._handler = self._handle

    def kill(self) -> None:
        under_way, self._under_way = self._under_way, set()
        self._start()
        for answer in under_way:
            if not answer.done():
                answer.set_exception(ActorUnavailableError("killed", None))

    def __getattr__(self, name: str):
        return Method(self, name)


class Method:
    def __init__(self, handle: Handle, name: str) -> None:
        self._handle, self._name = handle, name

    def remote(self, *args) -> Reference:
        answer: Future = Future()
        self._handle._under_way.add(answer)
        listener = self._handle.listener

        def run() -> None:
            result = getattr(listener, self._name)(*args)
            if answer in self._handle._under_way and not answer.done():
                answer.set_result(result)

        self._handle._threads.submit(run)
        return Reference(answer)


class Scene:
    def __init__(self, handle, **settings) -> None:
        self.instance = InstanceState(
            "pull-billing-0", PushSettings("billing", (Subscription.parse("orders"),), **settings)
        )
        self.handle = Handle(handle, self.instance.settings)
        self.sent: list[tuple[str, int, int]] = []
        self.refuse = False
        self.thread, self.senders = FeedThread(), ThreadPoolExecutor(2)
        self.gone = threading.Event()
        self.feed = self.make_feed(self.instance)
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
        )
        self.thread.add(feed)
        return feed

    def call(self, feed: ListenerFeed | None = None) -> None:
        """The Listener's own call, which comes every few seconds."""
        listener = self.handle.listener
        keep = (feed or self.feed).heard(self.handle, str(self.handle.lives), listener.ready(), listener.kept())
        if keep is not None:
            listener.keep(keep)

    def close(self) -> None:
        self.feed.close()
        self.thread.close()
        self.senders.shutdown(wait=False)

    def _send_back(self, broker_name: str, records: bytes, level: int, most: int) -> None:
        if self.refuse:
            raise ServiceNotAvailableError("the broker is away")
        self.sent += [(broker_name, offset, level) for offset in MemoryRecords.read(records).offsets]

    def fetch(self, count: int, first: int = 0) -> None:
        with self.instance.lock:
            self.instance.core.fetched(Q, first, real_run(first, count), first + count, 0.0)
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
    monkeypatch.setattr(pull_feed, "resolve", lambda reference, what, timeout_s: reference.future().result(timeout_s))
    made: list[Scene] = []

    def make(handle, **settings) -> Scene:
        made.append(Scene(handle, **settings))
        return made[-1]

    yield make
    for scene in made:
        scene.close()


@pytest.mark.parametrize("orderly", [False, True])
def test_what_was_fetched_is_heard_and_may_be_committed(scenes, orderly):
    heard = []
    scene = scenes(lambda message: heard.append(int(message.body)), orderly=orderly)
    scene.fetch(100)
    eventually(lambda: scene.feed.consumed == 100, "all is counted", WAIT_S)
    assert scene.commit_offset == 100
    assert sorted(heard) == list(range(100))
    assert scene.feed.failures == 0


def test_what_fails_goes_back_to_its_broker_and_is_done_then(scenes):
    def handle(message):
        if message.body == b"3":
            raise ValueError("no")

    scene = scenes(handle)
    scene.fetch(10)
    eventually(lambda: scene.commit_offset == 10, "the commit point", WAIT_S)
    assert scene.sent == [("broker-a", 3, 0)]
    assert (scene.feed.consumed, scene.feed.failures) == (9, 1)


def test_what_the_broker_does_not_take_is_kept(scenes):
    def handle(message):
        raise ValueError("no")

    scene = scenes(handle)
    scene.refuse = True
    scene.fetch(1)
    eventually(lambda: scene.instance.core.process_queues()[0].again, "the message to wait here", WAIT_S)
    assert scene.commit_offset == 0


@pytest.mark.parametrize("orderly", [False, True])
def test_after_the_process_died_nothing_is_lost_and_what_was_finished_is_not_repeated(scenes, orderly):
    gate = threading.Event()
    heard = []

    def handle(message):
        number = int(message.body)
        heard.append(number)
        if number == 5 and heard.count(5) == 1:
            gate.set()
            threading.Event().wait(WAIT_S)  # this life never comes back

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


def test_a_listener_that_cannot_be_loaded_gets_nothing_and_says_why(scenes, monkeypatch):
    monkeypatch.setattr(Listener, "ready", lambda self: "Traceback: no such module")
    scene = scenes(print)
    scene.fetch(1)
    eventually(lambda: "no such module" in scene.feed.away_because, "the reason", WAIT_S)
    assert "no such module" in scene.feed.broken
    assert scene.instance.core.listener_away


def test_what_was_suspended_is_known_to_the_next_life(scenes):
    scene = scenes(lambda message: None)
    assert not scene.instance.core.listener_away
    scene.feed.keep((True, frozenset({Q})))
    assert scene.handle.listener.kept() == (True, frozenset({Q}))
    after = InstanceState("pull-billing-0", scene.instance.settings)
    feed = scene.make_feed(after)
    scene.call(feed)
    assert not after.core.listener_away
    feed.close()
    assert after.core.suspended
    assert after.core.paused == {Q}


def test_a_listener_that_was_started_again_is_told_what_was_said_in_this_life(scenes):
    scene = scenes(lambda message: None)
    scene.feed.keep((True, frozenset({Q})))
    scene.handle.kill()
    scene.call()
    assert scene.instance.core.suspended
    assert scene.handle.listener.kept() == (True, frozenset({Q}))
    assert scene.feed.deaths == 1


def test_a_listener_that_has_been_silent_and_is_dead_for_good_is_noticed(scenes, monkeypatch):
    scene = scenes(lambda message: None)
    monkeypatch.setattr(pull_feed, "SILENT_AFTER_S", 0.0)
    monkeypatch.setattr(scene.handle.listener, "ready", ActorDiedError)
    scene.feed.look()
    assert not scene.gone.is_set()  # it has answered
    monkeypatch.setattr(Method, "remote", lambda self: Reference(failed(ActorDiedError())))
    eventually(lambda: scene.feed.look() or scene.gone.is_set(), "its end", WAIT_S)


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
    with scene.instance.lock:  # a pause after a fetch that is over at once
        scene.instance.core.fetched(Q, 0, real_run(0, 10), 10, time.monotonic())
    scene.feed.wake()
    eventually(lambda: scene.feed.consumed == 10, "all is counted", WAIT_S)
    scene.feed.take_turn()
    assert scene.feed.next_turn_s > time.monotonic()
