"""Recovery: before a store serves, it finds the last good record of its log and makes the queues consistent with the
log.

Recovery follows spec/storage.md §5, with a shorter scan if a snapshot allows it (snapshot.py). The consume queues are
read up to their first unit that was never written. Then recovery scans the newest part of the log, record by record.
After a clean stop the scan starts at the newest file whose first record is in a queue; after a crash it starts at the
newest file whose first record is older than the checkpoint. If bytes before a snapshot's end have changed, their file
is scanned, too. Records missing in their queue are put into the queue; units that point beyond the log's end are
removed.

The log ends before the first record that fails its checks, if no intact record follows it (log_end.py). RocketMQ ends
the log before that record in any case, and so loses all intact records after a damaged one. In raymq a damaged record
with intact records after it is a hole (storage/log/holes.py): its bytes stay, its unit stays or is created, and the
scan continues after the hole. A damaged BLANK with one intact field is rewritten, because its content follows from the
file's size.

In four more cases RocketMQ guesses, and this recovery does not:

- A record whose queue offset is beyond its queue's end shows that units are lost which the scan does not reach (for
  example if a queue directory was deleted). RocketMQ appends the unit at the wrong queue offset; this recovery starts
  the scan again at the first file.
- A record that does not fit its queue may have a changed queue offset, queue id or topic, which no checksum covers. The
  units and the adjacent records, SURVEY_BYTES on both sides, decide (misfits.py). If the record is changed, it is a
  hole, and its unit goes to its true place. If the scan has already trusted the record, the scan is undone and starts
  again.
- Queue files that do not belong to their queue are found (queue_check.py), and the scan starts at the first file too.
- A record's CRC covers its body only. A record also counts as bad if its topic cannot be a directory, or if its queue
  offset is larger than the number of records that fit into the log before it. After a crash, the log's last record
  counts as bad if a power failure between two sectors cut its properties (record_check.py).
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from dataclasses import dataclass

from raymq.common.protocol.store import Hole
from raymq.records.format.check import check_record
from raymq.records.format.dispatch import dispatch_view
from raymq.records.format.layout import RecordError
from storage.dispatch.batch_dispatch import QueueGapError
from storage.dispatch.queue_check import misplaced_file
from storage.dispatch.redispatch import Redispatch
from storage.files import disk
from storage.parts import StoreParts
from storage.queue.consume_queue import ConsumeQueue
from storage.queue.queue_table import AnyQueue
from storage.recovery.checkpoint import Checkpoint
from storage.recovery.cut_bytes import keep_cut_bytes
from storage.recovery.earlier_records import EarlierRecords
from storage.recovery.log_end import LogEnd
from storage.recovery.log_files import LogFiles
from storage.recovery.snapshot import Snapshot
from storage.recovery.walk import LogWalk

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Recovered:
    """The result of one recovery of a store."""

    text: str
    """Text that describes what recovery found and changed. The store logs this text and shows it in its status."""
    cut_bytes: int
    """Number of bytes that recovery cut off the log after the last good record."""
    last_store_timestamp_ms: int
    """The newest store time in ms in the part of the log that was scanned or that the snapshot covers; 0 for an empty
    log."""
    last_record_offset: int
    """Physical offset of the log's last record; -1 for an empty log."""
    holes: tuple[Hole, ...] = ()
    """The damaged ranges of the log that have intact records after them."""


class Recovery:
    """One recovery of one store. After `run` the log is open for appending, and the ends of the queues are
    known."""

    def __init__(self, parts: StoreParts, checkpoint: Checkpoint, snapshot: Snapshot | None) -> None:
        self._root = parts.settings.store_path_root_dir
        self._log, self._queues, self._reader = parts.log, parts.queues, parts.reader
        self._halves, self._hole_table = parts.halves, parts.holes
        self._checkpoint = checkpoint
        """The store times up to which the log and the queues are known to be on disk. Used only after a crash."""
        self._snapshot = snapshot
        """The last usable snapshot of the dedup table and the transactions. Recovery can begin its log scan at the
        snapshot's log offset. None if there is no usable snapshot."""
        self._after_crash = parts.after_crash
        self._redispatch = Redispatch(
            parts.queues, parts.dedup, parts.deliveries, after_crash=parts.after_crash, reader=parts.reader
        )
        self._files = LogFiles(parts)
        self._end = LogEnd(parts, checkpoint, snapshot, self._files.checks)
        self._earlier = EarlierRecords(parts, self._files, self._end, self._redispatch)
        self._walk = LogWalk(parts, self._files, self._end, self._redispatch)

    def run(self) -> Recovered:
        """Recover the store. No intact record is lost.

        Raises StoreCorruptError, and changes nothing, if the log's last part is on a disk that is missing.
        """
        if self._snapshot is not None:
            self._log.paths.require_up_to(self._snapshot.end)
        if not self._log.starts:
            return self._without_log()
        try:
            end_offset = self._walk_newest()
        except QueueGapError as gap:
            logger.warning("%s; scanning the whole log to rebuild the queues", gap)
            end_offset = self._walk_whole()
            if self._snapshot is not None:
                self._earlier.let_queues_reach(self._snapshot, end_offset)
        self._write_down_holes(end_offset)
        units_cut = sum(self._cut_units(queue, end_offset) for queue in self._queues)
        keep_cut_bytes(self._root, self._log, end_offset)
        cut_bytes = self._log.open_for_append(end_offset)
        self._queues.end_deletions_at(end_offset)
        for start in self._log.starts:
            if start + self._log.file_size > self._walk.began_at:
                # Bytes that the previous process wrote may still be only in memory. Write them again, because from now
                # on they count as flushed.
                if self._after_crash:
                    disk.write_again(self._log.path(start), max(self._walk.began_at - start, 0), end_offset - start)
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
                "%s: %d bytes at physical offset %d of the log are damaged: %s; the bytes are kept, and the "
                "later records are not affected",
                *(self._root, hole.size, hole.offset, hole.reason),
            )
        holes = self._hole_table.holes
        return Recovered(text, cut_bytes, self._walk.last_store_timestamp_ms, self._walk.last_record_offset, holes)

    def _cut_units(self, queue: AnyQueue, end_offset: int) -> int:
        """Remove a queue's units (entries) that point to records beyond the log's end. Returns the number of removed
        units.

        On return the removed units are also gone from the disk. New records will be stored at the physical offsets to
        which the removed units point, so the next recovery must not find these units.
        """
        count = queue.truncate_from(end_offset)
        if count or (isinstance(queue, ConsumeQueue) and queue.has_lost_units):
            for path in sorted(queue.take_dirty()):
                disk.flush_path(path)
        return count

    def _write_down_holes(self, end_offset: int) -> None:
        """Write the file `holes`: the damaged ranges (holes) of the scanned part of the log, and the earlier holes that
        still exist."""
        start = self._log.min_offset
        before = [
            hole
            for hole in self._hole_table.from_offset(start)
            if hole.end_offset <= min(self._walk.began_at, end_offset) and self._end.is_hole(hole)
        ]
        self._hole_table.replace(before + self._walk.holes, self._log.file_size)

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
        text = f"opened after {'a crash' if self._after_crash else 'a clean stop'}: {self._walk.walked} records checked"
        if self._redispatch.queued:
            text += f", {self._redispatch.queued} put into their queues again"
        if self._redispatch.mended:
            text += f", {self._redispatch.mended} damaged consume-queue entries rebuilt"
        if self._walk.blanks:
            text += f", {self._walk.blanks} damaged file ends written again"
        if self._hole_table.holes:
            text += f", {len(self._hole_table.holes)} damaged ranges kept"
        if units_cut:
            text += f", {units_cut} consume-queue entries after the log's end removed"
        if cut_bytes:
            text += f", {cut_bytes} bytes cut after physical offset {end_offset}, the end of the last good record"
        return text

    def _walk_newest(self) -> int:
        """Scan the newest part of the log, and return the log's end. Before the scan, find the ends of the queues, and
        load the producers and transactions of the older records. Raises QueueGapError if a queue lacks units of older
        records."""
        snapshot = self._snapshot if self._snapshot is not None and self._snapshot.fits(self._reader) else None
        if self._after_crash:
            self._cut_queues_at(self._walk_start(snapshot))
        else:
            for queue in self._queues:
                queue.recover()
                self._redispatch.ends.queues_reach(queue.max_physical_offset)
        misplaced = self._reset_misplaced_queues()
        self._queues.finish_deletions(self._log.min_offset)
        if misplaced:
            raise QueueGapError(misplaced)
        start = self._walk_start(snapshot)
        self._earlier.learn(start, snapshot)
        if snapshot is not None:
            last = dispatch_view(self._reader.log_bytes(snapshot.last, snapshot.end))
            self._walk.note(0, snapshot.last, last.store_timestamp_ms)
        return self._walk.walk_from(
            start, lambda: self._earlier.learn(start, snapshot), knows_ends=snapshot is not None, is_whole=False
        )

    def _walk_whole(self) -> int:
        """Scan the whole log from its first record on, and rebuild all consume queues that lack entries (units).
        Returns the log's end."""
        self._redispatch.start_again()
        self._halves.clear()
        start = self._log.min_offset
        if self._after_crash:
            self._cut_queues_at(start)
        return self._walk.walk_from(start, lambda: None, knows_ends=True, is_whole=True)

    def _reset_misplaced_queues(self) -> str:
        """Empty the queues whose files belong to another queue, so that these queues are rebuilt. Returns a text that
        names the queues."""
        found = []
        for queue in self._queues.plain:
            misplaced = misplaced_file(queue, self._reader)
            if misplaced:
                queue.truncate_to(0)
                found.append(misplaced)
        return "; ".join(found)

    def _cut_queues_at(self, physical_offset: int) -> None:
        """Remove from all queues the entries (units) that point to records at or after `physical_offset`. The log scan
        of recovery adds these entries again."""
        for queue in self._queues:
            queue.recover_until(physical_offset)

    def _walk_start(self, snapshot: Snapshot | None) -> int:
        """Return the physical offset at which the log scan begins. `snapshot`: the snapshot if it matches the log, else
        None.

        If the store has a snapshot that does not match, the log's bytes have changed somewhere after the snapshot's
        tail. The scan then begins at the tail's file or before it, so that recovery finds this damage before a reader
        does.
        """
        if snapshot is not None:
            return snapshot.end
        first = self._first_file_to_walk()
        if self._snapshot is not None:
            first = min(first, max(bisect_right(self._log.starts, self._snapshot.tail) - 1, 0))
        return self._log.starts[first]

    def _first_file_to_walk(self) -> int:
        """Return the index of the log file at which a scan without a snapshot begins: the newest file whose first
        record matches (spec §5, file match test). Return 0 if no file matches."""
        for index in range(len(self._log.starts) - 1, 0, -1):
            data = self._files.data(self._log.starts[index])
            size, good = check_record(data, 0, **self._files.checks)
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
            elif first.physical_offset <= self._redispatch.ends.dispatched_end:
                return index
        return 0
