"""Pauses between retries. The pauses grow up to a limit. A random part prevents many clients from retrying at the same
moment."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from raymq.common.errors import RaymqError

T = TypeVar("T")


class Backoff:
    """The pauses between the attempts of one caller. The pauses start at `first_s` and double up to `max_s`; each pause
    is randomly shortened by up to a quarter."""

    def __init__(self, first_s: float = 0.05, max_s: float = 1.0) -> None:
        self._first_s, self._max_s = first_s, max_s
        self._failures = 0

    def next(self) -> float:
        """Return the pause, in seconds, before the next attempt, after an attempt failed. Each call doubles the
        following pause, up to the maximum."""
        pause_s = min(self._max_s, self._first_s * 2 ** min(self._failures, 16))
        self._failures += 1
        return float(pause_s * random.uniform(0.75, 1.0))

    def reset(self) -> None:
        """Record a successful attempt: the pause after the next failure is `first_s` again."""
        self._failures = 0


def left_s(deadline_s: float) -> float:
    """Return the seconds until `deadline_s`, a time of `time.monotonic`'s clock. The result is at least 0.1, so that a
    last call can finish."""
    return max(0.1, deadline_s - time.monotonic())


class Persistence:
    """Decides how long one caller repeats a call that is safe to repeat: while the call raises retryable errors, until
    `deadline_s`, a time of `time.monotonic`'s clock."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s, self._backoff = deadline_s, Backoff()

    @property
    def left_s(self) -> float:
        """The timeout of the next attempt, in seconds."""
        return left_s(self._deadline_s)

    def pause_s(self, error: RaymqError) -> float | None:
        """Return the pause, in seconds, before the call is repeated after an error; None if it must not be repeated.
        The pause is at least as long as the server requests in its error."""
        pause_s = max(self._backoff.next(), error.retry_after_s or 0.0)
        return None if not error.retryable or time.monotonic() + pause_s >= self._deadline_s else pause_s


def persist_until(deadline_s: float, call: Callable[[float], T]) -> T:
    """Call `call` with the remaining seconds, and repeat the call while it raises retryable errors and the deadline has
    not passed. Raises the last error.

    The pause before a retry is at least as long as the server requests in its error. Use this function only for calls
    that are safe to repeat. `deadline_s`: the deadline, a time of `time.monotonic`'s clock.
    """
    persistence = Persistence(deadline_s)
    while True:
        try:
            return call(persistence.left_s)
        except RaymqError as error:
            pause_s = persistence.pause_s(error)
            if pause_s is None:
                raise
            time.sleep(pause_s)


async def persist_in_loop(deadline_s: float, call: Callable[[float], Awaitable[T]]) -> T:
    """Await `call`, with retries as in `persist_until`. The pauses do not block the event loop."""
    persistence = Persistence(deadline_s)
    while True:
        try:
            return await call(persistence.left_s)
        except RaymqError as error:
            pause_s = persistence.pause_s(error)
            if pause_s is None:
                raise
            await asyncio.sleep(pause_s)
