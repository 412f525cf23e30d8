"""The ends of the queues during a recovery, and the entries (units) that the log scan finds missing at these
ends."""

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
"""Maximum number of missing units of a queue that recovery keeps in memory before it writes them."""


class MissingUnits:
    """The entries (units) that are missing at the end of one consume queue, in order. They are not yet written to the
    queue's files."""

    def __init__(self, queue: ConsumeQueue) -> None:
        self.queue = queue
        # Physical offset at which the record of the queue's last unit ends. Units that are missing in the queue's
        # files, and are not yet written, count too.
        self.reach = queue.max_physical_offset
        self._count = 0
        # Groups of missing queue units. Each group consists of three arrays: the units' physical offsets, sizes and
        # tags codes.
        self._pieces: list[tuple[Ints, Ints, Ints]] = []
        # Missing queue entries (units) that were added one at a time. In the queue they follow the entries in
        # `_pieces`.
        self._rows: list[tuple[int, int, int]] = []

    @property
    def next_offset(self) -> int:
        """The queue offset that the queue's next entry (unit) gets after the missing entries in memory are written to
        the queue."""
        return self.queue.next_offset + self._count

    def add(self, physical_offset: int, size: int, tags_code: int) -> None:
        """Add one missing unit to the end of the queue, in memory."""
        self._rows.append((physical_offset, size, tags_code))
        self.reach = physical_offset + size
        self._count += 1
        self._write_if_many()

    def add_many(self, physical_offsets: Ints, sizes: NDArray[np.int32], tags_codes: Ints) -> None:
        """Add the consume queue's next missing entries (units), in memory. Each argument is a column with one value per
        unit."""
        if len(sizes):
            self._join_rows()
            self._pieces.append((physical_offsets, sizes.astype(np.int64), tags_codes))
            self.reach = int(physical_offsets[-1]) + int(sizes[-1])
            self._count += len(sizes)
            self._write_if_many()

    def write(self) -> None:
        """Write the missing entries (units) that were collected in memory to the consume queue's files, and remove them
        from memory."""
        if self._count:
            self._join_rows()
            offsets, sizes, codes = map(np.concatenate, zip(*self._pieces, strict=True))
            self.queue.reserve(self._count)
            self.queue.append_scattered(offsets, sizes.astype(np.int32), codes)
            self._count = 0
            self._pieces.clear()

    def _join_rows(self) -> None:
        """Convert the missing units that `add` has collected as tuples into arrays with one element per unit."""
        if self._rows:
            columns = np.array(self._rows, np.int64)
            self._pieces.append((columns[:, 0], columns[:, 1], columns[:, 2]))
            self._rows.clear()

    def _write_if_many(self) -> None:
        if self._count >= _UNITS_HELD:
            self.write()


class RecoveredEnds:
    """The ends of all queues of a store that is being recovered. Not thread-safe."""

    def __init__(self, queues: QueueTable, *, after_crash: bool) -> None:
        self._queues, self._after_crash = queues, after_crash
        # The queue units that each consume queue lacks, for the queues that the scanned records name. Contains only
        # queues whose records are single messages.
        self._missing: dict[QueueKey, MissingUnits] = {}
        # Physical offset at which the last record that has a consume-queue entry (unit) ends. It is unknown after a
        # crash.
        self.dispatched_end = -1
        # True if a queue has fewer entries (units) than the snapshot states. Recovery sets this flag and then rebuilds
        # all queues.
        self.queues_were_lost = False

    def queues_reach(self, physical_offset: int) -> None:
        """Record that the last entry (unit) of a consume queue points to a record that ends at
        `physical_offset`."""
        self.dispatched_end = max(self.dispatched_end, physical_offset)

    def forget(self) -> None:
        """Discard the missing queue units that recovery has collected but not written yet."""
        self._missing.clear()

    def write(self) -> None:
        """Write the missing entries (units) of all consume queues, which are still in memory, to the queues'
        files."""
        for missing in self._missing.values():
            missing.write()

    def find(self, key: QueueKey) -> MissingUnits | None:
        """Return the entries (units) that this recovery has found missing at the end of a queue. Return None if
        recovery has not scanned a record of this queue yet."""
        return self._missing.get(key)

    def missing_in(self, topic: str, queue_id: int) -> MissingUnits:
        """Return the object that collects the missing units of a queue (MissingUnits). Creates the object and the queue
        if they do not exist."""
        missing = self._missing.get((topic, queue_id))
        if missing is None:
            missing = self._missing[topic, queue_id] = MissingUnits(self._queues.get_or_create(topic, queue_id))
        return missing

    def was_deleted(self, key: QueueKey, physical_offset: int) -> bool:
        """True if this store or RocketMQ deleted the queue after the record at `physical_offset` was stored in
        it."""
        if self._queues.was_deleted_after(key, physical_offset):
            return True
        if self._after_crash or self.queues_were_lost or physical_offset >= self.dispatched_end:
            return False
        # After a clean stop, each queue that still exists is complete. So if this record's topic has no queue at all,
        # RocketMQ has deleted the topic. RocketMQ leaves no other trace of a deletion.
        return not self._queues.has_topic(key[0])

    def is_complete_at(self, physical_offset: int) -> bool:
        """Return True if the consume-queue entry (unit) of the record at `physical_offset` must exist. It must exist if
        the store stopped cleanly after it had stored the record, and if no queue was lost."""
        return not (self._after_crash or self.queues_were_lost) and physical_offset < self.dispatched_end

    def units_behind(self, last: Mapping[QueueKey, int], start: int, end_offset: int) -> list[int]:
        """Return the physical offsets of records that have lost their queue units. After a crash, recovery removed
        these units from the end of a queue, and has not added them again.

        Only records in [`start`, `end_offset`) are included, and only the first such record of each queue. `last` gives
        a queue offset for some queues; units up to this offset are treated as added again.
        """
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
