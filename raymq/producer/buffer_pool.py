"""The bound on a producer's memory: bytes and messages, counted from when a send allocates them until they have an end.

When the pool is full, senders wait for space, first come, first served: a thread blocks in `allocate`, a coroutine
awaits the future of its `Waiter`. A send that is larger than the whole pool gets its space when nothing else is
allocated.

`flushed` waits for everything allocated so far, whatever is allocated meanwhile: later messages are counted in a new
*generation*.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from raymq.errors import InvalidArgumentError, SystemBusyError


class Allocated(Protocol):
    """A message that holds space of the pool: its cost, and the generation in which the space was allocated."""

    cost_bytes: int
    generation: int


@dataclass(slots=True, eq=False)
class Waiter:
    """A send that waits for space. Once `granted` has ended, it holds the space, in `generation`."""

    cost_bytes: int
    count: int
    generation: int = -1
    granted: Future[None] = field(default_factory=Future)


class BufferPool:
    """Allocates the space of messages that have no end yet. Thread-safe.

    `max_bytes`, `max_messages`: the most that may be allocated at a time; InvalidArgumentError unless positive.
    """

    def __init__(self, max_bytes: int, max_messages: int) -> None:
        if max_bytes <= 0 or max_messages <= 0:
            raise InvalidArgumentError(f"a buffer for {max_messages} messages and {max_bytes} bytes holds nothing")
        self._max_bytes, self._max_messages = max_bytes, max_messages
        self._lock = threading.Lock()
        self._bytes = self._count = 0
        self._waiters: deque[Waiter] = deque()
        self._generation = 0
        self._counts: Counter[int] = Counter()
        """Messages by generation. While no flush is under way, there is one."""
        self._flushes: list[tuple[int, Future[None]]] = []
        """The flushes under way, oldest first: the last generation each waits for, and the future that it ends."""

    def try_allocate(self, cost_bytes: int, count: int) -> int | None:
        """Allocate space for `count` messages that cost `cost_bytes` together, without waiting.

        Returns their generation; None if they do not fit now, or if others wait for space already.
        """
        with self._lock:
            if self._waiters or not self._fits(cost_bytes, count):
                return None
            return self._grant(cost_bytes, count)

    def allocate(self, cost_bytes: int, count: int, timeout_s: float) -> int:
        """Allocate space for `count` messages, waiting for it up to `timeout_s`. Returns their generation.

        SystemBusyError when there was no space in time; nothing is allocated then.
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

    def add_waiter(self, cost_bytes: int, count: int) -> Waiter:
        """Wait for space behind those that wait already. Whoever does not wait to the end calls `remove_waiter`."""
        waiter = Waiter(cost_bytes, count)
        with self._lock:
            self._waiters.append(waiter)
        self._grant_waiters()
        return waiter

    def remove_waiter(self, waiter: Waiter) -> None:
        """Stop waiting, and deallocate the space if it was granted meanwhile."""
        with self._lock:
            waiting = waiter in self._waiters
            if waiting:
                self._waiters.remove(waiter)
        if waiting:
            self._grant_waiters()
        else:
            self.deallocate_unused(waiter.cost_bytes, waiter.count, waiter.generation)

    def deallocate(self, ended: Sequence[Allocated]) -> None:
        """Free the space of messages that have their end."""
        cost_bytes = sum([item.cost_bytes for item in ended])
        with self._lock:
            if self._flushes:
                self._counts.subtract([item.generation for item in ended])
            else:
                self._counts[self._generation] -= len(ended)
            self._bytes -= cost_bytes
            self._count -= len(ended)
        self._grant_waiters()

    def deallocate_unused(self, cost_bytes: int, count: int, generation: int) -> None:
        """Free space that was allocated for messages that are not sent after all."""
        with self._lock:
            self._counts[generation] -= count
            self._bytes -= cost_bytes
            self._count -= count
        self._grant_waiters()

    def flushed(self) -> Future[None]:
        """A future that ends when everything allocated before this call is deallocated."""
        flush: Future[None] = Future()
        with self._lock:
            self._flushes.append((self._generation, flush))
            self._generation += 1
        self._grant_waiters()
        return flush

    def full_error(self, timeout_s: float) -> SystemBusyError:
        """The error for a send that got no space within `timeout_s`; 0 for one that does not wait."""
        how_long = f"stayed full for {timeout_s:g} s" if timeout_s > 0 else "is full"
        return SystemBusyError(
            f"the producer's buffer of {self._max_bytes} bytes and {self._max_messages} messages {how_long}, nothing "
            "of this one was sent: the cluster takes messages more slowly than they are sent; see `raymq status`, or "
            "raise max_buffered_bytes or max_buffered_messages"
        )

    def _fits(self, cost_bytes: int, count: int) -> bool:
        if not self._count:
            return True
        return self._bytes + cost_bytes <= self._max_bytes and self._count + count <= self._max_messages

    def _grant(self, cost_bytes: int, count: int) -> int:
        self._bytes += cost_bytes
        self._count += count
        self._counts[self._generation] += count
        return self._generation

    def _grant_waiters(self) -> None:
        """Allocate space to the oldest waiters, as far as it goes, and end the flushes that are complete."""
        if not self._waiters and not self._flushes:
            return
        ended: list[Future[None]] = []
        with self._lock:
            while self._waiters and self._fits(self._waiters[0].cost_bytes, self._waiters[0].count):
                waiter = self._waiters.popleft()
                waiter.generation = self._grant(waiter.cost_bytes, waiter.count)
                ended.append(waiter.granted)
            for generation in [number for number, left in self._counts.items() if not left]:
                del self._counts[generation]
            oldest = min(self._counts, default=self._generation)
            while self._flushes and self._flushes[0][0] < oldest:
                ended.append(self._flushes.pop(0)[1])
        for future in ended:
            if future.set_running_or_notify_cancel():  # a coroutine that no longer waits has cancelled it
                future.set_result(None)
