"""Fetches that wait for a message: a bounded number, each woken only by the queues it asked for."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from raymq.errors import SystemBusyError

QueueKey = tuple[str, int]


class LongPolls:
    """The fetches waiting now, by queue. Thread-safe."""

    def __init__(self, max_waiters: int) -> None:
        self._max_waiters = max_waiters
        self._lock = threading.Lock()
        self._by_queue: dict[QueueKey, set[threading.Event]] = {}
        self._all: set[threading.Event] = set()

    def __len__(self) -> int:
        return len(self._all)

    @contextmanager
    def waiting(self, queues: Iterable[QueueKey]) -> Iterator[threading.Event]:
        """An event that `wake_queue` sets for any of `queues`. Look at the queues after entering, then wait.

        SystemBusyError if the limit is reached: nothing was registered.
        """
        event = threading.Event()
        keys = set(queues)
        with self._lock:
            if len(self._all) >= self._max_waiters:
                raise SystemBusyError(
                    f"{self._max_waiters} fetches are waiting already (fetch_waiters_max); "
                    "ask again without a wait, or later"
                )
            self._all.add(event)
            for key in keys:
                self._by_queue.setdefault(key, set()).add(event)
        try:
            yield event
        finally:
            with self._lock:
                self._all.discard(event)
                for key in keys:
                    events = self._by_queue[key]
                    events.discard(event)
                    if not events:
                        del self._by_queue[key]

    def wake_queue(self, queue: QueueKey) -> None:
        """Wake the fetches that wait for `queue`, in which something changed."""
        if queue in self._by_queue:  # Without the lock: a waiter registers before it looks at its queues.
            with self._lock:
                for event in self._by_queue.get(queue, ()):
                    event.set()

    def wake_all(self) -> None:
        """Wake every fetch that waits."""
        with self._lock:
            for event in self._all:
                event.set()
