"""Runs of records that carry nothing but their queue offset, for tests of what decides about them."""

from __future__ import annotations

from collections.abc import Sequence

from raymq.consumer.pull.fetched_records import PolledRecords, Run
from raymq.record.layout import QUEUE_OFFSET_OFFSET

RECORD_BYTES = 32


def fake_run(offsets: Sequence[int], next_offset: int | None = None) -> Run:
    """A run of these offsets; behind it the queue stands at `next_offset`, by default behind the last."""
    records = b"".join(
        bytes(QUEUE_OFFSET_OFFSET) + offset.to_bytes(8, "big") + bytes(RECORD_BYTES - QUEUE_OFFSET_OFFSET - 8)
        for offset in offsets
    )
    behind = next_offset if next_offset is not None else offsets[-1] + 1
    return Run(records, list(range(0, len(records), RECORD_BYTES)), behind)


def offsets_of(part: PolledRecords) -> list[int]:
    """The queue offsets in a slice. Ask before it is taken."""
    return [part.run.offset_at(part.run.first + index) for index in range(part.count)]
