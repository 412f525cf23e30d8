"""BufferPool: limits the memory of a producer's unfinished sends, in bytes and in messages.

If the pool is full, sends wait for space in the order of their calls: a thread blocks in `allocate`, a coroutine awaits
the future of its `BufferWaiter`. A send that is larger than the whole pool gets its space when nothing else is
allocated.

Space belongs to *holders*. A holder is a batch that gathers messages or is in flight, or a send that waited and was
granted space. `flushed` waits for all holders that exist at the time of the call. Holders that are made later belong to
a new *generation*, so no flush waits for them. A holder may get more space as long as its generation is the current
generation.

The pool shares its producer's lock, so that a message and its space are taken in one critical section. Methods whose
names end in `_locked` are called while that lock is held. Some of them return futures, which the caller must complete
after it has released the lock (`end_all`).
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from raymq.common.errors import InvalidArgumentError, SystemBusyError


@dataclass(slots=True, eq=False)
class BufferWaiter:
    """A send that waits for buffer space. After `granted` has completed, the waiter holds the space. `generation`: the
    BufferPool's generation to which the space belongs.

    `removed`: True if the waiter neither waits nor holds space, because its send timed out or was cancelled, or because
    a batch took over its space.
    """

    cost_bytes: int
    count: int
    generation: int = -1
    removed: bool = False
    granted: Future[None] = field(default_factory=Future)


class Space(Protocol):
    """A single message that holds its own buffer space while `allocated` is true."""

    cost_bytes: int
    generation: int
    allocated: bool


class BufferPool:
    """Allocates buffer space for unfinished messages. Thread-safe.

    `max_bytes`, `max_messages`: maximum bytes and messages that may be allocated at a time. Raises InvalidArgumentError
    unless both are positive. `lock`: the producer's lock; by default the pool makes its own.
    """

    def __init__(self, max_bytes: int, max_messages: int, lock: threading.Lock | None = None) -> None:
        if max_bytes <= 0 or max_messages <= 0:
            raise InvalidArgumentError(
                f"max_buffered_messages={max_messages} and max_buffered_bytes={max_bytes} leave no space for a "
                "message: raise them"
            )
        self._max_bytes, self._max_messages = max_bytes, max_messages
        self._lock = lock or threading.Lock()
        self._bytes = self._count = 0
        self._waiters: deque[BufferWaiter] = deque()
        self.generation = 0
        """Number of the current generation of batches and sends that hold buffer space. Each flush begins a new
        generation; the flush waits only for batches and sends of earlier generations."""
        self._holders: defaultdict[int, int] = defaultdict(int)
        """Number of batches and sends that hold buffer space, by generation. Each flush begins a new generation of
        holders, so while no flush waits, only one generation exists."""
        self._flushes: list[tuple[int, Future[None]]] = []
        """Waiting flushes, oldest first. For each flush: the number of the last generation whose batches and sends must
        end before the flush ends, and the flush's future. A generation contains the batches and sends that began
        between two flushes."""

    def try_allocate(self, cost_bytes: int, count: int) -> int | None:
        """Allocate buffer space for `count` messages that cost `cost_bytes` together, without waiting.

        Returns the generation of this space, which decides which flushes wait until the space is free. Returns None if
        the messages do not fit now, or if other sends wait for space.
        """
        with self._lock:
            if not self.extend_locked(cost_bytes, count):
                return None
            return self.hold_locked()

    def allocate(self, cost_bytes: int, count: int, timeout_s: float) -> int:
        """Allocate buffer space for `count` messages that cost `cost_bytes` together. Waits up to `timeout_s` if the
        pool is full.

        Returns the generation of this space, which decides which flushes wait until the space is free. Raises
        SystemBusyError, and allocates nothing, if no space became free in time.
        """
        generation = self.try_allocate(cost_bytes, count)
        if generation is not None:
            return generation
        if timeout_s <= 0:
            raise self.full_error(timeout_s)
        waiter = self.add_waiter(cost_bytes, count)
        try:
            waiter.granted.result(timeout_s)
        except BaseException as error:
            self.remove_waiter(waiter)
            if isinstance(error, TimeoutError):
                raise self.full_error(timeout_s) from None
            raise
        return waiter.generation

    def add_waiter(self, cost_bytes: int, count: int) -> BufferWaiter:
        """Make a waiter for buffer space, and enqueue it after all other waiters. A caller that stops waiting must call
        `remove_waiter`."""
        waiter = BufferWaiter(cost_bytes, count)
        self.enqueue(waiter)
        return waiter

    def enqueue(self, waiter: BufferWaiter) -> None:
        """Enqueue a waiter after all other waiters. Nothing happens if the waiter was removed before."""
        ended: list[Future[None]] = []
        with self._lock:
            if not waiter.removed:
                self._waiters.append(waiter)
                ended = self._settle_locked()
        end_all(ended)

    def remove_waiter(self, waiter: BufferWaiter) -> None:
        """Remove a waiter, a send that waits for buffer space. If space was already granted to the waiter, free the
        space. Idempotent. A removed waiter cannot be enqueued."""
        ended: list[Future[None]] = []
        with self._lock:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
                ended = self._settle_locked()
            elif not waiter.removed and waiter.generation >= 0:
                ended = self.deallocate_locked(waiter.cost_bytes, waiter.count, waiter.generation)
            waiter.removed = True
        end_all(ended)

    def take(self, waiter: BufferWaiter) -> int | None:
        """Transfer to the caller the buffer space that was granted to a waiter (a waiting send). Returns the space's
        generation, which decides which flushes wait until the space is free. Returns None if the waiter was removed or
        has no space yet."""
        with self._lock:
            if waiter.removed or waiter.generation < 0:
                return None
            waiter.removed = True
            return waiter.generation

    def deallocate(self, cost_bytes: int, count: int, generation: int) -> None:
        """Free the whole buffer space of one batch or send, and grant free space to waiting sends."""
        with self._lock:
            ended = self.deallocate_locked(cost_bytes, count, generation)
        end_all(ended)

    def flushed(self) -> Future[None]:
        """Return a future that completes when all batches and sends that now hold buffer space have freed their
        space."""
        flush: Future[None] = Future()
        with self._lock:
            self._flushes.append((self.generation, flush))
            self.generation += 1
            ended = self._settle_locked()
        end_all(ended)
        return flush

    def full_error(self, timeout_s: float) -> SystemBusyError:
        """Return the error for a send that got no buffer space within `timeout_s`. `timeout_s` is 0 for a send that
        does not wait."""
        how_long = f"stayed full for {timeout_s:g} s" if timeout_s > 0 else "is full"
        return SystemBusyError(
            f"the producer's buffer of {self._max_bytes} bytes and {self._max_messages} messages {how_long}, so "
            "this message was not sent: the program sends messages faster than the cluster accepts them; see "
            "`raymq status`, or raise max_buffered_bytes or max_buffered_messages"
        )

    def extend_locked(self, cost_bytes: int, count: int) -> bool:
        """Allocate more buffer space in the current generation, without waiting. Returns False if the pool is
        full."""
        if self._waiters:
            return False
        total_bytes, total = self._bytes + cost_bytes, self._count + count
        if (total_bytes > self._max_bytes or total > self._max_messages) and self._count:
            return False
        self._bytes, self._count = total_bytes, total
        return True

    def hold_locked(self) -> int:
        """Count a new holder of buffer space in the current generation, and return this generation. The holder is a
        batch or a send whose space is already allocated."""
        self._holders[self.generation] += 1
        return self.generation

    def allocate_locked(self, cost_bytes: int) -> bool:
        """Allocate buffer space for a single message. The message then counts as a holder of buffer space in the pool's
        current generation, so that a later flush waits for it. Returns False if the pool is full."""
        if self._waiters or (self._count and not self._fits(cost_bytes, 1)):
            return False
        self._bytes += cost_bytes
        self._count += 1
        self._holders[self.generation] += 1
        return True

    def share_locked(self, generation: int) -> None:
        """Count one more batch in `generation`, because a batch was divided into two batches that share its buffer
        space."""
        self._holders[generation] += 1

    def merge_locked(self, generation: int) -> list[Future[None]]:
        """Count one holder of buffer space (a batch or a send) fewer in the pool's generation `generation`, because
        another batch has taken over its space. Returns futures of flushes that the caller must complete."""
        self._holders[generation] -= 1
        return self._settle_locked() if self._flushes else []

    def deallocate_locked(self, cost_bytes: int, count: int, generation: int) -> list[Future[None]]:
        """Free the buffer space of a batch or a send. Returns the futures of waiting sends and flushes that the caller
        must complete."""
        self._holders[generation] -= 1
        self._bytes -= cost_bytes
        self._count -= count
        return self._settle_locked() if self._waiters or self._flushes else []

    def deallocate_single_locked(self, single: Space) -> bool:
        """Free the buffer space of a single message; a second call for the message changes nothing. Returns True if
        sends wait for buffer space or a flush is unfinished: the caller must then call `settle` of this pool."""
        if single.allocated:
            self._holders[single.generation] -= 1
            self._bytes -= single.cost_bytes
            self._count -= 1
            # Python runs no signal handler between these four assignments, so all of them take effect
            single.allocated = False
        return bool(self._waiters or self._flushes)

    def settle(self) -> None:
        """Give free buffer space to waiting sends. Complete each flush for which no batch or send still holds buffer
        space."""
        with self._lock:
            ended = self._settle_locked()
        end_all(ended)

    def _fits(self, cost_bytes: int, count: int) -> bool:
        if not self._count:
            return True
        return self._bytes + cost_bytes <= self._max_bytes and self._count + count <= self._max_messages

    def _settle_locked(self) -> list[Future[None]]:
        """Grant free buffer space to the sends that have waited longest. Returns futures that the caller must complete:
        the futures of the granted sends, and the futures of finished flushes. A flush is finished when no batch or send
        that the flush waits for still holds buffer space."""
        ended: list[Future[None]] = []
        while self._waiters and self._fits(self._waiters[0].cost_bytes, self._waiters[0].count):
            waiter = self._waiters.popleft()
            self._bytes += waiter.cost_bytes
            self._count += waiter.count
            waiter.generation = self.hold_locked()
            ended.append(waiter.granted)
        for generation in [number for number, left in self._holders.items() if not left]:
            del self._holders[generation]
        oldest = min(self._holders, default=self.generation)
        while self._flushes and self._flushes[0][0] < oldest:
            ended.append(self._flushes.pop(0)[1])
        return ended


def end_all(futures: Iterable[Future[None]]) -> None:
    """Complete the futures of sends that waited for buffer space, and of flushes. Call this function without the pool's
    lock, because completing a future runs callbacks."""
    for future in futures:
        # `set_running_or_notify_cancel` returns False if a coroutine stopped waiting and cancelled the future
        if future.set_running_or_notify_cancel():
            future.set_result(None)
