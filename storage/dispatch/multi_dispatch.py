"""Reads the multi-dispatch properties of records: a message may be in additional queues, besides the queue to which it
was sent (spec/storage.md §12).

The record itself names these queues, in two properties that are lists separated by commas. INNER_MULTI_DISPATCH lists
the additional queues (names `%LMQ%…`, each with its queue 0). INNER_MULTI_QUEUE_OFFSET lists the record's offsets in
these queues. The producer sets the first property, the store sets the second. Each of the queues is an ordinary consume
queue, whose units point to the same record.

This module reads the properties, for recovery and for another replica's chunks, regardless of this store's settings.
storage.append.multi_dispatch_appender writes the properties.

RocketMQ 4.9 also puts delayed messages, retried messages and its own messages into additional queues. RocketMQ 5 and
this store do not. But a retried message of RocketMQ 5 may still have the offsets of the original message, which are
wrong for the copy. So such a record may be the next record of an existing queue, but it never makes a queue start at a
new offset.
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
    """A record's position in a queue: the queue's topic and id, and the record's queue offset."""

    key: QueueKey
    queue_offset: int


def is_dispatched(topic: str) -> bool:
    """True if this store also puts messages of `topic` into the further queues that they name.

    As in RocketMQ 5, this happens only when a message is due and its transaction is committed. Retried messages and
    dead letters stay out of further queues: they would return to consumers that failed to process them.
    """
    waits = topic == SCHEDULE_TOPIC or topic in TRANSACTION_TOPICS
    return not waits and not topic.startswith((RETRY_PREFIX, DLQ_PREFIX, SYSTEM_PREFIX))


def light_queue_units(view: DispatchView, physical_offset: int) -> list[QueueUnit]:
    """Return the units of the record at `physical_offset` in the additional queues that the record names. Omits
    implausible units, because no CRC covers them.

    RocketMQ 4.9 also puts records into additional queues whose names lack the `%LMQ%` prefix. Such a queue has the same
    queue id as the record's own queue.
    """
    names, offsets = (
        split_names(view.properties.get(name, ""))
        for name in (PROPERTY_INNER_MULTI_DISPATCH, PROPERTY_INNER_MULTI_QUEUE_OFFSET)
    )
    if not names:
        return []
    if len(names) != len(offsets):
        if offsets:
            logger.error(
                "the record at physical offset %d names %d queues but %d offsets",
                physical_offset,
                len(names),
                len(offsets),
            )
        return []
    found: dict[QueueKey, QueueUnit] = {}
    for name, text in zip(names, offsets, strict=True):
        key = name, LMQ_QUEUE_ID if name.startswith(LMQ_PREFIX) else view.queue_id
        if can_be_queue(name) and key != (view.topic, view.queue_id):
            queue_offset = int(text) if text.isdecimal() and len(text) <= _OFFSET_DIGITS_MAX else -1
            if 0 <= queue_offset <= physical_offset // MIN_RECORD_SIZE:
                found.setdefault(key, QueueUnit(key, queue_offset))
            else:
                logger.error(
                    "the record at physical offset %d names an impossible offset %r of queue %s",
                    physical_offset,
                    text,
                    name,
                )
    return list(found.values())


def put_elsewhere(queues: QueueTable, view: DispatchView, physical_offset: int) -> list[QueueKey]:
    """Put a record of another replica into the further queues that the record names. Returns the queues in which the
    record was missing."""
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
    """Split a comma-separated list as Java does: empty items at the end are dropped."""
    stripped = text.rstrip(SEPARATOR)
    return stripped.split(SEPARATOR) if stripped.strip() else []


def can_be_queue(name: str) -> bool:
    """True if `name` can be the name of a queue directory."""
    return can_be_topic(name) and len(name.encode()) <= INTERNAL_TOPIC_NAME_MAX
