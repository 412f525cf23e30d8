"""Puts inner-batch records into the batch consume queue of their topic and queue id.

This module is for records that this store did not append itself. Recovery uses it, and so does a replica that appends
another replica's log chunks.
"""

from __future__ import annotations

import logging

from raymq.records.format.dispatch import DispatchView
from raymq.records.format.inner_batch import inner_batch
from raymq.records.format.layout import SYS_FLAG_INNER_BATCH, RecordError
from storage.queue.batch_consume_queue import BatchUnit
from storage.queue.queue_table import QueueTable

logger = logging.getLogger(__name__)


class QueueGapError(Exception):
    """A queue has a gap: it lacks the units of records that lie in the log before the part that recovery has
    scanned."""


def is_good_batch(view: DispatchView) -> bool:
    """True if the record is an inner batch whose properties contain its base offset and its number of messages."""
    try:
        return bool(view.sys_flag & SYS_FLAG_INNER_BATCH and inner_batch(view))
    except RecordError:
        return False


def belongs_to_batches(queues: QueueTable, view: DispatchView) -> bool:
    """True if the record is an inner batch with valid properties, and its queue is a batch consume queue."""
    return queues.holds_batches(view.topic, view.queue_id) and is_good_batch(view)


def put_batch(queues: QueueTable, view: DispatchView, physical_offset: int, *, may_fill_gaps: bool) -> bool:
    """Put the record at `physical_offset` into its batch queue, if the queue lacks it. Returns True if the record was
    put.

    Raises QueueGapError if earlier records are missing in the queue and `may_fill_gaps` is False. If `may_fill_gaps` is
    True, the missing records are logged as lost. If a record does not belong into a batch queue, it is logged and put
    into no queue; RocketMQ would not put it there either.
    """
    name = f"{view.topic}:{view.queue_id}"
    try:
        if not view.sys_flag & SYS_FLAG_INNER_BATCH:
            raise RecordError(
                f"the record at physical offset {physical_offset} is a single message, but queue {name} stores "
                "inner batches"
            )
        base_offset, messages = inner_batch(view)
        queue = queues.get_or_create_batch(view.topic, view.queue_id)
        if queue is None:
            raise RecordError(
                f"the record at physical offset {physical_offset} is an inner batch, but queue {name} stores "
                "single messages"
            )
    except RecordError as error:
        logger.error("%s; the record is not put into a queue", error)
        return False
    if physical_offset + view.size <= queue.max_physical_offset or base_offset < queue.next_offset:
        return False
    if base_offset > queue.next_offset:
        if not may_fill_gaps:
            raise QueueGapError(
                f"queue {name} ends at offset {queue.next_offset}, but the next record in the log has offset "
                f"{base_offset}"
            )
        if queue.next_offset:
            logger.error(
                "the records of queue %s from offset %d to %d are lost", name, queue.next_offset, base_offset - 1
            )
    queue.append_unit(
        BatchUnit(physical_offset, view.size, view.tags_code, view.store_timestamp_ms, base_offset, messages)
    )
    return True
