"""AsyncPullConsumer is the pull consumer for asyncio: PullConsumer's methods, without blocking the event loop.

A poll that waits costs no thread: the engine wakes it through the loop. Calls to brokers and stores run in a few
threads of this consumer's own, and so does decoding, unless it is less work than changing the thread. A poll that is
cancelled has taken nothing: the next one returns the messages.

A poll consists of steps, and what an await divides. Each step runs aside: a signal handler that raises in the loop's
thread ends the poll between steps.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Final, Generic

from raymq.client.consumer.async_consumer import AsyncConsumer, awaited, submit_call
from raymq.client.consumer.pull.consumer import PullConsumer, PullConsumerBase
from raymq.client.consumer.pull.engine import PullEngine
from raymq.client.consumer.pull.fetched_records import (
    Decode,
    Found,
    PolledRecords,
    as_messages,
    as_table,
    decode_messages,
    found,
)
from raymq.client.consumer.pull.poll_turn import PollTurn
from raymq.client.consumer.queue_lookup import QueueChangeListener
from raymq.common.errors import ClientStateError
from raymq.common.message import MessageExt
from raymq.common.numbers import POSITIVE, bounded
from raymq.common.parallel import aside

if TYPE_CHECKING:
    import pyarrow as pa

    from raymq.records.kernels.column_bodies import BodyType
    from raymq.records.kernels.columns import Unreadable

CALL_THREADS: Final = 4
INLINE_BYTES: Final = 16 * 1024
"""Records up to this size are decoded on the loop: some 0.1 ms."""
LOOK_AGAIN_S: Final = 1.0
"""How long a poll waits at most before it looks again. A signal handler that raises in the callback that wakes the poll
ends that callback, and nothing else would wake it."""


class _Step(Generic[Found]):
    """The outcome of a step of a poll: its end with the messages taken, records to be decoded, or a wait."""

    def __init__(
        self,
        taken: list[tuple[PolledRecords, Found]] | None = None,
        *,
        slices: Sequence[PolledRecords] = (),
        wait_s: float = 0.0,
    ) -> None:
        self.taken, self.slices, self.wait_s = taken, list(slices), wait_s


class AsyncPullConsumer(AsyncConsumer[PullConsumer], PullConsumerBase):
    """Made by `Client.async_pull_consumer` inside the event loop that uses it. One task polls at a time.

    Each method has the arguments, result and errors of PullConsumer's method with the same name. A method that calls a
    broker or a store is awaited. After `close` every method raises ClientStateError.
    """

    _MADE_BY = "async_pull_consumer"

    def __init__(self, engine: PullEngine) -> None:
        PullConsumerBase.__init__(self, engine)
        super().__init__(PullConsumer(engine), engine, threads=CALL_THREADS, name=self.group)
        self._waiter: asyncio.Future[None] | None = None
        """The future of a poll that waits. No asyncio.Event: one whose `set` was interrupted never wakes anybody."""
        self._watched: list[int] = []
        """The descriptors that the loop may be watching for a wait."""
        self._watch_lock = threading.Lock()
        """Held while `_watched` changes: the helper thread of an interrupted wait may still be changing it."""
        self._decoder = ThreadPoolExecutor(1, f"decode-{self.group}")
        engine.on_wakeup = partial(self._in_loop, self._look_again)  # in place of the twin's, which never polls

    subscribe = awaited(PullConsumer.subscribe)
    assign = awaited(PullConsumer.assign)

    commit = awaited(PullConsumer.commit)
    committed = awaited(PullConsumer.committed)
    send_back = awaited(PullConsumer.send_back)

    seek = awaited(PullConsumer.seek)
    seek_to_begin = awaited(PullConsumer.seek_to_begin)
    seek_to_end = awaited(PullConsumer.seek_to_end)
    lag = awaited(PullConsumer.lag)

    fetch_message_queues = awaited(PullConsumer.fetch_message_queues)
    begin_offsets = awaited(PullConsumer.begin_offsets)
    end_offsets = awaited(PullConsumer.end_offsets)
    offset_for_timestamp = awaited(PullConsumer.offset_for_timestamp)
    offsets_for_times = awaited(PullConsumer.offsets_for_times)

    async def register_queue_change_listener(self, topic: str, callback: QueueChangeListener) -> None:
        """Call a listener when a topic's queues change (`PullConsumer.register_queue_change_listener`).

        `callback`, a plain function, is called on the event loop.
        """
        await self._call(partial(self._twin.register_queue_change_listener, topic, partial(self._in_loop, callback)))

    # Messages

    @bounded(max_messages=POSITIVE)
    async def poll(self, max_messages: int = 500, timeout_s: float = 1.0) -> list[MessageExt]:
        """Await messages (`PullConsumer.poll`). Cancelled, it takes none: the next poll returns them."""
        decode = partial(decode_messages, on_unreadable=self._engine.polls.unreadable.note)
        turn = PollTurn()
        try:
            messages = as_messages(await self._poll(turn, decode, max_messages, timeout_s))
        except BaseException:
            turn.abandoned = True
            raise
        return messages

    @bounded(max_messages=POSITIVE)
    async def poll_table(
        self,
        max_messages: int = 65_536,
        timeout_s: float = 1.0,
        *,
        body_type: BodyType = "binary_view",
        columns: Sequence[str] | None = None,
        unreadable: Unreadable = "null",
    ) -> pa.Table:
        """Await messages as an Arrow table (`PullConsumer.poll_table`). Cancelled, it takes none."""
        decode = self._engine.polls.table_decoder(body_type, columns, unreadable)
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
        if asyncio.get_running_loop() is not self._loop:
            raise ClientStateError(
                "this async consumer was made in another event loop: make one here by client.async_pull_consumer(...)"
            )
        deadline_s = time.monotonic() + timeout_s
        step = aside(turn.step, self._begin, turn, decode, max_messages, timeout_s, deadline_s)
        try:
            while step.taken is None:
                if step.slices:
                    # Nothing is awaited between the step that takes messages and the return: a cancelled poll has taken
                    # nothing.
                    call = partial(self._engine.polls.decode, decode, step.slices)
                    _, decoding = aside(submit_call, self._decoder, call, self._loop)
                    decoded = await decoding
                    step = aside(turn.step, self._take, turn, decoded, decode, max_messages, deadline_s)
                else:
                    await self._wait(step.wait_s)
                    step = aside(turn.step, self._look, turn, decode, max_messages, deadline_s)
        except asyncio.CancelledError:
            aside(turn.step, self._end, turn)
            raise
        taken: list[tuple[PolledRecords, Found]] = step.taken
        return taken

    # The steps of a poll: none awaits, and none is interrupted. One that fails ends the poll.

    def _begin(
        self, turn: PollTurn, decode: Decode[Found], max_messages: int, timeout_s: float, deadline_s: float
    ) -> _Step[Found]:
        self._engine.polls.begin(turn, max_messages, timeout_s)
        return self._look(turn, decode, max_messages, deadline_s)

    def _look(self, turn: PollTurn, decode: Decode[Found], max_messages: int, deadline_s: float) -> _Step[Found]:
        """Decode a small fetch at once, hand a large one to a thread, or find out how long to wait."""
        engine, polls = self._engine, self._engine.polls
        with self._ended_by_error(turn):
            slices = [] if engine.closed else polls.peek(max_messages)
            if sum(part.size_bytes for part in slices) > INLINE_BYTES:
                return _Step(slices=slices)
            if slices:
                taken = polls.take(turn, polls.decode(decode, slices))
                if found(taken):
                    polls.end(turn)
                    return _Step(taken)
                return _Step()  # all of it was excluded: there may be more
            left_s = deadline_s - time.monotonic()
            if left_s > 0 and not engine.closed:
                polls.raise_loss()
                return _Step(wait_s=min(left_s, polls.wait_max_s(), LOOK_AGAIN_S))
            polls.end(turn)
        polls.raise_failure()
        return _Step([])

    def _take(
        self,
        turn: PollTurn,
        decoded: list[tuple[PolledRecords, Found]],
        decode: Decode[Found],
        max_messages: int,
        deadline_s: float,
    ) -> _Step[Found]:
        """Take what a thread has decoded, or look again."""
        with self._ended_by_error(turn):
            taken = self._engine.polls.take(turn, decoded)
            if found(taken):
                self._engine.polls.end(turn)
                return _Step(taken)
        return self._look(turn, decode, max_messages, deadline_s)

    def _end(self, turn: PollTurn) -> None:
        if not turn.has_ended:
            self._engine.polls.end(turn)

    @contextmanager
    def _ended_by_error(self, turn: PollTurn) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._engine.polls.end(turn)
            raise

    async def _wait(self, timeout_s: float) -> None:
        """Wait until there may be records, for `timeout_s` at most.

        An interrupt leaves nothing harmful: a timer that only wakes the next wait, and descriptors that the next wait
        or `close` unwatches.
        """
        waiter = self._waiter = self._loop.create_future()
        # Two timers: a signal handler may raise in the callback of one timer.
        timers = [self._loop.call_later(after_s, self._wake) for after_s in (timeout_s, timeout_s + LOOK_AGAIN_S)]
        try:
            # Aside: an interrupt in the loop's selector would leave it in contradiction with the kernel.
            aside(self._watch, self._engine.polls.descriptors())
            await waiter
        finally:
            for timer in timers:
                timer.cancel()
            aside(self._unwatch)

    def _wake(self) -> None:
        """Have the poll that waits look again. On the loop, so that nothing can be missed between a look and a wait.

        Aside: a future whose `set_result` was interrupted has a result, and never wakes its task. The loop stands still
        for that time; one in debug mode refuses calls of other threads all the same.
        """
        waiter = self._waiter
        if waiter is None or waiter.done():
            return
        if self._loop.get_debug():
            waiter.set_result(None)
        else:
            aside(_finish, waiter)

    def _watch(self, descriptors: list[int]) -> None:
        """Have the loop wake this consumer when a descriptor is readable."""
        with self._watch_lock:
            self._remove_readers()
            for descriptor in descriptors:
                self._watched.append(descriptor)
                self._loop.add_reader(descriptor, self._wake)

    def _unwatch(self) -> None:
        with self._watch_lock:
            self._remove_readers()

    def _remove_readers(self) -> None:
        while self._watched:
            self._loop.remove_reader(self._watched.pop())

    # Life

    async def close(self) -> None:
        """Leave the group, and end the consumer (`PullConsumer.close`). Idempotent."""
        await self._close(finished=True)

    async def _close(self, *, finished: bool) -> None:
        """Close, in whatever event loop: the consumer's own may have ended."""
        try:
            if not self._engine.closed:
                await self._call(partial(self._engine.close, finished=finished))
        finally:
            if self._engine.closed:  # else the close was cancelled before it began
                self._end_pools()
                if asyncio.get_running_loop() is self._loop:
                    aside(self._unwatch)

    async def __aenter__(self) -> AsyncPullConsumer:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close(finished=kind is None)

    def _in_loop(self, call: Callable[..., None], *args: object) -> None:
        """Make a call on the event loop. May be used from any thread."""
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:
            pass  # the loop is closed, and with it every wait

    def _look_again(self) -> None:
        self._wake()
        if self._engine.closed:
            self._end_pools()

    def _end_pools(self) -> None:
        for pool in (self._calls, self._decoder):
            pool.shutdown(wait=False)


def _finish(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
