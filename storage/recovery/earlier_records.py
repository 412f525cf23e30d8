"""Collects facts about the records before the start of a log scan: the recent producers, whose repeated sends must be
recognised, and the open transactions.

A snapshot contains these facts. Without a snapshot, the log file before the scan is read for the producers. All files
before the scan are read for the transactions, if the store has any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Final

from raymq.common.names import HALF_TOPIC
from raymq.records.format.check import check_record
from raymq.records.format.dispatch import DispatchView, dispatch_view
from storage.dispatch.batch_dispatch import QueueGapError
from storage.dispatch.half_messages import HALF_QUEUE_ID
from storage.dispatch.multi_dispatch import QueueKey, QueueUnit
from storage.dispatch.place_check import units_agree
from storage.dispatch.record_blocks import Block
from storage.dispatch.redispatch import Redispatch
from storage.parts import StoreParts
from storage.recovery.claims import one_bit_away, raw_topic_of
from storage.recovery.log_end import LogEnd
from storage.recovery.log_files import LogFiles, placed_view
from storage.recovery.snapshot import Snapshot

MISFITS_MAX: Final = 1000
"""Maximum number of records that recovery examines because they do not match their queues. For each, recovery searches
the true place (queue and queue offset). Counts only records before the start of the log scan. If more records do not
match, the queues must have lost their entries (units), so recovery trusts the records."""


class EarlierRecords:
    """The records of a log before the start of recovery's log scan."""

    def __init__(self, parts: StoreParts, files: LogFiles, end: LogEnd, redispatch: Redispatch) -> None:
        self._log, self._queues, self._reader = parts.log, parts.queues, parts.reader
        self._dedup, self._halves = parts.dedup, parts.halves
        self._files, self._end, self._redispatch = files, end, redispatch
        self._misfits_left = MISFITS_MAX

    def learn(self, walk_from: int, snapshot: Snapshot | None) -> None:
        """Load the producers and the transactions of the records before the log scan. If there is a snapshot, the scan
        starts at the snapshot's end.

        Raises QueueGapError if a queue ends earlier than it did when the snapshot was taken.
        """
        if snapshot is not None:
            self._use_snapshot(snapshot)
            return
        index = self._log.starts.index(walk_from)
        if index > 0:
            # The log scan does not cover the file before its start: this file's records are neither checked nor put
            # into queues. Read the file only to learn which messages producers may send again.
            self._remember_producers(self._log.starts[index - 1])
            if self._queues.get(HALF_TOPIC, HALF_QUEUE_ID) is not None:
                for start in self._log.starts[:index]:
                    self._remember_transactions(start)

    def _use_snapshot(self, snapshot: Snapshot) -> None:
        """Load the producers and the transactions from the snapshot. Raises QueueGapError if a queue ends before the
        offset that the snapshot has for it."""
        is_deleted = self._deletions_after(snapshot)
        for topic, queue_id, next_offset in snapshot.queues:
            queue = self._queues.get(topic, queue_id)
            found = 0 if queue is None else queue.next_offset
            if found < next_offset and not is_deleted((topic, queue_id)):
                self._redispatch.ends.queues_were_lost = True
                raise QueueGapError(
                    f"queue {topic}:{queue_id} ends at offset {found}, but had reached offset {next_offset} before"
                )
        for row in snapshot.producers:
            if not is_deleted((row.topic, row.queue_id)):
                self._dedup.load_row(row)
        self._halves.load(snapshot.transactions)

    def let_queues_reach(self, snapshot: Snapshot, end_offset: int) -> None:
        """Extend rebuilt queues to the ends in the snapshot. This is needed if the log no longer contains any message
        of a queue: the log then does not show the queue's end."""
        if snapshot.end > end_offset or not snapshot.fits(self._reader):
            return
        is_deleted = self._deletions_after(snapshot)
        for topic, queue_id, next_offset in snapshot.queues:
            if not is_deleted((topic, queue_id)) and not self._queues.holds_batches(topic, queue_id):
                queue = self._queues.get_or_create(topic, queue_id)
                if queue.next_offset < next_offset:
                    queue.start_at(next_offset)

    def _deletions_after(self, snapshot: Snapshot) -> Callable[[QueueKey], bool]:
        """Return a function that returns True for a queue that was deleted after the log offset at which the snapshot
        ends."""

        @cache
        def is_deleted(key: QueueKey) -> bool:
            # A clean stop of this store leaves no records after the snapshot. If a queue has records there, RocketMQ
            # has written them.
            here = self._queues.was_deleted_after(key, snapshot.end - 1)
            return here or self._redispatch.ends.was_deleted(key, snapshot.end)

        return is_deleted

    def _remember_producers(self, start: int) -> None:
        """Add the producers of a log file's records to the dedup table."""

        def remember(block: Block, physical_offset: int) -> bool:
            return self._is_believed(block, physical_offset) and self._redispatch.remember_block(block, physical_offset)

        for view, record, physical_offset in self._records(start, remember):
            placed = view
            if self._misfits_left and self._redispatch.places.is_misfit(view, physical_offset):
                self._misfits_left -= 1
                placed = self._by_its_unit(view, record, physical_offset)
            self._redispatch.remember_record(placed, physical_offset)

    def _records(
        self, start: int, take: Callable[[Block, int], bool]
    ) -> Iterator[tuple[DispatchView, memoryview, int]]:
        """Yield the intact records of a log file one by one, each as its view, its bytes and its physical offset. If
        possible, many ordinary records are read together as a block. `take` receives each block and the block's
        physical offset.

        If `take` returns True, the records of the block are not yielded. If it returns False, they are yielded one by
        one.
        """
        data, position = self._files.data(start), 0
        while True:
            block = self._files.block(start, position, check_crc=False)
            if block is not None and take(block, start + position):
                position += block.length
                continue
            until = self._files.singles_end(position)
            while position < until:
                size, good = check_record(data, position, check_crc=False)
                if not good or size <= 0:
                    behind = self._end.resume_in_file(start, position)
                    if behind is None:
                        return
                    position = behind
                    continue
                yield dispatch_view(data, position), data[position : position + size], start + position
                position += size

    def _is_believed(self, block: Block, physical_offset: int) -> bool:
        """True if the records of a block can be trusted. Otherwise the caller must compare each record with its queue
        unit."""
        return not self._misfits_left or units_agree(self._queues, block, physical_offset)

    def _by_its_unit(self, view: DispatchView, record: memoryview, physical_offset: int) -> DispatchView:
        """Return the view of a record that lies before the log scan, with the record's true place (queue and queue
        offset).

        Normally the true place is the place that is written in the record. But the disk may have changed one bit of it.
        If another place differs in one bit, and the consume-queue entry (unit) at that place points to the record, that
        place is the true one.
        """
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
        """Load the half messages of a log file that recovery does not scan, and the records that ended transactions.
        These half messages may be older than all scanned records."""
        data = self._files.data(start)

        def note(block: Block, physical_offset: int) -> bool:
            for at in block.starts[block.of_transactions()].tolist():
                position = physical_offset - start + at
                view = dispatch_view(data, position)
                self._note_transaction(view, data[position : position + view.size], physical_offset + at)
            return True

        for view, record, physical_offset in self._records(start, note):
            self._note_transaction(view, record, physical_offset)

    def _note_transaction(self, view: DispatchView, record: memoryview, physical_offset: int) -> None:
        self._halves.note(placed_view(view, physical_offset), record)
