"""The limit of concurrent appends at one store (spec/messaging.md §2.4, queue caps).

An append that waits keeps its bytes in memory. An append above the limit is rejected before any part of it is stored.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from raymq.common.errors import SystemBusyError


class AppendLimit:
    """Counts the running appends, including appends that wait for the store's append lock. Thread-safe."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        """Maximum number of concurrent appends; may be changed at any time. A lower limit does not interrupt running
        appends."""
        self._lock = threading.Lock()
        self._under_way = 0

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Count the `with` block as one running append, until the block ends. Raises SystemBusyError if the maximum
        number of appends is already running."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    def begin(self) -> None:
        """Count one running append until `end` is called. Raises SystemBusyError if the limit is reached."""
        with self._lock:
            if self._under_way >= self.capacity:
                raise SystemBusyError(
                    f"{self._under_way} appends are already running at this store, as many as send_queue_capacity "
                    "allows; nothing was stored, send again later"
                )
            self._under_way += 1

    @property
    def under_way(self) -> int:
        """The number of appends that have begun but not ended."""
        return self._under_way

    def end(self) -> None:
        """Note that a running append, which was counted by `begin`, has ended."""
        with self._lock:
            self._under_way -= 1
