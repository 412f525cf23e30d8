"""A clock for a store. A test sets the clock's time."""

from __future__ import annotations

import time


class Clock:
    """A store's clock that stands still at `now_ms` until a test changes `now_ms`. It starts at the machine's
    time."""

    def __init__(self) -> None:
        self.now_ms = time.time_ns() // 1_000_000

    def __call__(self) -> int:
        return self.now_ms
