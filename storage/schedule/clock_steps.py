"""Detects steps of the store's clock between the scheduler's rounds, and since the newest message was stored.

Delay levels are durations, but the queue entries of waiting messages have times of day. A step of the clock by a day
would make all of these messages due. So the scheduler compares the store's clock with a steady clock, which no step
changes, and tells its level queues about each step. Times that users have set (`deliver_at`) are times of day: the
store's clock decides.

A new process, or a new master, compares its clock with the store time of the newest message and with the time for which
this message has been in the store. This time is known to about a minute, so a small step is not noticed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

STEP_MS: Final = 1000
"""Smallest step of the clock in ms that is noticed between two rounds."""
STEP_AT_START_MS: Final = 120_000
"""Smallest step forward in ms that is noticed at the start of a scheduler."""


class ClockSteps:
    """Compares a store's clock with a steady clock. `steady_ms` reads the steady clock. One thread uses the object."""

    def __init__(self, steady_ms: Callable[[], int], expected_ms: int | None = None) -> None:
        """`expected_ms`: a time that the store's clock has certainly passed, if nobody has set it; None if unknown."""
        self._steady_ms, self._expected_ms = steady_ms, expected_ms
        # The last reading of the store's clock, with the readings of the steady clock before and after it.
        self._last: tuple[int, int, int] | None = None
        self._before_ms = steady_ms()

    def begin(self) -> None:
        """Call this before each reading of the store's clock."""
        self._before_ms = self._steady_ms()

    def step_ms(self, now_ms: int) -> int:
        """Return by how many ms the store's clock was set forward (back, if negative) since its last reading; 0 if it
        was not set.

        `now_ms` is the reading after `begin`. A step is never returned smaller than it was.
        """
        before_ms, after_ms = self._before_ms, self._steady_ms()
        last, self._last = self._last, (now_ms, before_ms, after_ms)
        if last is None:
            most = 0 if self._expected_ms is None else now_ms - self._expected_ms
            return most if most > STEP_AT_START_MS or most < -STEP_MS else 0
        passed_ms = now_ms - last[0]
        most, least = passed_ms - (before_ms - last[2]), passed_ms - (after_ms - last[1])
        return most if least > STEP_MS or most < -STEP_MS else 0
