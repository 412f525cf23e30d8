"""Long polls: fetches that wait for a message. The number of waiting fetches is bounded, and each is woken only by the
queues that it names."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from raymq.common.errors import SystemBusyError

QueueKey = tuple[str, int]


class LongPollWaiter:
    """A waiting fetch, with the queues whose changes wake the fetch."""

    __slots__ = ("keys", "wake")

    def __init__(self, keys: frozenset[QueueKey], wake: Callable[[], None]) -> None:
        self.keys, self.wake = keys, wake


class LongPolls:
    """The registry of waiting fetches, by queue. Thread-safe."""

    def __init__(self, max_waiters: int) -> None:
        self.max_waiters = max_waiters
        """Maximum number of fetches that wait at a time. May be changed; a lower limit does not end current
        waits."""
        self._lock = threading.Lock()
        self._by_queue: dict[QueueKey, set[LongPollWaiter]] = {}
        self._all: set[LongPollWaiter] = set()

    def __len__(self) -> int:
        return len(self._all)

    def register(self, queues: Iterable[QueueKey], wake: Callable[[], None]) -> LongPollWaiter:
        """Register the function `wake`. Any thread calls it for each change of one of `queues`, until `remove`.

        Check the queues after registering. `wake` must not block, and must not call `register` or `remove`. Raises
        SystemBusyError if the limit is reached. Nothing was registered in this case.
        """
        waiter = LongPollWaiter(frozenset(queues), wake)
        with self._lock:
            if len(self._all) >= self.max_waiters:
                raise SystemBusyError(
                    f"{len(self._all)} fetches already wait for messages (fetch_waiters_max); fetch again later, "
                    "or without a wait"
                )
            self._all.add(waiter)
            for key in waiter.keys:
                self._by_queue.setdefault(key, set()).add(waiter)
        return waiter

    def remove(self, waiter: LongPollWaiter) -> None:
        """Unregister the waiting fetch `waiter`, so that changes of its queues no longer wake it. Idempotent."""
        with self._lock:
            if waiter not in self._all:
                return
            self._all.discard(waiter)
            for key in waiter.keys:
                waiters = self._by_queue[key]
                waiters.discard(waiter)
                if not waiters:
                    del self._by_queue[key]

    @contextmanager
    def waiting(self, queues: Iterable[QueueKey]) -> Iterator[threading.Event]:
        """Register a waiter for `queues`, and yield its event. `wake_queue` sets the event for any of these queues. In
        the `with` block, check the queues first, and then wait for the event.

        Raises SystemBusyError if the maximum number of waiters is reached. In this case no waiter is registered.
        """
        event = threading.Event()
        waiter = self.register(queues, event.set)
        try:
            yield event
        finally:
            self.remove(waiter)

    def wake_queue(self, queue: QueueKey) -> None:
        """Wake the fetches that wait for a change of `queue`."""
        # Look up the waiters without the lock first: a waiter registers before it checks its queues, so none is missed.
        if queue in self._by_queue:
            with self._lock:
                for waiter in self._by_queue.get(queue, ()):
                    waiter.wake()

    def wake_all(self) -> None:
        """Wake every waiting fetch."""
        with self._lock:
            for waiter in self._all:
                waiter.wake()
