"""Tests of the asyncio pull consumer: it can be cancelled, uses few threads, and never blocks the event loop.

Behaviour that the asyncio consumer shares with the blocking consumer is tested in test_consumer.py.
"""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest

from raymq.client.consumer import fetcher
from raymq.client.consumer.pull import async_consumer, engine as pull_engine
from raymq.client.consumer.pull.async_consumer import AsyncPullConsumer
from raymq.client.consumer.pull.engine import PullEngine
from raymq.client.consumer.pull.settings import PullSettings
from raymq.common.errors import ClientStateError
from raymq.common.message import MessageQueue
from raymq.common.protocol.group import CommitAnswer, QueueOffset
from tests.support.clients.fakes import WAIT_S, FakeRoutes, topic_route
from tests.support.stores.stores import make_batch, open_store

Q0 = MessageQueue("orders", "a", 0)


class Offsets:
    """Fake brokers that keep committed offsets. A commit waits for the event `let_commit`."""

    def __init__(self) -> None:
        self.let_commit = threading.Event()
        self.let_commit.set()
        self.committing = threading.Event()
        self.committed: dict[MessageQueue, int] = {}

    def ensure_group(self, broker_name, timeout_s) -> None:
        pass

    def start_offset(self, queue, query, generation, timeout_s=20.0) -> QueueOffset:
        return QueueOffset(self.committed.get(queue, 0))

    def start_offsets(self, generations, query, timeout_s=20.0) -> dict[MessageQueue, QueueOffset]:
        return {queue: self.start_offset(queue, query, generation) for queue, generation in generations.items()}

    def commit_offsets(self, commits, timeout_s) -> CommitAnswer:
        self.committing.set()
        assert self.let_commit.wait(WAIT_S)
        self.committed |= {queue: wish.queue_offset for queue, wish in commits.items() if wish.queue_offset is not None}
        return CommitAnswer()


@pytest.fixture
def offsets(monkeypatch):
    offsets = Offsets()
    monkeypatch.setattr(pull_engine, "GroupOffsets", lambda name: offsets)
    monkeypatch.setattr(fetcher, "FETCH_LONG_POLL_S", 0.02)
    return offsets


@pytest.fixture
def store(tmp_path, no_flushes):
    store = open_store(tmp_path / "store")
    yield store
    store.close()


@pytest.fixture
def engine(offsets, store, commits):
    """Yield the engine of an asyncio consumer. The engine is closed after the test."""
    storage = SimpleNamespace(
        fetch=lambda requests, max_bytes, wait_s, timeout_s: store.fetch(requests, max_bytes=max_bytes, wait_s=wait_s),
        reader=lambda: None,
    )
    engine = PullEngine(
        PullSettings("billing", auto_commit_interval_s=3600.0),
        routes=FakeRoutes(topic_route(a=1)),
        storages=SimpleNamespace(get=lambda name: storage),
        rebalance=SimpleNamespace(),
        commits=commits,
        node_id="node-1",
        announce=lambda engine, data: None,
        on_close=lambda engine: None,
    )
    yield engine
    offsets.let_commit.set()
    engine.close()


async def assigned(engine: PullEngine) -> AsyncPullConsumer:
    consumer = AsyncPullConsumer(engine)
    await consumer.assign([Q0])
    return consumer


async def turn() -> None:
    """Let the other tasks of the event loop run until each of them waits."""
    for _ in range(10):
        await asyncio.sleep(0)


async def all_idle(consumer: AsyncPullConsumer) -> None:
    """Wait until all threads that make the consumer's calls are idle."""
    calls = consumer._calls
    while calls._work_queue.qsize() or calls._idle_semaphore._value < len(calls._threads):
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("inline_bytes", [0, 1 << 20])
def test_polls_that_are_cancelled_at_any_moment_lose_no_message(engine, store, monkeypatch, inline_bytes):
    monkeypatch.setattr(async_consumer, "INLINE_BYTES", inline_bytes)

    async def main() -> list[bytes]:
        consumer = await assigned(engine)
        bodies: list[bytes] = []
        turns = 0
        while len(bodies) < 200:
            if turns < 40:
                store.append([make_batch([b"%d" % (5 * turns + number) for number in range(5)])])
            poll = asyncio.create_task(consumer.poll(max_messages=3, timeout_s=WAIT_S))
            for _ in range(turns % 7):
                await asyncio.sleep(0 if turns % 2 else 0.002)
            if turns < 100:
                poll.cancel()
            turns += 1
            try:
                bodies += [message.body for message in await poll]
            except asyncio.CancelledError:
                continue
        return bodies

    assert asyncio.run(main()) == [b"%d" % number for number in range(200)]


def test_a_poll_that_waits_holds_no_thread_and_is_woken_by_a_message(engine, store):
    async def main() -> list[bytes]:
        consumer = await assigned(engine)
        poll = asyncio.create_task(consumer.poll(timeout_s=WAIT_S))
        await asyncio.wait_for(all_idle(consumer), WAIT_S)
        assert not consumer._decoder._threads
        store.append([make_batch([b"0"])])
        return [message.body for message in await poll]

    assert asyncio.run(main()) == [b"0"]


def test_a_slow_broker_blocks_neither_the_event_loop_nor_polls(engine, store, offsets):
    async def main() -> None:
        consumer = await assigned(engine)
        store.append([make_batch([b"0", b"1"])])
        await consumer.poll(max_messages=1, timeout_s=WAIT_S)
        offsets.let_commit.clear()
        commit = asyncio.create_task(consumer.commit())
        while not offsets.committing.is_set():
            await asyncio.sleep(0)
        assert [message.body for message in await consumer.poll(timeout_s=WAIT_S)] == [b"1"]
        assert not commit.done()
        offsets.let_commit.set()
        assert await commit == {Q0: 1}

    asyncio.run(main())


def test_however_many_calls_wait_the_threads_are_few(engine, store, offsets):
    async def main() -> None:
        consumer = await assigned(engine)
        offsets.let_commit.clear()
        commits = [asyncio.create_task(consumer.commit()) for _ in range(50)]
        await turn()
        assert len(consumer._calls._threads) <= async_consumer.CALL_THREADS
        offsets.let_commit.set()
        await asyncio.gather(*commits)

    asyncio.run(main())


def test_an_async_with_closes_and_ends_the_threads(engine, store, offsets):
    async def main() -> AsyncPullConsumer:
        store.append([make_batch([b"0", b"1"])])
        async with await assigned(engine) as consumer:
            await consumer.poll(max_messages=1, timeout_s=WAIT_S)
        await turn()
        return consumer

    consumer = asyncio.run(main())
    assert offsets.committed == {Q0: 1}
    for thread in (*consumer._calls._threads, *consumer._decoder._threads):
        thread.join(WAIT_S)
        assert not thread.is_alive()


def test_a_task_that_is_cancelled_in_a_with_leaves_the_last_polls_messages_uncommitted(engine, store, offsets):
    async def consume() -> None:
        async with await assigned(engine) as consumer:
            await consumer.poll(max_messages=1, timeout_s=WAIT_S)
            await consumer.poll(max_messages=1, timeout_s=WAIT_S)
            await asyncio.sleep(WAIT_S)

    async def main() -> None:
        store.append([make_batch([b"0", b"1"])])
        task = asyncio.create_task(consume())
        while engine._core._queues.get(Q0) is None or engine._core.get(Q0).position < 2:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert offsets.committed == {Q0: 1}


def test_a_queue_change_listener_is_called_on_the_loop(engine):
    async def main() -> None:
        consumer = await assigned(engine)
        called = asyncio.get_running_loop().create_future()
        engine._watch._interval_s = 0.01
        await consumer.register_queue_change_listener(
            "orders", lambda topic, queues: called.set_result((threading.current_thread(), len(queues)))
        )
        engine._routes.routes["orders"] = topic_route(a=2)
        assert await asyncio.wait_for(called, WAIT_S) == (threading.current_thread(), 2)

    asyncio.run(main())


def test_an_async_consumer_needs_an_event_loop(engine):
    with pytest.raises(ClientStateError, match="in a coroutine"):
        AsyncPullConsumer(engine)


def test_news_for_a_loop_that_has_ended_are_nobodys(engine, store):
    async def main() -> None:
        await assigned(engine)

    asyncio.run(main())
    store.append([make_batch([b"0"])])
    engine.on_wakeup()


def test_another_event_loop_may_close_a_consumer_whose_own_has_ended_but_not_poll(engine):
    async def make() -> AsyncPullConsumer:
        return await assigned(engine)

    consumer = asyncio.run(make())  # the event loop in which this consumer was made has ended

    async def elsewhere() -> None:
        with pytest.raises(ClientStateError, match="another event loop"):
            await consumer.poll(1, 0.1)
        await consumer.close()
        with pytest.raises(ClientStateError, match="closed"):
            await consumer.commit()

    asyncio.run(elsewhere())
    assert engine.closed
