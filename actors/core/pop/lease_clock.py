"""The clock of leases: the wall clock, except that it never goes back and never stops.

A lease ends at a time of day, because it outlives the broker's process. After the wall clock is set back, this clock
continues from its last time, at the rate of the monotonic clock, until the wall clock is ahead again. So a lease does
not last an hour longer because the clock was set back by an hour.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class LeaseClock:
    """A thread-safe clock. `wall_ms` returns the time in ms since 1970, `monotonic_ms` a time in ms that never goes
    back.
    """

    def __init__(self, wall_ms: Callable[[], int], monotonic_ms: Callable[[], int]) -> None:
        self._wall_ms, self._monotonic_ms = wall_ms, monotonic_ms
        self._lock = threading.Lock()
        self._latest_ms, self._latest_at_ms = 0, monotonic_ms()

    def now_ms(self) -> int:
        """Return the time in ms since 1970, never less than before."""
        with self._lock:
            at_ms = self._monotonic_ms()
            self._latest_ms = max(self._wall_ms(), self._latest_ms + at_ms - self._latest_at_ms)
            self._latest_at_ms = at_ms
            return self._latest_ms

    def not_before(self, time_ms: int) -> None:
        """Continue from `time_ms` at the earliest, because something was stored at that time."""
        with self._lock:
            at_ms = self._monotonic_ms()
            self._latest_ms = max(time_ms, self._latest_ms + at_ms - self._latest_at_ms)
            self._latest_at_ms = at_ms
