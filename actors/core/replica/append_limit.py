"""How many appends may be at a store at a time (spec/messaging.md §2.4, queue caps).

An append that waits holds its bytes in memory. One too many is refused before anything of it is stored.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from raymq.errors import SystemBusyError


class AppendLimit:
    """Counts the appends under way, those that wait for their turn included. Thread-safe."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()
        self._under_way = 0

    @contextmanager
    def take(self) -> Iterator[None]:
        """Be counted while the block runs; SystemBusyError if that is one too many."""
        with self._lock:
            if self._under_way >= self._capacity:
                raise SystemBusyError(
                    f"{self._under_way} appends are at this store already, as many as send_queue_capacity allows; "
                    "nothing was stored, send again later"
                )
            self._under_way += 1
        try:
            yield
        finally:
            with self._lock:
                self._under_way -= 1
