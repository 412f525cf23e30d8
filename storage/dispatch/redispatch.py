"""Dispatches log records again during a recovery: adds missing entries (units) to the consume queues, and producers to
the dedup table.

Records are dispatched one at a time, or as a block (record_blocks.py) with the same result. A block is refused if
anything in it is out of the ordinary: a gap, offsets out of order, an inner batch, a record in several queues, or a
topic deleted in the middle of the block. A block is refused before anything is changed, and its records must be
dispatched one at a time. How a record is dispatched depends on the record itself, not on this store's settings, because
RocketMQ may have written the record.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raymq.common.protocol.store import Hole
from raymq.records.format.dispatch import DispatchView
from raymq.records.format.layout import MIN_RECORD_SIZE, SYS_FLAG_INNER_BATCH
from raymq.records.kernels.fields import Ints
from raymq.records.logfiles.log_reader import LogReader
from storage.dispatch.batch_dispatch import QueueGapError, belongs_to_batches, put_batch
from storage.dispatch.block_dedup import producers_of, remember_producer
from storage.dispatch.dedup import DedupTable
from storage.dispatch.delivery_progress import DeliveryProgress
from storage.dispatch.multi_dispatch import QueueUnit, is_dispatched, light_queue_units
from storage.dispatch.place_check import PlaceCheck
from storage.dispatch.queue_check import leads_to_own, wrong_rows
from storage.dispatch.queue_ends import MissingUnits, RecoveredEnds
from storage.dispatch.record_blocks import Block, is_queued
from storage.log.holes import share_among_holes
from storage.queue.consume_queue import ConsumeQueue
from storage.queue.queue_table import QueueTable

logger = logging.getLogger(__name__)


class _Addition(NamedTuple):
    """The rows of a block whose units are missing in one queue, and the rows whose units the queue already has."""

    missing: MissingUnits
    rows: Ints
    # The rows (records) of the block whose entries (units) the queue already has. They come before the rows in `rows`,
    # whose entries are missing in the queue.
    known: Ints


class _Unit(NamedTuple):
    """A queue unit that points to a damaged range of the log (a hole)."""

    place: QueueUnit
    physical_offset: int
    size: int
    tags_code: int


class Redispatch:
    """Dispatches the log records of one recovery to the queues, the dedup table and the delivery progress. Not
    thread-safe."""

    def __init__(
        self,
        queues: QueueTable,
        dedup: DedupTable,
        deliveries: DeliveryProgress,
        *,
        after_crash: bool,
        reader: LogReader | None = None,
    ) -> None:
        """`reader` reads the log records to which the entries (units) of consume queues point. If it is None, the
        entries are not compared with the log."""
        self._queues, self._dedup, self._deliveries, self._reader = queues, dedup, deliveries, reader
        self.ends = RecoveredEnds(queues, after_crash=after_crash)
        self.places = PlaceCheck(queues, self.ends, reader)
        # Number of entries (units) that this recovery added to consume queues.
        self.queued = 0
        # Number of queue units that did not point to their records, and that this recovery rewrote.
        self.mended = 0
        # Damaged records (holes) that no queue unit points to. If a unit is missing in a queue, one of these holes may
        # be the unit's record.
        self._unplaced: list[Hole] = []
        # True if the consume queues are known to contain an entry (unit) for every log record before the start of this
        # recovery's log scan.
        self.knows_ends = False

    def start_again(self) -> None:
        """Discard the queue units that are not yet written, so that the recovery can scan the log again."""
        self.ends.forget()
        self._unplaced.clear()
        self.queued = 0

    def finish(self) -> None:
        """Write the queue units that recovery found to be missing, and that are still in memory, to the queues'
        files."""
        self.ends.write()

    def put_record(self, view: DispatchView, physical_offset: int, *, may_fill_gaps: bool) -> None:
        """Add a record's entry (unit) to each of the record's queues that lacks it. Also record the record's producer.
        The record must be intact.

        Raises QueueGapError if entries of earlier records are missing, unless `may_fill_gaps`. Gaps may be filled if
        the scan started at the log's first record: the records of the missing entries are then certainly lost.
        """
        if not is_queued(view.sys_flag):
            return
        if view.sys_flag & SYS_FLAG_INNER_BATCH or self._queues.holds_batches(view.topic, view.queue_id):
            if not self.ends.was_deleted((view.topic, view.queue_id), physical_offset):
                self.queued += put_batch(self._queues, view, physical_offset, may_fill_gaps=may_fill_gaps)
                if belongs_to_batches(self._queues, view):
                    self.remember_record(view, physical_offset)
            return
        own = QueueUnit((view.topic, view.queue_id), view.queue_offset)
        if self._put_unit(own, view, physical_offset, may_fill_gaps=may_fill_gaps):
            self.remember_record(view, physical_offset)
        for unit in light_queue_units(view, physical_offset):
            if self._queues.holds_batches(*unit.key) or self._may_be_stale(unit, view):
                continue
            self._put_unit(unit, view, physical_offset, may_fill_gaps=may_fill_gaps)

    def put_hole(self, hole: Hole, view: DispatchView | None, place: QueueUnit | None = None) -> None:
        """Dispatch a damaged record (a hole). `view` is the view of its header; None if the header cannot be trusted.

        The record's queue unit stays, or is created if it is the next unit of its queue. So the queue's offsets have no
        gap, and readers find the remains of the record.

        `place` is used if `view` is None: a queue and a queue offset that may belong to this damaged record, or to
        another record. The unit written for `place` states a size that is smaller than any message's.
        """
        if view is None and place is not None:
            units = [_Unit(place, hole.offset, MIN_RECORD_SIZE, 0)]
        elif view is None:
            # The consume-queue entries (units) that, before the crash, pointed into the damaged range (hole).
            units = self._lost_units(hole)
        elif self.ends.was_deleted((view.topic, view.queue_id), hole.offset) or not is_queued(view.sys_flag):
            return
        else:
            self.remember_record(view, hole.offset)
            if view.sys_flag & SYS_FLAG_INNER_BATCH:
                with suppress(QueueGapError):
                    self.queued += put_batch(self._queues, view, hole.offset, may_fill_gaps=False)
                return
            own = QueueUnit((view.topic, view.queue_id), view.queue_offset)
            units = [
                _Unit(unit, hole.offset, hole.size, view.tags_code)
                for unit in (own, *light_queue_units(view, hole.offset))
            ]
        if not [unit for unit in units if self._put_if_next(unit)]:
            self._unplaced.append(hole)

    def _put_if_next(self, unit: _Unit) -> bool:
        """Put a unit that points to damaged bytes into its queue, if it is the queue's next unit. Returns False if the
        queue ends before the unit's queue offset."""
        topic, queue_id = unit.place.key
        if self._queues.holds_batches(topic, queue_id) or self.ends.was_deleted(unit.place.key, unit.physical_offset):
            return False
        missing = self.ends.missing_in(topic, queue_id)
        if unit.place.queue_offset == missing.next_offset and unit.physical_offset >= missing.reach:
            missing.add(unit.physical_offset, unit.size, unit.tags_code)
            self.queued += 1
        return unit.place.queue_offset < missing.next_offset

    def _lost_units(self, hole: Hole) -> list[_Unit]:
        """Return the queue units that pointed into a damaged range of the log (a hole) before the crash, in log order.
        `BaseConsumeQueue.recover_until` has removed these units, because their content was not trustworthy."""
        found: list[_Unit] = []
        for queue in self._queues.plain:
            begins, sizes = (queue.lost_units[name].astype(np.int64) for name in ("physical_offset", "size"))
            inside = (begins >= hole.offset) & (sizes > 0) & (begins + sizes <= hole.end_offset)
            for row in np.flatnonzero(inside).tolist():
                place = QueueUnit(queue.key, queue.lost_units_from + row)
                found.append(_Unit(place, int(begins[row]), int(sizes[row]), int(queue.lost_units[row]["tags_code"])))
        return sorted(found, key=lambda unit: unit.physical_offset)

    def _may_be_stale(self, unit: QueueUnit, view: DispatchView) -> bool:
        """True if the record's offset in an additional queue may be stale, copied from another message
        (storage.dispatch.multi_dispatch). This is possible if the offset lies before the queue's first offset."""
        queue = self._queues.get_plain(*unit.key)
        return not is_dispatched(view.topic) and queue is not None and unit.queue_offset < queue.first_offset

    def _put_unit(self, unit: QueueUnit, view: DispatchView, physical_offset: int, *, may_fill_gaps: bool) -> bool:
        """Put a record's entry (unit) for one queue into this queue, if the queue lacks the entry. If the queue has an
        entry at this offset, correct it if it is wrong. Returns False if the queue was deleted after the record was
        stored."""
        (topic, queue_id), queue_offset = unit
        missing = self.ends.find(unit.key)
        if missing is None:
            if self.ends.was_deleted(unit.key, physical_offset):
                return False
            missing = self.ends.missing_in(topic, queue_id)
        gap = queue_offset - missing.next_offset
        if queue_offset < missing.queue.first_offset and not may_fill_gaps:
            raise QueueGapError(f"queue {topic}:{queue_id} has lost the entry of offset {queue_offset}")
        if gap >= 0:
            if gap > 0 and not self._lead_to_holes(missing, gap, physical_offset, may_fill_gaps=may_fill_gaps):
                self._skip_lost_units(missing, unit, may_fill_gaps=may_fill_gaps)
            missing.add(physical_offset, view.size, view.tags_code)
            self.queued += 1
        elif queue_offset < missing.queue.next_offset:
            rows = np.array([[physical_offset], [view.size], [view.tags_code]], np.int64)
            self._mend_units(missing.queue, queue_offset, *rows)
        return True

    def _mend_units(self, queue: ConsumeQueue, queue_offset: int, begins: Ints, sizes: Ints, codes: Ints) -> None:
        """Compare each unit of a queue, from `queue_offset` on, with the record to which it should point. If a unit
        points to another record, the disk has changed the unit: rewrite it."""
        if self._reader is None:
            return
        first = max(queue_offset, queue.first_offset)
        done = first - queue_offset
        while done < len(begins) and queue_offset + done < queue.next_offset:
            units = queue.units(queue_offset + done, len(begins) - done)
            if not len(units):
                return
            for row in wrong_rows(units, *(column[done : done + len(units)] for column in (begins, sizes, codes))):
                at = done + row
                if not leads_to_own(queue, queue_offset + at, self._reader):
                    unit = int(begins[at]), int(sizes[at]), int(codes[at])
                    self.mended += queue.put_unit_at(queue_offset + at, *unit)
            done += len(units)

    def remember_record(self, view: DispatchView, physical_offset: int) -> None:
        """Record the origin of a scanned record, so that it is not stored again. If the scheduler delivered the record
        as a delayed message, it is recorded in the delivery progress. Otherwise the record's producer is recorded in
        the dedup table."""
        was_deleted = self._queues.was_deleted_after((view.topic, view.queue_id), physical_offset)
        remember_producer(view, None if was_deleted else self._dedup, self._deliveries)

    def put_block(
        self, block: Block, physical_offset: int, *, may_fill_gaps: bool, believes_places: bool = True
    ) -> bool:
        """Put all records of a block into their queues, as `put_record` does for one record. The block's first record
        is at `physical_offset`.

        Returns False, and puts no record, if the caller must put the records one at a time. With
        `believes_places=False`, it also returns False if a record of the block is a misfit: the record does not match
        the queue that it names (`PlaceCheck`).
        """
        if not block.is_ordinary:
            return False
        # True for each record that has an entry (unit) in a consume queue. Records of a queue that was deleted later
        # are not included.
        counted = block.is_queued()
        # Before changing anything, check for every queue that its records in the block are in the order of their queue
        # offsets.
        additions: list[_Addition] = []
        for rows in block.by_queue(counted):
            if self._were_deleted(block, rows, physical_offset):
                last = physical_offset + int(block.starts[rows[-1]])
                if not (believes_places or self.places.is_believed_deleted(block.queue_of(rows), last)):
                    return False
                counted[rows] = False
                continue
            addition = self._addition(block, rows, physical_offset, may_fill_gaps=may_fill_gaps)
            if addition is None or not (believes_places or self._all_fit(block, rows, addition, physical_offset)):
                return False
            additions.append(addition)
        if not self._remember_rows(block, counted, physical_offset):
            return False
        for missing, rows, known in additions:
            self._mend_known(block, missing.queue, known, physical_offset)
            missing.add_many(block.starts[rows] + physical_offset, block.sizes[rows], block.tags_codes[rows])
            self.queued += len(rows)
        return True

    def remember_block(self, block: Block, physical_offset: int) -> bool:
        """Record the producers of all records of a block, as `remember_record` does for one record. Returns False, and
        records nothing, if the caller must record the producers one record at a time."""
        if (block.sys_flags & SYS_FLAG_INNER_BATCH).any():
            return False
        return self._remember_rows(block, np.ones(len(block.starts), bool), physical_offset)

    def _were_deleted(self, block: Block, rows: Ints, physical_offset: int) -> bool:
        """True if the block's records at `rows`, which belong to one queue, were all stored before this queue was
        deleted."""
        key = block.queue_of(rows)
        last = physical_offset + int(block.starts[rows[-1]])
        return self.ends.find(key) is None and self.ends.was_deleted(key, last)

    def _addition(self, block: Block, rows: Ints, physical_offset: int, *, may_fill_gaps: bool) -> _Addition | None:
        """Return the rows (records of `block`) whose units are missing in their queue, if these units can be appended
        together. All `rows` belong to one queue. Returns None if the caller must add the records one by one."""
        topic, queue_id = block.queue_of(rows)
        # Single messages are not appended to a queue of inner batches.
        if self._queues.holds_batches(topic, queue_id):
            return None
        # If the topic was deleted between the first and the last of these records, the records belong to two queues of
        # the same name.
        if self.ends.was_deleted((topic, queue_id), physical_offset + int(block.starts[rows[0]])):
            return None
        missing = self.ends.missing_in(topic, queue_id)
        offsets = block.queue_offsets[rows]
        # Number of records in `rows`, from the first record on, for which the queue already has entries (units).
        # Negative if the queue also lacks entries for records before the first one.
        known = missing.next_offset - int(offsets[0])
        # True if each row's queue offset is one more than the queue offset of the previous row.
        in_order = offsets[-1] - offsets[0] == len(offsets) - 1 and bool((offsets[1:] > offsets[:-1]).all())
        # True if the queue has lost units (entries) at its beginning: its first offset is higher than the queue offset
        # of some record in `rows`.
        lost = not may_fill_gaps and offsets.min() < missing.queue.first_offset
        # Rows (records) whose queue offsets are not consecutive can be skipped, but only if the queue already has units
        # for all of the rows.
        if lost or known < 0 or not (in_order or offsets.max() < missing.next_offset):
            return None
        known = min(known, len(rows))
        return _Addition(missing, rows[known:], rows[:known]) if in_order else _Addition(missing, rows[:0], rows[:0])

    def _all_fit(self, block: Block, rows: Ints, addition: _Addition, physical_offset: int) -> bool:
        """True if none of the block's records at `rows`, which belong to one queue, is a misfit. A misfit is a record
        whose queue, or whose offset in the queue, may have been changed by the disk."""
        missing, new, known = addition
        # `known`: rows (records) whose queue units exist. `new`: rows whose units must be added. If a row is in
        # neither, the queue offsets of the rows are out of order.
        if len(known) + len(new) < len(rows):
            return False
        return self.places.all_fit(block, known, new, missing.queue, physical_offset)

    def _mend_known(self, block: Block, queue: ConsumeQueue, rows: Ints, physical_offset: int) -> None:
        """Compare the units (entries) that the queue already has with their records in the block, and rewrite wrong
        units (`_mend_units`). `rows`: the indices of these records in the block, in queue order."""
        if len(rows):
            columns = block.starts[rows] + physical_offset, block.sizes[rows].astype(np.int64), block.tags_codes[rows]
            self._mend_units(queue, int(block.queue_offsets[rows[0]]), *columns)

    def _lead_to_holes(self, missing: MissingUnits, count: int, physical_offset: int, *, may_fill_gaps: bool) -> bool:
        """Add `count` units to a queue. They point to damaged records (holes) before `physical_offset`.

        Returns False, and adds nothing, if the holes are too small for this number of records. Also returns False if
        the missing records may lie before the start of the scan.
        """
        if not (self.knows_ends or may_fill_gaps):
            return False
        shared = share_among_holes(
            [hole for hole in self._unplaced if missing.reach <= hole.offset < physical_offset], count
        )
        if not shared:
            return False
        for hole, places in shared:
            for begin, size in places:
                missing.add(begin, size, 0)
            if len(places) == 1:
                self._unplaced.remove(hole)
        logger.error("%d offsets of queue %s:%d point to damaged records", count, *missing.queue.key)
        self.queued += count
        return True

    def _skip_lost_units(self, missing: MissingUnits, unit: QueueUnit, *, may_fill_gaps: bool) -> None:
        """Leave a gap in the queue, because the records of its next offsets are lost. The queue continues with `unit`.
        Raises QueueGapError unless `may_fill_gaps`."""
        queue, end = "{}:{}".format(*unit.key), missing.next_offset
        if not may_fill_gaps:
            raise QueueGapError(
                f"queue {queue} ends at offset {end}, but the next record in the log has offset {unit.queue_offset}"
            )
        missing.write()
        if end:
            logger.error("the records of queue %s from offset %d to %d are lost", queue, end, unit.queue_offset - 1)
        missing.queue.start_at(unit.queue_offset)

    def _remember_rows(self, block: Block, counted: NDArray[np.bool_], physical_offset: int) -> bool:
        """Record the producers of the block's records for which `counted` is true. Producers of ordinary records are
        recorded in the dedup table. The scheduler's deliveries are recorded in the delivery progress.

        Returns False, and changes nothing, if a record belongs to a deleted topic. Also returns False if the dedup
        table would evict producers, because the result would then depend on the order of the records.
        """
        found = producers_of(block, counted)
        was_deleted = any(self._queues.has_deletions_after(topic, physical_offset) for topic in found.topics)
        if was_deleted or not found.fits_into(self._dedup):
            return False
        found.remember_in(self._dedup, self._deliveries)
        return True
