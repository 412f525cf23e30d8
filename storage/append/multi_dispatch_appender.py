"""The appender of a store with multi-dispatch. It also puts a message into further queues that the message names.

A store has this appender if enable_lmq and enable_multi_dispatch are on (`open_appender`).
storage.dispatch.multi_dispatch describes the records. Queue offsets are fixed only under the append lock, and a
multi-dispatch record contains its queue offsets as text. So each multi-dispatch record gets its last property, and its
final size, under the lock, before anything is written. Units of the further queues are written after the units of the
messages' own queues. Recovery rebuilds the units that a crash loses.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np

from raymq.common.config.store import StoreSettings
from raymq.common.errors import MessageIllegalError
from raymq.common.message import MAX_PROPERTIES_BYTES, PROPERTY_INNER_MULTI_DISPATCH, PROPERTY_INNER_MULTI_QUEUE_OFFSET
from raymq.common.names import LMQ_PREFIX
from raymq.common.protocol.store import AppendResult
from raymq.records.format.crc import PROPERTY_CRC_LENGTH, is_sealed
from raymq.records.format.encode import EncodedBatch
from raymq.records.format.inner_batch_encode import is_inner_batch
from raymq.records.format.layout import decode_properties, record_ends
from raymq.records.kernels.fields import Ints, find_fields
from storage.append.appender import Appender, Delivered
from storage.append.checked_batch import CheckedBatch
from storage.append.put_check import PutMessageStatus, refusal
from storage.dispatch.delivery_progress import Delivery, Source
from storage.dispatch.multi_dispatch import LMQ_QUEUE_ID, SEPARATOR, QueueKey, can_be_queue, is_dispatched, split_names
from storage.log.append_plan import AppendSpan
from storage.log.commit_log import CommitLog
from storage.parts import StoreParts
from storage.queue.consume_queue import ConsumeQueue
from storage.queue.queue_table import QueueTable
from storage.recovery.recovery import Recovered

_NAMES_MARK: Final = f"{PROPERTY_INNER_MULTI_DISPATCH}\x01".encode()
_OFFSETS_MARK: Final = f"{PROPERTY_INNER_MULTI_QUEUE_OFFSET}\x01".encode()

logger = logging.getLogger(__name__)


def open_appender(
    parts: StoreParts, recovered: Recovered, *, store_host: bytes, clock_ms: Callable[[], int]
) -> Appender:
    """Create the appender of a store: a MultiDispatchAppender if the settings enable multi-dispatch, else an
    Appender."""
    settings = parts.settings
    multi_dispatch = settings.enable_lmq and settings.enable_multi_dispatch
    kind = MultiDispatchAppender if multi_dispatch else Appender
    return kind(parts, recovered, store_host=store_host, clock_ms=clock_ms)


class MultiDispatchAppender(Appender):
    """An Appender that also puts messages into the queues that their property INNER_MULTI_DISPATCH names."""

    def __init__(
        self, parts: StoreParts, recovered: Recovered, *, store_host: bytes, clock_ms: Callable[[], int]
    ) -> None:
        super().__init__(parts, recovered, store_host=store_host, clock_ms=clock_ms)
        self._new_multi_append = partial(MultiAppend, parts.settings, parts.queues, parts.log, self.record_max_bytes)

    def prepare(self, batches: Sequence[EncodedBatch]) -> Callable[[], list[AppendResult]]:
        """Prepare an append as `Appender.prepare` does, but without the fast path for a single message. The fast path
        cannot add a message to the additional queues that the message names."""
        return partial(self.append, self.check(batches))

    def append(self, batches: Sequence[CheckedBatch]) -> list[AppendResult]:
        """Append `batches` as `Appender.append` does. Also raises the MessageIllegalError of `dispatch` and
        `count_units`."""
        stored = self._stored_before(batches)
        multi = self._new_multi_append()
        rests = [
            _dispatched(multi, checked.without(len(prefix))) for checked, prefix in zip(batches, stored, strict=True)
        ]
        plan = self._plan(rests)
        self._reserve([*plan.units, *multi.count_units()], plan.log_end)
        results = self._write_batches(batches, rests, stored, plan)
        self._show_with_log(multi.write_units(plan.spans))
        return results

    def deliver(self, source: Source | None, deliveries: Sequence[Delivery]) -> list[Delivered]:
        """Deliver due messages as `Appender.deliver` does. If a message cannot be put into the additional queues that
        its properties name, it is put only into its own queue."""
        multi = self._new_multi_append()
        deliveries = [_dispatched_delivery(multi, item) for item in deliveries]
        plan, ends = self._plan_deliveries(deliveries)
        self._reserve(plan.units + multi.count_units(), plan.log_end)
        delivered = self._write_planned_deliveries(source, deliveries, plan)
        starts = starts_of(plan.spans[0], np.diff(ends, prepend=0))
        self._show_with_log(multi.write_units([[AppendSpan(0, 1, start)] for start in starts.tolist()]))
        return delivered


def _dispatched(multi: MultiAppend, checked: CheckedBatch) -> CheckedBatch:
    """Return the batch with each message's offsets in the additional queues that the message names
    (INNER_MULTI_DISPATCH). Return the batch itself if no message names such a queue."""
    sent = replace(checked.batch, records=checked.records)
    batch = multi.dispatch(sent)
    if batch is sent:
        return checked
    return CheckedBatch(batch, memoryview(batch.records), record_ends(batch.sizes))


def _dispatched_delivery(multi: MultiAppend, item: Delivery) -> Delivery:
    """Add to the record of a due message (`item`) the message's offsets in the additional queues that the message names
    (INNER_MULTI_DISPATCH). Return a copy of `item` with the new record, or `item` itself if the message names no
    additional queue."""
    columns = np.array([len(item.record)], np.int32), np.array([item.tags_code], np.int64)
    sent = EncodedBatch(item.topic, item.queue_id, item.record, *columns, None, ())
    batch = multi.dispatch(sent, must=False)
    return item if batch is sent else replace(item, record=bytearray(batch.records))


class MultiAppend:
    """The queue units that one append adds to the additional queues that its messages name, besides the messages' own
    queues. The caller holds the append lock.

    Call `dispatch` for each batch in write order, then `count_units`, then `write_units`.
    """

    def __init__(self, settings: StoreSettings, queues: QueueTable, log: CommitLog, record_max_bytes: int) -> None:
        self._queues, self._log = queues, log
        # Maximum size in bytes of a record, including the text of its offsets in other queues.
        self._record_max_bytes = min(record_max_bytes, settings.max_message_size_bytes)
        # Maximum number of light queues (RocketMQ's LMQ) in the store.
        self._max_queues = settings.max_lmq_consume_queue_num
        # The batches of this append. Their records contain the messages' offsets in the additional queues that the
        # messages name.
        self._batches: list[EncodedBatch] = []
        # For each additional queue that the messages of this append name: the messages to add to the queue, in order. A
        # pair of numbers stands for a message: the index of its batch in this append, and its row in the batch.
        self._rows: dict[QueueKey, list[tuple[int, int]]] = {}
        # For each additional queue that a message of this append names: the queue's next offset before the append.
        self._firsts: dict[QueueKey, int] = {}

    def dispatch(self, batch: EncodedBatch, *, must: bool = True) -> EncodedBatch:
        """Write the offsets that the batch's messages have in further queues into the records. Returns `batch` with
        these new records.

        Returns `batch` itself if no message names a further queue. An inner batch is returned as it is, because its
        messages are in no further queue.

        Raises MessageIllegalError if a light queue cannot have a given name, if there are too many queues, or if a
        record becomes too long. After this error the caller must abandon the append. With `must=False` nothing is
        raised: an error is logged, and the batch is put only into its own queue.
        """
        data = bytes(batch.records)
        rows: dict[QueueKey, list[int]] = {}
        if len(batch) and _NAMES_MARK in data and is_dispatched(batch.topic) and not is_inner_batch(data):
            try:
                batch = self._with_offsets(batch, data, rows)
            except MessageIllegalError as error:
                if must:
                    raise
                logger.error(
                    "a message is stored in queue %s:%d only, not in the other queues that it names: %s",
                    batch.topic,
                    batch.queue_id,
                    error,
                )
                rows = {}
        for key, added in rows.items():
            self._rows.setdefault(key, []).extend((len(self._batches), row) for row in added)
        self._batches.append(batch)
        return batch

    def count_units(self) -> list[tuple[ConsumeQueue, int]]:
        """Return the additional queues that get units (entries) by this append, each with its number of new units.
        Raises MessageIllegalError if the append also sends messages directly to one of these queues.

        In such a queue the units would be out of order.
        """
        for batch in self._batches:
            if len(batch) and (batch.topic, batch.queue_id) in self._rows:
                raise MessageIllegalError(
                    f"one append sends messages to topic {batch.topic!r} and also dispatches messages of other "
                    "topics to it; send them in separate appends"
                )
        return [(self._queue(key), len(rows)) for key, rows in self._rows.items()]

    def write_units(self, spans: Sequence[Sequence[AppendSpan]]) -> list[ConsumeQueue]:
        """Write this append's entries (units) into the additional queues that its messages name. The batches are
        already in the log, at `spans`. Returns the queues that got entries."""
        queues = []
        # For each batch: the physical offset of each of its records.
        starts = [
            starts_of(batch_spans, batch.sizes.astype(np.int64))
            for batch_spans, batch in zip(spans, self._batches, strict=True)
        ]
        for key, rows in self._rows.items():
            queue = self._queues.get_or_create(*key)
            queue.append_scattered(
                np.array([starts[batch][row] for batch, row in rows], np.int64),
                np.array([self._batches[batch].sizes[row] for batch, row in rows], np.int32),
                np.array([self._batches[batch].tag_codes[row] for batch, row in rows], np.int64),
            )
            queues.append(queue)
        return queues

    def _queue(self, key: QueueKey) -> ConsumeQueue:
        """Return the queue with the key `key`. If the queue does not exist, create it. The new queue starts at the
        offset that `_end_of` has found for it."""
        queue = self._queues.get_or_create(*key)
        if not queue.exists and self._firsts[key]:
            queue.start_at(self._firsts[key])
        return queue

    def _with_offsets(self, batch: EncodedBatch, data: bytes, rows: dict[QueueKey, list[int]]) -> EncodedBatch:
        """Return a copy of `batch` whose records contain the offsets of their messages in additional queues. `data`:
        the batch's records. `rows` collects, for each additional queue, the row indices of the messages that the queue
        gets."""
        ends = record_ends(batch.sizes)
        fields = find_fields(np.frombuffer(data, np.uint8), ends - batch.sizes)
        records: list[bytes] = []
        columns = (fields.starts.tolist(), fields.properties_at.tolist(), ends.tolist())
        for row, (start, at, end) in enumerate(zip(*columns, strict=True)):
            properties = data[at:end]
            names = split_names(decode_properties(properties).get(PROPERTY_INNER_MULTI_DISPATCH, ""))
            if not names:
                records.append(data[start:end])
                continue
            if batch.topic in names:
                raise MessageIllegalError(
                    f"a message of topic {batch.topic!r} names its own topic in {PROPERTY_INNER_MULTI_DISPATCH}; "
                    "nothing was stored"
                )
            offsets = {name: self._offset_in((name, LMQ_QUEUE_ID), rows) for name in names}
            for name in offsets:
                rows.setdefault((name, LMQ_QUEUE_ID), []).append(row)
            text = SEPARATOR.join(str(offsets[name]) for name in names)
            records.append(self._record(data[start:at], _put_in(properties, text)))
        sizes = np.array([len(record) for record in records], np.int32)
        return replace(batch, records=b"".join(records), sizes=sizes)

    def _offset_in(self, key: QueueKey, rows: dict[QueueKey, list[int]]) -> int:
        """Return the offset of the next message in the queue `key`, counting the messages that this append already adds
        to the queue."""
        if key not in self._firsts:
            self._firsts[key] = self._end_of(key)
        return self._firsts[key] + len(self._rows.get(key, ())) + len(rows.get(key, ()))

    def _end_of(self, key: QueueKey) -> int:
        """Return the next offset of the queue `key`, even if the queue does not exist yet
        (QueueTable.first_light_offset).

        Raises MessageIllegalError if no light queue (RocketMQ's LMQ) can have this key.
        """
        name = key[0]
        if not name.startswith(LMQ_PREFIX) or not can_be_queue(name) or self._queues.holds_batches(*key):
            raise MessageIllegalError(
                f"{PROPERTY_INNER_MULTI_DISPATCH} names {name!r}, which is not a light queue: the names of light "
                f"queues begin with {LMQ_PREFIX}"
            )
        queue = self._queues.get_plain(*key)
        if queue is not None and queue.exists:
            return queue.next_offset
        new = sum(self._queues.get(*other) is None for other in self._firsts)
        if self._queues.count_topics(LMQ_PREFIX) + new >= self._max_queues:
            raise refusal(
                PutMessageStatus.LMQ_CONSUME_QUEUE_NUM_EXCEEDED,
                f"the store already has {self._max_queues} {LMQ_PREFIX} queues, the maximum "
                f"(max_lmq_consume_queue_num), so it cannot create {name!r}",
            ).error
        return self._queues.first_light_offset(self._log.min_offset, self._log.end_offset)

    def _record(self, head: bytes, properties: bytes) -> bytes:
        """Build a record from `head`, the record's bytes before the properties, and new properties. Raises
        MessageIllegalError if the record is too long."""
        size = len(head) + len(properties)
        if len(properties) > MAX_PROPERTIES_BYTES or size > self._record_max_bytes:
            raise MessageIllegalError(
                f"including its offsets in other queues a record has {size} bytes and its properties have "
                f"{len(properties)} bytes; at most {self._record_max_bytes} and {MAX_PROPERTIES_BYTES} bytes are "
                "allowed"
            )
        return size.to_bytes(4) + head[4:-2] + len(properties).to_bytes(2) + properties


def starts_of(spans: Sequence[AppendSpan], sizes: Ints) -> Ints:
    """Return the physical offset of each record of a batch that was written to `spans` of the log."""
    # First compute the records' offsets as if the batch were stored from offset 0 without gaps. Then shift the records
    # of each span (a contiguous range of the log) to the span's physical offset.
    starts = np.cumsum(sizes) - sizes
    for span in spans:
        part = slice(span.first, span.last)
        starts[part] += span.physical_offset - starts[span.first]
    return starts


def _put_in(properties: bytes, offsets: str) -> bytes:
    """Add a property whose value is the text `offsets` (queue offsets) to a record's properties: at their end, but
    before the bytes of a property CRC."""
    end = len(properties) - PROPERTY_CRC_LENGTH if is_sealed(properties) else len(properties)
    pieces = [*filter(None, properties[:end].split(b"\x02")), _OFFSETS_MARK + offsets.encode(), properties[end:]]
    return b"\x02".join(pieces)
