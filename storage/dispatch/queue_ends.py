"""The ends of the queues during a recovery, and the units that a walk finds to be missing there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from raymq.records.kernels.fields import Ints
from raymq.records.logfiles.log_reader import PRE_BLANK_SIZE
from storage.dispatch.multi_dispatch import QueueKey
from storage.queue.consume_queue import ConsumeQueue
from storage.queue.queue_table import QueueTable

_UNITS_HELD: Final = 4096
"""Missing units of a queue are written when there are so many."""


class MissingUnits:
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


class RecoveredEnds:
    """The ends of all queues of a store that is being recovered. For one thread."""

    def __init__(self, queues: QueueTable, *, after_crash: bool) -> None:
        self._queues, self._after_crash = queues, after_crash
        # The missing units of each queue that a record named, of queues of single messages only.
        self._missing: dict[QueueKey, MissingUnits] = {}
        # The end of the last record that a queue points to; after a crash nobody knows it.
        self.dispatched_end = -1
        # Set by recovery when a queue has less than the snapshot says: all queues are made again then.
        self.queues_were_lost = False

    def queues_reach(self, physical_offset: int) -> None:
        """Note that a queue points to records up to `physical_offset`."""
        self.dispatched_end = max(self.dispatched_end, physical_offset)

    def forget(self) -> None:
        """Forget the units that were not written."""
        self._missing.clear()

    def write(self) -> None:
        """Write the units that are left."""
        for missing in self._missing.values():
            missing.write()

    def find(self, key: QueueKey) -> MissingUnits | None:
        """The missing units of a queue; None if no record has named the queue yet."""
        return self._missing.get(key)

    def missing_in(self, topic: str, queue_id: int) -> MissingUnits:
        """The missing units of a queue, which is made if there is none."""
        missing = self._missing.get((topic, queue_id))
        if missing is None:
            missing = self._missing[topic, queue_id] = MissingUnits(self._queues.get_or_create(topic, queue_id))
        return missing

    def was_deleted(self, key: QueueKey, physical_offset: int) -> bool:
        """True if the queue of a record at `physical_offset` was deleted since, by this store or by RocketMQ."""
        if self._queues.was_deleted_after(key, physical_offset):
            return True
        if self._after_crash or self.queues_were_lost or physical_offset >= self.dispatched_end:
            return False
        # A clean stop, other queues are complete, this topic has none: RocketMQ deleted it, and left no other trace.
        return not self._queues.has_topic(key[0])

    def is_complete_at(self, physical_offset: int) -> bool:
        """True if every record at an offset should have its unit: the store stopped cleanly behind it."""
        return not (self._after_crash or self.queues_were_lost) and physical_offset < self.dispatched_end

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
