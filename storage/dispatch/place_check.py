"""Compares records with the queues that they name, and with the entries (units) of these queues, before recovery trusts
the records.

No checksum covers a record's queue offset, queue id and topic. A record fits if it is its queue's next record, or if
the queue's unit at its offset points to it. Otherwise the record is a misfit. storage/recovery/misfits.py then finds
out if the disk has changed the misfit's fields.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from raymq.records.format.dispatch import DispatchView
from raymq.records.format.layout import SYS_FLAG_INNER_BATCH
from raymq.records.kernels.fields import Ints
from raymq.records.logfiles.log_reader import PRE_BLANK_SIZE, LogReader
from storage.dispatch.multi_dispatch import QueueKey
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
        begins = np.array([physical_offset], np.int64)
        return self._leads_elsewhere(queue, view.queue_offset, begins) and (
            self._reader is not None and leads_to_own(queue, view.queue_offset, self._reader)
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
        return not self._leads_elsewhere(queue, first, block.starts[known] + physical_offset)

    def units_agree(self, block: Block, physical_offset: int) -> bool:
        """True if the consume queues agree with a block of the log. For each record, the queue has a unit (entry) at
        the record's queue offset, and the unit points to the record."""
        for rows in block.by_queue(block.is_queued()):
            topic, queue_id = block.queue_of(rows)
            last = physical_offset + int(block.starts[rows[-1]])
            if self._queues.was_deleted_after((topic, queue_id), last):
                continue
            queue, offsets = self._queues.get_plain(topic, queue_id), block.queue_offsets[rows]
            if queue is None or (np.diff(offsets) != 1).any():
                return False
            if offsets[0] < queue.first_offset or offsets[-1] >= queue.next_offset:
                return False
            if self._leads_elsewhere(queue, int(offsets[0]), block.starts[rows] + physical_offset):
                return False
        return True

    def _leads_elsewhere(self, queue: ConsumeQueue, queue_offset: int, begins: Ints) -> bool:
        """Return True if a consume-queue unit points to another record than expected. Compares the units of `queue`
        from `queue_offset` on with `begins`, the physical offsets of the expected records in queue order."""
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
