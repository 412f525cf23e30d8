"""Pauses between attempts that grow to a limit, with a random part so that clients do not come back together."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from raymq.common.errors import RaymqError

T = TypeVar("T")


class Backoff:
    """Pauses between the attempts of one caller: `first_s`, doubling to `max_s`, each shortened by up to a quarter at
    random."""

    def __init__(self, first_s: float = 0.05, max_s: float = 1.0) -> None:
        self._first_s, self._max_s = first_s, max_s
        self._failures = 0

    def next(self) -> float:
        """An attempt failed: the seconds to wait before the next one."""
        pause_s = min(self._max_s, self._first_s * 2 ** min(self._failures, 16))
        self._failures += 1
        return float(pause_s * random.uniform(0.75, 1.0))

    def reset(self) -> None:
        """The last attempt succeeded."""
        self._failures = 0


def left_s(deadline_s: float) -> float:
    """The seconds until `deadline_s` on `time.monotonic`'s clock, 0.1 at least, so that a call has time to answer."""
    return max(0.1, deadline_s - time.monotonic())


def persist_until(deadline_s: float, call: Callable[[float], T]) -> T:
    """Repeat `call(seconds left)` while it fails retryably and time is left; the last failure is raised then.

    It waits for as long as the server says, if it does. Only for calls that are safe to repeat. `deadline_s` is on
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
