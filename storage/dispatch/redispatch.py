"""Dispatches the records of a recovery again: missing units to the queues, producers to the dedup table.

Records come one at a time, or as a block (record_blocks.py) with the same result. A block with anything out of the
ordinary (a gap, a topic deleted in its middle, offsets out of order, an inner batch, a record in several queues) is
refused before anything is changed; its records have to come one at a time. The records tell what they are, not this
store's settings: RocketMQ may have written them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raymq.common.protocol.store import Hole
from raymq.records.format.dispatch import DispatchView
from raymq.records.format.layout import MIN_RECORD_SIZE, SYS_FLAG_INNER_BATCH
from raymq.records.kernels.fields import Ints
from raymq.records.logfiles.log_reader import PRE_BLANK_SIZE, LogReader
from storage.dispatch.batch_dispatch import QueueGapError, belongs_to_batches, put_batch
from storage.dispatch.block_dedup import producers_of, remember_producer
from storage.dispatch.dedup import DedupTable
from storage.dispatch.delivery_progress import DeliveryProgress
from storage.dispatch.multi_dispatch import QueueKey, QueueUnit, is_dispatched, units_elsewhere
from storage.dispatch.queue_check import leads_to_own, wrong_rows
from storage.dispatch.record_blocks import Block, is_queued
from storage.queue.consume_queue import ConsumeQueue
from storage.queue.queue_table import QueueTable

logger = logging.getLogger(__name__)

_UNITS_HELD: Final = 4096
"""Missing units of a queue are written when there are so many."""


class _Missing:
    """Units found to be missing at the end of one queue, in order, not written yet."""

    def __init__(self, queue: ConsumeQueue) -> None:
        self.queue = queue
        # The physical offset at which the last record of the queue ends, these units included.
        self.reach = queue.max_physical_offset
        self._count = 0
        # Units in pieces, as columns: physical offsets, sizes, tags codes.
        self._pieces: list[tuple[Ints, Ints, Ints]] = []
        # Units behind the pieces, which came one at a time.
        self._rows: list[tuple[int, int, int]] = []

    @property
    def next_offset(self) -> int:
        """The queue's next offset, once these units are written."""
        return self.queue.next_offset + self._count

    def add(self, physical_offset: int, size: int, tags_code: int) -> None:
        """Add one unit."""
        self._rows.append((physical_offset, size, tags_code))
        self.reach = physical_offset + size
        self._count += 1
        self._write_if_many()

    def add_many(self, physical_offsets: Ints, sizes: NDArray[np.int32], tags_codes: Ints) -> None:
        """Add units given as columns."""
        if len(sizes):
            self._join_rows()
            self._pieces.append((physical_offsets, sizes.astype(np.int64), tags_codes))
            self.reach = int(physical_offsets[-1]) + int(sizes[-1])
            self._count += len(sizes)
            self._write_if_many()

    def write(self) -> None:
        """Write the units to the queue's files and forget them."""
        if self._count:
            self._join_rows()
            offsets, sizes, codes = map(np.concatenate, zip(*self._pieces, strict=True))
            self.queue.reserve(self._count)
            self.queue.append_scattered(offsets, sizes.astype(np.int32), codes)
            self._count = 0
            self._pieces.clear()

    def _join_rows(self) -> None:
        """Make the units that came one at a time a piece."""
        if self._rows:
            columns = np.array(self._rows, np.int64)
            self._pieces.append((columns[:, 0], columns[:, 1], columns[:, 2]))
            self._rows.clear()

    def _write_if_many(self) -> None:
        if self._count >= _UNITS_HELD:
            self.write()


class _Addition(NamedTuple):
    """The rows of a block that are missing in one queue."""

    missing: _Missing
    rows: Ints
    # The rows before these, which are in the queue.
    known: Ints


class _Unit(NamedTuple):
    """A unit that leads to damaged bytes."""

    place: QueueUnit
    physical_offset: int
    size: int
    tags_code: int


class Redispatch:
    """The dispatch of one recovery to the queues, the dedup table and the delivery progress. For one thread."""

    def __init__(
        self,
        queues: QueueTable,
        dedup: DedupTable,
        deliveries: DeliveryProgress,
        *,
        after_crash: bool,
        reader: LogReader | None = None,
    ) -> None:
        """`reader` reads the records that units lead to; None: units are not compared with the log."""
        self._queues, self._dedup, self._deliveries, self._reader = queues, dedup, deliveries, reader
        self._after_crash = after_crash
        # The missing units of each queue that a record named, of queues of single messages only.
        self._missing: dict[tuple[str, int], _Missing] = {}
        # The end of the last record that a queue points to; after a crash nobody knows it.
        self.dispatched_end = -1
        # Set by recovery when a queue has less than the snapshot says: all queues are made again then.
        self.queues_were_lost = False
        # The units that were put into queues.
        self.queued = 0
        # The units that did not lead to their records, and were made again.
        self.mended = 0
        # The damaged records that have no unit yet. Each may be the one that a queue lacks.
        self._unplaced: list[Hole] = []
        # True if no record before the walk can lack a unit.
        self.knows_ends = False

    def queues_reach(self, physical_offset: int) -> None:
        """Note that a queue points to records up to `physical_offset`."""
        self.dispatched_end = max(self.dispatched_end, physical_offset)

    def start_again(self) -> None:
        """Forget the units that were not written."""
        self._missing.clear()
        self._unplaced.clear()
        self.queued = 0

    def finish(self) -> None:
        """Write the units that are left."""
        for missing in self._missing.values():
            missing.write()

    def put_record(self, view: DispatchView, physical_offset: int, *, may_fill_gaps: bool) -> None:
        """Put a good record into the queues it belongs to, if it is missing there, and remember its producer.

        QueueGapError when units before it are missing, unless gaps may be filled: then the walk started at the log's
        first record, so that the records of missing units are lost.
        """
        if not is_queued(view.sys_flag):
            return
        if view.sys_flag & SYS_FLAG_INNER_BATCH or self._queues.holds_batches(view.topic, view.queue_id):
            if not self.was_deleted(view.topic, physical_offset):
                self.queued += put_batch(self._queues, view, physical_offset, may_fill_gaps=may_fill_gaps)
                if belongs_to_batches(self._queues, view):
                    self.remember_record(view, physical_offset)
            return
        own = QueueUnit((view.topic, view.queue_id), view.queue_offset)
        if self._put_unit(own, view, physical_offset, may_fill_gaps=may_fill_gaps):
            self.remember_record(view, physical_offset)
        for unit in units_elsewhere(view, physical_offset):
            if self._queues.holds_batches(*unit.key) or self._may_be_stale(unit, view):
                continue
            self._put_unit(unit, view, physical_offset, may_fill_gaps=may_fill_gaps)

    def put_hole(self, hole: Hole, view: DispatchView | None, place: QueueUnit | None = None) -> None:
        """Note a damaged record, and its `view` if its header can be believed. Its unit stays, or is made if it is the
        next one of its queue: so the queue's offsets have no gap, and a reader finds what is left of the record.

        With a `place`, which may be another damaged record's, the unit there leads to too few bytes for a message.
        """
        if view is None and place is not None:
            units = [_Unit(place, hole.offset, MIN_RECORD_SIZE, 0)]
        elif view is None:
            # After a crash: the units that led there before.
            units = self._lost_units(hole)
        elif self.was_deleted(view.topic, hole.offset) or not is_queued(view.sys_flag):
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
                for unit in (own, *units_elsewhere(view, hole.offset))
            ]
        if not [unit for unit in units if self._put_if_next(unit)]:
            self._unplaced.append(hole)

    def _put_if_next(self, unit: _Unit) -> bool:
        """Put a unit that leads to damaged bytes into its queue, if it is the next one there. False if the queue has
        not come so far."""
        topic, queue_id = unit.place.key
        if self._queues.holds_batches(topic, queue_id) or self.was_deleted(topic, unit.physical_offset):
            return False
        missing = self._missing_in(topic, queue_id)
        if unit.place.queue_offset == missing.next_offset and unit.physical_offset >= missing.reach:
            missing.add(unit.physical_offset, unit.size, unit.tags_code)
            self.queued += 1
        return unit.place.queue_offset < missing.next_offset

    def _lost_units(self, hole: Hole) -> list[_Unit]:
        """The units that led into a hole before the crash, in the order of the log. (`BaseConsumeQueue.recover_until`
        has removed them, as they may have been anything.)"""
        found: list[_Unit] = []
        for queue in self._queues.plain:
            begins, sizes = (queue.lost_units[name].astype(np.int64) for name in ("physical_offset", "size"))
            inside = (begins >= hole.offset) & (sizes > 0) & (begins + sizes <= hole.end_offset)
            for row in np.flatnonzero(inside).tolist():
                place = QueueUnit(queue.key, queue.lost_units_from + row)
                found.append(_Unit(place, int(begins[row]), int(sizes[row]), int(queue.lost_units[row]["tags_code"])))
        return sorted(found, key=lambda unit: unit.physical_offset)

    def _may_be_stale(self, unit: QueueUnit, view: DispatchView) -> bool:
        """True if an offset before its queue's beginning may be that of another message
        (storage.dispatch.multi_dispatch)."""
        queue = self._queues.get_plain(*unit.key)
        return not is_dispatched(view.topic) and queue is not None and unit.queue_offset < queue.first_offset

    def _put_unit(self, unit: QueueUnit, view: DispatchView, physical_offset: int, *, may_fill_gaps: bool) -> bool:
        """Put one unit of a record into a queue, if it is missing. False if the queue was deleted since."""
        (topic, queue_id), queue_offset = unit
        missing = self._missing.get(unit.key)
        if missing is None:
            if self.was_deleted(topic, physical_offset):
                return False
            missing = self._missing_in(topic, queue_id)
        gap = queue_offset - missing.next_offset
        if queue_offset < missing.queue.first_offset and not may_fill_gaps:
            raise QueueGapError(f"queue {topic}:{queue_id} has lost its offset {queue_offset}")
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
        """Compare the units of a queue from an offset on with the records that the log has for them, and make those
        again that lead elsewhere: the disk has changed them."""
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
        """Note the producer of a record."""
        was_deleted = self._queues.was_deleted_after(view.topic, physical_offset)
        remember_producer(view, None if was_deleted else self._dedup, self._deliveries)

    def is_misfit(self, view: DispatchView, physical_offset: int) -> bool:
        """True if a good record is not the next one of the queue that it names, nor the one that the queue has at its
        offset: a disk may have changed its queue offset, its queue id or its topic."""
        if not is_queued(view.sys_flag) or view.sys_flag & SYS_FLAG_INNER_BATCH:
            return False
        key = view.topic, view.queue_id
        if self._queues.holds_batches(*key):
            return True
        missing = self._missing.get(key)
        if missing is None and self._queues.was_deleted_after(view.topic, physical_offset):
            return False
        queue = self._queues.get_plain(*key)
        if queue is None or (missing is None and self.was_deleted(view.topic, physical_offset)):
            return view.queue_offset > 0 or self._is_complete_at(physical_offset)
        next_offset = queue.next_offset if missing is None else missing.next_offset
        if view.queue_offset >= next_offset:
            return view.queue_offset > next_offset or self._is_complete_at(physical_offset)
        if not queue.first_offset <= view.queue_offset < queue.next_offset:
            return True
        begins = np.array([physical_offset], np.int64)
        return self._leads_elsewhere(queue, view.queue_offset, begins) and (
            self._reader is not None and leads_to_own(queue, view.queue_offset, self._reader)
        )

    def units_behind(self, last: Mapping[QueueKey, int], start: int, end_offset: int) -> list[int]:
        """The physical offsets in [`start`, `end_offset`) of records with units that a crash left behind a queue's end,
        where the walk has put nothing; of each queue only the first. `last`: offsets of queues that count as put."""
        found = []
        for queue in self._queues.plain:
            missing = self._missing.get(queue.key)
            next_offset = queue.next_offset if missing is None else missing.next_offset
            next_offset = max(next_offset, last.get(queue.key, -1) + 1)
            units = queue.lost_units[max(next_offset - queue.lost_units_from, 0) :]
            begins = units["physical_offset"].astype(np.int64)
            inside = (begins >= start) & (begins < end_offset) & (units["size"] > 0)
            found += begins[np.flatnonzero(inside & (units["size"] != PRE_BLANK_SIZE))[:1]].tolist()
        return sorted(found)

    def _is_complete_at(self, physical_offset: int) -> bool:
        """True if every record at an offset should have its unit: the store stopped cleanly behind it."""
        return not (self._after_crash or self.queues_were_lost) and physical_offset < self.dispatched_end

    def _leads_elsewhere(self, queue: ConsumeQueue, queue_offset: int, begins: Ints) -> bool:
        """True if a unit of a queue, from an offset on, leads to another record than the one that names the offset.
        `begins`: the physical offsets of these records."""
        done = 0
        while done < len(begins):
            units = queue.units(queue_offset + done, len(begins) - done)
            if not len(units):
                break
            elsewhere = units["physical_offset"] != begins[done : done + len(units)]
            if (elsewhere & (units["size"] != PRE_BLANK_SIZE)).any():
                return True
            done += len(units)
        return False

    def put_block(
        self, block: Block, physical_offset: int, *, may_fill_gaps: bool, believes_places: bool = True
    ) -> bool:
        """`put_record` for the records of a block, the first of which is at `physical_offset`. False if nothing was
        done: the records have to come one at a time. So do misfits (`is_misfit`) without `believes_places`."""
        if not block.is_ordinary:
            return False
        # True for each record that has a unit, in a queue that was not deleted since.
        counted = block.is_queued()
        # Nothing is changed before every queue's rows are known to be in order.
        additions: list[_Addition] = []
        for rows in block.by_queue(counted):
            if self._were_deleted(block, rows, physical_offset):
                last = physical_offset + int(block.starts[rows[-1]])
                if not (believes_places or self._queues.was_deleted_after(block.queue_of(rows)[0], last)):
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

    def units_agree(self, block: Block, physical_offset: int) -> bool:
        """True if the queues' units say of each record of a block what the record says of its place."""
        for rows in block.by_queue(block.is_queued()):
            topic, queue_id = block.queue_of(rows)
            last = physical_offset + int(block.starts[rows[-1]])
            if self._queues.was_deleted_after(topic, last):
                continue
            queue, offsets = self._queues.get_plain(topic, queue_id), block.queue_offsets[rows]
            if queue is None or (np.diff(offsets) != 1).any():
                return False
            if offsets[0] < queue.first_offset or offsets[-1] >= queue.next_offset:
                return False
            if self._leads_elsewhere(queue, int(offsets[0]), block.starts[rows] + physical_offset):
                return False
        return True

    def remember_block(self, block: Block, physical_offset: int) -> bool:
        """`remember_record` for the records of a block. False if nothing was done."""
        if (block.sys_flags & SYS_FLAG_INNER_BATCH).any():
            return False
        return self._remember_rows(block, np.ones(len(block.starts), bool), physical_offset)

    def _were_deleted(self, block: Block, rows: Ints, physical_offset: int) -> bool:
        """True if all of `rows`, which are of one queue, belong to a topic that was deleted since."""
        topic, queue_id = block.queue_of(rows)
        last = physical_offset + int(block.starts[rows[-1]])
        return (topic, queue_id) not in self._missing and self.was_deleted(topic, last)

    def _addition(self, block: Block, rows: Ints, physical_offset: int, *, may_fill_gaps: bool) -> _Addition | None:
        """The units missing from the queue of `rows`, all of one queue, if they can be appended to it; None if the rows
        must be handled one by one."""
        topic, queue_id = block.queue_of(rows)
        # Single messages are not appended to a queue of inner batches.
        if self._queues.holds_batches(topic, queue_id):
            return None
        # The topic was deleted after the first row, and not after the last: the rows are of two queues.
        if self.was_deleted(topic, physical_offset + int(block.starts[rows[0]])):
            return None
        missing = self._missing_in(topic, queue_id)
        offsets = block.queue_offsets[rows]
        # So many of the rows the queue has already; negative if units before the first row are missing.
        known = missing.next_offset - int(offsets[0])
        # True if each offset follows the one before it.
        in_order = offsets[-1] - offsets[0] == len(offsets) - 1 and bool((offsets[1:] > offsets[:-1]).all())
        # The queue has lost units that are not at its end.
        lost = not may_fill_gaps and offsets.min() < missing.queue.first_offset
        # Rows out of order can be skipped only if the queue has all of them.
        if lost or known < 0 or not (in_order or offsets.max() < missing.next_offset):
            return None
        known = min(known, len(rows))
        return _Addition(missing, rows[known:], rows[:known]) if in_order else _Addition(missing, rows[:0], rows[:0])

    def _all_fit(self, block: Block, rows: Ints, addition: _Addition, physical_offset: int) -> bool:
        """True if none of the rows of one queue is a misfit."""
        queue, known = addition.missing.queue, addition.known
        if len(known) + len(addition.rows) < len(rows):
            return False
        if len(addition.rows) and self._is_complete_at(physical_offset + int(block.starts[addition.rows[0]])):
            return False
        if not len(known):
            return True
        first, last = (int(block.queue_offsets[row]) for row in (known[0], known[-1]))
        if first < queue.first_offset or last >= queue.next_offset:
            return False
        return not self._leads_elsewhere(queue, first, block.starts[known] + physical_offset)

    def _mend_known(self, block: Block, queue: ConsumeQueue, rows: Ints, physical_offset: int) -> None:
        """`_mend_units` for rows of a block that are in order, and that their queue has already."""
        if len(rows):
            columns = block.starts[rows] + physical_offset, block.sizes[rows].astype(np.int64), block.tags_codes[rows]
            self._mend_units(queue, int(block.queue_offsets[rows[0]]), *columns)

    def _missing_in(self, topic: str, queue_id: int) -> _Missing:
        """The missing units of a queue, which is made if there is none."""
        missing = self._missing.get((topic, queue_id))
        if missing is None:
            missing = self._missing[topic, queue_id] = _Missing(self._queues.get_or_create(topic, queue_id))
        return missing

    def was_deleted(self, topic: str, physical_offset: int) -> bool:
        """True if the topic of a record at `physical_offset` was deleted since, by this store or by RocketMQ."""
        if self._queues.was_deleted_after(topic, physical_offset):
            return True
        if self._after_crash or self.queues_were_lost or physical_offset >= self.dispatched_end:
            return False
        # A clean stop, other queues are complete, this topic has none: RocketMQ deleted it, and left no other trace.
        return not self._queues.has_topic(topic)

    def _lead_to_holes(self, missing: _Missing, count: int, physical_offset: int, *, may_fill_gaps: bool) -> bool:
        """Have the next `count` units of a queue lead to damaged records before a physical offset, as theirs must be
        among those. False if there are not so many of them, or the records may lie before the walk."""
        if not (self.knows_ends or may_fill_gaps):
            return False
        holes = [hole for hole in self._unplaced if missing.reach <= hole.offset < physical_offset]
        # Nobody knows how many records a larger hole had. Each has one; the largest one has all others.
        room = [1] * min(len(holes), count)
        if holes and count > len(holes):
            largest = max(range(len(holes)), key=lambda index: holes[index].size)
            room[largest] += count - len(holes)
            if room[largest] > holes[largest].size // MIN_RECORD_SIZE:
                return False
        if not holes:
            return False
        for hole, records in zip(holes, room, strict=False):
            step = hole.size // records
            for record in range(records):
                # So few bytes are never taken for a message, whatever they are: a whole one may lie at a wrong place.
                missing.add(hole.offset + step * record, min(step, MIN_RECORD_SIZE), 0)
            if records == 1:
                self._unplaced.remove(hole)
        logger.error("%d offsets of queue %s:%d lead to damaged records", count, *missing.queue.key)
        self.queued += count
        return True

    def _skip_lost_units(self, missing: _Missing, unit: QueueUnit, *, may_fill_gaps: bool) -> None:
        """Let the queue go on at `unit`, behind a gap. QueueGapError unless gaps may be filled."""
        queue, end = "{}:{}".format(*unit.key), missing.next_offset
        if not may_fill_gaps:
            raise QueueGapError(f"queue {queue} ends at offset {end}, but the log has its offset {unit.queue_offset}")
        missing.write()
        if end:
            logger.error("the records of %s from offset %d to %d are lost", queue, end, unit.queue_offset - 1)
        missing.queue.start_at(unit.queue_offset)

    def _remember_rows(self, block: Block, counted: NDArray[np.bool_], physical_offset: int) -> bool:
        """Note the producers of the records for which `counted` is true. False, and nothing is done, if one is of a
        deleted topic, or if producers would be forgotten: then their order matters."""
        found = producers_of(block, counted)
        was_deleted = any(self._queues.was_deleted_after(topic, physical_offset) for topic in found.topics)
        if was_deleted or not found.fits_into(self._dedup):
            return False
        found.remember_in(self._dedup, self._deliveries)
        return True
