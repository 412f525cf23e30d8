"""Recovery: a store finds the good end of its log and makes the queues agree with it, before it serves.

It follows spec/storage.md §5, with a shorter walk where a snapshot allows it (snapshot.py). The consume queues are read
up to their first unit that was never written. Then the newest part of the log is walked, record by record: after a
clean stop from the newest file whose first record is in a queue, after a crash from the newest file whose first record
is older than the checkpoint. Records that are missing in their queue are put there; units that point behind the log's
end are removed.

The log ends before the first record that fails its checks, if no intact record follows it (log_end.py). RocketMQ ends
it there in any case, and so loses all that is intact behind a record that rotted on the disk. Here such a record is a
hole (storage/log/holes.py): its bytes stay, its unit stays or is made, and the walk goes on behind it. A damaged BLANK,
of which one field is left, is written again: its content follows from the file's size.

In four more cases RocketMQ guesses, and this does not:

- A record whose queue offset is beyond its queue's end shows that units are lost which the walk does not reach (a queue
  directory was deleted). RocketMQ appends the unit at the wrong queue offset; here the walk starts again at the first
  file.
- A record that does not fit its queue may have a changed queue offset, queue id or topic, which no checksum covers. The
  units and the records beside it decide, SURVEY_BYTES on both sides (misfits.py). If it is changed, it is a hole, and
  its unit goes to its true place. If the walk has believed it before, the walk is undone and begins again.
- Queue files that are not where they belong are found (queue_check.py), and the walk starts at the first file too.
- A record's CRC covers its body only. A record is not good either whose topic cannot be a directory, or whose queue
  offset is more than the records that fit in the log before it; nor is, after a crash, the log's last one if a power
  failure between two sectors cut its properties (record_check.py).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Final

from raymq.common.names import HALF_TOPIC, OP_HALF_TOPIC
from raymq.common.protocol.store import Hole
from raymq.records.format.check import check_record
from raymq.records.format.dispatch import DispatchView, dispatch_view
from raymq.records.format.encode import ProducerSequence
from raymq.records.format.layout import RecordError
from storage.dispatch.batch_dispatch import QueueGapError
from storage.dispatch.dedup import ProducerRow
from storage.dispatch.half_messages import HALF_QUEUE_ID
from storage.dispatch.multi_dispatch import QueueKey, QueueUnit
from storage.dispatch.queue_check import misplaced_file
from storage.dispatch.record_blocks import BLOCK_BYTES, Block, read_block
from storage.dispatch.record_check import is_implausible, is_torn
from storage.dispatch.redispatch import Redispatch
from storage.files import disk
from storage.parts import StoreParts
from storage.recovery.checkpoint import Checkpoint
from storage.recovery.claims import SURVEY_BYTES, Claim, ClaimReader, Survey, one_bit_away, raw_topic_of, with_place
from storage.recovery.cut_bytes import keep_cut_bytes
from storage.recovery.log_end import LogEnd
from storage.recovery.misfits import Change, Misfits
from storage.recovery.snapshot import Snapshot

WALKS_MAX: Final = 16
"""If a record that was walked turns out to name a wrong place, the walk begins again, so often at most. After that
records are believed."""

logger = logging.getLogger(__name__)


class _WalkAgainError(Exception):
    """A record that was walked and believed names a wrong place."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """The result of a recovery."""

    text: str
    """The findings and changes in words; the store logs them and shows them in its status."""
    cut_bytes: int
    """The bytes that were cut off behind the last good record."""
    last_store_timestamp_ms: int
    """The newest store time in the part that was walked or that the snapshot covers; 0 for an empty log."""
    last_record_offset: int
    """The physical offset of the last record; -1 for an empty log."""
    holes: tuple[Hole, ...] = ()
    """The damaged ranges of the log that have intact records behind them."""


class Recovery:
    """One recovery of one store. `run` leaves the log open for appending and the queues at their ends."""

    def __init__(self, parts: StoreParts, checkpoint: Checkpoint, snapshot: Snapshot | None) -> None:
        settings = parts.settings
        self._root = settings.store_path_root_dir
        self._log, self._queues, self._dedup, self._reader = parts.log, parts.queues, parts.dedup, parts.reader
        self._halves = parts.halves
        self._checkpoint = checkpoint
        """The store times up to which log and queues are known to be on disk; only used after a crash."""
        self._snapshot = snapshot
        """A position that a walk may begin at, with what is known before it; None without a usable one."""
        self._after_crash = parts.after_crash
        # The property CRC covers the whole record: with it, the body's own says nothing more.
        check_property_crc = settings.force_verify_prop_crc
        check_crc = settings.check_crc_on_recover and not check_property_crc
        self._checks = {"check_crc": check_crc, "check_property_crc": check_property_crc}
        self._delay_levels_ms = settings.delay_levels_ms
        self._redispatch = Redispatch(
            parts.queues, parts.dedup, parts.deliveries, after_crash=parts.after_crash, reader=parts.reader
        )
        self._last_store_timestamp_ms = 0
        self._last_record_offset = -1
        self._end = LogEnd(parts, checkpoint, snapshot, self._checks)
        self._hole_table = parts.holes
        self._holes: list[Hole] = []
        """The holes in the part that was walked last."""
        self._uses_snapshot = False
        """True if the walk begins where the snapshot ends, and so every queue's end is known there."""
        self._walked_from = 0
        """The physical offset at which the last walk began."""
        self._walked = 0
        """The number of records that were walked."""
        self._claims = ClaimReader(
            parts.log, parts.reader, parts.queues, self._end, self._checks, self._delay_levels_ms
        )
        self._changes: dict[int, Change] = {}
        """The records with a changed place, by physical offset."""
        self._surveyed: list[tuple[int, int]] = []
        """The parts of the log in which all changed places are found."""
        self._bases: dict[QueueKey, int] = {}
        """The next offsets of the queues when the walk began."""
        self._marks: deque[int] = deque()
        """The physical offsets of some records that the walk passed last."""
        self._blanks = 0
        """The damaged BLANKs that were written again."""

    def run(self) -> Recovered:
        """Recover. Nothing that is intact is lost.

        StoreCorruptError, and nothing is changed, when a disk with the log's end is not there.
        """
        if self._snapshot is not None:
            self._log.paths.require_up_to(self._snapshot.end)
        if not self._log.starts:
            return self._without_log()
        try:
            end_offset = self._walk_from(self._start_of_walk())
        except QueueGapError as gap:
            logger.warning("%s; walking the whole log to make its queues again", gap)
            self._redispatch.start_again()
            self._halves.clear()
            if self._after_crash:
                self._cut_queues_at(self._log.min_offset)
            end_offset = self._walk_from(self._log.min_offset, is_whole=True)
            self._let_queues_reach_snapshot(end_offset)
        self._write_down_holes(end_offset)
        units_cut = sum(queue.truncate_from(end_offset) for queue in self._queues)
        keep_cut_bytes(self._root, self._log, end_offset)
        cut_bytes = self._log.open_for_append(end_offset)
        self._queues.end_deletions_at(end_offset)
        for start in self._log.starts:
            if start + self._log.file_size > self._walked_from:
                # Bytes that the process before wrote may still be in memory only, and count as flushed from here on.
                if self._after_crash:
                    disk.write_again(self._log.path(start), max(self._walked_from - start, 0), end_offset - start)
                else:
                    disk.flush_path(self._log.path(start))
        for plain in self._queues.plain:
            plain.forget_lost_units()
        for queue in self._queues:
            queue.correct_min_offset(self._log.min_offset)
            queue.visible_offset = queue.next_offset
        text = self._describe(end_offset, cut_bytes, units_cut)
        logger.log(logging.WARNING if cut_bytes or units_cut else logging.INFO, "%s: %s", self._root, text)
        for hole in self._hole_table.holes:
            logger.error(
                "%s: %d bytes at physical offset %d of the log are damaged: %s; the bytes are kept, and what is behind "
                "them is not affected",
                *(self._root, hole.size, hole.offset, hole.reason),
            )
        holes = self._hole_table.holes
        return Recovered(text, cut_bytes, self._last_store_timestamp_ms, self._last_record_offset, holes)

    def _write_down_holes(self, end_offset: int) -> None:
        """Keep the holes of the part that was walked, and those before it that are still there."""
        start = self._log.min_offset
        before = [
            hole
            for hole in self._hole_table.from_offset(start)
            if hole.end_offset <= min(self._walked_from, end_offset) and self._end.is_hole(hole)
        ]
        self._hole_table.replace(before + self._holes, self._log.file_size)

    def _without_log(self) -> Recovered:
        text = "new and empty"
        if len(self._queues):
            text = f"no commit log: {len(self._queues)} queues deleted"
            logger.warning("%s: %s", self._root, text)
            self._queues.delete_all()
        self._log.open_for_append(0)
        self._hole_table.replace((), self._log.file_size)
        return Recovered(text, 0, 0, -1)

    def _describe(self, end_offset: int, cut_bytes: int, units_cut: int) -> str:
        text = f"opened after {'a crash' if self._after_crash else 'a clean stop'}: {self._walked} records checked"
        if self._redispatch.queued:
            text += f", {self._redispatch.queued} put into their queues again"
        if self._redispatch.mended:
            text += f", {self._redispatch.mended} damaged queue units made again"
        if self._blanks:
            text += f", {self._blanks} damaged ends of files written again"
        if self._hole_table.holes:
            text += f", {len(self._hole_table.holes)} damaged ranges kept"
        if units_cut:
            text += f", {units_cut} queue units behind the log's end removed"
        if cut_bytes:
            text += f", {cut_bytes} bytes cut behind physical offset {end_offset}, the end of the last good record"
        return text

    def _start_of_walk(self) -> int:
        """The physical offset to walk from. Also finds the ends of the queues, and fills the dedup table with the
        producers that are known to have sent before that offset."""
        snapshot = self._snapshot if self._snapshot is not None and self._snapshot.fits(self._reader) else None
        self._uses_snapshot = snapshot is not None
        if self._after_crash:
            walk_from = self._log.starts[self._first_file_to_walk()] if snapshot is None else snapshot.end
            self._cut_queues_at(walk_from)
        else:
            for queue in self._queues:
                queue.recover()
                self._redispatch.queues_reach(queue.max_physical_offset)
        misplaced = self._reset_misplaced_queues()
        self._queues.finish_deletions(self._log.min_offset)
        if misplaced:
            raise QueueGapError(misplaced)
        start = self._log.starts[self._first_file_to_walk()] if snapshot is None else snapshot.end
        self._learn_producers(start)
        return start

    def _learn_producers(self, walk_from: int) -> None:
        """Note the producers, and the transactions, that are known before the start of a walk. QueueGapError as of
        `_use_snapshot`."""
        if self._uses_snapshot:
            assert self._snapshot is not None
            self._use_snapshot(self._snapshot)
            return
        index = self._log.starts.index(walk_from)
        if index > 0:
            # This file is not checked and not dispatched: it only tells which messages producers may send again.
            self._remember_producers(self._log.starts[index - 1])
            if self._queues.get(HALF_TOPIC, HALF_QUEUE_ID) is not None:
                for start in self._log.starts[:index]:
                    self._remember_transactions(start)

    def _reset_misplaced_queues(self) -> str:
        """Empty the queues whose files are not their own, to be made again; returns a text that names them."""
        found = []
        for queue in self._queues.plain:
            misplaced = misplaced_file(queue, self._reader)
            if misplaced:
                queue.truncate_to(0)
                found.append(misplaced)
        return "; ".join(found)

    def _cut_queues_at(self, physical_offset: int) -> None:
        """Remove the units that the walk from `physical_offset` on will put into the queues again."""
        for queue in self._queues:
            queue.recover_until(physical_offset)

    def _use_snapshot(self, snapshot: Snapshot) -> None:
        """Take over the producers and the last record from the snapshot. QueueGapError if a queue ends sooner than the
        snapshot says."""

        is_deleted = self._deletions_after(snapshot)
        for topic, queue_id, next_offset in snapshot.queues:
            queue = self._queues.get(topic, queue_id)
            found = 0 if queue is None else queue.next_offset
            if found < next_offset and not is_deleted(topic):
                self._redispatch.queues_were_lost = True
                raise QueueGapError(
                    f"queue {topic}:{queue_id} ends at offset {found}, but it had reached {next_offset}"
                )
        for row in snapshot.producers:
            if not is_deleted(row.topic):
                self._dedup.load_row(row)
        self._halves.load(snapshot.transactions)
        self._last_record_offset = snapshot.last
        last = dispatch_view(self._reader.log_bytes(snapshot.last, snapshot.end))
        self._last_store_timestamp_ms = last.store_timestamp_ms

    def _let_queues_reach_snapshot(self, end_offset: int) -> None:
        """Let queues that were made again go on where the snapshot says that they ended: a log that holds no message
        of a queue any more does not tell."""
        snapshot = self._snapshot
        if snapshot is None or snapshot.end > end_offset or not snapshot.fits(self._reader):
            return
        is_deleted = self._deletions_after(snapshot)
        for topic, queue_id, next_offset in snapshot.queues:
            if not is_deleted(topic) and not self._queues.holds_batches(topic, queue_id):
                queue = self._queues.get_or_create(topic, queue_id)
                if queue.next_offset < next_offset:
                    queue.start_at(next_offset)

    def _deletions_after(self, snapshot: Snapshot) -> Callable[[str], bool]:
        """A function that is true for the topics that were deleted behind the end of a snapshot."""

        @cache
        def is_deleted(topic: str) -> bool:
            # A clean stop of this store leaves nothing behind the snapshot: where a queue goes on, RocketMQ was here.
            here = self._queues.was_deleted_after(topic, snapshot.end - 1)
            return here or self._redispatch.was_deleted(topic, snapshot.end)

        return is_deleted

    def _first_file_to_walk(self) -> int:
        """The index of the newest file whose first record matches (spec §5, file match test), else 0."""
        for index in range(len(self._log.starts) - 1, 0, -1):
            data = self._data(self._log.starts[index])
            size, good = check_record(data, 0, **self._checks)
            if not good or size <= 0:
                continue
            try:
                first = dispatch_view(data, 0)
            except RecordError:
                continue
            if first.store_timestamp_ms == 0:
                continue
            if self._after_crash:
                if first.store_timestamp_ms <= self._checkpoint.min_timestamp:
                    return index
            elif first.physical_offset <= self._redispatch.dispatched_end:
                return index
        return 0

    def _data(self, start: int) -> memoryview:
        return self._reader.maps.get(str(self._log.path(start))).data

    def _walk_from(self, physical_offset: int, *, is_whole: bool = False) -> int:
        """Walk the log from the start of a record on; returns the physical offset at which the last good one ends.
        `is_whole`: nothing before that offset is left to look at."""
        self._bases = {queue.key: queue.next_offset for queue in self._queues.plain}
        self._surveyed.clear()
        producers = self._dedup.rows() if is_whole else []
        for _ in range(WALKS_MAX):
            try:
                return self._walk_once(physical_offset, is_whole=is_whole)
            except _WalkAgainError:
                self._undo_walk(physical_offset, producers, is_whole=is_whole)
        logger.error(
            "%s: %d walks found records that name wrong places; the others are believed", self._root, WALKS_MAX
        )
        self._surveyed.append((0, self._log.starts[-1] + self._log.file_size))
        return self._walk_once(physical_offset, is_whole=is_whole)

    def _undo_walk(self, physical_offset: int, producers: list[ProducerRow], *, is_whole: bool) -> None:
        """Make queues, producers and transactions what they were before the walk from an offset. `producers`: those
        that were known then, if the whole log is walked."""
        self._redispatch.start_again()
        self._halves.clear()
        self._dedup.clear()
        self._walked = 0
        for queue in self._queues.plain:
            base = self._bases.get(queue.key)
            if base is None:
                self._queues.forget_queue(queue)
            elif base < queue.next_offset:
                queue.truncate_to(base)
        if is_whole:
            for row in producers:
                self._dedup.load_row(row)
        else:
            self._learn_producers(physical_offset)

    def _walk_once(self, physical_offset: int, *, is_whole: bool) -> int:
        """`_walk_from`. _WalkAgainError if it has to be undone."""
        self._walked_from = physical_offset
        self._holes.clear()
        self._marks.clear()
        may_fill_gaps = physical_offset == self._log.min_offset
        self._redispatch.knows_ends = is_whole or may_fill_gaps or self._uses_snapshot
        end_offset = self._walk_good(physical_offset, may_fill_gaps=may_fill_gaps)
        while (resume := self._end.resume_offset(end_offset)) is not None:
            blank = self._end.lost_blank(end_offset)
            if blank:
                self._rewrite(end_offset, blank)
                resume = end_offset
            for hole in self._end.holes_between(end_offset, resume):
                self._pass_hole(hole)
            end_offset = self._walk_good(resume, may_fill_gaps=may_fill_gaps)
        for offset in self._redispatch.units_behind({}, physical_offset, end_offset):
            self._survey_around(offset, end_offset)
        self._redispatch.finish()
        return end_offset

    def _is_surveyed(self, physical_offset: int, end_offset: int | None = None) -> bool:
        """True if all changed places at an offset, or up to `end_offset`, are known."""
        return any(start <= physical_offset < end and (end_offset or 0) <= end for start, end in self._surveyed)

    def _survey_around(self, physical_offset: int, walked_to: int) -> None:
        """Find the changed places near a record that does not fit its queue. _WalkAgainError if one of them is before
        `walked_to`. On return the part of the log up to SURVEY_BYTES behind the record is surveyed."""
        if self._is_surveyed(physical_offset):
            return
        file_start = physical_offset - physical_offset % self._log.file_size
        starts = [mark for mark in self._marks if physical_offset - SURVEY_BYTES <= mark <= physical_offset]
        start = min([*starts, physical_offset]) if starts else max(file_start, self._walked_from)
        survey = self._claims.read(start, min(physical_offset, start + SURVEY_BYTES) + SURVEY_BYTES)
        is_first = start == self._walked_from
        bases = {}
        if is_first and self._after_crash:
            bases = {key: base for key, base in self._bases.items() if base or not start}
        default_base = 0 if is_first and self._after_crash and not start else None
        misfits = Misfits(survey, bases, default_base, self._leads_to, self._raw_topic, self._sequence_of)
        found = misfits.find([physical_offset, *self._lost_ends(survey)], self._end.is_named)
        new = {offset: change for offset, change in found.items() if offset not in self._changes}
        self._changes.update(new)
        # Records near the survey's end have no neighbours behind them there.
        is_whole = survey.end > self._log.starts[-1] + self._log.file_size
        self._surveyed.append((start, survey.end if is_whole else (physical_offset + survey.end) // 2))
        if any(offset < walked_to for offset in new):
            raise _WalkAgainError

    def _lost_ends(self, survey: Survey) -> list[int]:
        """The physical offsets of records whose units the crash left behind the last offset of a queue that a record
        in a survey names; of each queue only the first."""
        last = {claim.place.key: claim.place.queue_offset for claim in survey.claims}
        return self._redispatch.units_behind(last, survey.start, survey.end)

    def _leads_to(self, place: QueueUnit, physical_offset: int, size: int) -> bool:
        """True if a queue had a unit at a place, before this recovery, that leads to a record."""
        queue = self._queues.get_plain(*place.key)
        if queue is None:
            return False
        units = queue.lost_units[max(place.queue_offset - queue.lost_units_from, 0) :][:1]
        if place.queue_offset < queue.lost_units_from or not len(units):
            if self._after_crash or not queue.first_offset <= place.queue_offset < self._bases.get(queue.key, 0):
                return False
            units = queue.units(place.queue_offset, 1)
        return [(int(unit["physical_offset"]), int(unit["size"])) for unit in units] == [(physical_offset, size)]

    def _sequence_of(self, claim: Claim) -> ProducerSequence | None:
        record = self._reader.log_bytes(claim.physical_offset, claim.physical_offset + claim.size)
        return dispatch_view(record).producer if claim.is_movable else None

    def _raw_topic(self, claim: Claim) -> bytes:
        return raw_topic_of(self._reader.log_bytes(claim.physical_offset, claim.physical_offset + claim.size))

    def _walk_good(self, physical_offset: int, *, may_fill_gaps: bool) -> int:
        """Walk the log from the start of a record on; returns the physical offset at which no good record starts."""
        end_offset = physical_offset
        for start in self._log.starts:
            if start + self._log.file_size > end_offset:
                end_offset, complete = self._walk_file(start, end_offset - start, may_fill_gaps=may_fill_gaps)
                if not complete:
                    break
        return end_offset

    def _rewrite(self, physical_offset: int, blank: bytes) -> None:
        """Write the damaged BLANK of a file again; on return it is on disk. OSError."""
        path = self._log.path(physical_offset - physical_offset % self._log.file_size)
        disk.overwrite(path, physical_offset % self._log.file_size, blank)
        logger.error("%s: the BLANK at %d was damaged, and is written again", path, physical_offset)
        self._blanks += 1

    def _pass_hole(self, hole: Hole) -> None:
        """Note a damaged record. If its header can still be read, its queue, its producer and its transaction get
        to know it as if it were good."""
        self._holes.append(hole)
        view = self._end.header_of(hole, self._delay_levels_ms)
        self._redispatch.put_hole(hole, view)
        if view is not None and view.topic != OP_HALF_TOPIC:  # of that topic the body counts
            self._halves.note(_placed(view, hole.offset), self._data_of(hole))

    def _pass_changed(self, change: Change, record: memoryview, physical_offset: int) -> None:
        """Note a record with a changed place as a hole. If its true place is known, the record counts there."""
        hole = Hole(physical_offset, len(record), change.reason)
        self._holes.append(hole)
        if change.place is None or not change.is_sure:
            self._redispatch.put_hole(hole, None, change.place)
            return
        mended = with_place(record, change.place)
        view = dispatch_view(mended, delay_levels_ms=self._delay_levels_ms)
        self._redispatch.put_hole(hole, view)
        self._halves.note(_placed(view, physical_offset), mended)

    def _data_of(self, hole: Hole) -> memoryview:
        start = hole.offset - hole.offset % self._log.file_size
        return self._data(start)[hole.offset - start : hole.end_offset - start]

    def _remember_producers(self, start: int) -> None:
        """Remember who sent the records of a file."""
        data, position = self._data(start), 0
        while True:
            block = self._block(data, start, position, check_crc=False)
            agrees = block is not None and self._redispatch.units_agree(block, start + position)
            if block is not None and agrees and self._redispatch.remember_block(block, start + position):
                position += block.length
                continue
            until = position + BLOCK_BYTES
            while position < until:
                size, good = check_record(data, position, check_crc=False)
                if not good or size <= 0:
                    behind = self._end.resume_in_file(start, position)
                    if behind is None:
                        return
                    position = behind
                    continue
                view = dispatch_view(data, position)
                if self._redispatch.is_misfit(view, start + position):
                    view = self._by_its_unit(view, data[position : position + size], start + position)
                self._redispatch.remember_record(view, start + position)
                position += size

    def _by_its_unit(self, view: DispatchView, record: memoryview, physical_offset: int) -> DispatchView:
        """The view of a record before the walk at the place whose unit leads to it, if one changed bit makes its own
        another one; else as the record says."""
        own = QueueUnit((view.topic, view.queue_id), view.queue_offset)
        for place in one_bit_away(own, raw_topic_of(record)):
            queue = self._queues.get_plain(*place.key)
            if queue is None or not queue.first_offset <= place.queue_offset < queue.next_offset:
                continue
            [unit] = queue.units(place.queue_offset, 1)
            if (unit["physical_offset"], unit["size"]) == (physical_offset, view.size):
                (topic, queue_id), queue_offset = place
                return view._replace(topic=topic, queue_id=queue_id, queue_offset=queue_offset)
        return view

    def _remember_transactions(self, start: int) -> None:
        """Note the half messages of a file that is not walked, and what ended them: they may be older than all that
        is."""
        data, position = self._data(start), 0
        while True:
            block = self._block(data, start, position, check_crc=False)
            if block is not None:
                for at in block.starts[block.of_transactions()].tolist():
                    self._note_transaction(data, start, position + at)
                position += block.length
                continue
            until = position + BLOCK_BYTES
            while position < until:
                size, good = check_record(data, position, check_crc=False)
                if not good or size <= 0:
                    behind = self._end.resume_in_file(start, position)
                    if behind is None:
                        return
                    position = behind
                    continue
                self._note_transaction(data, start, position)
                position += size

    def _note_transaction(self, data: memoryview, start: int, position: int) -> None:
        view = dispatch_view(data, position)
        self._halves.note(_placed(view, start + position), data[position : position + view.size])

    def _walk_file(self, start: int, position: int, *, may_fill_gaps: bool) -> tuple[int, bool]:
        """Walk one file from `position` on. Returns the physical offset at which its last good record ends, and True if
        the log goes on there."""
        data = self._data(start)
        while True:
            self._mark(start + position)
            block = None
            if not self._checks["check_property_crc"]:
                block = self._block(data, start, position, check_crc=self._checks["check_crc"])
            if block is not None and self._put_block(block, start + position, may_fill_gaps=may_fill_gaps):
                self._note_walked(
                    len(block.starts), start + position + int(block.starts[-1]), block.last_store_timestamp_ms
                )
                position += block.length
                continue
            until = position + BLOCK_BYTES
            while position < until:
                size = self._walk_record(data, start, position, may_fill_gaps=may_fill_gaps)
                if size is None:
                    return start + position, False
                if size == 0:
                    goes_on = start != self._log.starts[-1]
                    return (start + len(data), True) if goes_on else (start + position, False)
                position += size

    def _mark(self, physical_offset: int) -> None:
        """Remember that the walk passed a record's start, and forget what is too far behind it."""
        self._marks.append(physical_offset)
        while self._marks[0] < physical_offset - SURVEY_BYTES:
            self._marks.popleft()

    def _put_block(self, block: Block, physical_offset: int, *, may_fill_gaps: bool) -> bool:
        """Dispatch the records of a block. False if nothing was done."""
        end_offset = physical_offset + block.length
        if any(physical_offset <= offset < end_offset for offset in self._changes):
            return False
        believes_places = self._is_surveyed(physical_offset, end_offset)
        if not believes_places and self._end.names_place_in(physical_offset, end_offset):
            return False
        return self._redispatch.put_block(
            block, physical_offset, may_fill_gaps=may_fill_gaps, believes_places=believes_places
        )

    def _walk_record(self, data: memoryview, start: int, position: int, *, may_fill_gaps: bool) -> int | None:
        """Check and dispatch one record. Returns its size, 0 for a BLANK, None if it is not a good record."""
        size, good = check_record(data, position, **self._checks)
        if not good:
            return None
        if size:
            view = dispatch_view(data, position, delay_levels_ms=self._delay_levels_ms)
            if is_implausible(view, start + position):
                return None
            if self._after_crash and is_torn(data, position, size, file_start=start, **self._checks):
                return None
            if self._end.is_named(start + position) or self._redispatch.is_misfit(view, start + position):
                self._survey_around(start + position, start + position)
            if start + position in self._changes:
                self._pass_changed(self._changes[start + position], data[position : position + size], start + position)
                self._note_walked(1, start + position, view.store_timestamp_ms)
                return size
            self._redispatch.put_record(view, start + position, may_fill_gaps=may_fill_gaps)
            self._halves.note(_placed(view, start + position), data[position : position + size])
            self._note_walked(1, start + position, view.store_timestamp_ms)
        return size

    def _block(self, data: memoryview, start: int, position: int, *, check_crc: bool) -> Block | None:
        return read_block(
            data,
            position,
            start + position,
            check_crc=check_crc,
            delay_levels_ms=self._delay_levels_ms,
            may_be_torn=self._after_crash,
        )

    def _note_walked(self, count: int, last_record_offset: int, store_timestamp_ms: int) -> None:
        self._walked += count
        self._last_record_offset = last_record_offset
        self._last_store_timestamp_ms = max(self._last_store_timestamp_ms, store_timestamp_ms)


def _placed(view: DispatchView, physical_offset: int) -> DispatchView:
    """The view of a record with the physical offset at which the record is, whatever the record says."""
    return view if view.physical_offset == physical_offset else view._replace(physical_offset=physical_offset)
