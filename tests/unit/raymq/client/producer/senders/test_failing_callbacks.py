"""Tests of callbacks, hooks and observers that raise exceptions, also SystemExit and KeyboardInterrupt. Each message
keeps its true outcome, and other messages are sent."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from msgspec import structs

from raymq.client.producer.observers import SendObserver, SendWatch
from raymq.common import parallel
from raymq.common.errors import SendUnknownError
from raymq.common.message import Message, MessageQueue, SendStatus
from tests.support.clients.fakes import WAIT_S, FakeStore, no_thread_starts, topic_route
from tests.support.clients.producers import Gate

QUEUES = [MessageQueue("orders", "a", number) for number in range(3)]
ENDS = [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), ValueError("a bug")]


def numbered(*numbers: int) -> list[Message]:
    return [Message("orders", str(number).encode()) for number in numbers]


@pytest.fixture
def exiting(monkeypatch):
    """Make calls as the main thread does at the exit of Python 3.12: no helper thread is idle, and none can start."""
    monkeypatch.setattr(parallel, "_idle", [])
    with no_thread_starts():
        yield


@pytest.fixture
def route():
    return topic_route(a=3)


def raising(error: BaseException) -> Callable[..., None]:
    def function(*arguments: object, **keywords: object) -> None:
        raise error

    return function


class FailingHook:
    """Send hook whose `after_send` records each message and then raises an exception."""

    def __init__(self, error: BaseException) -> None:
        self.error, self.after = error, []

    def before_send(self, context) -> None:
        pass

    def after_send(self, context) -> None:
        self.after.append((context.message.body, context.error))
        raise self.error


class FailingObserver(SendObserver):
    """Observer whose `sent` and `failed` raise an exception."""

    def __init__(self, error: BaseException) -> None:
        self.sent = self.failed = raising(error)


class FailingWatch(SendObserver, SendWatch):
    """Observer of each send whose `ended` raises an exception."""

    watches = True

    def __init__(self, error: BaseException) -> None:
        self.ended = raising(error)

    def begin(self, messages):
        return messages, self


@pytest.mark.parametrize("error", ENDS)
def test_a_callback_that_raises_changes_no_outcome_and_stops_no_sender(make, error):
    gate = Gate()
    producer = make(store := FakeStore(script=[gate]))
    first = producer.send_async(numbered(0)[0], queue=QUEUES[0])
    assert gate.entered.wait(WAIT_S)
    futures = [producer.send_async(message, queue=QUEUES[0]) for message in numbered(1, 2, 3)]
    called = []
    for future in [first, *futures]:
        future.add_done_callback(raising(error))
        future.add_done_callback(called.append)
    gate.opened.set()
    assert [future.result(WAIT_S).queue_offset for future in [first, *futures]] == [0, 1, 2, 3]
    producer.flush(WAIT_S)
    assert called == [first, *futures]
    assert producer.send_async(numbered(4)[0]).result(WAIT_S).queue_offset == 4
    producer.close()
    assert store.everything() == [b"0", b"1", b"2", b"3", b"4"]


@pytest.mark.parametrize("kind", [FailingHook, FailingObserver, FailingWatch])
@pytest.mark.parametrize("error", ENDS)
def test_a_hook_or_an_observer_that_raises_changes_no_outcome(make, kind, error, route):
    failing = kind(error)
    settings = {"hooks": [failing]} if kind is FailingHook else {"observers": [failing]}
    producer = make(store := FakeStore(), **settings, route=route)
    assert producer.send_async(numbered(0)[0], queue=QUEUES[0]).result(WAIT_S).queue_offset == 0
    futures = [producer.send_async(message, queue=queue) for queue in QUEUES for message in numbered(1, 2)]
    for future in futures:
        assert future.result(WAIT_S).status is SendStatus.SEND_OK
    producer.flush(WAIT_S)
    if isinstance(error, Exception) or kind is not FailingObserver:
        # these sends run in the caller's thread
        assert producer.send(numbered(3)[0], queue=QUEUES[0]).queue_offset == 3
        assert producer.send(numbered(4)[0], queue=QUEUES[0]).queue_offset == 4
        assert [result.queue_offset for result in producer.send_batch(numbered(5, 6), queue=QUEUES[0])] == [5, 6]
        producer.flush(WAIT_S)
        if kind is FailingHook:
            assert len(failing.after) == 11
            assert all(failure is None for _, failure in failing.after)
    assert len(store.attempts) == len({bytes(b.records) for attempt in store.attempts for b in attempt[:1]})


@pytest.mark.parametrize("kind", [FailingHook, FailingWatch])
def test_an_interrupt_in_the_main_thread_is_raised_after_all_messages_have_their_outcomes(make, exiting, kind):
    """At the exit of Python 3.12, the main thread calls hooks itself, and a signal handler may interrupt a hook."""
    assert threading.current_thread() is threading.main_thread()
    failing, store = kind(KeyboardInterrupt()), FakeStore()
    producer = make(store, **({"hooks": [failing]} if kind is FailingHook else {"observers": [failing]}))
    gathered = []
    for number in range(3):
        with pytest.raises(KeyboardInterrupt):
            gathered.append(producer.send_batch(numbered(2 * number, 2 * number + 1)))
    producer.flush(WAIT_S)
    producer.close()
    assert store.everything() == [b"0", b"1", b"2", b"3", b"4", b"5"]
    assert len(store.attempts) == 3


def test_an_interrupted_attempt_of_a_sender_without_a_thread_is_made_again(make, exiting):
    """The main thread sends. A signal handler interrupts its first attempt at the connection, the second attempt while
    it encodes the messages, and the third attempt while it waits for the store's answer."""
    store = FakeStore()
    producer = make(store)
    store.connects, store.script = [raising(KeyboardInterrupt())], [raising(KeyboardInterrupt())]
    encoder = producer.pipeline._context.encoder
    encode, encoder.encode = encoder.encode, raising(KeyboardInterrupt())
    sends = numbered(0, 1, 2)
    for number in range(3):
        with pytest.raises(KeyboardInterrupt):
            producer.send_async(sends[number], queue=QUEUES[0])
        if number == 1:
            encoder.encode = encode
    assert store.everything() == []
    later = producer.send_async(numbered(3)[0], queue=QUEUES[0])
    assert later.result(WAIT_S).queue_offset == 3
    assert store.everything() == [b"0", b"1", b"2", b"3"]
    producer.flush(WAIT_S)
    producer.close()


def test_an_interrupt_of_other_messages_leaves_a_message_that_its_caller_sent_as_it_is(make, exiting):
    """The caller's message is stored less durably than requested, so it is sent again. A signal handler interrupts the
    second attempt, which the caller makes because the sender has no thread."""
    store = FakeStore()

    def better(batches):
        store.status = SendStatus.SEND_OK

    producer = make(store, retry_when_not_store_ok=True)
    producer.send_batch(numbered(0, 1))
    store.attempts.clear()
    store.status, store.script = SendStatus.FLUSH_DISK_TIMEOUT, [None, raising(KeyboardInterrupt()), better]
    with pytest.raises(KeyboardInterrupt):
        producer.send_batch(numbered(2, 3))
    producer.flush(WAIT_S)
    assert len(store.attempts) == 3
    assert len({bytes(batch.records) for [batch] in store.attempts}) == 1
    assert [result.queue_offset for result in producer.send_batch(numbered(4, 5))] == [4, 5]
    producer.close()
    assert store.everything() == [b"0", b"1", b"2", b"3", b"4", b"5"]


# Tests of bugs after the store has stored messages


def shortened(answers: list, count: int) -> list:
    """Return the store's answers, the first of them with queue offsets for `count` messages only."""
    answers[0] = structs.replace(answers[0], queue_offsets=tuple(range(count)))
    return answers


@pytest.mark.parametrize("error", [TypeError("a bug"), MemoryError()])
@pytest.mark.parametrize("sends_before", [0, 1, 2])
def test_a_bug_after_the_store_has_answered_never_promises_that_nothing_is_stored(make, sends_before, error):
    producer = make(store := FakeStore())
    for message in numbered(*range(sends_before)):
        producer.send(message)
    append = store.append

    def buggy(batches, timeout_s):
        append(batches, timeout_s)
        raise error

    store.append = buggy
    with pytest.raises(SendUnknownError, match=repr(error).partition("(")[0]):
        producer.send(numbered(8)[0])
    with pytest.raises(SendUnknownError):
        producer.send_batch(numbered(6, 7))
    store.append = append
    assert producer.send(numbered(9)[0]).status is SendStatus.SEND_OK
    producer.flush(WAIT_S)
    assert len(store.everything()) == sends_before + 4


def test_a_wrong_answer_for_one_queue_leaves_the_outcomes_of_other_queues_as_they_are(make, route):
    gate = Gate()
    producer = make(store := FakeStore(script=[gate]), route=route)
    futures = [producer.send_async(numbered(0)[0], queue=QUEUES[2])]
    assert gate.entered.wait(WAIT_S)
    wrong = [producer.send_async(message, queue=QUEUES[0]) for message in numbered(1, 2)]
    futures += [producer.send_async(message, queue=QUEUES[1]) for message in numbered(3, 4)]
    append = store.append
    store.append = lambda batches, timeout_s: shortened(append(batches, timeout_s), 1)
    gate.opened.set()
    for future in wrong:
        assert isinstance(future.exception(WAIT_S), SendUnknownError)
    assert [future.result(WAIT_S).queue_offset for future in futures] == [0, 0, 1]
    producer.flush(WAIT_S)
    store.append = append
    assert producer.send(numbered(5)[0], queue=QUEUES[0]).queue_offset == 2
