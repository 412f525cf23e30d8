"""Generates records of a queue, for tests of classes that keep records in memory."""

from __future__ import annotations

from collections.abc import Sequence

from raymq.client.consumer.pull.fetched_records import FetchedRecords, PolledRecords
from raymq.records.format.layout import RecordHeader, header_size
from raymq.records.format.memory_records import LocatedRecords, MemoryRecords

RECORD_BYTES = header_size(0) + 12


def records_of(offsets: Sequence[int], *, reconsume_times: int = 0) -> MemoryRecords:
    """Return one record for each queue offset in `offsets`. All records have the same size and a valid header, but
    their content cannot be decoded."""
    return MemoryRecords.read(b"".join(_record(offset, reconsume_times) for offset in offsets))


def fetched_of(offsets: Sequence[int], next_offset: int | None = None) -> FetchedRecords:
    """Return fetched records at the given offsets, in the form in which a pull consumer keeps them.

    `next_offset`: the queue offset that follows the records; by default the last record's offset plus 1.
    """
    return FetchedRecords(
        LocatedRecords.read(records_of(offsets).data), offsets[-1] + 1 if next_offset is None else next_offset
    )


def offsets_of(part: PolledRecords) -> list[int]:
    """Return the queue offsets of a slice of polled records. This function takes the first remaining records of the
    consumer's buffer. So call it before the consumer removes the slice from its buffer."""
    first = part.fetched.first
    offsets: list[int] = part.fetched.records.offsets[first : first + part.count].tolist()
    return offsets


def _record(offset: int, reconsume_times: int) -> bytes:
    header = RecordHeader(RECORD_BYTES, 0, 0, 0, 0, offset, 0, 0, 0, bytes(8), 0, bytes(8), reconsume_times, 0, 0)
    return header.encode().ljust(RECORD_BYTES, b".")
