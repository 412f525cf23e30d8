"""One queue of one topic: the positions of its messages in the commit log (spec/storage.md §2).

On disk
    consumequeue/TOPIC/QUEUE/00000000000000000000      units by queue offset, 300,000 in a file
    consumequeue/TOPIC/QUEUE/00000000000006000000      named after the byte offset of the first

A unit, big-endian
    | physical_offset 8 | size 4 | tags_code 8 |

A unit (0, 2147483647, 0) points to no record. If the first messages of a queue are no longer in the log, such units
take the place of these messages' units. A message's unit is written right after the message's record. After a crash,
recovery rebuilds lost units from the log.
"""

from __future__ import annotations

import struct
from mmap import mmap
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from raymq.common.config.values import CONSUME_QUEUE_UNIT_BYTES as UNIT_BYTES
from raymq.common.errors import DataLossError, StoreCorruptError
from raymq.records.format.layout import UNIT_DTYPE, RecordError, read_header
from raymq.records.kernels.stamp import begins_of, fill_units, units_of
from raymq.records.logfiles.directory import CONSUME_QUEUE_DIR
from raymq.records.logfiles.ext_units import EXT_ADDRESS_MAX
from raymq.records.logfiles.log_reader import PRE_BLANK_SIZE
from storage.queue.base_queue import NO_LIMIT, BaseConsumeQueue
from storage.queue.compacted_log import CompactedLog

_UNIT: Final = struct.Struct(">qiq")
_SIZE_AT: Final = 8
"""Byte position within a consume-queue unit at which the record's size begins."""
_BLANK_SIZE: Final = PRE_BLANK_SIZE.to_bytes(4)
_SCAN_UNITS: Final = 16_384
_RECOVER_FIRST_UNITS: Final = 256
"""Number of units at the start of a queue file that recovery checks first. If all of them are correct, recovery checks
more units at a time."""
_RECOVER_GROWTH: Final = 4
_DAMAGED_MAX: Final = 1000
"""Maximum number of consecutive damaged records that a search by time skips."""
_COMPARED_RECORDS: Final = 3
"""Number of records before the found offset whose store times a search by time also checks. This protects the search
against a single wrong store time."""
_LOST_UNITS_MAX: Final = 65_536
"""Approximate maximum number of removed units of a queue that recovery keeps in memory."""


class ConsumeQueue(BaseConsumeQueue):
    """The entries (units) of one consume queue, one entry for each message. The n-th entry of the queue has queue
    offset n."""

    store_directory = CONSUME_QUEUE_DIR
    unit_bytes = UNIT_BYTES

    out_of_order = False
    """True if recovery found a file whose first entry (unit) points to an earlier part of the log than the previous
    file's entries. The queue then ends where this file would begin."""
    compacted: CompactedLog | None = None
    """The queue's compacted log, if the topic is compacted. Set under the append lock."""
    lost_units: NDArray[np.void] = np.empty(0, UNIT_DTYPE)
    """Copy of the first entries (units) that `recover_until` removed from the queue. Some of these entries may be
    correct. Empty after recovery."""
    lost_units_from = 0
    """Queue offset of the first unit in `lost_units`."""
    _forgotten_before = 0
    """The queue's messages before this queue offset are expired. They no longer count as part of the queue, even if the
    log still has them."""
    _map: mmap | None = None
    """Memory map of the queue file that was written last; None if that file has no map. Use it only through
    `_map_at`."""
    _map_start = 0
    """Start position of the file in `_map`: the number of bytes from the beginning of the queue to the beginning of
    this file."""
    _map_known = -1
    """The value that `WriteHandles.closed_count` (number of closed files) had when `_map` was looked up. `_map` is
    valid while the count has this value. -1 forces the next write to look up the map again."""

    @property
    def first_offset(self) -> int:
        """Queue offset of the queue's first unit on disk, whether or not the log still contains the unit's
        message."""
        return self._files.starts[0] // UNIT_BYTES if self._files.starts else self.next_offset

    @property
    def first_physical_offset(self) -> int | None:
        units = self.units(self._first_at_or_after(0), 1)
        return int(units[0]["physical_offset"]) if len(units) else None

    def file_ranges(self) -> list[tuple[int, int]]:
        """Return, for each queue file that has units, the queue offset of its first unit and the number of its
        units."""
        firsts = [start // UNIT_BYTES for start in self._files.starts if start < self.next_offset * UNIT_BYTES]
        return [(first, min(self._units_per_file, self.next_offset - first)) for first in firsts]

    def _starts_before(self, start: int, physical_limit: int) -> bool:
        [unit] = self._reader.units(self.topic, self.queue_id, start // UNIT_BYTES, 1)
        return bool(unit["size"] > 0 and 0 < unit["physical_offset"] < physical_limit)

    def _has_no_units(self) -> bool:
        return self.next_offset == self.first_offset

    def _remove_all_units(self) -> None:
        self.truncate_to(0)

    def _keep_good_units(self, starts: list[int], physical_limit: int) -> None:
        self.next_offset = self._files.starts[0] // UNIT_BYTES if self._files.starts else 0
        self.out_of_order = False
        reach = 0
        for start in starts:
            self._files.dirty.add(self._files.path(start))
            self.next_offset = start // UNIT_BYTES
            reach, ends = self._pass_good_units(self.next_offset + self._units_per_file, reach, physical_limit)
            if ends:
                break
        if physical_limit != NO_LIMIT:
            self._keep_lost_units()
        self.truncate_to(self.next_offset)

    def _keep_lost_units(self) -> None:
        """Copy the first units after `next_offset` to `lost_units`. Only units in the same file are copied, up to the
        first unit that was never written. Units that were copied earlier, when the queue was cut at a later offset, are
        kept."""
        kept, kept_from = self.lost_units, self.lost_units_from
        units, count = np.empty(0, UNIT_DTYPE), 1
        while len(units) < _LOST_UNITS_MAX:
            units = self._reader.units(self.topic, self.queue_id, self.next_offset, count)
            if len(units) < count or not units["size"][-1]:
                break
            count *= _RECOVER_FIRST_UNITS if count == 1 else _RECOVER_GROWTH
        written = np.flatnonzero(units["size"] == 0)
        self.lost_units = units[: written[0] if len(written) else len(units)].copy()
        self.lost_units_from = self.next_offset
        if len(kept):
            between = self.lost_units[: max(kept_from - self.next_offset, 0)]
            if len(between) != kept_from - self.next_offset:
                between, self.lost_units_from = between[:0], kept_from
            self.lost_units = np.concatenate((between, kept))

    @property
    def has_lost_units(self) -> bool:
        """True if recovery has removed entries (units) from the queue and has not put them back."""
        return self.lost_units_from + len(self.lost_units) > self.next_offset

    def forget_lost_units(self) -> None:
        """Discard the copy of the entries (units) that recovery has removed from the queue."""
        self.lost_units = np.empty(0, UNIT_DTYPE)

    def _pass_good_units(self, file_end: int, reach: int, physical_limit: int) -> tuple[int, bool]:
        """Move `next_offset` from the start of a queue file to the end of the file's correct units (entries), but not
        beyond `file_end`. `reach`: the log offset at which the last record of the earlier files' units ends.

        Returns the log offset at which the last record of all units up to `next_offset` ends. The second value is True
        if the queue ends in this file. The file is read in chunks: most of a short queue's file was never written, and
        reading all of it would take memory.
        """
        is_first, count = True, _RECOVER_FIRST_UNITS
        while self.next_offset < file_end:
            asked = min(count, file_end - self.next_offset)
            units = self._reader.units(self.topic, self.queue_id, self.next_offset, asked)
            # Begin and end of each unit's record in the log. The end is 0 for a unit that points to no record.
            points_nowhere = units["size"] == PRE_BLANK_SIZE
            begins = units["physical_offset"].astype(np.int64)
            ends = np.where(points_nowhere, 0, begins + units["size"])
            # before[i]: the highest log offset at which a record of the units before unit i ends. Units of earlier
            # files count, too. The array has one more element than `units`.
            before = np.maximum.accumulate(np.concatenate(([reach], ends)))
            out_of_order = (begins < before[:-1]) & ~points_nowhere
            bad = np.flatnonzero((begins < 0) | (units["size"] <= 0) | (begins >= physical_limit) | out_of_order)
            if len(bad):
                self.next_offset += int(bad[0])
                self.out_of_order = bool(is_first and bad[0] == 0 and out_of_order[0] and units[0]["size"] > 0)
                return reach, True
            self.next_offset += len(units)
            reach = int(before[-1])
            if len(units) < asked:
                break  # The queue file is shorter than expected; the queue continues in the next file.
            is_first, count = False, min(count * _RECOVER_GROWTH, _SCAN_UNITS)
        return reach, False

    def units(self, from_offset: int, count: int) -> NDArray[np.void]:
        """Return at most `count` entries (units) of this consume queue, from `from_offset` on. The queue's units end at
        `next_offset`. At the end of a queue file, fewer units are returned."""
        count = min(count, self.next_offset - from_offset)
        if from_offset + count > self.visible_offset:
            self._handles.complete_writes()
        return self._reader.units(self.topic, self.queue_id, from_offset, count)

    def next_unit(self, from_offset: int, end_offset: int) -> NDArray[np.void]:
        """Return the first entry (unit) in [`from_offset`, `end_offset`) that points to a record, as an array of length
        one.

        Returns an empty array if no entry points to a record.
        """
        return self._next_pointing(from_offset, end_offset)[1]

    def _next_pointing(self, from_offset: int, end_offset: int) -> tuple[int, NDArray[np.void]]:
        """Return the first entry (unit) in [`from_offset`, `end_offset`) that points to a record, together with its
        queue offset. The queue offset comes first in the result. The unit is returned in the same form as by
        `next_unit`.

        If no unit is found, the offset is `end_offset`, or the offset of the first unit that does not exist.
        """
        count = 1
        while from_offset < end_offset and len(units := self.units(from_offset, min(count, end_offset - from_offset))):
            pointing = np.flatnonzero(units["size"] != PRE_BLANK_SIZE)
            if len(pointing):
                first = int(pointing[0])
                return from_offset + first, units[first:][:1]
            from_offset += len(units)
            count = _SCAN_UNITS
        return from_offset, np.empty(0, UNIT_DTYPE)

    def reserve(self, count: int) -> None:
        """Create the files for this consume queue's next `count` units (entries), so that writing the units needs no
        more disk space. Raises OSError if a file cannot be created."""
        if self.has_room_for(count):
            return
        last = (self.next_offset + count - 1) * UNIT_BYTES
        while not self._files.starts or self._files.starts[-1] + self._file_size <= last:
            position = self._files.starts[-1] + self._file_size if self._files.starts else self.next_offset * UNIT_BYTES
            self._files.make(position - position % self._file_size)

    def has_room_for(self, count: int) -> bool:
        """True if the queue files for `count` more units already exist, so that `reserve` has nothing to do."""
        starts = self._files.starts
        if not starts:
            return count <= 0
        return (self.next_offset + count) * UNIT_BYTES <= starts[-1] + self._file_size

    def append_unit(self, physical_offset: int, size: int, tags_code: int) -> None:
        """Write the queue's entry (unit) of one record. `size`: the record's length in bytes. `reserve` must have been
        called.

        Raises OSError if the write fails: part of the entry may be written, and `next_offset` has not moved.
        """
        position = self.next_offset * UNIT_BYTES
        mapped = self._map
        if self._map_known != self._handles.closed_count or not 0 <= position - self._map_start < self._file_size:
            mapped = self._map_at(position)
        if mapped is None:
            self._write(_UNIT.pack(physical_offset, size, tags_code))
        else:
            _UNIT.pack_into(mapped, position - self._map_start, physical_offset, size, tags_code)
            self.next_offset += 1
        self.max_physical_offset = physical_offset + size

    def append_units(
        self,
        physical_offset: int,
        sizes: NDArray[np.int32],
        tags_codes: NDArray[np.int64],
        ends: NDArray[np.int64] | None = None,
    ) -> None:
        """Write the queue's entries (units) of records that lie back to back in the log from `physical_offset` on, as
        `append_unit` does for one record.

        `ends`: the `record_ends` of the sizes, if the caller has already computed them.
        """
        self.append_scattered(begins_of(physical_offset, sizes, ends), sizes, tags_codes)

    def append_scattered(
        self, physical_offsets: NDArray[np.int64], sizes: NDArray[np.int32], tags_codes: NDArray[np.int64]
    ) -> None:
        """Append the entries (units) of records to the queue, as `append_unit` does for one record. The records may lie
        anywhere in the log, but their physical offsets must ascend."""
        position, count = self.next_offset * UNIT_BYTES, len(sizes)
        mapped = self._map_at(position)
        if mapped is not None and position + count * UNIT_BYTES <= self._map_start + self._file_size:
            units = np.ndarray((count,), UNIT_DTYPE, mapped, position - self._map_start)
            fill_units(units, physical_offsets, sizes, tags_codes)
            self.next_offset += count
        else:
            self._write(units_of(physical_offsets, sizes, tags_codes).view(np.uint8).data)
        self.max_physical_offset = int(physical_offsets[-1]) + int(sizes[-1])

    def start_at(self, queue_offset: int) -> None:
        """Make an empty queue start at `queue_offset`. Earlier units in its first file then point to no record.

        If the queue is not empty, this fills a gap whose records are lost (spec §2, rule 2): the offsets from
        `next_offset` up to `queue_offset` get such units, too.
        """
        if not self._files.starts:
            self.next_offset = queue_offset - queue_offset % self._units_per_file
            self.min_offset = queue_offset
        count = queue_offset - self.next_offset
        if count:
            self.reserve(count)
            blanks = np.zeros(count, UNIT_DTYPE)
            blanks["size"] = PRE_BLANK_SIZE
            self._write(blanks.view(np.uint8).data)

    def truncate_from(self, physical_limit: int) -> int:
        old_end = self.next_offset
        if self.max_physical_offset > physical_limit:
            self.truncate_to(self._first_at_or_after(physical_limit))
        return old_end - self.next_offset

    def truncate_to(self, queue_offset: int) -> None:
        end = queue_offset * UNIT_BYTES
        self._files.cut(end)
        self.next_offset = queue_offset
        self.min_offset = min(self.min_offset, queue_offset)
        self._forgotten_before = min(self._forgotten_before, queue_offset)
        self.max_physical_offset = -1
        if self._files.starts and end > self._files.starts[0]:
            [last] = self.units(queue_offset - 1, 1)
            if last["size"] != PRE_BLANK_SIZE:
                self.max_physical_offset = int(last["physical_offset"]) + int(last["size"])

    def correct_min_offset(self, min_physical_offset: int) -> None:
        """Move `min_offset` to the queue's first message that starts at or after the log's first byte (spec §2).

        An entry (unit) of the queue that points to no record never counts as a message. RocketMQ may count it.
        """
        if self._files.starts:
            # Assign `min_offset` in a single step: readers may read it at any time, and must not see an intermediate
            # value.
            self.min_offset = max(self._first_at_or_after(min_physical_offset), self._forgotten_before)

    @property
    def first_readable_offset(self) -> int:
        """First queue offset that consumers may read. A compacted queue begins at 0, because its missing messages were
        replaced by newer messages."""
        return self.min_offset if self.compacted is None else 0

    def blank(self, queue_offsets: NDArray[np.int64]) -> None:
        """Blank the queue's entries (units) at `queue_offsets`, so that they point to no record. Called under the
        append lock.

        Consumers may be reading these entries. So only the size field of each entry is written, and a reader sees
        either the old entry or a blank entry. Raises OSError if the disk fails.
        """
        for offset in queue_offsets.tolist():
            position = offset * UNIT_BYTES
            start = position - position % self._file_size
            path = self._files.path(start)
            self._files.dirty.add(path)
            self._handles.write(path, position - start + _SIZE_AT, _BLANK_SIZE)

    def put_unit_at(self, queue_offset: int, physical_offset: int, size: int, tags_code: int) -> bool:
        """Replace the entry (unit) at a queue offset if it does not point to the given record, or has another tags
        code. Returns True if the entry was replaced.

        An entry that points to no record, and only fills its offset, stays unchanged. The code of an entry with the
        address of an extension unit is not compared. Called under the append lock. Raises OSError if the disk fails.
        """
        [unit] = self.units(queue_offset, 1)
        points = (unit["physical_offset"], unit["size"]) == (physical_offset, size)
        has_code = unit["tags_code"] == tags_code or unit["tags_code"] <= EXT_ADDRESS_MAX
        if unit["size"] == PRE_BLANK_SIZE or (points and has_code):
            return False
        position = queue_offset * UNIT_BYTES
        start = position - position % self._file_size
        path = self._files.path(start)
        self._files.dirty.add(path)
        self._handles.write(path, position - start, _UNIT.pack(physical_offset, size, tags_code))
        if queue_offset == self.next_offset - 1:
            self.max_physical_offset = physical_offset + size
        return True

    def first_stored_at(self, time_ms: int) -> int:
        """Return the first queue offset, from `min_offset` on, whose message was stored at `time_ms` or later.

        Returns `visible_offset` if no readable message was stored then. Skips damaged records and units. Suppose that a
        record's store time is earlier than the store time of a record before it. Then the later of the two times is
        used for it: retention must not drop messages because one time is wrong.
        """
        min_offset = self.min_offset
        first = self._search_stored_at(time_ms, min_offset, self.visible_offset)
        while (younger := self._stored_before(first - 1, time_ms, min_offset)) is not None:
            first = self._search_stored_at(time_ms, min_offset, younger)
        return first

    def _search_stored_at(self, time_ms: int, low: int, high: int) -> int:
        """Return the first queue offset in [`low`, `high`] whose message was stored at or after `time_ms`. Returns
        `high` if all messages before it are older. Assumes ascending store times."""
        while low < high:
            middle = (low + high) // 2
            # The search needs a store time. If the record of an offset is damaged or missing, the search uses the store
            # time of the next intact record.
            offset, stored_ms = self._next_stored(middle, high)
            if stored_ms is not None and stored_ms < time_ms:
                low = offset + 1
            else:
                high = middle
        return low

    def _next_stored(self, from_offset: int, end_offset: int) -> tuple[int, int | None]:
        """Return the queue offset and the store time of the first intact record in [`from_offset`, `end_offset`).

        Examines at most _DAMAGED_MAX records. If none of them is intact, the returned time is None, and the returned
        offset follows the last examined record.
        """
        for _ in range(_DAMAGED_MAX):
            from_offset, unit = self._next_pointing(from_offset, end_offset)
            if not len(unit):
                break
            stored_ms = self._stored_ms(unit)
            if stored_ms is not None:
                return from_offset, stored_ms
            from_offset += 1
        return from_offset, None

    def _stored_before(self, queue_offset: int, time_ms: int, min_offset: int) -> int | None:
        """Search the last _COMPARED_RECORDS records before `queue_offset` for a record that was stored at `time_ms` or
        later. Return the record's queue offset, or None if no such record is found."""
        for offset in range(queue_offset - 1, max(queue_offset - 1 - _COMPARED_RECORDS, min_offset - 1), -1):
            unit = self.units(offset, 1)
            stored_ms = self._stored_ms(unit) if len(unit) else None
            if stored_ms is not None and stored_ms >= time_ms:
                return offset
        return None

    def _stored_ms(self, unit: NDArray[np.void]) -> int | None:
        """Return the store time of the record that a consume-queue entry (`unit`) points to; None if the record is
        damaged or missing."""
        [[start, size, _]] = unit.tolist()
        if size == PRE_BLANK_SIZE:
            return None
        try:
            header = read_header(self._reader.log_bytes(start, start + size))
        except (DataLossError, RecordError):
            return None
        return header.store_timestamp_ms if (header.total_size, header.physical_offset) == (size, start) else None

    def forget_before(self, queue_offset: int) -> None:
        """Move the queue's beginning to `queue_offset`, even if the log has earlier messages. If the queue ends before
        `queue_offset`, its beginning moves to its end.

        The beginning never moves back.
        """
        self._forgotten_before = max(self._forgotten_before, min(queue_offset, self.next_offset))
        self.min_offset = max(self.min_offset, self._forgotten_before)

    def drop_files_before_min(self) -> list[Path]:
        return self._files.drop_files_before(self.min_offset * UNIT_BYTES)

    def take_dirty(self, least_pages: int = 0) -> set[Path]:
        dirty = super().take_dirty(least_pages)
        if dirty:
            self._map_known = -1
        return dirty

    def _begin_byte(self) -> int:
        return max(self.min_offset, self.first_offset) * UNIT_BYTES

    def _end_byte(self) -> int:
        return self.next_offset * UNIT_BYTES

    def first_at_or_after(self, physical_offset: int) -> int:
        """Return the first queue offset, from `min_offset` on, whose record starts at or after a physical offset.

        Returns `visible_offset` if no readable record starts at or after the physical offset.
        """
        while True:
            min_offset = self.min_offset
            try:
                return self._first_at_or_after(physical_offset, min_offset, self.visible_offset)
            except StoreCorruptError:
                if self.min_offset == min_offset:
                    raise
                # Search again: retention deleted a queue file during the search.

    def units_before(self, physical_offset: int) -> NDArray[np.void]:
        """Return the visible unit of the queue's last record that starts before `physical_offset`, as an array of
        length one. Returns an empty array if there is no such unit, or if the units cannot be read."""
        try:
            offset = self.first_at_or_after(physical_offset) - 1
        except StoreCorruptError:
            return np.empty(0, UNIT_DTYPE)
        return self.units(offset, 1) if offset >= self.min_offset else np.empty(0, UNIT_DTYPE)

    def first_placed_at(self, physical_offset: int) -> int:
        """Search as `first_at_or_after` does, but in all entries (units) of the queue, visible or not. Returns
        `next_offset` if no entry matches. Called under the append lock."""
        return self._first_at_or_after(physical_offset, self.min_offset)

    def _first_at_or_after(self, physical_offset: int, from_offset: int = 0, end_offset: int | None = None) -> int:
        low = max(self._files.starts[0] // UNIT_BYTES if self._files.starts else 0, from_offset)
        high = found = self.next_offset if end_offset is None else end_offset
        while low < high:
            middle = (low + high) // 2
            # If the record of a queue offset is lost, use the position of the next record.
            queue_offset, unit = self._next_pointing(middle, high)
            if not len(unit):
                if queue_offset < high:
                    raise StoreCorruptError(
                        f"the consume queue in {self.directory} has no entry for offset {queue_offset}"
                    )
                high = middle
            elif unit[0]["physical_offset"] < physical_offset:
                low = queue_offset + 1
            else:
                found, high = queue_offset, middle
        return found

    def _map_at(self, position: int) -> mmap | None:
        """Return the memory map of the queue file that contains byte `position` of the queue, and mark the file as
        dirty. The file must exist.

        Also sets `_map_start`, the byte position at which the file starts. Returns None if the file handles
        (`_handles`) write this file without a map.
        """
        if self._map_known == self._handles.closed_count and 0 <= position - self._map_start < self._file_size:
            return self._map
        start = position - position % self._file_size
        path = self._files.path(start)
        self._files.dirty.add(path)
        self._map = self._handles.map_of(path)
        self._map_start, self._map_known = start, self._handles.closed_count
        return self._map

    def _write(self, data: bytes | memoryview) -> None:
        position = self.next_offset * UNIT_BYTES
        written = 0
        while written < len(data):
            at = position + written
            start = at - at % self._file_size
            path = self._files.path(start)
            self._files.dirty.add(path)
            piece = data[written : written + start + self._file_size - at]
            self._handles.write(path, at - start, piece)
            written += len(piece)
        self.next_offset += len(data) // UNIT_BYTES
