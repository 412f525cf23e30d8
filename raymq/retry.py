"""Pauses between attempts that grow to a limit, with a random part so that clients do not come back together."""

from __future__ import annotations

import random


class Backoff:
    """`next()` gives the seconds to wait: first_s, doubling to max_s, each shortened by up to a quarter at random."""

    def __init__(self, first_s: float = 0.05, max_s: float = 1.0) -> None:
        self._first_s, self._max_s = first_s, max_s
        self._failures = 0

    def next(self) -> float:
        pause_s = min(self._max_s, self._first_s * 2 ** min(self._failures, 16))
        self._failures += 1
        return float(pause_s * random.uniform(0.75, 1.0))

    def reset(self) -> None:
        """The last attempt succeeded."""
        self._failures = 0
