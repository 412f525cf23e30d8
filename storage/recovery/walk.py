"""Scans a part of the log during recovery, in blocks or record by record, and makes the queues consistent with the log.

A damaged record is a hole, and the scan continues after it. A record that does not match its queue may name a changed
place (queue and queue offset). The part of the log around it is then searched (changed_places.py) before the scan
trusts the record. The scan may have trusted a record that turns out to be changed. Then the scan's effects on queues
and tables are undone, and the scan is repeated.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Final

from raymq.common.names import OP_HALF_TOPIC
from raymq.common.protocol.store import Hole
from raymq.records.format.check import check_record
from raymq.records.format.dispatch import dispatch_view
from storage.dispatch.record_blocks import Block
from storage.dispatch.record_check import is_implausible, is_torn
from storage.dispatch.redispatch import Redispatch
from storage.files import disk
from storage.parts import StoreParts
from storage.recovery.changed_places import ChangedPlaces, WalkAgainError
from storage.recovery.claims import SURVEY_BYTES, with_place
from storage.recovery.log_end import LogEnd
from storage.recovery.log_files import LogFiles, placed_view
from storage.recovery.misfits import Change

WALKS_MAX: Final = 16
"""Maximum number of log scans in one recovery that may find a wrong place. Recovery repeats a scan if a record that was
already scanned names a wrong queue or queue offset. After this number of scans, all remaining records are trusted in
one last scan."""

logger = logging.getLogger(__name__)


class LogWalk:
    """The log scans of one recovery, which may have to repeat a scan."""

    def __init__(self, parts: StoreParts, files: LogFiles, end: LogEnd, redispatch: Redispatch) -> None:
        self._root, self._after_crash = parts.settings.store_path_root_dir, parts.after_crash
        self._log, self._queues, self._dedup, self._halves = parts.log, parts.queues, parts.dedup, parts.halves
        self._files, self._end, self._redispatch = files, end, redispatch
        self._changed = ChangedPlaces(parts, files, end, redispatch)
        self._marks: deque[int] = deque()
        """Physical offsets at which some of the most recently scanned records start."""
        self.began_at = 0
        """Physical offset at which the last scan of the log began."""
        self.holes: list[Hole] = []
        """The damaged ranges (holes) in the part of the log that was scanned last."""
        self.walked = 0
        """Number of log records that the recovery has scanned. If recovery discards the effects of a scan and repeats
        it, the count starts again at 0."""
        self.blanks = 0
        """The number of damaged BLANKs (end-of-file markers) that recovery rewrote."""
        self.last_store_timestamp_ms = 0
        """The newest store time in ms of all log records that recovery has scanned."""
        self.last_record_offset = -1
        """Physical offset of the log's last record; -1 for an empty log."""

    def walk_from(
        self, physical_offset: int, learn_again: Callable[[], None], *, knows_ends: bool, is_whole: bool
    ) -> int:
        """Scan the log from `physical_offset` on, the start of a record. Returns the physical offset at which the last
        good record ends.

        If a scan must be repeated, its effects are undone, and `learn_again` is called. This function loads the facts
        about the records before `physical_offset` again. `knows_ends`: True if the queues have entries (units) for all
        records before `physical_offset`. `is_whole`: True if the log has no records before `physical_offset`. Raises
        QueueGapError if a queue lacks entries for records before the scan.
        """
        self._changed.begin(physical_offset)
        may_fill_gaps = physical_offset == self._log.min_offset
        self._redispatch.knows_ends = is_whole or may_fill_gaps or knows_ends
        producers = self._dedup.rows() if is_whole else []
        for _ in range(WALKS_MAX):
            try:
                return self._walk_once(physical_offset, may_fill_gaps=may_fill_gaps)
            except WalkAgainError:
                self._undo_walk()
            if is_whole:
                for row in producers:
                    self._dedup.load_row(row)
            else:
                learn_again()
        logger.error(
            "%s: %d scans found records with wrong queue positions; the remaining records are accepted",
            self._root,
            WALKS_MAX,
        )
        self._changed.believe_the_rest()
        return self._walk_once(physical_offset, may_fill_gaps=may_fill_gaps)

    def _undo_walk(self) -> None:
        """Undo the effects of a log scan: restore the queues to their state before the scan, and discard all producers
        and transactions."""
        self._redispatch.start_again()
        self._halves.clear()
        self._dedup.clear()
        self.walked = 0
        for queue in self._queues.plain:
            base = self._changed.bases.get(queue.key)
            if base is None:
                self._queues.forget_queue(queue)
            elif base < queue.next_offset:
                queue.truncate_to(base)

    def _walk_once(self, physical_offset: int, *, may_fill_gaps: bool) -> int:
        """Scan the log once from `physical_offset` on. Returns the physical offset at which the last good record ends.
        Raises WalkAgainError if the scan's effects must be undone and the scan repeated."""
        self.began_at = physical_offset
        self.holes.clear()
        self._marks.clear()
        end_offset = self._walk_good(physical_offset, may_fill_gaps=may_fill_gaps)
        while (resume := self._end.resume_offset(end_offset)) is not None:
            blank = self._end.lost_blank(end_offset)
            if blank:
                self._rewrite(end_offset, blank)
                resume = end_offset
            for hole in self._end.holes_between(end_offset, resume):
                self._pass_hole(hole)
            end_offset = self._walk_good(resume, may_fill_gaps=may_fill_gaps)
        for offset in self._redispatch.ends.units_behind({}, physical_offset, end_offset):
            self._changed.survey_around(self._marks, offset, end_offset)
        self._redispatch.finish()
        return end_offset

    def _walk_good(self, physical_offset: int, *, may_fill_gaps: bool) -> int:
        """Scan intact records from `physical_offset` on, where a record starts. Returns the first physical offset after
        these records at which no intact record starts."""
        end_offset = physical_offset
        for start in self._log.starts:
            if start + self._log.file_size > end_offset:
                end_offset, complete = self._walk_file(start, end_offset - start, may_fill_gaps=may_fill_gaps)
                if not complete:
                    break
        return end_offset

    def _rewrite(self, physical_offset: int, blank: bytes) -> None:
        """Rewrite the damaged BLANK (end-of-file marker) of a log file. On return it is on disk. Raises OSError if the
        disk fails."""
        path = self._log.path(physical_offset - physical_offset % self._log.file_size)
        disk.overwrite(path, physical_offset % self._log.file_size, blank)
        logger.error(
            "log file %s: the end-of-file marker at physical offset %d was damaged and has been rewritten",
            path,
            physical_offset,
        )
        self.blanks += 1

    def _pass_hole(self, hole: Hole) -> None:
        """Record a damaged record as a hole (damaged range of the log). If the record's header is still readable, the
        record also counts for its queue, its producer and its transaction, as if it were intact."""
        self.holes.append(hole)
        view = self._end.header_of(hole, self._files.delay_levels_ms)
        self._redispatch.put_hole(hole, view)
        # In a record of the op topic only the body counts. This record's body is damaged, so the table of half messages
        # ignores the record.
        if view is not None and view.topic != OP_HALF_TOPIC:
            self._halves.note(placed_view(view, hole.offset), self._files.bytes_at(hole.offset, hole.size))

    def _pass_changed(self, change: Change, record: memoryview, physical_offset: int) -> None:
        """Treat a record whose place (queue and queue offset) the disk has changed as a damaged range (hole). If its
        true place is known for certain, the queue gets an entry (unit) there that points to the record."""
        hole = Hole(physical_offset, len(record), change.reason)
        self.holes.append(hole)
        if change.place is None or not change.is_sure:
            self._redispatch.put_hole(hole, None, change.place)
            return
        mended = with_place(record, change.place)
        view = dispatch_view(mended, delay_levels_ms=self._files.delay_levels_ms)
        self._redispatch.put_hole(hole, view)
        self._halves.note(placed_view(view, physical_offset), mended)

    def _walk_file(self, start: int, position: int, *, may_fill_gaps: bool) -> tuple[int, bool]:
        """Scan one log file from `position` on. Returns the physical offset at which the last intact record ends, and
        True if the log continues in the next file."""
        data = self._files.data(start)
        while True:
            self._mark(start + position)
            block = self._files.checked_block(start, position)
            if block is not None and self._put_block(block, start + position, may_fill_gaps=may_fill_gaps):
                self.note(len(block.starts), start + position + int(block.starts[-1]), block.last_store_timestamp_ms)
                position += block.length
                continue
            until = self._files.singles_end(position)
            while position < until:
                size = self._walk_record(data, start, position, may_fill_gaps=may_fill_gaps)
                if size is None:
                    return start + position, False
                if size == 0:
                    goes_on = start != self._log.starts[-1]
                    return (start + len(data), True) if goes_on else (start + position, False)
                position += size

    def _mark(self, physical_offset: int) -> None:
        """Remember the start of a record that the log scan has reached. Forget all remembered record starts that lie
        more than SURVEY_BYTES before it."""
        self._marks.append(physical_offset)
        while self._marks[0] < physical_offset - SURVEY_BYTES:
            self._marks.popleft()

    def _put_block(self, block: Block, physical_offset: int, *, may_fill_gaps: bool) -> bool:
        """Dispatch the records of a block. Returns False if nothing was done: the records must then be scanned one by
        one."""
        end_offset = physical_offset + block.length
        if self._changed.has_changes_in(physical_offset, end_offset):
            return False
        believes_places = self._changed.is_surveyed(physical_offset, end_offset)
        if not believes_places and self._end.names_place_in(physical_offset, end_offset):
            return False
        return self._redispatch.put_block(
            block, physical_offset, may_fill_gaps=may_fill_gaps, believes_places=believes_places
        )

    def _walk_record(self, data: memoryview, start: int, position: int, *, may_fill_gaps: bool) -> int | None:
        """Check and dispatch one record. Returns its size, 0 for a BLANK (end-of-file marker), or None if there is no
        good record."""
        size, good = check_record(data, position, **self._files.checks)
        if not good:
            return None
        if size:
            view = dispatch_view(data, position, delay_levels_ms=self._files.delay_levels_ms)
            if is_implausible(view, start + position):
                return None
            if self._after_crash and is_torn(data, position, size, file_start=start, **self._files.checks):
                return None
            if not self._changed.is_surveyed(start + position) and (
                self._end.is_named(start + position) or self._redispatch.places.is_misfit(view, start + position)
            ):
                self._changed.survey_around(self._marks, start + position, start + position)
            if start + position in self._changed.changes:
                self._pass_changed(
                    self._changed.changes[start + position], data[position : position + size], start + position
                )
                self.note(1, start + position, view.store_timestamp_ms)
                return size
            self._redispatch.put_record(view, start + position, may_fill_gaps=may_fill_gaps)
            self._halves.note(placed_view(view, start + position), data[position : position + size])
            self.note(1, start + position, view.store_timestamp_ms)
        return size

    def note(self, count: int, last_record_offset: int, store_timestamp_ms: int) -> None:
        """Count `count` more log records as scanned. `last_record_offset`: the physical offset of the last of these
        records. `store_timestamp_ms`: the newest store time of these records."""
        self.walked += count
        self.last_record_offset = last_record_offset
        self.last_store_timestamp_ms = max(self.last_store_timestamp_ms, store_timestamp_ms)
