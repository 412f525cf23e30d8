"""Tests of the behaviour that Producer and AsyncProducer share, and of the behaviour that only AsyncProducer
has."""

from __future__ import annotations

import asyncio
import inspect
import pickle
import threading
import time
from concurrent.futures import Future

import pyarrow as pa
import pytest

from raymq.client.producer import async_producer
from raymq.client.producer.async_producer import AsyncProducer
from raymq.client.producer.producer import Producer
from raymq.common.errors import (
    ClientStateError,
    InvalidArgumentError,
    MessageIllegalError,
    RequestTimeoutError,
    SendUnknownError,
    ServiceNotAvailableError,
    SystemBusyError,
)
from raymq.common.message import Message, MessageQueue
from tests.support.clients.fakes import WAIT_S, FakeStore, topic_route
from tests.support.clients.producers import Gate

GONE = ServiceNotAvailableError("the actor is restarting")


def message(body: bytes = b"x") -> Message:
    return Message("orders", body)


class OnLoop:
    """An AsyncProducer with the blocking interface of Producer. Each call runs its coroutine to the end on a separate
    event loop."""

    def __init__(self, producer) -> None:
        self._twin = AsyncProducer(producer)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def start(self, method: str, *args, **more) -> Future:
        return asyncio.run_coroutine_threadsafe(getattr(self._twin, method)(*args, **more), self._loop)

    def __getattr__(self, method: str):
        return lambda *args, **more: self.start(method, *args, **more).result(WAIT_S)

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)
        self._loop.close()


@pytest.fixture(params=["threads", "event loop"])
def twin(make, request):
    """Return a function that makes a Producer or an AsyncProducer, depending on the test's parameter."""
    loops = []

    def make_twin(*stores, **settings):
        producer = make(*stores, **settings)
        if request.param == "threads":
            return producer
        loops.append(OnLoop(producer))
        return loops[-1]

    yield make_twin
    for loop in loops:
        loop.end()


def test_a_message_is_stored_and_its_queue_and_offset_returned(twin):
    store = FakeStore()
    assert twin(store).send(message()).queue == MessageQueue("orders", "a", 0)
    assert store.everything() == [b"x"]


def test_a_batch_is_stored_in_order_in_one_queue(twin):
    sent = twin(FakeStore(), route=topic_route(a=4)).send_batch([message(b"%d" % n) for n in range(9)])
    assert [result.queue_offset for result in sent] == list(range(9))
    assert len({result.queue for result in sent}) == 1


def test_a_table_is_stored(twin):
    assert twin(FakeStore()).send_table("orders", pa.table({"body": [b"x"] * 50})).count == 50


def test_a_message_can_name_its_queue(twin):
    producer = twin(FakeStore(), route=topic_route(a=4))
    assert producer.send(message(), sharding_key=1001).queue.queue_id == 1
    assert producer.send(message(), queue=MessageQueue("orders", "a", 2)).queue.queue_id == 2
    assert producer.send(message(), selector=lambda queues, *_: queues[3]).queue.queue_id == 3


def test_bad_input_is_refused_before_anything_waits(twin):
    producer = twin(store := FakeStore(), max_buffered_messages=1)
    with pytest.raises(MessageIllegalError):
        producer.send("text")
    with pytest.raises(InvalidArgumentError):
        producer.send(message(), sharding_key=1, queue=MessageQueue("orders", "a", 0))
    with pytest.raises(TypeError):
        producer.send(message(), colour="red")
    with pytest.raises(MessageIllegalError):
        producer.send_batch([])
    assert store.attempts == []
    assert producer.send(message())


def test_a_send_is_retried(twin):
    store = FakeStore(script=[("lost", GONE), GONE])
    assert twin(store).send(message()).queue_offset == 0
    assert store.everything() == [b"x"]


def test_out_of_time_the_outcome_is_unknown(twin, clock):
    with pytest.raises(SendUnknownError):
        twin(FakeStore(script=[GONE, clock.passes(GONE)])).send(message())


def test_a_full_buffer_is_reported(twin):
    gate = Gate()
    producer = twin(store := FakeStore(script=[gate]), max_buffered_messages=1)
    producer.send_oneway(message())
    with pytest.raises(SystemBusyError, match=r"stayed full for 0\.02 s"):
        producer.send(message(), timeout_s=0.02)
    gate.opened.set()
    producer.flush(WAIT_S)
    assert store.everything() == [b"x"]


def test_with_when_full_raise_a_full_buffer_is_an_error_at_once(twin):
    gate = Gate()
    producer = twin(FakeStore(script=[gate]), max_buffered_messages=1, when_full="raise")
    producer.send_oneway(message())
    with pytest.raises(SystemBusyError, match="is full"):
        producer.send(message())
    gate.opened.set()


def test_flush_waits_and_raises_when_that_takes_too_long(twin):
    gate = Gate()
    producer = twin(store := FakeStore(script=[gate]))
    producer.send_oneway(message())
    with pytest.raises(RequestTimeoutError, match="the flush of the producer"):
        producer.flush(0.02)
    gate.opened.set()
    producer.flush(WAIT_S)
    assert store.everything() == [b"x"]


def test_close_flushes_and_later_sends_are_refused(twin):
    producer = twin(store := FakeStore())
    producer.send_oneway(message())
    producer.close()
    producer.close()
    assert store.everything() == [b"x"]
    with pytest.raises(ClientStateError):
        producer.send(message())


# Tests of the behaviour of AsyncProducer that needs an event loop


def test_the_event_loop_runs_while_sends_wait_for_space_in_order(make):
    gate = Gate()

    async def run() -> list[int]:
        async with AsyncProducer(make(FakeStore(script=[gate]), max_buffered_messages=1)) as producer:
            sends = [asyncio.create_task(producer.send(message(b"%d" % n))) for n in range(50)]
            while not gate.entered.is_set():
                await asyncio.sleep(0)
            assert not any(send.done() for send in sends)
            gate.opened.set()
            return [result.queue_offset for result in await asyncio.gather(*sends)]

    assert asyncio.run(run()) == list(range(50))


def test_no_thread_is_spent_per_message(make):
    gate = Gate()

    async def run() -> int:
        async with AsyncProducer(make(FakeStore(script=[gate]), max_buffered_messages=100)) as producer:
            sends = [asyncio.create_task(producer.send(message())) for _ in range(1000)]
            while not gate.entered.is_set():
                await asyncio.sleep(0)
            threads = threading.active_count()
            gate.opened.set()
            await asyncio.gather(*sends)
            return threads

    before = threading.active_count()
    # a producer adds two threads: the sender, and the thread that requested the route
    assert asyncio.run(run()) <= before + 2


def test_a_send_cancelled_while_it_awaits_space_sends_nothing_and_stops_waiting(make):
    gate = Gate()
    store = FakeStore(script=[gate])

    async def run() -> None:
        async with AsyncProducer(make(store, max_buffered_messages=1)) as producer:
            first = asyncio.create_task(producer.send(message(b"first")))
            while not gate.entered.is_set():
                await asyncio.sleep(0)
            lost = asyncio.create_task(producer.send(message(b"cancelled")))
            last = asyncio.create_task(producer.send(message(b"last")))
            await asyncio.sleep(0.01)
            lost.cancel()
            with pytest.raises(asyncio.CancelledError):
                await lost
            gate.opened.set()
            await asyncio.gather(first, last)

    asyncio.run(run())
    assert store.everything() == [b"first", b"last"]


def test_a_send_cancelled_on_its_way_is_carried_on_and_flush_awaits_it(make):
    gate = Gate()
    store = FakeStore(script=[gate])

    async def run() -> None:
        async with AsyncProducer(make(store)) as producer:
            send = asyncio.create_task(producer.send(message()))
            while not gate.entered.is_set():
                await asyncio.sleep(0)
            send.cancel()
            with pytest.raises(asyncio.CancelledError):
                await send
            flush = asyncio.create_task(producer.flush(WAIT_S))
            await asyncio.sleep(0.01)
            assert not flush.done()
            gate.opened.set()
            await flush

    asyncio.run(run())
    assert store.everything() == [b"x"]


def test_a_route_is_fetched_in_a_thread_once_at_a_time_and_again_later(make, monkeypatch):
    producer = make(FakeStore())
    asked: list[str] = []
    route = producer.pipeline.route("orders", 1.0, keyed=False)

    def slow_route(topic, timeout_s, *, keyed):
        asked.append(threading.current_thread().name)
        time.sleep(0.02)
        return route

    monkeypatch.setattr(producer.pipeline, "route", slow_route)

    async def run() -> None:
        twin = AsyncProducer(producer)
        await asyncio.gather(*[twin.send(message()) for _ in range(20)])
        assert len(asked) == 1
        assert asked[0] != threading.current_thread().name
        monkeypatch.setattr(async_producer, "ROUTE_VALID_S", 0.0)
        twin._routes.clear()
        await twin.send(message())
        await twin.send(message())
        assert len(asked) == 3

    asyncio.run(run())


def test_a_route_that_is_not_known_is_the_error_of_all_who_wait_for_it(make, monkeypatch):
    producer = make(FakeStore())

    def no_route(topic, timeout_s, *, keyed):
        raise GONE

    async def run() -> list:
        twin = AsyncProducer(producer)
        monkeypatch.setattr(producer.pipeline, "route", no_route)
        failed = await asyncio.gather(*[twin.send(message()) for _ in range(3)], return_exceptions=True)
        monkeypatch.undo()
        await twin.send(message())
        return failed

    assert asyncio.run(run()) == [GONE] * 3


def test_an_async_producer_cannot_be_pickled(make):
    with pytest.raises(TypeError, match="in the process that uses"):
        pickle.dumps(AsyncProducer(make(FakeStore())))


@pytest.mark.parametrize(
    "name", sorted(name for name, _ in inspect.getmembers(AsyncProducer, inspect.iscoroutinefunction) if name[0] != "_")
)
def test_twins_take_the_same_arguments(name):
    def arguments(kind):
        return [
            (parameter.name, parameter.kind, parameter.default, parameter.annotation)
            for parameter in inspect.signature(getattr(kind, name)).parameters.values()
        ]

    assert arguments(AsyncProducer) == arguments(Producer)
