"""Reads multi-dispatch: a message may be in other queues too, beside the one it was sent to (spec/storage.md §12).

The record itself says so, in two properties that are lists separated by commas: INNER_MULTI_DISPATCH names the other
queues, `%LMQ%…` and their queue 0, and INNER_MULTI_QUEUE_OFFSET the record's offsets there. The producer sets the
first, the store the second. Each of the queues is an ordinary consume queue, whose units point to the same record.

The properties are read here, for recovery and for another replica's chunks, whatever the settings of this store;
storage.append.multi_dispatch_appender writes them. RocketMQ 4.9 also puts messages there that are delayed, retried or
its own. RocketMQ 5 and this store do not, but a retried message of RocketMQ 5 may carry the stale offsets of the
message that was given back: such a record may continue a queue, and never begins one anew.
"""

from __future__ import annotations

import logging
from typing import Final, NamedTuple

import numpy as np

from raymq.common.message import PROPERTY_INNER_MULTI_DISPATCH, PROPERTY_INNER_MULTI_QUEUE_OFFSET
from raymq.common.names import (
    DLQ_PREFIX,
    INTERNAL_TOPIC_NAME_MAX,
    LMQ_PREFIX,
    RETRY_PREFIX,
    SCHEDULE_TOPIC,
    SYSTEM_PREFIX,
    TRANSACTION_TOPICS,
)
from raymq.records.format.dispatch import DispatchView
from raymq.records.format.layout import MIN_RECORD_SIZE
from storage.dispatch.record_check import can_be_topic
from storage.queue.queue_table import QueueTable

LMQ_QUEUE_ID: Final = 0
SEPARATOR: Final = ","

_OFFSET_DIGITS_MAX: Final = 18

logger = logging.getLogger(__name__)

QueueKey = tuple[str, int]


class QueueUnit(NamedTuple):
    """A record's position in a queue: the queue's topic and id, and the offset there."""

    key: QueueKey
    queue_offset: int


def is_dispatched(topic: str) -> bool:
    """True if this store puts messages of `topic` into other queues too: as in RocketMQ 5 not before they are due and
    their transaction is committed, and no dead letters, which would come back to the consumers that gave them up."""
    waits = topic == SCHEDULE_TOPIC or topic in TRANSACTION_TOPICS
    return not waits and not topic.startswith((RETRY_PREFIX, DLQ_PREFIX, SYSTEM_PREFIX))


def light_queue_units(view: DispatchView, physical_offset: int) -> list[QueueUnit]:
    """The units of the record at `physical_offset` in other queues. Impossible ones are left out: no CRC covers them.

    RocketMQ 4.9 puts records into queues of other names too, then into the one with the record's own queue id.
    """
    names, offsets = (
        split_names(view.properties.get(name, ""))
        for name in (PROPERTY_INNER_MULTI_DISPATCH, PROPERTY_INNER_MULTI_QUEUE_OFFSET)
    )
    if not names:
        return []
    if len(names) != len(offsets):
        if offsets:
            logger.error("the record at %d names %d queues and %d offsets", physical_offset, len(names), len(offsets))
        return []
    found: dict[QueueKey, QueueUnit] = {}
    for name, text in zip(names, offsets, strict=True):
        key = name, LMQ_QUEUE_ID if name.startswith(LMQ_PREFIX) else view.queue_id
        if can_be_queue(name) and key != (view.topic, view.queue_id):
            queue_offset = int(text) if text.isdecimal() and len(text) <= _OFFSET_DIGITS_MAX else -1
            if 0 <= queue_offset <= physical_offset // MIN_RECORD_SIZE:
                found.setdefault(key, QueueUnit(key, queue_offset))
            else:
                logger.error("the record at %d cannot be at offset %r of queue %s", physical_offset, text, name)
    return list(found.values())


def put_elsewhere(queues: QueueTable, view: DispatchView, physical_offset: int) -> list[QueueKey]:
    """Put a record of another replica into the other queues that it names; returns those where it was missing."""
    put = []
    for key, queue_offset in light_queue_units(view, physical_offset):
        if queues.holds_batches(*key):
            continue
        queue = queues.get_or_create(*key)
        if queue_offset < queue.next_offset or physical_offset < queue.max_physical_offset:
            continue
        if queue_offset > queue.next_offset or not queue.exists:
            queue.start_at(queue_offset)
        queue.reserve(1)
        queue.append_units(physical_offset, np.array([view.size], np.int32), np.array([view.tags_code], np.int64))
        put.append(key)
    return put


def split_names(text: str) -> list[str]:
    """The items of a list, split as Java does: empty ones at the end are dropped."""
    stripped = text.rstrip(SEPARATOR)
    return stripped.split(SEPARATOR) if stripped.strip() else []


def can_be_queue(name: str) -> bool:
    """True if a queue of that name can have a directory."""
    return can_be_topic(name) and len(name.encode()) <= INTERNAL_TOPIC_NAME_MAX
