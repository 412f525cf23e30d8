"""Tells a torn tail, at which the log ends, from a damaged record with intact ones behind it, which is kept as a hole.

The log ends before a record that fails its checks if no intact record follows, in its file or in a later one. It also
ends there if the record was never completely written, though some of what follows it was. There are two ways to that,
both only after a crash, and only behind what is known to be on disk:

- A process was killed in the middle of an append. The first 8 bytes of an append are written last (log_writer.py), so
  they are zero, or their end is; the rest of that record is intact, and all that follows belongs to the same append.
- A power cut lost some of the sectors that were written last and never flushed. Such a sector is zero from end to end.
  The record behind it is not older than the last one that the checkpoint knows to be flushed.

Nobody has an acknowledgement for either of these. Everything else is damage of what was good before, and stays.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final

from raymq.common.protocol.store import Hole
from raymq.records.format.check import check_record
from raymq.records.format.dispatch import DispatchView, dispatch_view
from raymq.records.format.layout import (
    BLANK_LENGTH,
    MAGIC_V1,
    MAGIC_V2,
    MIN_RECORD_SIZE,
    SYS_FLAG_INNER_BATCH,
    RecordError,
    encode_blank,
    store_timestamp_at,
)
from raymq.records.logfiles.log_reader import PRE_BLANK_SIZE
from storage.dispatch.record_blocks import is_queued
from storage.dispatch.record_check import SECTOR_BYTES, is_implausible
from storage.files.mapped_file import HEAD_BYTES
from storage.log.holes import PLACE_REASON, is_changed_beside_body, reason_of
from storage.log.log_walk import fills_file, is_intact, resume_behind
from storage.parts import StoreParts
from storage.recovery.checkpoint import Checkpoint
from storage.recovery.snapshot import Snapshot

_MAGICS: Final = (MAGIC_V1.to_bytes(4, signed=True), MAGIC_V2.to_bytes(4, signed=True))


class LogEnd:
    """Decides where the log of a store ends that is being recovered."""

    def __init__(
        self, parts: StoreParts, checkpoint: Checkpoint, snapshot: Snapshot | None, checks: dict[str, bool]
    ) -> None:
        """`checks`: those of `check_record`, for the records of this log."""
        self._log, self._reader, self._checks, self._queues = parts.log, parts.reader, checks, parts.queues
        self._after_crash, self._named = parts.after_crash, parts.holes.holes
        self._replica_file = parts.settings.store_path_root_dir / "config" / "replica.json"
        self._flushed_ms = checkpoint.physic_msg_timestamp
        self._flushed_offset = 0 if snapshot is None else snapshot.end

    def resume_offset(self, physical_offset: int) -> int | None:
        """The physical offset behind a position at which no intact record starts where the log goes on: with an intact
        record, or after a hole that is known. None if the log ends at that position."""
        found = self._next_record(physical_offset)
        known = self._known_end(physical_offset)
        if known is not None:
            return known if found is None else min(found, known)
        if found is None or self._was_never_written(physical_offset, found):
            return None
        return found

    def _known_end(self, physical_offset: int) -> int | None:
        """The end of the hole at a position that the file `holes` names; None if it names none there.

        Its bytes were on disk before the file named it. So it is neither torn nor unwritten, even if it is the last
        thing in the log, as it may be on a slave (storage/replication/chunk_appender.py).
        """
        named = [hole.end_offset for hole in self._named if hole.offset <= physical_offset < hole.end_offset]
        return (
            named[0] if named and physical_offset - physical_offset % self._log.file_size in self._log.starts else None
        )

    def holes_between(self, physical_offset: int, resume_offset: int) -> list[Hole]:
        """The damaged records from one offset up to the intact record at another one, each in one file."""
        holes: list[Hole] = []
        position = physical_offset
        while position < resume_offset:
            start = position - position % self._log.file_size
            data, file_end = self._data(start), start + self._log.file_size
            end = self._end_in_file(data, start, position - start, resume_offset)
            holes += self._records_between(data, start, position - start, end)
            position = resume_offset if start + end == resume_offset else file_end
        return holes

    def _end_in_file(self, data: memoryview, start: int, position: int, resume_offset: int) -> int:
        """The end, in a file, of the damaged bytes from `position` on: the record at which the log goes on, or the
        BLANK before the next file. Without that, nothing tells where the last record ended, and it is the file's end.
        """
        if resume_offset < start + len(data):
            return resume_offset - start
        found = resume_behind(data, start, position, **self._checks)
        return len(data) if found is None else found

    def resume_in_file(self, start: int, position: int) -> int | None:
        """The position in a file at which a walk goes on behind a damaged record; None where the file ends, or only
        its BLANK follows."""
        data = self._data(start)
        if fills_file(data, position):
            return None
        found = resume_behind(data, start, position, **self._checks)
        return None if found is None or fills_file(data, found) else found

    def is_hole(self, hole: Hole) -> bool:
        """False if intact records lie back to back from the start of a hole to its end, and the unit of the queue that
        each one names leads to it."""
        start = hole.offset - hole.offset % self._log.file_size
        if start not in self._log.starts:
            return False
        data, position, end = self._data(start), hole.offset - start, hole.end_offset - start
        while position < end and is_intact(data, start, position, **self._checks):
            if self._is_misplaced(dispatch_view(data, position), start + position):
                return True
            position += int.from_bytes(data[position : position + 4])
        return position != end and not (fills_file(data, position) and end == len(data))

    def _is_misplaced(self, view: DispatchView, physical_offset: int) -> bool:
        """True if the queue that an intact record names has another record at its offset, or none."""
        if not is_queued(view.sys_flag) or view.sys_flag & SYS_FLAG_INNER_BATCH:
            return False
        if self._queues.was_deleted_after((view.topic, view.queue_id), physical_offset):
            return False
        queue = self._queues.get_plain(view.topic, view.queue_id)
        if queue is None or view.queue_offset >= queue.next_offset:
            return True
        if view.queue_offset < queue.first_offset:
            return False
        [unit] = queue.units(view.queue_offset, 1)
        leads_there = (unit["physical_offset"], unit["size"]) == (physical_offset, view.size)
        return not leads_there and unit["size"] != PRE_BLANK_SIZE

    def names_place_in(self, physical_offset: int, end_offset: int) -> bool:
        """True if the file `holes` names a hole in a range whose reason is the place of a record in its queue."""
        return any(
            hole.offset < end_offset and physical_offset < hole.end_offset and hole.reason.startswith(PLACE_REASON)
            for hole in self._named
        )

    def is_named(self, physical_offset: int) -> bool:
        """`names_place_in` for the record at an offset."""
        return self.names_place_in(physical_offset, physical_offset + 1)

    def header_of(self, hole: Hole, delay_levels_ms: tuple[int, ...]) -> DispatchView | None:
        """The view of a damaged record (`believable_view`)."""
        start = hole.offset - hole.offset % self._log.file_size
        record = self._data(start)[hole.offset - start : hole.end_offset - start]
        return believable_view(record, hole.offset, delay_levels_ms)

    def lost_blank(self, physical_offset: int) -> bytes:
        """The 8 bytes of the BLANK that a file had at an offset, if only one of its two fields is damaged; else empty.

        Its content follows from the file's size. All that is behind it in the file is zero: a damaged record is not.
        """
        start = physical_offset - physical_offset % self._log.file_size
        data, position = self._data(start), physical_offset - start
        found, blank = bytes(data[position : position + BLANK_LENGTH]), encode_blank(len(data) - position)
        half = BLANK_LENGTH // 2
        is_half = (found[:half] == blank[:half]) != (found[half:] == blank[half:])
        return blank if is_half and not any(data[position + BLANK_LENGTH :]) else b""

    def _records_between(self, data: memoryview, start: int, position: int, end: int) -> list[Hole]:
        """The damaged records in a range of a file: one by one if their sizes lead from its start to its end."""
        edges = [position]
        while edges[-1] < end:
            size = int.from_bytes(data[edges[-1] : edges[-1] + 4], signed=True)
            if not MIN_RECORD_SIZE <= size <= end - edges[-1]:
                edges = [position, end]
                break
            edges.append(edges[-1] + size)
        return [Hole(start + at, to - at, reason_of(data[at:to], start + at)) for at, to in pairwise(edges)]

    def _next_record(self, physical_offset: int) -> int | None:
        """The next intact record behind a position, in its file or in a later one."""
        for start in self._log.starts:
            if start + self._log.file_size <= physical_offset:
                continue
            position = max(physical_offset - start, 0)
            # Most often nothing was ever written there, and then nothing is read.
            used_end = self._log.used_end(start, position)
            if used_end <= position:
                continue
            data = self._data(start)
            if start > physical_offset and is_intact(data, start, 0, **self._checks):
                return start
            found = resume_behind(data, start, position, used_end, **self._checks)
            if found is not None and not fills_file(data, found):
                return start + found
        return None

    def _was_never_written(self, physical_offset: int, resume_offset: int) -> bool:
        """True if the record at an offset was not completely written before the crash, nor was what follows it."""
        if not self._after_crash or physical_offset < self._flushed_offset:
            return False
        start = physical_offset - physical_offset % self._log.file_size
        data, position = self._data(start), physical_offset - start
        end = self._end_in_file(data, start, position, resume_offset)
        if self._is_one_append(data, start, position, end):
            return True
        file_start = resume_offset - resume_offset % self._log.file_size
        stored_ms = store_timestamp_at(self._data(file_start), resume_offset - file_start)
        if end == len(data):
            # The file has lost its BLANK, too, and most of its rest may never have been used.
            end = position + _least_size(data, position)
        return stored_ms >= self._flushed_ms and _has_unwritten_sector(data, position, end)

    def _is_one_append(self, data: memoryview, start: int, position: int, end: int) -> bool:
        """True if all but the first bytes of the record in [`position`, `end`) is there, and what follows it is of the
        same append: intact records of the same time up to the last byte of the log."""
        first = _with_head(data[position:end])
        if not first or any(self._log.used_end(other, 0) for other in self._log.starts if other > start):
            return False
        stored_ms, used_end = store_timestamp_at(first, 0), self._log.used_end(start, position)
        at = end
        while at < used_end and is_intact(data, start, at, **self._checks):
            if store_timestamp_at(data, at) != stored_ms and not self._writes_many():
                return False
            at += int.from_bytes(data[at : at + 4])
        # A kill may also have cut the append short: then no intact record is behind that.
        return at >= used_end or resume_behind(data, start, at, used_end, **self._checks) is None

    def _writes_many(self) -> bool:
        """True if records of many appends are written at a time: by a replica, or from a transient store pool."""
        return self._log.has_pool or self._replica_file.exists()

    def _data(self, start: int) -> memoryview:
        return self._reader.maps.get(str(self._log.path(start))).data


def believable_view(damaged: memoryview, physical_offset: int, delay_levels_ms: tuple[int, ...]) -> DispatchView | None:
    """The view of a record whose body, size or magic is damaged; None if another field may be damaged, too."""
    record = bytearray(damaged)
    record[:4] = len(record).to_bytes(4)
    for magic in (bytes(record[4:HEAD_BYTES]), *_MAGICS):
        record[4:HEAD_BYTES] = magic
        if is_intact(memoryview(record), physical_offset, 0, check_crc=False):
            if is_changed_beside_body(memoryview(record)):
                return None
            try:
                view = dispatch_view(record, delay_levels_ms=delay_levels_ms)
            except RecordError:
                continue
            return None if is_implausible(view, physical_offset) else view
    return None


def _with_head(record: memoryview) -> bytearray:
    """A record, of whose first 8 bytes only some were written, with all of them; empty if it is no such record."""
    whole = bytearray(record)
    for magic in _MAGICS:
        head = len(record).to_bytes(4) + magic
        written = bytes(record[:HEAD_BYTES]).rstrip(b"\0")
        if head.startswith(written) and len(written) < HEAD_BYTES:
            whole[:HEAD_BYTES] = head
            if check_record(whole).ok:
                return whole
    return bytearray()


def _least_size(data: memoryview, position: int) -> int:
    """How many bytes from `position` up to the end of a file belong to a damaged record for sure."""
    rest = bytes(data[position:])
    size = int.from_bytes(rest[:4], signed=True)
    named = size if rest[4:HEAD_BYTES] in _MAGICS and MIN_RECORD_SIZE <= size <= len(rest) else HEAD_BYTES
    return max(named, len(rest.rstrip(b"\0")))


def _has_unwritten_sector(data: memoryview, position: int, end: int) -> bool:
    """True if all that a range has of one of its sectors is zero. A record begins with its size and its magic, and
    fewer bytes than these tell nothing."""
    at = position
    while at < end:
        sector_end = min((at // SECTOR_BYTES + 1) * SECTOR_BYTES, end)
        if (at > position or sector_end - at >= BLANK_LENGTH) and not any(data[at:sector_end]):
            return True
        at = sector_end
    return False
