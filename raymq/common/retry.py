"""Pauses between attempts that grow to a limit, with a random part so that clients do not retry at the same moment."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from raymq.common.errors import RaymqError

T = TypeVar("T")


class Backoff:
    """Pauses between the attempts of one caller: from `first_s`, doubling to `max_s`, each randomly shortened by up to
    a quarter."""

    def __init__(self, first_s: float = 0.05, max_s: float = 1.0) -> None:
        self._first_s, self._max_s = first_s, max_s
        self._failures = 0

    def next(self) -> float:
        """Return the seconds to wait after a failed attempt."""
        pause_s = min(self._max_s, self._first_s * 2 ** min(self._failures, 16))
        self._failures += 1
        return float(pause_s * random.uniform(0.75, 1.0))

    def reset(self) -> None:
        """Start again at `first_s`, after a successful attempt."""
        self._failures = 0


def left_s(deadline_s: float) -> float:
    """Return the seconds until `deadline_s` on `time.monotonic`'s clock, but at least 0.1, so that a call can
    finish."""
    return max(0.1, deadline_s - time.monotonic())


def persist_until(deadline_s: float, call: Callable[[float], T]) -> T:
    """Repeat `call(seconds left)` while it raises retryable errors and time is left. Raises the last error.

    Waits for as long as the server requests in its error. Only for calls that are safe to repeat. `deadline_s`: on
    `time.monotonic`'s clock.
    """
    backoff = Backoff()
    while True:
        try:
            return call(left_s(deadline_s))
        except RaymqError as error:
            pause_s = max(backoff.next(), error.retry_after_s or 0.0)
            if not error.retryable or time.monotonic() + pause_s >= deadline_s:
                raise
            time.sleep(pause_s)
