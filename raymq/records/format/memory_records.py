"""Records of one queue in memory, which are sliced and joined without decoding.

Consumers keep fetched records in this form, so a limit on the records' bytes also limits a consumer's memory. Records
can be sent back, or converted into a table, without an object per message.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raymq.records.format.check import check_record, find_starts, record_starts
from raymq.records.format.crc import PROPERTY_CRC_LENGTH, is_sealed, property_crc, seal_holds
from raymq.records.format.layout import MIN_RECORD_SIZE, QUEUE_OFFSET_OFFSET, RecordError, header_size_at, windows

_RECONSUME_TIMES_FROM_END_OF_HEADER: Final = 16
"""Distance in bytes of the reconsume times from the end of a record's header. The last 16 bytes of a header are the
reconsume times (4 bytes), the prepared transaction's offset (8 bytes) and the body's size (4 bytes)."""


class LocatedRecords(NamedTuple):
    """Records of one queue, in ascending order of their queue offsets."""

    data: memoryview | bytes
    """The buffer that contains the records. If the buffer is a mapped file, records of other queues may lie between
    these records."""
    starts: NDArray[np.int64]
    """The position of each of the n records in `data`, shape (n,)."""
    sizes: NDArray[np.int64]
    """The length of each record in bytes, shape (n,)."""
    offsets: NDArray[np.int64]
    """The queue offset of each of the n records, shape (n,)."""
    position: int = -1
    """Physical offset of the first byte of `data`; -1 if `data` is not part of a commit-log file."""

    @property
    def physical_offsets(self) -> NDArray[np.int64] | None:
        """The physical offset of each record, shape (n,); None if `data` is not part of a commit-log file."""
        return None if self.position < 0 else self.starts + self.position

    def part(self, first: int, last: int) -> LocatedRecords:
        """Return the records with the indices `first` to `last - 1`."""
        rows = slice(first, last)
        return LocatedRecords(self.data, self.starts[rows], self.sizes[rows], self.offsets[rows], self.position)

    def pick(self, rows: NDArray[np.int64]) -> LocatedRecords:
        """Return the records at the given ascending indices."""
        return LocatedRecords(self.data, self.starts[rows], self.sizes[rows], self.offsets[rows], self.position)

    def joined(self) -> bytes:
        """Return the bytes of all records, one record after another."""
        view = memoryview(self.data)
        spans = zip(self.starts.tolist(), self.sizes.tolist(), strict=True)
        return b"".join([view[start : start + size] for start, size in spans])

    @classmethod
    def read(cls, data: bytes) -> LocatedRecords:
        """Return the records that fill `data`. Raises RecordError if the records' sizes do not add up to the length of
        `data`. Checks nothing else."""
        starts = record_starts(data)
        offsets = windows(data, 8)[starts + QUEUE_OFFSET_OFFSET].view(">i8").astype(np.int64)
        return cls(data, starts, np.diff(starts, append=len(data)), offsets)

    @classmethod
    def of_fetch(cls, data: bytes, count: int, first_offset: int, next_offset: int) -> LocatedRecords:
        """Return the `count` records that a fetch returned for the queue offsets from `first_offset` up to
        `next_offset`. The records may be damaged.

        A record with a damaged size ends where the next intact record begins. If the fetch returned every message of
        the offset range, a damaged record gets the offset that is missing between its neighbours. If the fetch skipped
        messages, a damaged record gets the offset after the previous record's offset.
        """
        try:
            found = cls.read(data)
            offsets = found.offsets
            if len(offsets) == count and (
                not count
                or (first_offset <= offsets[0] and offsets[-1] < next_offset and (offsets[1:] > offsets[:-1]).all())
            ):
                return found
        except RecordError:
            pass  # some records are damaged: continue below with `_of_damaged`, which checks each record separately
        return cls._of_damaged(data, count, first_offset, next_offset)

    @classmethod
    def _of_damaged(cls, data: bytes, count: int, first_offset: int, next_offset: int) -> LocatedRecords:
        """Return the records of a fetch whose bytes include damaged records. Apart from the damage, the result is as
        that of `of_fetch`."""
        all_wanted, starts = count == next_offset - first_offset, find_starts(data)
        sizes = np.diff(starts, append=len(data))
        if all_wanted and len(starts) == count:
            return cls(data, starts, sizes, np.arange(first_offset, next_offset))
        rows: list[tuple[int, int, int]] = []
        damaged: list[tuple[int, int]] = []

        def fill(end_offset: int, position: int) -> None:
            """Give queue offsets to the damaged records that follow the last intact record. The offsets end before
            `end_offset`. `position`: the start of the next intact record, or the end of `data`."""
            start = rows[-1][2] + 1 if rows else first_offset
            places = [*damaged, *[(position, 0)] * (end_offset - start if all_wanted else 0)]
            rows.extend((*place, offset) for place, offset in zip(places, range(start, end_offset), strict=False))
            damaged.clear()

        for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
            offset = queue_offset_at(data, start) if check_record(data, start, check_crc=False) == (size, True) else -1
            if (rows[-1][2] + 1 if rows else first_offset) <= offset < next_offset:
                fill(offset, start)
                rows.append((start, size, offset))
            else:
                damaged.append((start, size))
        fill(next_offset, len(data))
        table = np.array(rows, np.int64).reshape(-1, 3)
        return cls(data, table[:, 0].copy(), table[:, 1].copy(), table[:, 2].copy())


@dataclass(frozen=True, slots=True)
class MemoryRecords:
    """Whole records of one queue, one after another, in ascending order of their queue offsets."""

    data: bytes
    """The records' bytes. Record i is `data[starts[i]:starts[i + 1]]`."""
    starts: Sequence[int]
    """The position of each record in `data`. The last item is the length of `data`."""
    offsets: Sequence[int]
    """The queue offset of each record; item i belongs to record i."""

    @classmethod
    def read(cls, data: bytes) -> MemoryRecords:
        """Return the records that fill `data`. Raises RecordError if the records' sizes do not add up to the length of
        `data`. Checks nothing else."""
        return cls.of(LocatedRecords.read(data))

    @classmethod
    def of(cls, located: LocatedRecords) -> MemoryRecords:
        """Return `located` as MemoryRecords. The records of `located` must follow one another without gaps, and fill
        all bytes of `located`."""
        data = bytes(located.data)
        return cls(data, [*located.starts.tolist(), len(data)], located.offsets.tolist())

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def size_bytes(self) -> int:
        """The total length of all records in bytes."""
        return len(self.data)

    def size_of(self, indices: Iterable[int]) -> int:
        """Return the total length in bytes of the records at the given indices."""
        return sum(self.starts[index + 1] - self.starts[index] for index in indices)

    def in_memory(self) -> MemoryRecords:
        """Return this object itself, because its records are already in memory."""
        return self

    def part(self, first: int, last: int) -> MemoryRecords:
        """Return the records with the indices `first` to `last - 1`. Returns this object itself if the range covers all
        records."""
        if first == 0 and last == len(self):
            return self
        base = self.starts[first]
        starts = [start - base for start in self.starts[first : last + 1]]
        return MemoryRecords(self.data[base : self.starts[last]], starts, self.offsets[first:last])

    def pick(self, indices: Iterable[int]) -> MemoryRecords:
        """Return the records of this object at `indices`, which must be ascending and not empty. Returns this object
        itself if the indices cover all its records."""
        wanted = sorted(indices)
        if len(wanted) == len(self):
            return self
        return join_records([self.part(index, index + 1) for index in wanted])

    def reconsume_times(self, index: int) -> int:
        """Return the reconsume times of record `index`, from its header. This number counts how often consumers have
        sent the message back."""
        position = self._reconsume_times_at(index)
        return 0 if position is None else int.from_bytes(self.data[position : position + 4])

    def failed_once_more(self, indices: Iterable[int]) -> MemoryRecords:
        """Return a copy of all records, in which the reconsume times of the records at `indices` are higher by one. If
        such a record has a correct property CRC, the property CRC is recomputed."""
        data = bytearray(self.data)
        for index in indices:
            position = self._reconsume_times_at(index)
            if position is not None:
                record = memoryview(data)[self.starts[index] : self.starts[index + 1]]
                was_whole = is_sealed(record) and seal_holds(record)
                data[position : position + 4] = (self.reconsume_times(index) + 1).to_bytes(4)
                if was_whole:
                    record[-PROPERTY_CRC_LENGTH:] = property_crc(record)
        return MemoryRecords(bytes(data), self.starts, self.offsets)

    def _reconsume_times_at(self, index: int) -> int | None:
        """Return the position of the reconsume-times field of record `index`. Returns None if the record is damaged and
        too short for the field."""
        start = self.starts[index]
        if self.starts[index + 1] - start < MIN_RECORD_SIZE:
            return None
        return start + header_size_at(self.data, start) - _RECONSUME_TIMES_FROM_END_OF_HEADER


def queue_offset_at(data: bytes, start: int) -> int:
    """Return the queue offset in the header of the record at `start`."""
    return int.from_bytes(data[start + QUEUE_OFFSET_OFFSET : start + QUEUE_OFFSET_OFFSET + 8], signed=True)


def join_records(parts: Sequence[MemoryRecords]) -> MemoryRecords:
    """Join the records of all `parts`, in order. There must be at least one part. If there is only one part, it is
    returned without a copy."""
    if len(parts) == 1:
        return parts[0]
    starts, offsets = [0], list[int]()
    for part in parts:
        base = starts[-1]
        starts += [base + start for start in part.starts[1:]]
        offsets += part.offsets
    return MemoryRecords(b"".join(part.data for part in parts), starts, offsets)
