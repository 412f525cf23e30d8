"""Compares records with the queues that they name, and with the entries (units) of these queues, before recovery or an
inspection of an open log (storage/scrub/inspector.py) trusts the records.

No checksum covers a record's queue offset, queue id and topic. A record fits if it is its queue's next record, or if
the queue's unit at its offset points to it. Otherwise the record is a misfit. storage/recovery/misfits.py then finds
out if the disk has changed the misfit's fields.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from raymq.common.errors import StoreCorruptError
from raymq.common.names import is_light_queue
from raymq.records.format.dispatch import DispatchView
from raymq.records.format.layout import SYS_FLAG_INNER_BATCH
from raymq.records.kernels.fields import Ints
from raymq.records.logfiles.log_reader import PRE_BLANK_SIZE, LogReader
from storage.dispatch.multi_dispatch import QueueKey, QueueUnit, light_queue_units
from storage.dispatch.queue_check import leads_to_own
from storage.dispatch.queue_ends import RecoveredEnds
from storage.dispatch.record_blocks import Block, is_queued
from storage.queue.consume_queue import ConsumeQueue
from storage.queue.queue_table import QueueTable


class PlaceCheck:
    """Finds the misfits among the records of one recovery: records that do not match the queue that they name. Changes
    nothing."""

    def __init__(self, queues: QueueTable, ends: RecoveredEnds, reader: LogReader | None) -> None:
        """`reader` reads the records to which consume-queue entries (units) point. If `reader` is None, a unit that
        does not point to the checked record counts as wrong."""
        self._queues, self._ends, self._reader = queues, ends, reader
        # Topics that are treated as deleted. They have no queues, but their records are not reported as damaged
        # (misfits).
        self._deleted: set[str] = set()

    def believe_deleted(self, topics: Iterable[str]) -> None:
        """Treat `topics` as deleted by RocketMQ, which keeps no trace of a deletion. Records of these topics then do
        not count as misfits (damaged records), although their queues are missing."""
        self._deleted.update(topics)

    def is_believed_deleted(self, key: QueueKey, physical_offset: int) -> bool:
        """True if the missing queue `key` counts as deleted after its message at `physical_offset` was stored. A
        deleted queue is no sign of damage."""
        return key[0] in self._deleted or self._queues.was_deleted_after(key, physical_offset)

    def is_misfit(self, view: DispatchView, physical_offset: int) -> bool:
        """True if an intact record does not fit the queue that it names. It is then neither the queue's next record,
        nor the record to which the queue's unit at its offset points. A disk may have changed the record's queue
        offset, queue id or topic."""
        if not is_queued(view.sys_flag) or view.sys_flag & SYS_FLAG_INNER_BATCH:
            return False
        key = view.topic, view.queue_id
        if self._queues.holds_batches(*key):
            return True
        missing = self._ends.find(key)
        if missing is None and self.is_believed_deleted(key, physical_offset):
            return False
        queue = self._queues.get_plain(*key)
        if queue is None or (missing is None and self._ends.was_deleted(key, physical_offset)):
            return view.queue_offset > 0 or self._ends.is_complete_at(physical_offset)
        next_offset = queue.next_offset if missing is None else missing.next_offset
        if view.queue_offset >= next_offset:
            return view.queue_offset > next_offset or self._ends.is_complete_at(physical_offset)
        if not queue.first_offset <= view.queue_offset < queue.next_offset:
            return True
        if self._reader is None or not _leads_elsewhere(queue, view.queue_offset, np.array([physical_offset])):
            return False
        # If the record of the named unit is damaged, this record could take its place. A unit that points to this
        # record from another place shows that this record's own place has changed.
        return leads_to_own(queue, view.queue_offset, self._reader) or (
            true_place(self._queues, view, physical_offset, visible_only=False) is not None
        )

    def all_fit(self, block: Block, known: Ints, missing: Ints, queue: ConsumeQueue, physical_offset: int) -> bool:
        """Return True if none of the given records of a block is a misfit, that is, if each record matches its place in
        the queue.

        The records belong to one queue, in the queue's order. `known`: rows of the records for which the queue has
        units. `missing`: rows of the records after them, which have no units yet.
        """
        if len(missing) and self._ends.is_complete_at(physical_offset + int(block.starts[missing[0]])):
            return False
        if not len(known):
            return True
        first, last = (int(block.queue_offsets[row]) for row in (known[0], known[-1]))
        if first < queue.first_offset or last >= queue.next_offset:
            return False
        return not _leads_elsewhere(queue, first, block.starts[known] + physical_offset)


def units_agree(queues: QueueTable, block: Block, physical_offset: int) -> bool:
    """True if the consume queues agree with a block of the log. For each record, the queue has a unit (entry) at the
    record's queue offset, and the unit points to the record."""
    for rows in block.by_queue(block.is_queued()):
        topic, queue_id = block.queue_of(rows)
        last = physical_offset + int(block.starts[rows[-1]])
        if queues.was_deleted_after((topic, queue_id), last):
            continue
        queue, offsets = queues.get_plain(topic, queue_id), block.queue_offsets[rows]
        if queue is None or (np.diff(offsets) != 1).any():
            return False
        if offsets[0] < queue.first_offset or offsets[-1] >= queue.next_offset:
            return False
        if _leads_elsewhere(queue, int(offsets[0]), block.starts[rows] + physical_offset, block.sizes[rows]):
            return False
    return True


def true_place(
    queues: QueueTable, view: DispatchView, physical_offset: int, *, visible_only: bool = True
) -> QueueUnit | None:
    """Return the true place (queue and queue offset) of the record at `physical_offset`, if the disk has changed the
    place that the record names. Return None if nothing shows such a change.

    `visible_only`: search only the units that consumers may see. A recovery passes False, because consumers see nothing
    yet, and no other thread appends.

    The change is certain if a unit points to exactly this record from a place that the record does not name, and no
    unit points to the record from the place that it names. Searches the units of all queues, at about 50 µs per queue.
    Units of light queues and of the additional queues that the record names are no evidence: their offsets may be
    stale.
    """
    if not is_queued(view.sys_flag) or view.sys_flag & SYS_FLAG_INNER_BATCH:
        return None
    named = QueueUnit((view.topic, view.queue_id), view.queue_offset)
    if unit_agrees(queues, named, physical_offset, view.size):
        return None
    additional = {unit.key for unit in light_queue_units(view, physical_offset)}
    for queue in queues.plain:
        if queue.key in additional or is_light_queue(queue.topic):
            continue
        try:
            find = queue.first_at_or_after if visible_only else queue.first_placed_at
            queue_offset = find(physical_offset)
        except StoreCorruptError:
            # A queue without readable units is no evidence. Its own readers report the queue.
            continue
        units = queue.units(queue_offset, 1)
        if len(units) and (units[0]["physical_offset"], units[0]["size"]) == (physical_offset, view.size):
            return QueueUnit(queue.key, queue_offset)
    return None


def unit_agrees(queues: QueueTable, place: QueueUnit, physical_offset: int, size: int) -> bool:
    """True if the unit at `place` (queue and queue offset) points to the record of `size` bytes at `physical_offset`.
    Also true if the queue need not have this unit: the unit was blanked or deleted, or the queue was deleted after the
    record was stored."""
    queue = queues.get_plain(*place.key)
    if queues.was_deleted_after(place.key, physical_offset):
        return True
    if queue is None or place.queue_offset >= queue.next_offset:
        return False
    units = queue.units(place.queue_offset, 1)
    if place.queue_offset < queue.first_offset or not len(units):
        return True
    return (units[0]["physical_offset"], units[0]["size"]) == (physical_offset, size) or (
        units[0]["size"] == PRE_BLANK_SIZE
    )


def _leads_elsewhere(
    queue: ConsumeQueue, queue_offset: int, begins: Ints, sizes: NDArray[np.int32] | None = None
) -> bool:
    """Return True if a consume-queue unit points to another record than expected. Compares the units of `queue` from
    `queue_offset` on with `begins`, the physical offsets of the expected records in queue order, and with `sizes`, the
    sizes of these records, unless it is None."""
    done = 0
    while done < len(begins):
        units = queue.units(queue_offset + done, len(begins) - done)
        if not len(units):
            break
        elsewhere = units["physical_offset"] != begins[done : done + len(units)]
        if sizes is not None:
            elsewhere |= units["size"] != sizes[done : done + len(units)]
        if (elsewhere & (units["size"] != PRE_BLANK_SIZE)).any():
            return True
        done += len(units)
    return False
