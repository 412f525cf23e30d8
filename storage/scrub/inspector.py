"""Checks a range of the log of an open store, and records the damage that it finds as holes (damaged ranges).

Damage that appears while a store runs is first seen by a reader, by another replica, or by the scrubber. None of them
is believed: each names a range of the log, and this module checks the records of the range itself, as recovery does.

    range ─▶ widened to records ─▶ each record checked, without a lock ─▶ damage checked again, under the append lock
          ─▶ table of holes, file `holes` ─▶ replication stops before the hole, a replica's bytes repair it (mend.py)

A record is damaged if its size, magic, CRC of the body, property CRC, lengths or own physical offset is wrong, or if it
names a queue that cannot exist. It is also damaged if a queue unit shows that it belongs to another place than it names
(place_check.true_place). A unit that points to no record is rewritten from an intact record that names the unit's
place. A damaged BLANK (end-of-file marker) with one intact field is rewritten, too.

Only bytes that are in the log's files are checked, never records that are being written. Places are checked only for
records that consumers may see, because the units of later records may be missing. Bytes of the log change only in a
repair, under the append lock. So damage that is confirmed under this lock is no half-written repair.
"""

from __future__ import annotations

import logging
import threading
from typing import Final, NamedTuple

import numpy as np

from raymq.common.errors import DataLossError, StoreNotWritableError
from raymq.common.protocol.store import Hole
from raymq.records.format.dispatch import DispatchView, dispatch_view
from raymq.records.format.layout import SYS_FLAG_INNER_BATCH, RecordError
from raymq.records.logfiles.log_reader import PRE_BLANK_SIZE
from storage.append.write_gate import WriteGate
from storage.dispatch.multi_dispatch import QueueUnit, light_queue_units
from storage.dispatch.place_check import true_place, unit_agrees, units_agree
from storage.dispatch.queue_check import leads_to_own, wrong_rows
from storage.dispatch.record_blocks import BLOCK_BYTES, Block, is_queued, read_block
from storage.dispatch.record_check import is_implausible
from storage.files import disk
from storage.files.disk_usage import is_want_of_space
from storage.log.holes import PLACE_REASON, damaged_records, lost_blank
from storage.log.log_walk import fills_file, is_intact, resume_behind
from storage.parts import StoreParts

RECORDED_HOLES_MAX: Final = 10_000
"""Maximum number of holes (damaged log ranges) in the table. An inspection adds no hole beyond this number. The disk of
such a store has failed as a whole."""
PLACES_MAX: Final = 256
"""Maximum number of records in one inspection whose true places (queue and queue offset) are searched in all queues.
The places of further records are not checked."""

logger = logging.getLogger(__name__)


class Inspection(NamedTuple):
    """The result of checking a range of the log."""

    begin_offset: int
    """Physical offset at which the check began: the start of a record or of a known hole (damaged range)."""
    end_offset: int
    """Physical offset at which the check ended: the end of a record, of a hole or of a log file. The next inspection
    can begin here. The check reached the end of the written log if this offset is before the requested end."""
    records: int
    """Number of intact records in the range."""
    holes: tuple[Hole, ...] = ()
    """The holes (damaged ranges) that this inspection added to the table. Known holes are not included."""
    mended_units: int = 0
    """Number of queue units that were rewritten because they did not point to their records."""
    rewritten_blanks: int = 0
    """Number of damaged BLANKs (end-of-file markers) that were rewritten."""


class _Findings:
    """The results of a running inspection."""

    def __init__(self) -> None:
        self.records = self.mended_units = self.rewritten_blanks = 0
        self.places_left = PLACES_MAX
        self.damaged: list[Hole] = []
        """Damaged ranges that were found without the append lock, and are not confirmed yet."""
        self.holes: list[Hole] = []
        """Damaged ranges that are recorded in the table of holes."""


class LogInspector:
    """Checks records of one open log. Thread-safe: one inspection runs at a time, and further ones wait."""

    def __init__(self, parts: StoreParts, gate: WriteGate) -> None:
        self._parts, self._gate = parts, gate
        self._log, self._queues, self._reader = parts.log, parts.queues, parts.reader
        self._delay_levels_ms = parts.settings.delay_levels_ms
        self._checks = {"check_property_crc": parts.settings.force_verify_prop_crc}
        """Keyword arguments for `check_record`. The CRC of the body, and the property CRC of a record that has one, are
        always checked."""
        self._turn = threading.Lock()

    def inspect(self, physical_offset: int, end_offset: int) -> Inspection:
        """Check the records of the log from `physical_offset` up to before `end_offset`, and record new damage.

        The offsets may lie anywhere, also inside records: the range is widened to whole records, and ends at the
        written end of the log. A check of 1 GiB of records of 1 KiB takes some seconds, so inspect a large log in
        parts, each from the `end_offset` of the previous Inspection on. On return each damaged range is in the table of
        holes and in the file `holes`. Calls are safe to repeat: a known hole is skipped.

        May be called by any thread that holds no lock of the store, but not by the lanes' thread: it reads the disk,
        and takes the append lock for a short time if it finds damage. Raises ServiceNotAvailableError if the store is
        closed. Raises StoreNotWritableError if the file `holes` cannot be written; damage found before stays recorded.
        """
        with self._turn:
            self._gate.require_open()
            found = _Findings()
            end = min(end_offset, self._log.committed_offset)
            begin = position = self._record_start(max(physical_offset, self._log.min_offset), end)
            try:
                while position < end:
                    position = self._check_part(position, end, found)
                    self._confirm(found)
            except DataLossError:
                # Retention deletes whole files, oldest first. Any other missing file of the log is an error.
                if position >= self._log.min_offset:
                    raise
            return Inspection(
                begin, position, found.records, tuple(found.holes), found.mended_units, found.rewritten_blanks
            )

    def _record_start(self, physical_offset: int, end: int) -> int:
        """Return the start of the record or known hole (damaged range) that contains a physical offset, or an earlier
        start in the same log file.

        If the record at the offset is damaged, only an earlier record proves where records start. The nearest intact
        record before the offset to which a queue unit points is used, or else the first record of the file.
        """
        start = physical_offset - physical_offset % self._log.file_size
        if physical_offset >= end or physical_offset == start:
            return physical_offset
        known = self._hole_at(physical_offset)
        if known is not None:
            return known.offset
        try:
            file = self._file(start)
        except DataLossError:
            return physical_offset
        if is_intact(file, start, physical_offset - start, **self._checks):
            return physical_offset
        best = start
        for queue in self._queues.plain:
            for unit in queue.units_before(physical_offset):
                begin = int(unit["physical_offset"])
                if unit["size"] != PRE_BLANK_SIZE and best < begin and is_intact(file, start, begin - start):
                    best = begin
        return best

    def _hole_at(self, physical_offset: int) -> Hole | None:
        """Return the known hole (damaged range) that contains a physical offset; None if no hole contains it."""
        holes = self._parts.holes.holes
        return next((one for one in holes if one.offset <= physical_offset < one.end_offset), None)

    def _file(self, start: int) -> memoryview:
        """Return the bytes of the log file that starts at a physical offset. Raises DataLossError if it was deleted."""
        return self._reader.log_bytes(start, start + self._log.file_size)

    def _check_part(self, position: int, end: int, found: _Findings) -> int:
        """Check about BLOCK_BYTES of the log from `position` on, within one log file. Returns the physical offset at
        which the check continues."""
        known = self._hole_at(position)
        if known is not None:
            return known.end_offset
        start = position - position % self._log.file_size
        file, within = self._file(start), position - start
        next_hole = min((one.offset for one in self._parts.holes.holes if one.offset > position), default=end)
        limit = min(end, next_hole, start + self._log.file_size) - start
        length = self._check_block(file[:limit], start, within, found)
        if length:
            return position + length
        until = min(within + BLOCK_BYTES, limit)
        while within < until:
            if fills_file(file, within):
                return start + self._log.file_size
            size = self._check_record(file, start, within, found)
            if size == 0:
                return self._pass_damage(file, start, within, found)
            within += size
        return start + within

    def _check_block(self, data: memoryview, start: int, within: int, found: _Findings) -> int:
        """Check a block of records of a log file, a column at a time. Returns the block's length in bytes; 0 if the
        records must be checked one by one."""
        if self._checks["check_property_crc"]:
            return 0
        position = start + within
        block = read_block(data, within, position, check_crc=True, delay_levels_ms=self._delay_levels_ms)
        if block is None or (block.physical_offsets != block.starts + position).any():
            return 0
        visible = self._parts.visibility.visible_offset
        if position < visible and not (
            position + block.length <= visible and units_agree(self._queues, block, position)
        ):
            return 0
        if position < visible:
            self._mend_codes(data, block, within, position, found)
            if block.has_light_queue_units:
                for at in block.starts.tolist():
                    view = dispatch_view(data, within + at, delay_levels_ms=self._delay_levels_ms)
                    found.mended_units += self._mend_light_units(view, position + at)
        found.records += len(block.starts)
        return block.length

    def _mend_codes(self, data: memoryview, block: Block, within: int, position: int, found: _Findings) -> None:
        """Rewrite the units of a block of records whose tags codes differ from the records. The block begins at byte
        `within` of a log file's `data`, and at physical offset `position`. The units point to the records. Raises
        StoreNotWritableError if the disk fails."""
        for rows in block.by_queue(block.is_queued()):
            queue, done = self._queues.get_plain(*block.queue_of(rows)), 0
            while queue is not None and done < len(rows):
                left = rows[done:]
                units = queue.units(int(block.queue_offsets[left[0]]), len(left))
                left = left[: len(units)]
                starts, sizes = block.starts[left], block.sizes[left].astype(np.int64)
                for row in wrong_rows(units, starts + position, sizes, block.tags_codes[left]):
                    at = int(starts[row])
                    view = dispatch_view(data, within + at, delay_levels_ms=self._delay_levels_ms)
                    found.mended_units += self._mend_unit(view, position + at)
                done += max(len(units), 1)

    def _has_other_code(self, view: DispatchView) -> bool:
        """True if the unit at the place that an intact record names points to the record, but has another tags code."""
        queue = self._queues.get_plain(view.topic, view.queue_id)
        if not is_queued(view.sys_flag) or queue is None:
            return False
        if not queue.first_offset <= view.queue_offset < queue.next_offset:
            return False
        columns = (np.array([value], np.int64) for value in (view.physical_offset, view.size, view.tags_code))
        units = queue.units(view.queue_offset, 1)
        return bool(len(units) and units[0]["physical_offset"] == view.physical_offset and wrong_rows(units, *columns))

    def _mend_light_units(self, view: DispatchView, physical_offset: int) -> int:
        """Rewrite the units of an intact record in the additional queues that it names, if they point to no record of
        their queues. Returns the number of rewritten units. Raises StoreNotWritableError if the disk fails."""
        mended = 0
        for place in light_queue_units(view, physical_offset):
            queue = self._queues.get_plain(*place.key)
            if queue is None or not queue.min_offset <= place.queue_offset < queue.next_offset:
                continue
            [unit] = queue.units(place.queue_offset, 1)
            is_lost = unit["size"] == PRE_BLANK_SIZE or self._hole_at(int(unit["physical_offset"])) is not None
            if not is_lost and not leads_to_own(queue, place.queue_offset, self._reader):
                own = view._replace(topic=place.key[0], queue_id=place.key[1], queue_offset=place.queue_offset)
                mended += self._mend_unit(own, physical_offset)
        return mended

    def _check_record(self, file: memoryview, start: int, within: int, found: _Findings) -> int:
        """Check the record at a position of a log file. Returns the record's size, or 0 if no intact record starts
        there. A record that names a wrong place is noted as damage, and its size is returned."""
        if not is_intact(file, start, within, **self._checks):
            return 0
        try:
            view = dispatch_view(file, within, delay_levels_ms=self._delay_levels_ms)
        except RecordError:
            return 0
        reason = self._place_damage(view, start + within, found)
        if reason:
            found.damaged.append(Hole(start + within, view.size, reason))
            return view.size
        found.records += 1
        if start + within < self._parts.visibility.visible_offset:
            found.mended_units += self._mend_unit(view, start + within) if self._has_other_code(view) else 0
            found.mended_units += self._mend_light_units(view, start + within)
        return view.size

    def _place_damage(self, view: DispatchView, physical_offset: int, found: _Findings) -> str:
        """Return the reason why the place (queue and queue offset) that an intact record names is damaged; empty if
        nothing shows damage. Rewrites the unit at that place if the unit points to no record of its queue."""
        if is_implausible(view, physical_offset):
            return f"{PLACE_REASON}: the record names {view.topic!r}:{view.queue_id} at {view.queue_offset}"
        if not is_queued(view.sys_flag) or view.sys_flag & SYS_FLAG_INNER_BATCH:
            return ""
        named = QueueUnit((view.topic, view.queue_id), view.queue_offset)
        if (
            physical_offset >= self._parts.visibility.visible_offset
            or unit_agrees(self._queues, named, physical_offset, view.size)
            or found.places_left <= 0
        ):
            return ""
        found.places_left -= 1
        place = true_place(self._queues, view, physical_offset)
        if place is not None:
            return (
                f"{PLACE_REASON}: the record names {view.topic}:{view.queue_id} at {view.queue_offset}, but belongs at "
                f"{place.key[0]}:{place.key[1]} at {place.queue_offset}"
            )
        found.mended_units += self._mend_unit(view, physical_offset)
        return ""

    def _mend_unit(self, view: DispatchView, physical_offset: int) -> bool:
        """Rewrite the unit at the place that an intact record names, if the unit points to no record of its queue.
        Returns True if the unit was rewritten. Raises StoreNotWritableError if the disk fails."""
        with self._parts.append_lock:
            self._gate.require_open()
            queue = self._queues.get_plain(view.topic, view.queue_id)
            if queue is None or not queue.first_offset <= view.queue_offset < queue.next_offset:
                return False
            if leads_to_own(queue, view.queue_offset, self._reader):
                return False
            try:
                mended = queue.put_unit_at(view.queue_offset, physical_offset, view.size, view.tags_code)
            except OSError as error:
                raise self._disk_error(error, f"queue {view.topic}:{view.queue_id}") from error
        if mended:
            logger.error(
                "the consume-queue entry of queue %s:%d at offset %d was damaged and has been rewritten: the record is "
                "at physical offset %d",
                *(view.topic, view.queue_id, view.queue_offset, physical_offset),
            )
        return mended

    def _pass_damage(self, file: memoryview, start: int, within: int, found: _Findings) -> int:
        """Note the damage at a position of a log file. Returns the physical offset at which the check continues."""
        file_end, written = start + self._log.file_size, self._log.committed_offset
        if file_end <= written and lost_blank(file, within):
            found.rewritten_blanks += self._rewrite_blank(file, start, within)
            return file_end
        limit = min(written - start, len(file))
        behind = resume_behind(file, start, within, limit, **self._checks)
        stop = start + (limit if behind is None else behind)
        stop = min([stop, *(one.offset for one in self._parts.holes.holes if one.offset > start + within)])
        found.damaged += damaged_records(file, start, within, stop - start)
        return stop

    def _rewrite_blank(self, file: memoryview, start: int, within: int) -> bool:
        """Rewrite a damaged BLANK (end-of-file marker). On return it is on disk. Returns False if it is intact by now.
        Raises StoreNotWritableError if the disk fails."""
        with self._parts.append_lock:
            self._gate.require_open()
            blank = lost_blank(file, within) if start >= self._log.min_offset else b""
            if not blank:
                return False
            try:
                disk.overwrite(self._log.path(start), within, blank)
            except OSError as error:
                raise self._disk_error(error, f"log file {self._log.path(start)}") from error
        logger.error(
            "log file %s: the end-of-file marker at physical offset %d was damaged and has been rewritten",
            self._log.path(start),
            start + within,
        )
        return True

    def _confirm(self, found: _Findings) -> None:
        """Check the noted damage again under the append lock, and record what is still damaged in the table of holes.
        Raises StoreNotWritableError if the disk fails."""
        if not found.damaged:
            return
        noted, found.damaged = found.damaged, []
        table = self._parts.holes
        with self._parts.append_lock:
            self._gate.require_open()
            room = RECORDED_HOLES_MAX - len(table.holes)
            holes = [one for one in noted if self._is_damaged(one)]
            if len(holes) > room:
                logger.error(
                    "%s: the log has more than %d damaged ranges; %d more are not recorded. Replace the disk, and let "
                    "another replica fill this store again",
                    *(self._parts.settings.store_path_root_dir, RECORDED_HOLES_MAX, len(holes) - max(room, 0)),
                )
                holes = holes[: max(room, 0)]
            if not holes:
                return
            try:
                self._parts.space.write(lambda: table.add(holes, self._log.file_size))
            except OSError as error:
                raise self._disk_error(error, "the list of damaged log ranges") from error
        found.holes += holes
        for hole in holes:
            logger.error(
                "%s: %d bytes at physical offset %d of the log are damaged: %s; the bytes are kept, and the later "
                "records are not affected",
                *(self._parts.settings.store_path_root_dir, hole.size, hole.offset, hole.reason),
            )

    def _is_damaged(self, hole: Hole) -> bool:
        """True if a noted range of the log is still damaged, and not in the table of holes yet. Called under the append
        lock."""
        if hole.offset < self._log.min_offset or hole.end_offset > self._log.committed_offset:
            return False
        if any(one.offset < hole.end_offset and hole.offset < one.end_offset for one in self._parts.holes.holes):
            return False
        start = hole.offset - hole.offset % self._log.file_size
        file, within, end = self._file(start), hole.offset - start, hole.end_offset - start
        while within < end and is_intact(file, start, within, **self._checks):
            view = dispatch_view(file, within)
            if is_implausible(view, start + within) or true_place(self._queues, view, start + within) is not None:
                return True
            within += view.size
        return within != end and not (fills_file(file, within) and end == len(file))

    def _disk_error(self, error: OSError, what: str) -> StoreNotWritableError:
        """Return the error for a failed write. A full disk can be written later; after any other failure the gate
        closes."""
        if not is_want_of_space(error):
            self._gate.fail(error)
        return StoreNotWritableError(f"cannot write {what}: {error}; the damage is found again by the next inspection")
