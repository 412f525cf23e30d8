"""Write inner batches. An inner batch is one record of many messages, with one unit in the batch queue of its topic and
queue id.

The append (appender.py) has already planned the record's place and created the files. This module writes the queue
offset of the first message into the record: in its header, and as text in INNER_BASE
(raymq.records.format.inner_batch_encode). The queue and the dedup table advance by the number of messages. A retry
sends the same record, so either all of its messages are stored or none.
"""

from __future__ import annotations

from functools import partial

from raymq.common.errors import MessageIllegalError
from raymq.common.message import PROPERTY_INNER_NUM, SendStatus
from raymq.common.protocol.store import AppendResult
from raymq.records.format.crc import is_sealed
from raymq.records.format.dispatch import dispatch_view
from raymq.records.format.encode import EncodedBatch
from raymq.records.format.inner_batch_encode import base_position, count_messages, is_inner_batch, put_base
from raymq.records.format.layout import SYS_FLAG_INNER_BATCH
from raymq.records.kernels.check import BatchFacts
from raymq.records.kernels.stamp import stamp_one
from storage.append.checked_batch import CheckedBatch
from storage.parts import StoreParts
from storage.queue.batch_consume_queue import BatchConsumeQueue, BatchUnit


def count_inner(facts: BatchFacts) -> int:
    """Return the number of messages in a checked inner batch; 0 for any other batch."""
    return count_messages(facts.first_properties) if facts.sys_flags & SYS_FLAG_INNER_BATCH else 0


def message_count(batch: EncodedBatch) -> int:
    """Return the number of messages in a stored batch."""
    if not is_inner_batch(batch.records):
        return len(batch.sizes)
    return int(dispatch_view(batch.records).properties[PROPERTY_INNER_NUM])


class InnerBatchWriter:
    """Writes the inner batches of one store. The caller holds the append lock."""

    def __init__(self, parts: StoreParts, store_host: bytes) -> None:
        self._log, self._queues, self._dedup, self._visibility = parts.log, parts.queues, parts.dedup, parts.visibility
        self._store_host = store_host

    def queue(self, topic: str, queue_id: int) -> BatchConsumeQueue:
        """Return the batch queue of a topic and queue id, and create it if it does not exist. Raises
        MessageIllegalError if the queue contains single messages."""
        queue = self._queues.get_or_create_batch(topic, queue_id)
        if queue is None:
            raise MessageIllegalError(
                f"queue {queue_id} of topic {topic!r} stores single messages and does not accept inner batches: "
                "the topic has another queue type; send the messages one by one"
            )
        return queue

    def write(
        self, checked: CheckedBatch, queue: BatchConsumeQueue, physical_offset: int, store_timestamp_ms: int
    ) -> AppendResult:
        """Write an inner batch at `physical_offset` of the log, in existing files, and write its consume-queue entry
        (unit). Raises OSError if the disk failed."""
        batch, records, base_offset = checked.batch, checked.records, queue.next_offset
        stamp = partial(_stamp, base_position(records), base_offset, physical_offset, store_timestamp_ms)
        self._log.write(
            physical_offset, records, store_timestamp_ms, partial(stamp, self._store_host), whole=is_sealed(records)
        )
        unit = BatchUnit(physical_offset, len(records), 0, store_timestamp_ms, base_offset, checked.inner)
        queue.append_unit(unit)
        self._visibility.add(self._log.end_offset, queue, queue.next_offset)
        if batch.producer is not None:
            self._dedup.record_messages(batch.producer, batch.topic, batch.queue_id, checked.inner, base_offset)
        return AppendResult(SendStatus.SEND_OK, base_offset, physical_offset, store_timestamp_ms)

    def stored(self, queue: BatchConsumeQueue, queue_offset: int, store_timestamp_ms: int) -> AppendResult:
        """Build the result for an inner batch that an earlier send stored at `queue_offset`.

        If retention has deleted the batch, its physical offset is -1 and its store time is `store_timestamp_ms`.
        """
        unit = queue.holder_of(queue_offset)
        where = (-1, store_timestamp_ms) if unit is None else (unit.physical_offset, unit.store_timestamp_ms)
        return AppendResult(SendStatus.SEND_OK, queue_offset, *where, True)


def _stamp(
    position: int,
    base_offset: int,
    physical_offset: int,
    store_timestamp_ms: int,
    store_host: bytes,
    record: bytearray | memoryview,
) -> None:
    """Write into an inner batch's record the fields that only the store can set. The property CRC is written last,
    because it covers the other fields."""
    put_base(record, position, base_offset)
    stamp_one(base_offset, physical_offset, store_timestamp_ms, store_host, record)
