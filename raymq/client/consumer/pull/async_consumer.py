"""AsyncPullConsumer is the pull consumer for asyncio: PullConsumer's methods, without blocking the event loop.

A poll that waits uses no thread: the engine wakes the poll through the event loop. Calls to brokers and stores run in a
few threads of this consumer. Decoding runs in these threads too, unless it takes less time than a change of thread. A
cancelled poll has taken no messages: the next poll returns them.

A poll is a sequence of steps, separated by awaits. Each step runs in a helper thread. So a signal handler that raises
in the event loop's thread can end the poll only between steps.
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
"""Maximum bytes of records that are decoded on the event loop. Decoding this many bytes takes about 0.1 ms."""
LOOK_AGAIN_S: Final = 1.0
"""Maximum time in s that a poll waits before it checks for records again. A signal handler may raise in the callback
that wakes the poll, and so end the callback. Without this limit, nothing else would wake the poll."""


class _Step(Generic[Found]):
    """Outcome of one step of a poll. Either the poll has ended with the messages that it took, or records must be
    decoded, or the poll must wait."""

    def __init__(
        self,
        taken: list[tuple[PolledRecords, Found]] | None = None,
        *,
        slices: Sequence[PolledRecords] = (),
        wait_s: float = 0.0,
    ) -> None:
        self.taken, self.slices, self.wait_s = taken, list(slices), wait_s


class AsyncPullConsumer(AsyncConsumer[PullConsumer], PullConsumerBase):
    """A pull consumer for asyncio, created by `Client.async_pull_consumer` inside the event loop that uses it. One task
    polls at a time.

    Each method has the arguments, result and errors of PullConsumer's method with the same name. Methods that call a
    broker or a store are coroutines. After `close` every method raises ClientStateError.
    """

    _MADE_BY = "async_pull_consumer"

    def __init__(self, engine: PullEngine) -> None:
        PullConsumerBase.__init__(self, engine)
        super().__init__(PullConsumer(engine), engine, threads=CALL_THREADS, name=self.group)
        self._waiter: asyncio.Future[None] | None = None
        """The future on which a poll waits. An asyncio.Event is unsuitable: if a signal interrupts its `set`, the event
        never wakes the waiting task."""
        self._watched: list[int] = []
        """File descriptors that the event loop may currently watch, because a poll waits until one of them is
        readable."""
        self._watch_lock = threading.Lock()
        """Lock that is held while the list `_watched` changes. It is needed because the helper thread of an interrupted
        wait may change the list at the same time."""
        self._decoder = ThreadPoolExecutor(1, f"decode-{self.group}")
        # `engine` runs the polls of both consumers, this one and the blocking consumer. Make it wake polls on the event
        # loop, because no one polls the blocking consumer here.
        engine.on_wakeup = partial(self._in_loop, self._look_again)

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
        """Register a listener for changes of a topic's queues (`PullConsumer.register_queue_change_listener`).

        `callback`, a plain function, is called on the event loop.
        """
        await self._call(partial(self._twin.register_queue_change_listener, topic, partial(self._in_loop, callback)))

    # Methods that return messages

    @bounded(max_messages=POSITIVE)
    async def poll(self, max_messages: int = 500, timeout_s: float = 1.0) -> list[MessageExt]:
        """Await messages (`PullConsumer.poll`). A cancelled poll takes no messages: the next poll returns them."""
        turn = PollTurn()
        try:
            messages = as_messages(await self._poll(turn, decode_messages, max_messages, timeout_s))
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
        """Await messages as an Arrow table (`PullConsumer.poll_table`). A cancelled poll takes no messages."""
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
                "this async consumer belongs to another event loop: create a consumer in this event loop "
                "with client.async_pull_consumer(...)"
            )
        deadline_s = time.monotonic() + timeout_s
        step = aside(turn.step, self._begin, turn, decode, max_messages, deadline_s)
        try:
            while step.taken is None:
                if step.slices:
                    # Do not await between the step that takes messages and the return. Otherwise a poll could be
                    # cancelled after it has taken messages.
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

    # The steps of a poll. No step awaits, and signal handlers cannot interrupt a step. A step that fails ends the poll.

    def _begin(self, turn: PollTurn, decode: Decode[Found], max_messages: int, deadline_s: float) -> _Step[Found]:
        self._engine.polls.begin(turn)
        return self._look(turn, decode, max_messages, deadline_s)

    def _look(self, turn: PollTurn, decode: Decode[Found], max_messages: int, deadline_s: float) -> _Step[Found]:
        """Look for buffered records and return the poll's next step. The step has messages if a small fetch could be
        decoded at once. It has undecoded records if a large fetch must be decoded in a thread. Otherwise it says how
        long the poll waits."""
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
                # The subscription's filter excluded all records that this step of the poll read, but the store may have
                # more records. So return a step without messages, which makes the poll check again at once.
                return _Step()
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
        """Pass the decoded records to the poll. If the subscription selects none of their messages, check for more
        records."""
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
        """Wait until records may be available, for at most `timeout_s`.

        An interrupted wait leaves a timer and watched file descriptors. Both are harmless: the timer only wakes the
        next wait, and the next wait or `close` removes the file descriptors.
        """
        waiter = self._waiter = self._loop.create_future()
        # Set two timers, because a signal handler may raise in the callback of one timer, which would then not wake the
        # poll.
        timers = [self._loop.call_later(after_s, self._wake) for after_s in (timeout_s, timeout_s + LOOK_AGAIN_S)]
        try:
            # Call `_watch` in a helper thread, because it changes the file descriptors that the event loop watches. If
            # a signal interrupted `_watch`, the selector's list of descriptors would differ from the kernel's list.
            aside(self._watch, self._engine.polls.descriptors())
            await waiter
        finally:
            for timer in timers:
                timer.cancel()
            aside(self._unwatch)

    def _wake(self) -> None:
        """Wake the waiting poll, so that it checks for records again. Runs on the event loop, so that no wake-up is
        missed between a check and a wait.

        A helper thread sets the future's result, and the loop's thread waits for it. If a signal interrupted
        `set_result`, the future would have a result, but would never wake its task. A loop in debug mode refuses calls
        from other threads, so in debug mode the loop's thread sets the result.
        """
        waiter = self._waiter
        if waiter is None or waiter.done():
            return
        if self._loop.get_debug():
            waiter.set_result(None)
        else:
            aside(_finish, waiter)

    def _watch(self, descriptors: list[int]) -> None:
        """Make the event loop wake this consumer when one of the file descriptors becomes readable."""
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

    # Methods that close the consumer

    async def close(self) -> None:
        """Leave the group and close the consumer (`PullConsumer.close`). Idempotent."""
        await self._close(finished=True)

    async def _close(self, *, finished: bool) -> None:
        """Close the consumer. May run in another event loop, because the loop that created the consumer may
        have ended."""
        try:
            if not self._engine.closed:
                await self._call(partial(self._engine.close, finished=finished))
        finally:
            # The engine is still open here if the close was cancelled before the engine's own close began.
            if self._engine.closed:
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
        """Schedule a call on the event loop. May be used from any thread."""
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:
            pass  # ignore the error: the event loop is closed, so no poll can be waiting

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
