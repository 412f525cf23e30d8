"""Tests of client objects at the exit of Python 3.12, where no thread can be started. Sends still reach the
store, and objects that need a thread raise a clear error."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from raymq.client.consumer.fetcher import Fetcher
from raymq.client.consumer.push.async_calls import AsyncCalls
from raymq.client.consumer.queue_lookup import QueueWatch
from raymq.client.consumer.rebalance_client import RebalanceClient
from raymq.client.producer.completion import SendFuture
from raymq.client.request.pending import PendingRequests
from raymq.client.request.reply_watch import ReplyWatch
from raymq.common import parallel
from raymq.common.errors import (
    ClientStateError,
    NotMasterError,
    RequestTimeoutError,
    SendUnknownError,
    ServiceNotAvailableError,
)
from raymq.common.message import Message, MessageQueue, SendStatus
from raymq.common.protocol.store import FetchRequest, QueueBounds
from raymq.log_handler import RaymqHandler
from raymq.remoting.heartbeats import Heartbeats
from raymq.telemetry.trace.dispatcher import TRACE_TEXT_MAX, TraceDispatcher, TraceLine
from tests.support.clients.fakes import WAIT_S, FakeStore, no_thread_starts, topic_route
from tests.support.clients.producers import Gate, MakeProducer, producers_of_fakes
from tests.support.history.waiting import eventually

QUEUE = MessageQueue("orders", "a", 0)
GONE = ServiceNotAvailableError("the store restarts")

LAST_SENDS = """
import asyncio
import atexit
from raymq.client.producer.async_producer import AsyncProducer
from raymq.common.message import Message
from tests.support.clients.fakes import FakeStore, topic_route
from tests.support.clients.producers import producers_of_fakes

a, b = FakeStore("storage-a-0"), FakeStore("storage-b-0")
fakes = producers_of_fakes()
make = fakes.__enter__()
plain, later = (make(a, b, route=topic_route(a=1, b=1)) for _ in range(2))

def last():
    plain.send(Message("orders", b"0"))
    plain.send_async(Message("orders", b"1")).result(60)
    plain.send_batch([Message("orders", b"2"), Message("orders", b"3")])
    plain.send_oneway(Message("orders", b"4"))
    plain.close()

async def last_async():
    producer = AsyncProducer(later)
    await producer.send(Message("orders", b"5"))
    await asyncio.gather(*[producer.send(Message("orders", str(number).encode())) for number in (6, 7)])
    await producer.flush()
    await producer.close()

atexit.register(lambda: print(sorted(a.everything() + b.everything())))
atexit.register(lambda: asyncio.run(last_async()))
atexit.register(last)
"""


@pytest.fixture
def make() -> Iterator[MakeProducer]:
    with producers_of_fakes() as make:
        make(FakeStore()).send(Message("orders", b"starts the helper threads of signals"))
        yield make


def bodies(*stores: FakeStore) -> list[bytes]:
    return sorted(body for store in stores for body in store.everything())


def numbered(*numbers: int) -> list[Message]:
    return [Message("orders", str(number).encode()) for number in numbers]


def always(steps: list[Any], error: Exception, until: threading.Event | None = None) -> Callable[..., Exception | None]:
    """Return a step of a FakeStore's script, which follows itself and fails each time with `error`. After `until` is
    set, the step succeeds. A test may set the event while another thread makes the step."""

    def step(*batches: object) -> Exception | None:
        if until is not None and until.is_set():
            return None
        steps.append(step)
        return error

    return step


def test_a_programs_first_sends_at_its_real_exit_are_stored() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LAST_SENDS], capture_output=True, text=True, timeout=2 * WAIT_S, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == str([str(number).encode() for number in range(8)])


def test_the_first_sends_to_each_broker_group_need_no_thread(make: MakeProducer) -> None:
    stores = {"a": FakeStore("storage-a-0"), "b": FakeStore("storage-b-0")}
    producer = make(*stores.values(), route=topic_route(a=1, b=1))
    with no_thread_starts():
        for broker_name in stores:
            queue = MessageQueue("orders", broker_name, 0)
            first, second = numbered(0, 1)
            assert producer.send(first, queue=queue).status is SendStatus.SEND_OK
            futures = [producer.send_async(second, queue=queue)]
            producer.send_batch(numbered(2, 3), queue=queue)
            futures += [producer.send_async(message, queue=queue) for message in numbered(4, 5, 6)]
            assert all(future.done() for future in futures)
        producer.flush(WAIT_S)
        producer.close()
    for store in stores.values():
        assert store.everything() == [str(number).encode() for number in range(7)]
    with pytest.raises(ClientStateError, match="closed"):
        producer.send(first)


@pytest.mark.parametrize("step", [GONE, ("lost", RequestTimeoutError("append", 1.0))])
@pytest.mark.parametrize("sends_before", [0, 1, 2])
def test_a_failed_attempt_without_a_thread_is_repeated(make: MakeProducer, step: object, sends_before: int) -> None:
    """The second send takes the whole pipeline, and the third send takes the shortcut for single messages."""
    producer = make(store := FakeStore())
    with no_thread_starts():
        for message in numbered(*range(sends_before)):
            producer.send(message)
        store.script = [step, step]
        [last] = numbered(9)
        assert producer.send(last).status is SendStatus.SEND_OK
    assert store.everything() == [*(str(number).encode() for number in range(sends_before)), b"9"]


@pytest.mark.parametrize("sends_before", [0, 1, 2])
def test_a_send_without_a_thread_is_repeated_until_it_is_as_durable_as_requested(
    make: MakeProducer, sends_before: int
) -> None:
    producer = make(store := FakeStore(), retry_when_not_store_ok=True)

    def better(batches: object) -> None:
        store.status = SendStatus.SEND_OK

    with no_thread_starts():
        for message in numbered(*range(sends_before)):
            producer.send(message)
        store.status, store.script = SendStatus.FLUSH_DISK_TIMEOUT, [None, better]
        [last] = numbered(9)
        assert producer.send(last).status is SendStatus.SEND_OK
    assert store.everything()[-1:] == [b"9"]
    assert len(store.everything()) == sends_before + 1


def test_a_send_without_a_thread_fails_at_its_deadline_and_close_ends(make: MakeProducer) -> None:
    producer = make(store := FakeStore(), send_timeout_s=0.05)
    store.script.append(always(store.script, GONE))
    with no_thread_starts():
        with pytest.raises((ServiceNotAvailableError, SendUnknownError)):
            producer.send(numbered(0)[0])
        producer.close()
    assert store.everything() == []


def test_messages_move_from_a_failed_broker_to_a_sender_without_a_thread(make: MakeProducer) -> None:
    a, b = FakeStore("storage-a-0"), FakeStore("storage-b-0")
    producer = make(a, b, route=topic_route(a=1, b=1))
    producer.pipeline._turns.next = lambda *arguments: QUEUE  # all messages go to broker group a first
    first, second, *others = numbered(0, 1, 2, 3, 4, 5)
    producer.send(first)
    a.connects.append(always(a.connects, GONE))
    a.script.append(NotMasterError("a", 1))
    with no_thread_starts():
        assert producer.send(second).queue.broker_name == "b"
        futures = [producer.send_async(message) for message in others]
        assert [future.result(WAIT_S).queue.broker_name for future in futures] == ["b"] * 4
        producer.flush(WAIT_S)
    assert (bodies(a), bodies(b)) == ([b"0"], [b"1", b"2", b"3", b"4", b"5"])


@pytest.mark.parametrize("has_thread", [False, True])
def test_a_callback_may_send_to_a_broker_group_without_a_thread(make: MakeProducer, has_thread: bool) -> None:
    a, b = FakeStore("storage-a-0"), FakeStore("storage-b-0")
    producer = make(a, b, route=topic_route(a=1, b=1))
    to_a, to_b = MessageQueue("orders", "a", 0), MessageQueue("orders", "b", 0)
    first, second, third = numbered(0, 1, 2)
    if has_thread:
        producer.send(first, queue=to_a)
    gate, later = Gate(), []
    with no_thread_starts():
        if has_thread:
            a.script = [gate]
            sent = producer.send_async(second, queue=to_a)
            sent.add_done_callback(lambda future: later.append(producer.send_async(third, queue=to_b)))
            gate.opened.set()
        else:
            sent = producer.send_async(first, queue=to_a)
            sent.add_done_callback(lambda future: later.append(producer.send_async(third, queue=to_b)))
        eventually(lambda: later, "the callback's send", WAIT_S)
        assert later[0].result(WAIT_S).status is SendStatus.SEND_OK
    assert bodies(b) == [b"2"]


def test_threads_that_run_at_the_exit_send_at_the_same_time_and_lose_nothing(make: MakeProducer) -> None:
    a, b = FakeStore("storage-a-0"), FakeStore("storage-b-0")
    producer = make(a, b, route=topic_route(a=2, b=2))
    begin, failures = threading.Event(), []

    def send(thread: int) -> None:
        begin.wait(WAIT_S)
        try:
            for number in range(50):
                message = Message("orders", f"{thread}-{number}".encode())
                if number % 2:
                    producer.send(message)
                else:
                    producer.send_async(message)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=send, args=(number,), daemon=True) for number in range(4)]
    for thread in threads:
        thread.start()
    with no_thread_starts():
        begin.set()
        for thread in threads:
            thread.join(WAIT_S)
        producer.flush(WAIT_S)
        producer.close()
    assert failures == []
    assert bodies(a, b) == sorted(f"{thread}-{number}".encode() for thread in range(4) for number in range(50))


# Threads that send at the same time for senders without a thread


@contextmanager
def exiting_with(*threads: threading.Thread) -> Iterator[None]:
    """Start threads, which wait in their first step, and then let no further thread start within the block."""
    for thread in threads:
        thread.start()
    with no_thread_starts():
        yield


def test_a_flush_without_a_thread_keeps_its_timeout_while_another_thread_sends(make: MakeProducer) -> None:
    producer = make(store := FakeStore(script=[gate := Gate()]))
    go = threading.Event()
    sender = threading.Thread(target=lambda: (go.wait(WAIT_S), producer.send(numbered(0)[0])), daemon=True)
    with exiting_with(sender):
        go.set()
        assert gate.entered.wait(WAIT_S)
        with pytest.raises(RequestTimeoutError, match="flush"):
            producer.flush(0.05)
        assert not gate.opened.is_set()
        gate.opened.set()
        producer.flush(WAIT_S)
        sender.join(WAIT_S)
    assert store.everything() == [b"0"]


def test_a_flush_without_a_thread_keeps_its_timeout_while_it_sends(make: MakeProducer, monkeypatch) -> None:
    """A signal handler has interrupted the send of a message to a store that is away. The flush sends the message."""
    monkeypatch.setattr(parallel, "_idle", [])

    def interrupt() -> None:
        raise KeyboardInterrupt

    producer = make(store := FakeStore())
    store.connects = [interrupt]
    with no_thread_starts():
        with pytest.raises(KeyboardInterrupt):
            producer.send_async(numbered(0)[0])
        store.connects.append(always(store.connects, GONE))
        with pytest.raises(RequestTimeoutError, match="flush"):
            producer.flush(0.05)
        assert store.connects
        store.connects.clear()
        producer.flush(WAIT_S)
        producer.close()
    assert store.everything() == [b"0"]


def test_a_callback_may_wait_for_a_thread_that_sends_without_a_thread(make: MakeProducer) -> None:
    producer = make(store := FakeStore(script=[gate := Gate()]), send_timeout_s=0.2, attempt_timeout_s=WAIT_S)
    go, later, joined = [threading.Event() for _ in range(2)], [], []
    first, second = numbered(0, 1)
    threads = [
        threading.Thread(target=lambda: (go[0].wait(WAIT_S), producer.send(first, timeout_s=WAIT_S)), daemon=True),
        threading.Thread(target=lambda: (go[1].wait(WAIT_S), later.append(producer.send_async(second))), daemon=True),
    ]

    def callback(future: object) -> None:
        go[1].set()
        threads[1].join(WAIT_S)
        joined.append(threads[1].is_alive())

    with exiting_with(*threads):
        go[0].set()
        assert gate.entered.wait(WAIT_S)
        [batch] = producer.pipeline._senders["a"]._taken
        SendFuture(batch.completion, 0).add_done_callback(callback)
        gate.opened.set()
        eventually(lambda: joined, "the callback's return", WAIT_S)
        threads[0].join(WAIT_S)
        producer.flush(WAIT_S)
    assert joined == [False]
    assert later[0].done()
    assert store.everything()[0] == b"0"


def test_a_caller_does_not_wait_for_the_messages_of_other_callers(make: MakeProducer) -> None:
    """A thread sends to a store that is away, for longer than this test waits. Sends to another store end at once."""
    a, b = FakeStore("storage-a-0"), FakeStore("storage-b-0")
    producer = make(a, b, route=topic_route(a=1, b=1))
    to_a, to_b = MessageQueue("orders", "a", 0), MessageQueue("orders", "b", 0)
    b.connects.append(always(b.connects, GONE, until=(back := threading.Event())))
    go, tried = threading.Event(), threading.Event()
    first, *others = numbered(*range(5))

    def send() -> None:
        assert go.wait(WAIT_S)
        tried.set()
        producer.send(first, queue=to_b, timeout_s=10 * WAIT_S)

    sender = threading.Thread(target=send, daemon=True)
    with exiting_with(sender):
        go.set()
        assert tried.wait(WAIT_S)
        eventually(lambda: producer.pipeline._context.threadless._owner == sender.ident, "the thread's turn", WAIT_S)
        for message in others:
            assert producer.send(message, queue=to_a).status is SendStatus.SEND_OK
        assert sender.is_alive()
        back.set()
        sender.join(WAIT_S)
        assert not sender.is_alive()
    assert (bodies(a), bodies(b)) == ([b"1", b"2", b"3", b"4"], [b"0"])


def test_a_caller_leaves_the_messages_of_other_callers_to_a_thread_that_waits(make: MakeProducer) -> None:
    """The first caller sends to a. The second caller waits with a message to b, whose store is away. The
    first caller returns when its own message is stored, and the second caller goes on with its own message."""
    a, b = FakeStore("storage-a-0", script=[gate := Gate()]), FakeStore("storage-b-0")
    producer = make(a, b, route=topic_route(a=1, b=1))
    to_a, to_b = MessageQueue("orders", "a", 0), MessageQueue("orders", "b", 0)
    b.connects.append(always(b.connects, GONE, until=(back := threading.Event())))
    go = [threading.Event() for _ in range(2)]
    first, second = numbered(0, 1)
    one = threading.Thread(target=lambda: (go[0].wait(WAIT_S), producer.send(first, queue=to_a)), daemon=True)
    two = threading.Thread(
        target=lambda: (go[1].wait(WAIT_S), producer.send(second, queue=to_b, timeout_s=10 * WAIT_S)), daemon=True
    )
    threadless = producer.pipeline._context.threadless
    with exiting_with(one, two):
        go[0].set()
        assert gate.entered.wait(WAIT_S)
        go[1].set()
        eventually(lambda: threadless._waiting, "the second caller's wait", WAIT_S)
        gate.opened.set()
        one.join(WAIT_S)
        assert not one.is_alive()
        assert two.is_alive()
        eventually(lambda: threadless._owner == two.ident, "the turn of the second caller", WAIT_S)
        back.set()
        two.join(WAIT_S)
        assert not two.is_alive()
    assert (bodies(a), bodies(b)) == ([b"0"], [b"1"])


def test_a_thread_that_an_interrupt_ends_leaves_the_turn_to_a_thread_that_waits(make: MakeProducer) -> None:
    def interrupt(batches: object) -> None:
        gate(batches)
        raise SystemExit(3)

    gate = Gate()
    producer = make(store := FakeStore(script=[interrupt]))
    go, ended = [threading.Event() for _ in range(2)], []
    first, second = numbered(0, 1)

    def send() -> None:
        assert go[0].wait(WAIT_S)
        try:
            producer.send_async(first)
        except SystemExit as error:
            ended.append(error.code)

    one = threading.Thread(target=send, daemon=True)
    two = threading.Thread(target=lambda: (go[1].wait(WAIT_S), producer.send(second)), daemon=True)
    with exiting_with(one, two):
        go[0].set()
        assert gate.entered.wait(WAIT_S)
        go[1].set()
        eventually(lambda: producer.pipeline._context.threadless._waiting, "the second caller's wait", WAIT_S)
        gate.opened.set()
        one.join(WAIT_S)
        two.join(WAIT_S)
        producer.flush(WAIT_S)
    assert ended == [3]
    assert store.everything() == [b"0", b"1"]


# Objects around a producer


class Lines:
    """Fake trace context with one record."""

    count = 1

    def lines(self) -> Iterator[TraceLine]:
        yield TraceLine("record", ("key",))


class Long(Lines):
    """Fake trace context with one record that fills a trace message."""

    def lines(self) -> Iterator[TraceLine]:
        yield TraceLine("x" * TRACE_TEXT_MAX, ())


def test_trace_records_of_the_exit_are_sent_by_close() -> None:
    sent: list[object] = []
    producer = SimpleNamespace(
        send=lambda message, timeout_s: sent.append(message), close=lambda: sent.append("closed")
    )
    traces = TraceDispatcher(lambda: producer)
    with no_thread_starts():
        traces.put(Lines())
        traces.put(Lines())
        traces.close()
        traces.close()
    assert [getattr(item, "body", item) for item in sent] == [b"recordrecord", "closed"]
    assert traces.statistics().sent == 2


def test_the_close_of_a_trace_without_a_thread_ends_in_time() -> None:
    """Each send takes as long as it may. So the first message of the trace uses up the time of `close`."""
    timeouts: list[float | None] = []

    def send(message: object, timeout_s: float | None = None) -> None:
        timeouts.append(timeout_s)
        threading.Event().wait(WAIT_S if timeout_s is None else timeout_s)
        raise GONE

    traces = TraceDispatcher(lambda: SimpleNamespace(send=send, close=lambda: None))
    with no_thread_starts():
        for _ in range(3):
            traces.put(Long())
        traces.close(0.05)
    [timeout_s] = timeouts
    assert timeout_s is not None
    assert 0 < timeout_s <= 0.05
    assert traces.statistics().failed == 3
    assert "the close of the trace" in traces.statistics().last_error


def test_the_close_of_a_trace_starts_the_thread_that_could_not_be_started_earlier() -> None:
    entered, release = threading.Event(), threading.Event()

    def send(message: object, timeout_s: float | None = None) -> None:
        entered.set()
        assert release.wait(WAIT_S)

    traces = TraceDispatcher(lambda: SimpleNamespace(send=send, close=lambda: None))
    with no_thread_starts():
        traces.put(Lines())
    traces.close(0.01)
    assert entered.wait(WAIT_S)
    release.set()
    eventually(lambda: traces.statistics().sent == 1, "the record is sent", WAIT_S)


def test_a_trace_record_raises_no_error_if_the_process_has_too_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    sent: list[object] = []
    producer = SimpleNamespace(send=lambda message, timeout_s: sent.append(message), close=lambda: None)
    traces = TraceDispatcher(lambda: producer)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        traces.put(Lines())
    traces.close()
    assert len(sent) == 1


def test_a_producer_and_a_consumer_of_the_exit_need_no_heartbeat_thread() -> None:
    beats = Heartbeats(SimpleNamespace(brokers=dict), "10.0.0.1")
    with no_thread_starts():
        beats.set_producer(producer := object(), "g")
        beats.remove(producer)
        beats.close()


def test_a_listener_of_queue_changes_is_registered_at_the_exit_without_an_error() -> None:
    watch = QueueWatch(lambda topic: [QUEUE], 1.0, "watch")
    with no_thread_starts():
        watch.register("orders", lambda topic, queues: None)
        watch.stop()


def test_a_fetcher_at_the_exit_raises_no_error_and_counts_no_thread_that_did_not_start() -> None:
    names: list[str] = []
    fetcher = Fetcher(
        wanted=lambda: {QUEUE: 0},
        assigned=lambda: frozenset([QUEUE]),
        deliver=lambda queue, offset, result: None,
        request=lambda queue, offset: FetchRequest(queue.topic, queue.queue_id, offset, 10),
        storages=lambda queue: ["storage-a-0"],
        storage=lambda name: SimpleNamespace(fetch=lambda *_, **__: names.append(name) or []),
        outdated=lambda queue: None,
        lost=lambda queue, offset, error: None,
    )
    fetcher._names[QUEUE] = "storage-a-0"
    with no_thread_starts():
        for _ in range(3):
            fetcher.wake_readers()
        fetcher.find_again(QUEUE)
    assert [readers.threads for readers in fetcher._readers.values()] == [0]
    assert fetcher._finder is None
    fetcher._names[QUEUE] = "storage-a-0"
    fetcher.wake_readers()  # no reader was counted, so a thread that can start reads the queue
    eventually(lambda: names, "a read", WAIT_S)
    fetcher.stop()


# Objects that are useless without a thread


def first_request() -> object:
    return PendingRequests().add("id", 1.0, lambda: Message("orders", b"?"))


def first_reply_queue() -> object:
    watch = ReplyWatch(
        *("me", SimpleNamespace(get=None), SimpleNamespace(get=None)), take=lambda message: None, idle_s=lambda: 0.0
    )
    watch._lookup = SimpleNamespace(bounds=lambda queue: QueueBounds(0, 40, 40))
    return watch.begin(QUEUE)


def first_consumer() -> object:
    source = SimpleNamespace(next_heartbeat=lambda: None)
    return RebalanceClient(SimpleNamespace(brokers=dict)).join("g", source)


def new_handler() -> object:
    return RaymqHandler("logs", client=SimpleNamespace(producer=lambda group: None))


async def nothing() -> None:
    pass


def first_awaitable() -> object:
    awaitable = nothing()
    try:
        return AsyncCalls().start(awaitable)
    finally:
        awaitable.close()


@pytest.mark.parametrize(
    ("begin", "what"),
    [
        (first_request, "the first request of a client"),
        (first_reply_queue, "the first request of a client"),
        (first_consumer, "a consumer of group 'g'"),
        (new_handler, "a RaymqHandler"),
        (first_awaitable, "the event loop of listeners"),
    ],
)
def test_an_object_that_needs_a_thread_raises_a_clear_error(begin: Callable[[], object], what: str) -> None:
    with no_thread_starts(), pytest.raises(ClientStateError, match=f"{what} needs a new thread.*program exits"):
        begin()


def test_a_request_that_could_not_begin_does_not_wait() -> None:
    requests = PendingRequests()
    with no_thread_starts(), pytest.raises(ClientStateError):
        requests.add("id", 1.0, lambda: Message("orders", b"?"))
    assert requests.statistics().waiting == 0
    requests.close()


def test_listeners_coroutines_run_after_a_thread_could_not_start_once() -> None:
    calls = AsyncCalls()
    first = nothing()
    with no_thread_starts(), pytest.raises(ClientStateError):
        calls.start(first)
    first.close()
    assert calls.start(nothing()).result(WAIT_S) is None
