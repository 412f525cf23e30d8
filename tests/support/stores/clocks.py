"""A clock for a store, which a test sets."""

from __future__ import annotations

import time


class Clock:
    """Stands at `now_ms`, which begins at the machine's time."""

    def __init__(self) -> None:
        self.now_ms = time.time_ns() // 1_000_000

    def __call__(self) -> int:
        return self.now_ms
