"""The limit of appends at one store at a time (spec/messaging.md §2.4, queue caps).

An append that waits holds its bytes in memory. An append above the limit is refused before anything of it is stored.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from raymq.common.errors import SystemBusyError


class AppendLimit:
    """Counts the running appends, including those that wait for the store's append lock. Thread-safe."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        """The most appends at a time; may be changed. A lower limit ends no running append."""
        self._lock = threading.Lock()
        self._under_way = 0

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Count one append while the block runs. SystemBusyError: the limit is reached."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    def begin(self) -> None:
        """Count one append until `end`. SystemBusyError: the limit is reached."""
        with self._lock:
            if self._under_way >= self.capacity:
                raise SystemBusyError(
                    f"{self._under_way} appends run at this store already, as many as send_queue_capacity allows; "
                    "nothing was stored, send again later"
                )
            self._under_way += 1

    @property
    def under_way(self) -> int:
        """The number of appends that have begun and not ended."""
        return self._under_way

    def end(self) -> None:
        """Count one append less."""
        with self._lock:
            self._under_way -= 1
