"""AsyncPullConsumer is the pull consumer for asyncio: PullConsumer's methods, without blocking the event loop.

A poll that waits costs no thread: the engine wakes it through the loop. Calls to brokers and stores run in a few
threads of this consumer's own, and so does decoding, unless it is less work than changing the thread. A poll that is
cancelled has taken nothing: the next one returns the messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Final, NoReturn, TypeVar

from raymq.closing import OfProcess
from raymq.consumer.pull.engine import PullEngine
from raymq.consumer.pull.fetched_records import (
    Decode,
    Found,
    PolledRecords,
    as_messages,
    as_table,
    decode_messages,
    found,
)
from raymq.consumer.pull.poll_turn import PollTurn
from raymq.consumer.queue_change import QueueChangeListener
from raymq.consumer.subscription import Expression, Expressions
from raymq.errors import ClientStateError
from raymq.message import MessageExt, MessageQueue

if TYPE_CHECKING:
    import pyarrow as pa

    from raymq.kernels.column_bodies import BodyType
    from raymq.kernels.columns import Unreadable

CALL_THREADS: Final = 4
INLINE_BYTES: Final = 16 * 1024
"""Records up to this size are decoded on the loop: some 0.1 ms."""

T = TypeVar("T")


class AsyncPullConsumer(OfProcess):
    """Made by `Client.async_pull_consumer` inside the event loop that uses it. One task polls at a time.

    Methods do the same, and raise the same, as those of PullConsumer with the same name; those that call a broker or a
    store are awaited. After `close` every method raises ClientStateError.
    """

    def __init__(self, engine: PullEngine) -> None:
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            raise ClientStateError(
                "an async consumer belongs to an event loop: call client.async_pull_consumer(...) inside a coroutine"
            ) from None
        self.group = engine.names.unwrap(engine.settings.group)
        self._engine = engine
        self._wakeup = asyncio.Event()
        self._calls = ThreadPoolExecutor(CALL_THREADS, f"calls-{self.group}")
        self._decoder = ThreadPoolExecutor(1, f"decode-{self.group}")
        engine.on_wakeup = partial(self._in_loop, self._look_again)

    # What is consumed

    async def subscribe(self, topic: str, expression: Expression = "*") -> None:
        await self._call(self._engine.subscribe, topic, expression)

    def unsubscribe(self, topic: str) -> None:
        self._engine.unsubscribe(topic)

    async def assign(self, queues: Iterable[MessageQueue], expression: Expressions = "*") -> None:
        await self._call(self._engine.assign, list(queues), expression)

    def assignment(self) -> list[MessageQueue]:
        return self._engine.assignment()

    # Messages

    async def poll(self, max_messages: int = 500, timeout_s: float = 1.0) -> list[MessageExt]:
        decode = partial(decode_messages, on_unreadable=self._engine.unreadable.note)
        turn = PollTurn()
        try:
            messages = as_messages(await self._poll(turn, decode, max_messages, timeout_s))
        except BaseException:
            turn.abandoned = True
            raise
        return messages

    async def poll_table(
        self,
        max_messages: int = 65_536,
        timeout_s: float = 1.0,
        *,
        body_type: BodyType = "binary_view",
        columns: Sequence[str] | None = None,
        unreadable: Unreadable = "null",
    ) -> pa.Table:
        decode = self._engine.table_decoder(body_type, columns, unreadable)
        turn = PollTurn()
        try:
            table = as_table(await self._poll(turn, decode, max_messages, timeout_s), body_type, columns)
        except BaseException:
            turn.abandoned = True
            raise
        return table

    async def __aiter__(self) -> AsyncIterator[MessageExt]:
        while not self._engine.closed:
            try:
                messages = await self.poll(max_messages=1)
            except ClientStateError:
                if self._engine.closed:
                    return
                raise
            for message in messages:
                yield message

    async def _poll(
        self, turn: PollTurn, decode: Decode[Found], max_messages: int, timeout_s: float
    ) -> list[tuple[PolledRecords, Found]]:
        engine = self._engine
        if asyncio.get_running_loop() is not self._loop:
            raise ClientStateError(
                "this async consumer was made in another event loop: make one here by client.async_pull_consumer(...)"
            )
        engine.poll_begins(turn, max_messages, timeout_s)
        taken: list[tuple[PolledRecords, Found]] = []
        try:
            deadline_s = self._loop.time() + timeout_s
            while not found(taken) and not engine.closed:
                self._wakeup.clear()
                slices = engine.peek(max_messages)
                if slices:
                    # Between `take` and the return nothing is awaited: a cancelled poll has taken nothing.
                    taken = engine.take(turn, await self._decode(decode, slices))
                elif (left_s := deadline_s - self._loop.time()) <= 0:
                    break
                else:
                    engine.raise_loss()
                    await self._wait(min(left_s, engine.wait_max_s()))
        finally:
            engine.poll_ends(turn)
        if not taken:
            engine.raise_failure()
        return taken

    async def _decode(self, decode: Decode[Found], slices: list[PolledRecords]) -> list[tuple[PolledRecords, Found]]:
        if sum(part.size_bytes for part in slices) <= INLINE_BYTES:
            return self._engine.decode(decode, slices)
        return await self._loop.run_in_executor(self._decoder, self._engine.decode, decode, slices)

    async def _wait(self, timeout_s: float) -> None:
        descriptors = self._engine.descriptors()
        for descriptor in descriptors:
            self._loop.add_reader(descriptor, self._wakeup.set)
        try:
            async with asyncio.timeout(timeout_s):
                await self._wakeup.wait()
        except TimeoutError:
            pass  # the poll looks at the time itself
        finally:
            for descriptor in descriptors:
                self._loop.remove_reader(descriptor)

    # Committing

    async def commit(self, offsets: Mapping[MessageQueue, int] | None = None) -> dict[MessageQueue, int]:
        return await self._call(self._engine.commit, offsets)

    def acknowledge(self, messages: Iterable[MessageExt]) -> None:
        self._engine.acknowledge(messages)

    async def send_back(self, message: MessageExt, *, delay_level: int = 0, max_reconsume_times: int = -1) -> None:
        await self._call(self._engine.send_back, message, delay_level, max_reconsume_times)

    async def committed(self, queue: MessageQueue) -> int | None:
        return await self._call(self._engine.committed, queue)

    # Positions

    def position(self, queue: MessageQueue) -> int:
        return self._engine.position(queue)

    async def seek(self, queue: MessageQueue, offset: int) -> None:
        await self._call(self._engine.seek, queue, offset)

    async def seek_to_begin(self, queue: MessageQueue) -> None:
        await self._call(self._engine.seek_to_begin, queue)

    async def seek_to_end(self, queue: MessageQueue) -> None:
        await self._call(self._engine.seek_to_end, queue)

    def pause(self, queues: Iterable[MessageQueue]) -> None:
        self._engine.pause(list(queues))

    def resume(self, queues: Iterable[MessageQueue]) -> None:
        self._engine.resume(list(queues))

    def paused(self) -> list[MessageQueue]:
        return self._engine.paused()

    async def lag(self) -> dict[MessageQueue, int]:
        return await self._call(self._engine.lag)

    # Any queue

    async def fetch_message_queues(self, topic: str) -> list[MessageQueue]:
        return await self._call(self._engine.lookup.queues, topic)

    async def begin_offsets(self, queues: Iterable[MessageQueue]) -> dict[MessageQueue, int]:
        return await self._call(self._engine.lookup.begin_offsets, list(queues))

    async def end_offsets(self, queues: Iterable[MessageQueue]) -> dict[MessageQueue, int]:
        return await self._call(self._engine.lookup.end_offsets, list(queues))

    async def offset_for_timestamp(self, queue: MessageQueue, timestamp_ms: int) -> int:
        return (await self.offsets_for_times({queue: timestamp_ms}))[queue]

    async def offsets_for_times(self, times_ms: Mapping[MessageQueue, int]) -> dict[MessageQueue, int]:
        return await self._call(self._engine.lookup.offsets_for_times, times_ms)

    async def register_queue_change_listener(self, topic: str, callback: QueueChangeListener) -> None:
        """Do as PullConsumer's method; but `callback`, a plain function, is called on the event loop."""
        await self._call(self._engine.watch.register, topic, partial(self._in_loop, callback))

    # Life

    async def close(self) -> None:
        await self._close(finished=True)

    async def _close(self, *, finished: bool) -> None:
        """Close, in whatever event loop: the consumer's own may have ended."""
        if not self._engine.closed:
            await self._call(partial(self._engine.close, finished=finished))
            self._end_pools()

    async def __aenter__(self) -> AsyncPullConsumer:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close(finished=kind is None)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a raymq consumer cannot be pickled: make one with client.async_pull_consumer where it is used")

    async def _call(self, call: Callable[..., T], *args: object) -> T:
        """Await a blocking call in a thread. Cancelling the wait does not undo the call."""
        self._engine.check_open()
        return await asyncio.get_running_loop().run_in_executor(self._calls, partial(call, *args))

    def _in_loop(self, call: Callable[..., None], *args: object) -> None:
        """Make a call on the event loop. May be used from any thread."""
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:
            pass  # the loop is closed: nobody waits there any more

    def _look_again(self) -> None:
        self._wakeup.set()
        if self._engine.closed:
            self._end_pools()

    def _end_pools(self) -> None:
        for pool in (self._calls, self._decoder):
            pool.shutdown(wait=False)
