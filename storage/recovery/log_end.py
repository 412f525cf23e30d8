"""Decides where the log ends. Distinguishes a torn end of the log from a damaged record (hole) with intact records
after it. A hole is kept.

The log ends before a record that fails its checks if no intact record follows, in its file or in a later one. The log
also ends at that record if it was never completely written, although some of the bytes after it were. This can happen
in two ways, both only after a crash, and only after the part of the log that is known to be on disk:

- A process was killed in the middle of an append. The first 8 bytes of an append are written last (log_writer.py), so
  they are zero, or the last of them are. The rest of that record is intact, and everything after it belongs to the same
  append.
- A power cut lost some of the sectors that were written last and never flushed. Such a sector is all zeros. The record
  after it is not older than the last record that the checkpoint says is flushed.

In both cases no producer has received an acknowledgement for the lost records. All other damage affects records that
were good before; these records are kept.
"""

from __future__ import annotations

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
    store_timestamp_at,
)
from raymq.records.logfiles.log_reader import PRE_BLANK_SIZE
from storage.dispatch.record_blocks import is_queued
from storage.dispatch.record_check import SECTOR_BYTES, is_implausible
from storage.files.mapped_file import HEAD_BYTES
from storage.log.holes import PLACE_REASON, damaged_records, is_changed_beside_body, lost_blank
from storage.log.log_walk import fills_file, is_intact, resume_behind
from storage.parts import StoreParts
from storage.recovery.checkpoint import Checkpoint
from storage.recovery.snapshot import Snapshot

_MAGICS: Final = (MAGIC_V1.to_bytes(4, signed=True), MAGIC_V2.to_bytes(4, signed=True))


class LogEnd:
    """Decides where the log ends during the recovery of a store."""

    def __init__(
        self, parts: StoreParts, checkpoint: Checkpoint, snapshot: Snapshot | None, checks: dict[str, bool]
    ) -> None:
        """`checks`: the arguments with which `check_record` checks the records of this log."""
        self._log, self._reader, self._checks, self._queues = parts.log, parts.reader, checks, parts.queues
        self._after_crash, self._named = parts.after_crash, parts.holes.holes
        self._replica_file = parts.settings.store_path_root_dir / "config" / "replica.json"
        self._flushed_ms = checkpoint.physic_msg_timestamp
        self._flushed_offset = 0 if snapshot is None else snapshot.end

    def resume_offset(self, physical_offset: int) -> int | None:
        """Return the physical offset at which the log continues after a position without an intact record. The log
        continues at an intact record, or after a known hole (damaged range). Returns None if the log ends at that
        position."""
        found = self._next_record(physical_offset)
        known = self._known_end(physical_offset)
        if known is not None:
            return known if found is None else min(found, known)
        if found is None or self._was_never_written(physical_offset, found):
            return None
        return found

    def _known_end(self, physical_offset: int) -> int | None:
        """Return the end of the known hole (damaged range) at a physical offset. Return None if the file `holes` has no
        hole there.

        The hole's bytes were on disk before the file named the hole. So they are neither torn nor unwritten, even if
        the hole is at the end of the log, as can happen on a slave (storage/replication/chunk_appender.py).
        """
        named = [hole.end_offset for hole in self._named if hole.offset <= physical_offset < hole.end_offset]
        return (
            named[0] if named and physical_offset - physical_offset % self._log.file_size in self._log.starts else None
        )

    def holes_between(self, physical_offset: int, resume_offset: int) -> list[Hole]:
        """Return the damaged records (holes) from a physical offset up to the intact record at `resume_offset`. Each
        hole lies in one log file."""
        holes: list[Hole] = []
        position = physical_offset
        while position < resume_offset:
            start = position - position % self._log.file_size
            data, file_end = self._data(start), start + self._log.file_size
            end = self._end_in_file(data, start, position - start, resume_offset)
            holes += damaged_records(data, start, position - start, end)
            position = resume_offset if start + end == resume_offset else file_end
        return holes

    def _end_in_file(self, data: memoryview, start: int, position: int, resume_offset: int) -> int:
        """Return the end, within a log file, of the damaged bytes from `position` on.

        The damaged bytes end where the log continues: at an intact record, or at the BLANK (end-of-file marker) of the
        file. If neither follows in this file, the damaged bytes extend to the end of the file.
        """
        if resume_offset < start + len(data):
            return resume_offset - start
        found = resume_behind(data, start, position, **self._checks)
        return len(data) if found is None else found

    def resume_in_file(self, start: int, position: int) -> int | None:
        """Return the position in a log file at which the log scan continues after the damaged record at `position`.
        Returns None if the file has no further record. The file then ends after the damaged record, or contains only a
        BLANK (end-of-file marker) after it."""
        data = self._data(start)
        if fills_file(data, position):
            return None
        found = resume_behind(data, start, position, **self._checks)
        return None if found is None or fills_file(data, found) else found

    def is_hole(self, hole: Hole) -> bool:
        """True if a range of the log is still damaged (a hole). False if intact records fill it from start to end, and
        each record's consume queue has an entry (unit) that points to the record."""
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
        """True if an intact record is misplaced: the queue that it names has another record, or no record, at its queue
        offset."""
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
        """True if the file `holes` lists a record in this range of the log whose place (queue and queue offset) was
        changed."""
        return any(
            hole.offset < end_offset and physical_offset < hole.end_offset and hole.reason.startswith(PLACE_REASON)
            for hole in self._named
        )

    def is_named(self, physical_offset: int) -> bool:
        """True if the file `holes` lists the record at a physical offset because its place (queue and queue offset) was
        changed."""
        return self.names_place_in(physical_offset, physical_offset + 1)

    def header_of(self, hole: Hole, delay_levels_ms: tuple[int, ...]) -> DispatchView | None:
        """Return the header of a damaged record (`believable_view`); None if the header cannot be trusted."""
        start = hole.offset - hole.offset % self._log.file_size
        record = self._data(start)[hole.offset - start : hole.end_offset - start]
        return believable_view(record, hole.offset, delay_levels_ms)

    def lost_blank(self, physical_offset: int) -> bytes:
        """Return the 8 bytes of the BLANK (end-of-file marker) that a log file had at an offset, if only one of its two
        fields is damaged (holes.lost_blank). Otherwise return empty bytes."""
        start = physical_offset - physical_offset % self._log.file_size
        return lost_blank(self._data(start), physical_offset - start)

    def _next_record(self, physical_offset: int) -> int | None:
        """Return the physical offset of the next intact record after a position, in the same log file or in a later
        file. Return None if no record follows."""
        for start in self._log.starts:
            if start + self._log.file_size <= physical_offset:
                continue
            position = max(physical_offset - start, 0)
            # In the usual case nothing was written after `position` in this log file. Skip such a file without reading
            # it.
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
        """True if the record at `physical_offset` was only partly written before the crash, so that the log must end
        before this record. The intact record at `resume_offset` was then part of the same append, or was never flushed.
        """
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
            # The file's BLANK (end-of-file marker) is lost too, so the end of the damaged bytes is unknown. Most of the
            # rest of the file may never have been used. So search for unwritten sectors only in bytes that certainly
            # belong to the record.
            end = position + _least_size(data, position)
        return stored_ms >= self._flushed_ms and _has_unwritten_sector(data, position, end)

    def _is_one_append(self, data: memoryview, start: int, position: int, end: int) -> bool:
        """True if the damage looks like an append that was interrupted before it wrote its own first 8 bytes. Of the
        record in [`position`, `end`) only some of the first 8 bytes are then missing. The bytes after the record, up to
        the last byte of the log, are intact records with the same store time."""
        first = _with_head(data[position:end])
        if not first or any(self._log.used_end(other, 0) for other in self._log.starts if other > start):
            return False
        stored_ms, used_end = store_timestamp_at(first, 0), self._log.used_end(start, position)
        at = end
        while at < used_end and is_intact(data, start, at, **self._checks):
            if store_timestamp_at(data, at) != stored_ms and not self._writes_many():
                return False
            at += int.from_bytes(data[at : at + 4])
        # The killed process may have left bytes of an incomplete append after the intact records. If so, no other
        # intact record follows these bytes.
        return at >= used_end or resume_behind(data, start, at, used_end, **self._checks) is None

    def _writes_many(self) -> bool:
        """True if records of many appends may be written to the log together: by a replica, or from a transient store
        pool."""
        return self._log.has_pool or self._replica_file.exists()

    def _data(self, start: int) -> memoryview:
        return self._reader.maps.get(str(self._log.path(start))).data


def believable_view(damaged: memoryview, physical_offset: int, delay_levels_ms: tuple[int, ...]) -> DispatchView | None:
    """Return the header view of a damaged record if only its size, magic or body is damaged. Returns None if another
    field may be damaged, too."""
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
    """Return a copy of a record whose first 8 bytes (size and magic) are complete. An append writes its own first 8
    bytes last. So the last of these bytes may be missing in the append's first record; this function fills them in.
    Returns empty bytes if the record is then still not intact."""
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
    """Return the minimum size of the damaged record at `position` of a log file: the bytes that certainly belong to the
    record."""
    rest = bytes(data[position:])
    size = int.from_bytes(rest[:4], signed=True)
    named = size if rest[4:HEAD_BYTES] in _MAGICS and MIN_RECORD_SIZE <= size <= len(rest) else HEAD_BYTES
    return max(named, len(rest.rstrip(b"\0")))


def _has_unwritten_sector(data: memoryview, position: int, end: int) -> bool:
    """True if the given range of a log file has a disk sector that contains only zeros. If the range begins inside a
    sector, the rest of this sector counts only if a record's size and magic fit into it."""
    at = position
    while at < end:
        sector_end = min((at // SECTOR_BYTES + 1) * SECTOR_BYTES, end)
        if (at > position or sector_end - at >= BLANK_LENGTH) and not any(data[at:sector_end]):
            return True
        at = sector_end
    return False
