"""The clock of leases: the wall clock, except that it never goes back and never stands still.

A lease ends at a time of day, because it has to outlive the broker's process. After a step back of the wall clock this
clock goes on from where it was, at the rate of the monotonic clock, until the wall clock is ahead again. So a lease
does not last an hour longer because somebody has set a clock back by an hour.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class LeaseClock:
    """Thread-safe. `wall_ms` gives the time in ms since 1970, `monotonic_ms` a time in ms that never goes back."""

    def __init__(self, wall_ms: Callable[[], int], monotonic_ms: Callable[[], int]) -> None:
        self._wall_ms, self._monotonic_ms = wall_ms, monotonic_ms
        self._lock = threading.Lock()
        self._latest_ms, self._latest_at_ms = 0, monotonic_ms()

    def now_ms(self) -> int:
        """The time in ms since 1970; no less than any time before."""
        with self._lock:
            at_ms = self._monotonic_ms()
            self._latest_ms = max(self._wall_ms(), self._latest_ms + at_ms - self._latest_at_ms)
            self._latest_at_ms = at_ms
            return self._latest_ms

    def not_before(self, time_ms: int) -> None:
        """Go on from `time_ms` at the earliest: something was stored at that time."""
        with self._lock:
            at_ms = self._monotonic_ms()
            self._latest_ms = max(time_ms, self._latest_ms + at_ms - self._latest_at_ms)
            self._latest_at_ms = at_ms
