"""The queues where messages wait, as the scheduler sees them: their ends, their units' times, their records.

Everything here is a view of the store's own parts; nothing is kept. What is seen may not be on disk yet: a delivery
comes after its source in the log, so a power cut that takes the source takes the delivery too.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from raymq.delay import is_waiting_topic
from raymq.errors import DataLossError
from raymq.logfiles.log_reader import PRE_BLANK_SIZE, LogReader
from raymq.record.dispatch import dispatch_view
from raymq.record.layout import RecordError
from storage.append.appender import Appender
from storage.dispatch.delivery_progress import DeliveryProgress, Source, SourceProgress
from storage.queue.queue_table import QueueTable
from storage.schedule.delay_queues import Bounds

_NO_CODES: Final = np.empty(0, np.int64)

logger = logging.getLogger(__name__)


class DelayQueueReader:
    """What the scheduler reads of one store, and how it tells how far it got. Thread-safe."""

    def __init__(
        self,
        append_lock: threading.Lock,
        appender: Appender,
        queues: QueueTable,
        deliveries: DeliveryProgress,
        reader: LogReader,
        levels_ms: tuple[int, ...],
    ) -> None:
        self._append_lock = append_lock
        self._appender = appender
        self._queues = queues
        self._deliveries = deliveries
        self._reader = reader
        self._levels_ms = levels_ms

    @property
    def store_host_ipv6(self) -> bool:
        """Whether the store's records carry an IPv6 store host."""
        return len(self._appender.store_host) == 20

    def look(self) -> tuple[int, dict[Source, Bounds]]:
        """The time now, and what is in the queues. Nothing will be stored with an earlier time from here on.

        OSError: what was appended cannot be brought to the log's files, to be read.
        """
        with self._append_lock:
            self._appender.commit()
            now_ms = self._appender.look_at_the_clock()
            bounds = {
                (queue.topic, queue.queue_id): Bounds(queue.min_offset, queue.next_offset)
                for queue in self._queues
                if is_waiting_topic(queue.topic)
            }
        return now_ms, bounds

    def codes(self, source: Source, from_offset: int, count: int) -> NDArray[np.int64]:
        """The times of at most `count` units; fewer where a file ends.

        A unit that RocketMQ made again holds its tag's code, 32 bits, and no time: then the record says when.
        """
        queue = self._queues.get_plain(*source)
        if queue is None:
            return _NO_CODES
        units = queue.units(from_offset, count)
        codes = self._reader.tags_codes(*source, units)[0]
        for row in np.flatnonzero((codes == codes.astype(np.int32)) & (units["size"] != PRE_BLANK_SIZE)).tolist():
            codes[row] = self._time_of(units[row : row + 1], int(codes[row]))
        return codes

    def _time_of(self, units: NDArray[np.void], otherwise: int) -> int:
        """What the record of one unit says of its time; `otherwise` if it cannot be read."""
        view = self._record(units)
        try:
            return otherwise if view is None else dispatch_view(view, delay_levels_ms=self._levels_ms).tags_code
        except RecordError:
            return otherwise

    def records(self, source: Source, queue_offsets: Sequence[int]) -> list[memoryview | None]:
        """The records of these units; None for one that is gone."""
        queue = self._queues.get_plain(*source)
        if queue is None:
            return [None] * len(queue_offsets)
        first, end = max(min(queue_offsets), queue.min_offset), max(queue_offsets) + 1
        pieces = {}  # by their first offset; the units of a queue lie in several files
        while first < end and len(units := queue.units(first, end - first)):
            pieces[first] = units
            first += len(units)
        starts = list(pieces)
        found: list[memoryview | None] = []
        for queue_offset in queue_offsets:
            index = bisect_right(starts, queue_offset) - 1
            found.append(
                self._record(pieces[starts[index]][queue_offset - starts[index] :][:1]) if index >= 0 else None
            )
        return found

    def _record(self, units: NDArray[np.void]) -> memoryview | None:
        if not len(units) or units[0]["size"] == PRE_BLANK_SIZE:
            return None
        try:
            return self._reader.views(units)[0]
        except DataLossError as error:
            logger.error("%s", error)
            return None

    def progress(self, source: Source) -> SourceProgress:
        """How far a queue is delivered."""
        with self._append_lock:
            return self._deliveries.get(source)

    def advance(self, source: Source, epoch: int, queue_offset: int) -> None:
        """A message was delivered, or given up, and so were those before it."""
        with self._append_lock:
            self._deliveries.advance(source, epoch, queue_offset + 1)

    def raise_low(self, source: Source, low: int) -> None:
        """No message of a timer queue before `low` waits any more."""
        with self._append_lock:
            self._deliveries.raise_low(source, low)
