"""Writes inner batches: one record of many messages, and one unit in the batch queue of its topic and queue id.

The append (appender.py) has planned where the record goes and made the files. Here the record gets the queue offset of
its first message, in its header and as text in INNER_BASE (raymq.records.format.inner_batch_encode); queue and dedup
table move on by the number of its messages. A retry holds the very same record, so its messages are stored all or none.
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
    """The messages of a batch that is an inner batch and passed the put checks; 0 for any other."""
    return count_messages(facts.first_properties) if facts.sys_flags & SYS_FLAG_INNER_BATCH else 0


def message_count(batch: EncodedBatch) -> int:
    """The number of messages in a batch that was stored."""
    if not is_inner_batch(batch.records):
        return len(batch.sizes)
    return int(dispatch_view(batch.records).properties[PROPERTY_INNER_NUM])


class InnerBatchWriter:
    """Writes the inner batches of one store. Used under the append lock."""

    def __init__(self, parts: StoreParts, store_host: bytes) -> None:
        self._log, self._queues, self._dedup, self._visibility = parts.log, parts.queues, parts.dedup, parts.visibility
        self._store_host = store_host

    def queue(self, topic: str, queue_id: int) -> BatchConsumeQueue:
        """The batch queue, made if there is none. MessageIllegalError if the queue holds single messages."""
        queue = self._queues.get_or_create_batch(topic, queue_id)
        if queue is None:
            raise MessageIllegalError(
                f"queue {queue_id} of topic {topic!r} holds single messages and takes no inner batch: the topic was "
                "made with another queue type"
            )
        return queue

    def write(
        self, checked: CheckedBatch, queue: BatchConsumeQueue, physical_offset: int, store_timestamp_ms: int
    ) -> AppendResult:
        """Write an inner batch to `physical_offset` of the log, in files that are there, and its unit. OSError: the
        disk failed."""
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
        """The result for an inner batch that an earlier send stored at `queue_offset`. Where retention has deleted it,
        its physical offset is -1, and `store_timestamp_ms` stands for its time."""
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
    """Fill in all that only the store knows. The property CRC, which covers the rest, comes last."""
    put_base(record, position, base_offset)
    stamp_one(base_offset, physical_offset, store_timestamp_ms, store_host, record)
