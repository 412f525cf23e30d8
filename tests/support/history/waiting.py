"""Waits for a condition: checks it repeatedly until a deadline, instead of sleeping for a fixed time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(condition: Callable[[], T], what: str, timeout_s: float = 60.0) -> T:
    """Wait until `condition()` returns a true value, and return the value. Raises AssertionError with the text `what`
    if the timeout expires."""
    deadline_s = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline_s:
            raise AssertionError(f"{what} did not happen within {timeout_s:g} s; the last value was {value!r}")
        time.sleep(0.02)
    return value
