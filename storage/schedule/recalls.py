"""The delayed messages that are recalled, as the scheduler knows them: read from the timer queue of the recalls.

The queue is part of the log, so recovery and replicas have it, and the table is made anew by each scheduler. A round of
the scheduler reads the recalls that were stored before it asked for the time, so it knows each one whose store time is
before its message's. A recall stays in the table until its message's time is past and every timer queue is delivered
up to now. Like a message of the roll queue, one that is for later than a day is filed again after a day, so that it
does not keep the log's files. The appender refuses more recalls than RECALLS_MAX at a time.
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
from storage.schedule.delay_queues import Bounds, Due

RECALLS: Final[Source] = (TIMER_TOPIC, TIMER_RECALL_QUEUE)
_CHUNK: Final = 1024

logger = logging.getLogger(__name__)


class Recall(NamedTuple):
    """A recall: the key of the message, and the time when the message is due, in ms since 1970."""

    key: str
    deliver_at_ms: int


class RecallTable:
    """The recalls that are in force. Used by the scheduler's thread."""

    def __init__(self, reader: DelayQueueReader) -> None:
        self._reader = reader
        self._seen = reader.progress(RECALLS).next_offset
        self._due_ms: dict[str, int] = {}
        # How many recalled messages are due at each time: most messages need no further look.
        self._times: Counter[int] = Counter()

    def look(self, bounds: Bounds) -> None:
        """Read the recalls that were stored since the last look."""
        self._seen = max(self._seen, bounds.min_offset)
        while self._seen < bounds.end:
            end = min(self._seen + _CHUNK, bounds.end)
            for offset, view in enumerate(self._reader.read_records(RECALLS, range(self._seen, end)), self._seen):
                recall = read_recall(view)
                if recall is None:
                    logger.error(
                        "%s:%d: the recall at offset %d cannot be read: its message is delivered", *RECALLS, offset
                    )
                elif recall.key not in self._due_ms:
                    self._due_ms[recall.key] = recall.deliver_at_ms
                    self._times[recall.deliver_at_ms] += 1
            self._seen = end

    def among(self, source: Source, dues: Sequence[Due], views: Sequence[memoryview | None]) -> set[int]:
        """The indices of messages of a delay queue that are recalled."""
        if not self._due_ms or source[0] != TIMER_TOPIC:
            return set()
        return {
            index
            for index, (due, view) in enumerate(zip(dues, views, strict=True))
            if view is not None and (not due.epoch or due.due_ms in self._times) and _key_of(view) in self._due_ms
        }

    def forget(self, recall: Recall) -> None:
        """Drop a recall: its message's time is past, and the message is not in a timer queue any more."""
        due_ms = self._due_ms.pop(recall.key, None)
        if due_ms is not None:
            self._times[due_ms] -= 1
            if not self._times[due_ms]:
                del self._times[due_ms]


def read_recall(view: memoryview | None) -> Recall | None:
    """The recall in a record; None if there is none to be read."""
    try:
        properties = {} if view is None else decode_properties(split_record(view).properties)
    except RecordError:
        return None
    key, due_ms = properties.get(PROPERTY_TIMER_DELETE_KEY), parse_number(properties.get(PROPERTY_TIMER_DELIVER_MS))
    return None if not key or due_ms is None else Recall(key, due_ms)


def _key_of(view: memoryview) -> str:
    """The key of a message that waits; empty if it cannot be read."""
    try:
        properties = decode_properties(split_record(view).properties)
    except RecordError:
        return ""
    return delete_key(properties.get(PROPERTY_REAL_TOPIC, ""), properties.get(PROPERTY_UNIQ_KEY, ""))
