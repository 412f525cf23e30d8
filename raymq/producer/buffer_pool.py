"""The bound on what waits in a producer: bytes and messages, from when a send hands them over until they have an end.

When it is full, senders line up, first come, first served: a thread waits (`take`), a coroutine awaits the future of
its `Waiter`. What is larger than the whole buffer passes when nothing else waits.

`flushed` is for everything handed over so far, whatever is handed over meanwhile: what comes after it is counted in a
new *generation*.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from raymq.errors import InvalidArgumentError, SystemBusyError


class Counted(Protocol):
    """What is given back: its cost, and the generation it was taken in."""

    cost_bytes: int
    generation: int


@dataclass(slots=True, eq=False)
class Waiter:
    """A place in the line. When `granted` ends, the room is taken, in `generation`."""

    cost_bytes: int
    count: int
    generation: int = -1
    granted: Future[None] = field(default_factory=Future)


class BufferPool:
    """Counts what waits. Thread-safe."""

    def __init__(self, max_bytes: int, max_messages: int) -> None:
        if max_bytes <= 0 or max_messages <= 0:
            raise InvalidArgumentError(f"a buffer for {max_messages} messages and {max_bytes} bytes holds nothing")
        self._max_bytes, self._max_messages = max_bytes, max_messages
        self._lock = threading.Lock()
        self._bytes = self._count = 0
        self._line: deque[Waiter] = deque()
        self._generation = 0
        self._counts: Counter[int] = Counter()
        """Messages by generation. While no flush is under way, there is one."""
        self._flushes: list[tuple[int, Future[None]]] = []

    def try_take(self, cost_bytes: int, count: int) -> int | None:
        """Room for `count` messages, if there is some and nobody waits for it: the generation, else None."""
        with self._lock:
            if self._line or not self._fits(cost_bytes, count):
                return None
            return self._grant(cost_bytes, count)

    def take(self, cost_bytes: int, count: int, timeout_s: float) -> int:
        """Room for `count` messages, waiting for it up to `timeout_s`: the generation. SystemBusyError."""
        generation = self.try_take(cost_bytes, count)
        if generation is not None:
            return generation
        if timeout_s <= 0:
            raise self.full(timeout_s)
        place = self.line_up(cost_bytes, count)
        try:
            place.granted.result(timeout_s)
        except BaseException as error:
            self.leave(place)
            if isinstance(error, TimeoutError):
                raise self.full(timeout_s) from None
            raise
        return place.generation

    def line_up(self, cost_bytes: int, count: int) -> Waiter:
        """A place in the line for room. Whoever does not wait to the end has to `leave`."""
        place = Waiter(cost_bytes, count)
        with self._lock:
            self._line.append(place)
        self._serve()
        return place

    def leave(self, place: Waiter) -> None:
        """Give up a place, and the room if it was granted meanwhile."""
        with self._lock:
            waiting = place in self._line
            if waiting:
                self._line.remove(place)
        if waiting:
            self._serve()
        else:
            self.give_back(place.cost_bytes, place.count, place.generation)

    def give(self, ended: Sequence[Counted]) -> None:
        """These messages have their end."""
        cost_bytes = sum([item.cost_bytes for item in ended])
        with self._lock:
            if self._flushes:
                self._counts.subtract([item.generation for item in ended])
            else:
                self._counts[self._generation] -= len(ended)
            self._bytes -= cost_bytes
            self._count -= len(ended)
        self._serve()

    def give_back(self, cost_bytes: int, count: int, generation: int) -> None:
        """Room that was taken and is not used."""
        with self._lock:
            self._counts[generation] -= count
            self._bytes -= cost_bytes
            self._count -= count
        self._serve()

    def flushed(self) -> Future[None]:
        """Ends when everything that was handed over before this call has its end."""
        flush: Future[None] = Future()
        with self._lock:
            self._flushes.append((self._generation, flush))
            self._generation += 1
        self._serve()
        return flush

    def full(self, timeout_s: float) -> SystemBusyError:
        """What a sender is told for whom there was no room."""
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

    def _serve(self) -> None:
        """Grant room to the first in the line, as far as it goes, and end the flushes that are complete."""
        if not self._line and not self._flushes:
            return
        ended: list[Future[None]] = []
        with self._lock:
            while self._line and self._fits(self._line[0].cost_bytes, self._line[0].count):
                place = self._line.popleft()
                place.generation = self._grant(place.cost_bytes, place.count)
                ended.append(place.granted)
            for generation in [number for number, left in self._counts.items() if not left]:
                del self._counts[generation]
            oldest = min(self._counts, default=self._generation)
            while self._flushes and self._flushes[0][0] < oldest:
                ended.append(self._flushes.pop(0)[1])
        for future in ended:
            if future.set_running_or_notify_cancel():  # a coroutine that no longer waits has cancelled it
                future.set_result(None)
