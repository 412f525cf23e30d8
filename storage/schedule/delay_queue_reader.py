"""Reads the queues of delayed messages for the scheduler: the ends of the queues, the times in their entries (units),
and their records.

The reader keeps no state: it reads the store's own components. The messages that it reads may not be on disk yet. A
delivery is after its source message in the log, so a power cut that loses the source loses the delivery too.

A record is compared with its queue entry, as readers of other queues do (raymq/records/logfiles/own_records.py). If the
record and the entry disagree, the store first rewrites the entry from the log. If they still disagree, the record is
damaged: its size is corrected, and any other damage makes the record unreadable.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from raymq.common.delay import is_waiting_topic
from raymq.common.errors import DataLossError
from raymq.common.protocol.store import QueuePosition, RepairState
from raymq.records.format.dispatch import dispatch_view
from raymq.records.format.layout import IPV6_HOST_BYTES, UNIT_DTYPE, RecordError
from raymq.records.logfiles.log_reader import PRE_BLANK_SIZE
from raymq.records.logfiles.own_records import is_at, with_places
from storage.append.appender import Appender
from storage.dispatch.delivery_progress import Source, SourceProgress
from storage.parts import StoreParts
from storage.queue.consume_queue import ConsumeQueue
from storage.schedule.delay_queues import DelayQueueBounds

_NO_CODES: Final = np.empty(0, np.int64)

logger = logging.getLogger(__name__)


class DelayQueueReader:
    """Gives the scheduler access to one store's delay queues, and to their delivery progress. Thread-safe."""

    def __init__(self, parts: StoreParts, appender: Appender) -> None:
        """`appender`: its clock gives the reader the current time. It commits appended records to the log files before
        they are read."""
        self._append_lock = parts.append_lock
        self._appender = appender
        self._queues = parts.queues
        self._deliveries = parts.deliveries
        self._reader = parts.reader
        self._levels_ms = parts.settings.delay_levels_ms

    @property
    def store_host_ipv6(self) -> bool:
        """True if the store's records contain an IPv6 store host."""
        return len(self._appender.store_host) == IPV6_HOST_BYTES

    def read_bounds(self) -> tuple[int, dict[Source, DelayQueueBounds]]:
        """Return the current time in ms, and the bounds of each delay queue. A message that is stored after this call
        never has a store time before the returned time.

        Raises OSError if the appended records cannot be written to the log's files.
        """
        with self._append_lock:
            self._appender.commit()
            now_ms = self._appender.read_clock()
            bounds = {
                (queue.topic, queue.queue_id): DelayQueueBounds(queue.min_offset, queue.next_offset)
                for queue in self._queues
                if is_waiting_topic(queue.topic)
            }
        return now_ms, bounds

    def delivery_times(self, source: Source, from_offset: int, count: int) -> NDArray[np.int64]:
        """Return the delivery times, in ms, in at most `count` entries (units) of a delay queue from an offset on. At
        the end of a queue file fewer are returned. An entry that RocketMQ rebuilt contains a tags code of 32 bits
        instead of a time: the time is then read from the record."""
        queue = self._queues.get_plain(*source)
        if queue is None:
            return _NO_CODES
        units = queue.units(from_offset, count)
        codes = self._reader.tags_codes(*source, units)[0]
        # A unit's code is normally the delivery time, which has more than 32 bits. A code of at most 32 bits has two
        # possible reasons. Either RocketMQ has rebuilt the unit, and the code is the tags code: read the delivery time
        # from the record. Or the unit has no record.
        for row in np.flatnonzero((codes == codes.astype(np.int32)) & (units["size"] != PRE_BLANK_SIZE)).tolist():
            codes[row] = self._time_of(units[row : row + 1], int(codes[row]))
        return codes

    def _time_of(self, units: NDArray[np.void], otherwise: int) -> int:
        """Read the record of one delay-queue unit, and return the message's delivery time. Returns `otherwise` if the
        record cannot be read."""
        view = self._record(units)
        try:
            return otherwise if view is None else dispatch_view(view, delay_levels_ms=self._levels_ms).tags_code
        except RecordError:
            return otherwise

    def state_of(self, position: QueuePosition) -> RepairState:
        """Return the state of a record of a delay queue that could not be read. LOST if the store has no replicas."""
        state_of = self._reader.state_of
        return RepairState.LOST if state_of is None else state_of(position)

    def read_records(self, source: Source, queue_offsets: Sequence[int]) -> list[memoryview | None]:
        """Return the records at `queue_offsets` of a delay queue; None for a missing record.

        If a record is damaged, its queue unit still has the right values. The returned copy of the record then has the
        size, queue offset and physical offset from the unit.
        """
        queue = self._queues.get_plain(*source)
        if queue is None:
            return [None] * len(queue_offsets)
        units = _units_at(queue, queue_offsets)
        found = self._records(units)
        wrong = _rows_elsewhere(found, units, queue_offsets)
        if wrong and self._reader.mend_units is not None:
            first, last = min(queue_offsets[row] for row in wrong), max(queue_offsets[row] for row in wrong)
            if self._reader.mend_units(*source, first, last + 1):
                units = _units_at(queue, queue_offsets)
                found = self._records(units)
                wrong = _rows_elsewhere(found, units, queue_offsets)
        for row in wrong:
            record = bytearray(found[row] or b"")
            place = int(units[row]["physical_offset"]), queue_offsets[row], source[1]
            found[row] = memoryview(with_places(record, *place))
        return found

    def _records(self, units: NDArray[np.void]) -> list[memoryview | None]:
        """Return the record of each queue unit. A unit without a record gives None. A lost record also gives None, and
        is logged."""
        if (units["size"] > 0).all() and not (units["size"] == PRE_BLANK_SIZE).any():
            try:
                views = self._reader.views(units)
            except DataLossError:
                views = []
            found: list[memoryview | None] = []
            sizes = iter(units["size"].tolist())
            for view in views:
                # Split a view into single records. One view covers all records that are adjacent in the log.
                at = 0
                while at < len(view):
                    size = next(sizes)
                    found.append(view[at : at + size])
                    at += size
            if len(found) == len(units):
                return found
        return [self._record(units[row : row + 1]) for row in range(len(units))]

    def _record(self, units: NDArray[np.void]) -> memoryview | None:
        """Return the record to which the first of `units` (queue entries) points. Return None if this unit points to no
        record, or if the record is lost. A lost record is logged."""
        if units[0]["size"] == PRE_BLANK_SIZE:
            return None
        try:
            return self._reader.views(units)[0]
        except DataLossError as error:
            logger.error("%s", error)
            return None

    def progress(self, source: Source) -> SourceProgress:
        """Return the delivery progress of a delay queue."""
        with self._append_lock:
            return self._deliveries.get(source)

    def advance(self, source: Source, epoch: int, queue_offset: int) -> None:
        """Record that a message of a delay queue, and all messages before it, were delivered or given up."""
        with self._append_lock:
            self._deliveries.advance(source, epoch, queue_offset + 1)

    def raise_low(self, source: Source, low: int) -> None:
        """Record that no message of a timer queue before offset `low` waits for delivery."""
        with self._append_lock:
            self._deliveries.raise_low(source, low)


def _units_at(queue: ConsumeQueue, queue_offsets: Sequence[int]) -> NDArray[np.void]:
    """Return the units at `queue_offsets` of a queue, in this order. For an offset that the queue does not contain, the
    result has a unit that points to no record."""
    wanted = np.array(queue_offsets, np.int64)
    found = np.zeros(len(wanted), UNIT_DTYPE)
    found["size"] = PRE_BLANK_SIZE
    # The requested queue entries (units) can lie in several queue files, and each call of `units` reads from one file
    # only. Therefore read the entries in a loop.
    first, end = max(min(queue_offsets), queue.min_offset), max(queue_offsets) + 1
    while first < end and len(units := queue.units(first, end - first)):
        here = (wanted >= first) & (wanted < first + len(units))
        found[here] = units[wanted[here] - first]
        first += len(units)
    return found


def _rows_elsewhere(
    records: Sequence[memoryview | None], units: NDArray[np.void], queue_offsets: Sequence[int]
) -> list[int]:
    """Return the row numbers of records that do not match their consume-queue entry (unit): the record's physical
    offset or queue offset differs from the entry's."""
    return [
        row
        for row, (record, position, offset) in enumerate(
            zip(records, units["physical_offset"].tolist(), queue_offsets, strict=True)
        )
        if record is not None and not is_at(record, position, offset)
    ]
