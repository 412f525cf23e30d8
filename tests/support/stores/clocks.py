"""Clocks for a store. A test sets the clocks' times."""

from __future__ import annotations

import time

from storage.files.age_marks import Elapsed
from storage.message_store import MessageStore

HOUR_MS = 3_600_000


class Clock:
    """A store's clock that stands still at `now_ms` until a test changes `now_ms`. It starts at the machine's
    time."""

    def __init__(self) -> None:
        self.now_ms = time.time_ns() // 1_000_000
        self._steps_ms = 0

    def __call__(self) -> int:
        return self.now_ms

    def set_forward(self, by_ms: int) -> None:
        """Set the clock forward (back, if negative) although no time passes."""
        self.now_ms += by_ms
        self._steps_ms += by_ms

    def elapsed(self) -> Elapsed:
        """Read a clock that advances with this one, but that `set_forward` does not change."""
        return Elapsed("test", self.now_ms - self._steps_ms)


def let_pass(store: MessageStore, hours: float = 1000) -> None:
    """Advance the age clock of an open store. All messages that are stored now get older by `hours`."""
    store.ages.observe(store.log.end_offset)
    read = store.ages.read_elapsed

    def read_later() -> Elapsed:
        boot, ms = read()
        return Elapsed(boot, ms + int(hours * HOUR_MS))

    store.ages.read_elapsed = read_later
    store.ages.observe(store.log.end_offset)
