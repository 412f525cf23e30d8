"""One queue of inner batches: the positions of its records in the log, and their queue offsets.

The layout on disk is in raymq/records/logfiles/ext_units.py; a file has 300,000 units. Unlike in a consume queue, a
unit's position does not give its queue offset. Units are numbered from 0 by position. Each unit holds the queue offset
of its record's first message, and the number of messages.

Units are written right after their records (storage/append/inner_batches.py). Units that a crash lost, and units of
another replica's records, are built from the log (storage/dispatch/batch_dispatch.py).
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raymq.common.config.values import BATCH_UNIT_BYTES
from raymq.common.protocol.store import Boundary
from raymq.records.logfiles.directory import BATCH_CONSUME_QUEUE_DIR
from raymq.records.logfiles.ext_units import read_units
from storage.queue.base_queue import BaseConsumeQueue

_UNIT: Final = struct.Struct(">qiqqqhii")


class BatchUnit(NamedTuple):
    """The consume-queue entry (unit) of an inner batch: a record that contains `messages` messages. The first of these
    messages has queue offset `base_offset`."""

    physical_offset: int
    size: int
    tags_code: int
    store_timestamp_ms: int
    base_offset: int
    messages: int

    def encode(self) -> bytes:
        return _UNIT.pack(*self, -1, 0)


class BatchConsumeQueue(BaseConsumeQueue):
    """The units of one batch consume queue, one unit for each inner batch. Queue offsets count messages, not
    units."""

    store_directory = BATCH_CONSUME_QUEUE_DIR
    unit_bytes = BATCH_UNIT_BYTES

    _first = 0
    """Number of the queue's first unit whose record the log still contains."""
    _end = 0
    """Number that the next entry (unit) of this queue will get."""

    @property
    def first_physical_offset(self) -> int | None:
        first = self._number_at(0)
        return int(self._unit(first)["physical_offset"]) if first < self._end else None

    def reserve(self, count: int) -> None:
        """Create the queue files for `count` more entries (units). Raises OSError if the disk fails or is full."""
        end = (self._end + count) * BATCH_UNIT_BYTES
        while not self._files.starts or self._files.starts[-1] + self._file_size < end:
            self._files.make(self._files.starts[-1] + self._file_size if self._files.starts else 0)

    def append_unit(self, unit: BatchUnit) -> None:
        """Append a record's entry (unit) to the queue. The record must lie after all other records of the queue. Raises
        OSError if the disk fails or is full."""
        self.reserve(1)
        position = self._end * BATCH_UNIT_BYTES
        start = position - position % self._file_size
        path = self._files.path(start)
        self._handles.write(path, position - start, unit.encode())
        self._files.dirty.add(path)
        self._end += 1
        self.next_offset = unit.base_offset + unit.messages
        self.max_physical_offset = unit.physical_offset + unit.size

    def truncate_from(self, physical_limit: int) -> int:
        old_end = self._end
        if self.max_physical_offset > physical_limit:
            self._truncate(self._first_unit_with("physical_offset", physical_limit, self._number_at(0)))
        return old_end - self._end

    def truncate_to(self, queue_offset: int) -> None:
        self._truncate(self._number_of_holder(queue_offset))

    def correct_min_offset(self, min_physical_offset: int) -> None:
        self._first = self._first_unit_with("physical_offset", min_physical_offset, self._number_at(0))
        self.min_offset = self._base_offset_of(self._first)

    def drop_files_before_min(self) -> list[Path]:
        return self._files.drop_files_before(self._first * BATCH_UNIT_BYTES)

    def holder_of(self, queue_offset: int) -> BatchUnit | None:
        """Return the consume-queue entry (unit) of the inner batch, a single record, that contains the message with
        `queue_offset`. Returns None if no inner batch contains it."""
        number = self._number_of_holder(queue_offset)
        if number >= self._end:
            return None
        unit = BatchUnit(*(int(value) for value in self._unit(number).item()[:6]))
        return unit if unit.base_offset <= queue_offset else None

    def first_at_or_after(self, physical_offset: int) -> int:
        """Return the first queue offset whose record starts at or after a physical offset; `next_offset` if no record
        does.

        The search begins at `min_offset`.
        """
        return self._base_offset_of(self._first_unit_with("physical_offset", physical_offset, self._first))

    def offset_by_time(self, timestamp_ms: int, boundary: Boundary) -> int:
        """Return the queue offset for a store time.

        LOWER: the first message of the first record stored at or after `timestamp_ms`; the queue's end if no such
        record exists. UPPER: the first message of the last record stored at or before `timestamp_ms`; the queue's first
        message if no such record exists.
        """
        limit = timestamp_ms if boundary is Boundary.LOWER else timestamp_ms + 1
        number = self._first_unit_with("store_timestamp", limit, self._first)
        return self._base_offset_of(number if boundary is Boundary.LOWER else max(number - 1, self._first))

    def unit_at(self, number: int) -> BatchUnit | None:
        """Return the unit with a number; None if its record is no longer in the log, or if it does not exist."""
        if not self._first <= number < self._end:
            return None
        return BatchUnit(*(int(value) for value in self._unit(number).item()[:6]))

    def put_unit_at(self, number: int, unit: BatchUnit) -> None:
        """Replace the unit with a number, which exists. Called under the append lock. Raises OSError if the disk
        fails."""
        position = number * BATCH_UNIT_BYTES
        start = position - position % self._file_size
        path = self._files.path(start)
        self._files.dirty.add(path)
        self._handles.write(path, position - start, unit.encode())

    def _begin_byte(self) -> int:
        return self._first * BATCH_UNIT_BYTES

    def _end_byte(self) -> int:
        return self._end * BATCH_UNIT_BYTES

    def _has_no_units(self) -> bool:
        return self._end == self._number_at(0)

    def _remove_all_units(self) -> None:
        self._truncate(0)

    def _units(self, start: int) -> NDArray[np.void]:
        return read_units(self._reader.maps, self._files.path(start))

    def _unit(self, number: int) -> np.void:
        start, index = divmod(number, self._units_per_file)
        unit: np.void = self._units(start * self._file_size)[index]
        return unit

    def _number_at(self, index: int) -> int:
        """Return the number of the first entry (unit) in the queue file with the index `index`. Entries are numbered
        from the queue's start."""
        return self._files.starts[index] // BATCH_UNIT_BYTES if self._files.starts else 0

    def _base_offset_of(self, number: int) -> int:
        return int(self._unit(number)["base_offset"]) if number < self._end else self.next_offset

    def _first_unit_with(self, field: str, least: int, first: int) -> int:
        """Search this queue for the first unit (entry of an inner batch) whose field `field` is at least `least`. The
        search begins at unit number `first`. Return the unit's number, or the number after the queue's last unit if no
        unit has such a value. The field's values must be ascending."""
        numbers = range(first, self._end)
        return first + bisect_left(numbers, least, key=lambda number: int(self._unit(number)[field]))

    def _number_of_holder(self, queue_offset: int) -> int:
        """Return the number of the first unit of this batch consume queue whose last message has at least the offset
        `queue_offset`."""
        first = self._number_at(0)
        numbers = range(first, self._end)
        return first + bisect_right(numbers, queue_offset, key=lambda number: self._next_offset_of(self._unit(number)))

    def _next_offset_of(self, unit: np.void) -> int:
        return int(unit["base_offset"]) + int(unit["count"])

    def _starts_before(self, start: int, physical_limit: int) -> bool:
        unit = self._units(start)[0]
        return bool(unit["size"] > 0 and unit["physical_offset"] < physical_limit)

    def _keep_good_units(self, starts: list[int], physical_limit: int) -> None:
        end = self._number_at(0)
        physical_end = queue_end = 0
        for start in starts:
            self._files.dirty.add(self._files.path(start))
            end = start // BATCH_UNIT_BYTES
            for unit in self._units(start):
                begin, size, base = int(unit["physical_offset"]), int(unit["size"]), int(unit["base_offset"])
                in_order = physical_end <= begin < physical_limit and base >= queue_end
                if not in_order or size <= 0 or unit["count"] <= 0:
                    break
                physical_end, queue_end = begin + size, self._next_offset_of(unit)
                end += 1
            else:
                continue
            break
        self._truncate(end)

    def _truncate(self, end: int) -> None:
        """Remove the unit with number `end` and all later units of the queue, in memory and on disk."""
        self._files.cut(end * BATCH_UNIT_BYTES)
        self._end = end
        self._first = min(self._first, end)
        self.next_offset, self.max_physical_offset = 0, -1
        if end > self._number_at(0):
            last = self._unit(end - 1)
            self.next_offset = self._next_offset_of(last)
            self.max_physical_offset = int(last["physical_offset"]) + int(last["size"])
        self.min_offset = min(self.min_offset, self.next_offset)
