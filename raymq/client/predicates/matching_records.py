"""MatchingRecords holds the records of a queue that match a predicate, without copying them. The module has no side
effects, except for the calls of the predicate."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from raymq.client.predicates.evaluation import Evaluated
from raymq.records.format.memory_records import LocatedRecords

Decide = Callable[[LocatedRecords, float], Evaluated]
"""Function that evaluates a predicate on records, in order, until a given time. It decides on at least the first
record, or returns the failure on the first record."""


@dataclass(slots=True)
class MatchingRecords:
    """The records that matched a predicate, and the queue offset after the checked records.

    `failure`: why the predicate did not decide on the record at `next_offset`. `ended`: True if the predicate ended its
    process during the check.
    """

    next_offset: int
    records: list[LocatedRecords] = field(default_factory=list)
    count: int = 0
    size_bytes: int = 0
    looked: int = 0
    """Number of records on which the predicate has decided."""
    failure: str = ""
    ended: bool = False


def keep(
    found: Iterable[LocatedRecords],
    next_offset: int,
    decide: Decide,
    *,
    max_messages: int,
    max_bytes: int,
    until_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> MatchingRecords:
    """Filter `found`, and return the matching records. `decide` applies the filter. `next_offset`: the queue offset
    after `found`.

    Returns at most `max_messages` records of at most `max_bytes` together, but at least one record if any matches.
    Stops when `clock` reaches `until_s`, but checks some records in any case. If records of `found` remain for a later
    call, the result's `next_offset` is the offset of the first remaining record.
    """
    kept = MatchingRecords(next_offset)
    for piece in found:
        records = piece
        while len(records.offsets):
            if kept.looked and clock() >= until_s:
                kept.next_offset = int(records.offsets[0])
                return kept
            evaluated = decide(records, until_s)
            decided = len(evaluated.matches)
            taken = _take(kept, records, evaluated, max_messages, max_bytes)
            kept.looked += taken
            if taken < len(records.offsets):
                kept.next_offset = int(records.offsets[taken])
            if taken < decided:
                return kept
            kept.ended |= evaluated.ended
            if evaluated.failure or not decided:
                kept.failure = evaluated.failure
                return kept
            records = records.part(decided, len(records.offsets))
            kept.next_offset = next_offset
    return kept


def _take(
    kept: MatchingRecords, records: LocatedRecords, evaluated: Evaluated, max_messages: int, max_bytes: int
) -> int:
    """Add the records that match the filter to `kept`, until a limit (messages or bytes) is reached. Returns the number
    of records that are dealt with: all of `records`, or the records before the first match that exceeds a limit."""
    rows = np.flatnonzero(evaluated.matches)
    sizes = np.cumsum(records.sizes[rows])
    fitting = int(np.searchsorted(sizes, max_bytes - kept.size_bytes, "right"))
    admitted = min(max_messages - kept.count, max(fitting, 0 if kept.count else 1), len(rows))
    if admitted:
        kept.records.append(records.pick(rows[:admitted]))
        kept.count += admitted
        kept.size_bytes += int(sizes[admitted - 1])
    return len(evaluated.matches) if admitted == len(rows) else int(rows[admitted])
