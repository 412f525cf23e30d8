"""The answer of a store about the delayed messages that wait in it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DelayedInStore:
    """Delayed messages that wait in one store. `levels`: how many, by level, "deliver_at" for times of their own;
    `hours`: how many become due in each of the next 24 hours, those of the roll queue not counted.

    `due_ms` and `records` are the first ones that are due in the time asked for, in the order of their times; the
    records lie back to back, and `sizes` are their lengths. `complete`: there are no more of them, and no queue was too
    long to be looked at.
    """

    levels: dict[str, int]
    hours: tuple[int, ...]
    late_ms: int
    due_ms: tuple[int, ...]
    records: bytes
    complete: bool
    sizes: tuple[int, ...] = ()
