"""Computes a slave's queue units for queue offsets that occur in no record of the master's log, or in several records.

A log has such offsets if records were lost before RocketMQ or this store appended more, or if the disk changed the
offsets in records. The master's recovery accepted the log as it is (storage/dispatch/redispatch.py). So a slave must
accept the log, too, or it would wait forever. The slave uses the same rules as the master and gets the same units:

- Offsets that are missing before a record point to damaged records before it to which no unit points yet, if enough of
  them exist. A reader gets an error for each of these offsets. If the damaged bytes are repaired later, their records
  get these units.
- Otherwise the missing offsets point to no record, and readers skip them.
- A record at an offset that its queue already has gets no unit.

Both logs are equal, so the log contains no intact record for the missing offsets before that record.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raymq.common.errors import InvalidArgumentError
from raymq.common.protocol.store import Hole
from raymq.records.kernels.fields import Ints
from raymq.records.logfiles.log_reader import PRE_BLANK_SIZE
from storage.log.holes import share_among_holes
from storage.parts import StoreParts
from storage.queue.consume_queue import ConsumeQueue

logger = logging.getLogger(__name__)


class QueueUnits(NamedTuple):
    """The units (entries) that a copied log chunk, or a copied damaged range (hole), adds to one queue, in order. Each
    array has one element per unit."""

    # The topic and queue id of the queue to which these consume-queue entries (units) belong.
    key: tuple[str, int]
    # The queue offset of the first unit. The offsets of the later units follow without gaps.
    queue_offset: int
    physical_offsets: Ints
    sizes: NDArray[np.int32]
    tags_codes: Ints


class PlacedUnit(NamedTuple):
    """A consume-queue entry (unit) and its queue offset."""

    queue_offset: int
    physical_offset: int
    size: int
    tags_code: int


class QueueGaps:
    """Computes the units to append to the queues of one store. If a queue lacks offsets before a new record's offset,
    the result also has units for these offsets, which point to no intact record. Called under the append lock."""

    def __init__(self, parts: StoreParts) -> None:
        self._queues, self._holes = parts.queues, parts.holes

    def units_of(
        self, by_queue: Mapping[tuple[str, int], Sequence[PlacedUnit]], anew: frozenset[tuple[str, int]] = frozenset()
    ) -> list[QueueUnits]:
        """Return the entries (units) to append to each queue: the entries in `by_queue`, preceded by entries for the
        offsets that the queue lacks. Changes nothing.

        `anew`: queues that the caller deletes first. Raises InvalidArgumentError if a queue holds inner batches.
        """
        units = []
        for key, rows in by_queue.items():
            queue = None if key in anew else self._queues.get(*key)
            if not (queue is None or isinstance(queue, ConsumeQueue)):
                raise InvalidArgumentError(
                    f"queue {key[0]}:{key[1]} stores inner batches, but the master sent single messages"
                )
            found = self._units_in(key, queue if queue is not None and queue.exists else None, rows)
            if len(found.sizes):
                units.append(found)
        return units

    def _units_in(self, key: tuple[str, int], queue: ConsumeQueue | None, rows: Sequence[PlacedUnit]) -> QueueUnits:
        """Return the entries (units) to append to `queue` for the records in `rows`, and for missing offsets before
        them. If `queue` is None, the queue does not exist yet and begins with these entries."""
        first = rows[0].queue_offset if queue is None else queue.next_offset
        following, reach = first, -1 if queue is None else queue.max_physical_offset
        placed: list[tuple[int, int, int]] = []
        pieces: list[Ints] = []
        for row in rows:
            if row.queue_offset < following:
                logger.error(
                    "queue %s:%d already has offset %d, so the record %s gets no consume-queue entry",
                    *key,
                    row.queue_offset,
                    row,
                )
                continue
            if row.queue_offset > following:
                pieces += [_columns(placed), self._fill(key, row.queue_offset - following, reach, row.physical_offset)]
                placed = []
            placed.append(row[1:])
            following, reach = row.queue_offset + 1, row.physical_offset + row.size
        columns = np.concatenate([*pieces, _columns(placed)])
        return QueueUnits(key, first, columns[:, 0], columns[:, 1].astype(np.int32), columns[:, 2])

    def _fill(self, key: tuple[str, int], count: int, reach: int, physical_offset: int) -> Ints:
        """Return queue units (entries) for queue offsets without a record, as columns of physical offsets, sizes and
        tags codes. If the missing records exist, they lie between the physical offsets `reach` and `physical_offset`.
        """
        shared = share_among_holes(self._unplaced(reach, physical_offset), count)
        logger.error(
            "%d offsets of queue %s:%d have no intact record before physical offset %d: their entries point to %s",
            *(count, *key, physical_offset, "damaged records" if shared else "nothing"),
        )
        if shared:
            return _columns([(begin, size, 0) for _, places in shared for begin, size in places])
        return np.tile(np.array([0, PRE_BLANK_SIZE, 0], np.int64), (count, 1))

    def _unplaced(self, start: int, end_offset: int) -> list[Hole]:
        """Return the damaged ranges (holes) in a part of the log, if no entry (unit) of a consume queue points into
        them. `start`, `end_offset`: the physical offsets of this part."""
        holes = [hole for hole in self._holes.holes if start <= hole.offset < end_offset]
        return [hole for hole in holes if not any(self._leads_into(queue, hole) for queue in self._queues.plain)]

    def _leads_into(self, queue: ConsumeQueue, hole: Hole) -> bool:
        """True if an entry (unit) of the consume queue points into a damaged range (hole) of the log."""
        offset = queue.first_placed_at(hole.offset)
        if offset >= queue.next_offset:
            return False
        [unit] = queue.units(offset, 1)
        points = unit["size"] != PRE_BLANK_SIZE
        return bool(points and hole.offset <= unit["physical_offset"] < hole.end_offset)


def _columns(rows: Sequence[tuple[int, int, int]]) -> Ints:
    return np.array(rows, np.int64).reshape(-1, 3)
