"""The recalls (cancellations) of delayed messages, which the scheduler reads from the timer queue of recalls.

The queue is part of the log, so recovery and replicas have it, and each scheduler rebuilds its table of recalls from
the queue. In each round the scheduler first reads the clock, and then the recalls that were stored before. So the table
has every recall that was stored before its message was due. A recall stays in the table until its message's due time is
past and every timer queue is delivered up to now. If a message is due in more than a day, its recall is stored again
each day, like a message of the roll queue. So the recall does not keep old log files. The appender refuses a recall if
RECALLS_MAX recalls are already stored.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

from raymq.common.delay import TIMER_RECALL_QUEUE, TIMER_TOPIC
from raymq.common.java_text import parse_number
from raymq.common.message import (
    PROPERTY_REAL_TOPIC,
    PROPERTY_TIMER_DELETE_KEY,
    PROPERTY_TIMER_DELIVER_MS,
    PROPERTY_UNIQ_KEY,
)
from raymq.common.protocol.recall import delete_key
from raymq.records.format.layout import RecordError, decode_properties
from raymq.records.format.rewrite import split_record
from storage.dispatch.delivery_progress import Source
from storage.schedule.delay_queue_reader import DelayQueueReader
from storage.schedule.delay_queues import DelayQueueBounds, Due

RECALLS: Final[Source] = (TIMER_TOPIC, TIMER_RECALL_QUEUE)
_CHUNK: Final = 1024

logger = logging.getLogger(__name__)


class RecallRequest(NamedTuple):
    """A recall: the key of the recalled message, and the time in ms since 1970 at which the message is due."""

    key: str
    deliver_at_ms: int


class RecallTable:
    """Table of the recalls of delayed messages that are in force. Only the scheduler's thread uses the table."""

    def __init__(self, reader: DelayQueueReader) -> None:
        self._reader = reader
        self._seen = reader.progress(RECALLS).next_offset
        self._due_ms: dict[str, int] = {}
        # Number of recalled messages, by due time. A message whose due time is not in this table was not recalled, so
        # its record need not be read.
        self._times: Counter[int] = Counter()

    def look(self, bounds: DelayQueueBounds) -> None:
        """Read the recalls of delayed messages that were stored since the last call of this method."""
        self._seen = max(self._seen, bounds.min_offset)
        while self._seen < bounds.end:
            end = min(self._seen + _CHUNK, bounds.end)
            for offset, view in enumerate(self._reader.read_records(RECALLS, range(self._seen, end)), self._seen):
                recall = read_recall(view)
                if recall is None:
                    logger.error(
                        "queue %s:%d: the recall at offset %d cannot be read, so the recalled message is delivered",
                        *RECALLS,
                        offset,
                    )
                elif recall.key not in self._due_ms:
                    self._due_ms[recall.key] = recall.deliver_at_ms
                    self._times[recall.deliver_at_ms] += 1
            self._seen = end

    def among(self, source: Source, dues: Sequence[Due], views: Sequence[memoryview | None]) -> set[int]:
        """Return the indices, in `dues`, of the messages that were recalled. `dues` are due messages of one delay
        queue."""
        if not self._due_ms or source[0] != TIMER_TOPIC:
            return set()
        return {
            index
            for index, (due, view) in enumerate(zip(dues, views, strict=True))
            if view is not None and (not due.epoch or due.due_ms in self._times) and _key_of(view) in self._due_ms
        }

    def forget(self, recall: RecallRequest) -> None:
        """Drop the recall of a message. The message's due time is past, and the message is no longer in the timer
        queues."""
        due_ms = self._due_ms.pop(recall.key, None)
        if due_ms is not None:
            self._times[due_ms] -= 1
            if not self._times[due_ms]:
                del self._times[due_ms]


def read_recall(view: memoryview | None) -> RecallRequest | None:
    """Read the recall in a record; None if the record is missing, unreadable, or contains no recall."""
    try:
        properties = {} if view is None else decode_properties(split_record(view).properties)
    except RecordError:
        return None
    key, due_ms = properties.get(PROPERTY_TIMER_DELETE_KEY), parse_number(properties.get(PROPERTY_TIMER_DELIVER_MS))
    return None if not key or due_ms is None else RecallRequest(key, due_ms)


def _key_of(view: memoryview) -> str:
    """Return the recall key of a waiting message; empty if the record cannot be read."""
    try:
        properties = decode_properties(split_record(view).properties)
    except RecordError:
        return ""
    return delete_key(properties.get(PROPERTY_REAL_TOPIC, ""), properties.get(PROPERTY_UNIQ_KEY, ""))
