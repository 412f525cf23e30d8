"""Putting messages that are stored now into the other queues that they name (multi_dispatch.py).

Only the append lock fixes an offset, and the record has it as text: so each of these records gets its last property,
and its final size, under the lock, before anything is written. Their units are written after those of their own queues;
what a crash takes of them, recovery makes again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from raymq.columnar.fields import Ints, find_fields
from raymq.config.store import StoreSettings
from raymq.errors import MessageIllegalError
from raymq.message import MAX_PROPERTIES_BYTES, PROPERTY_INNER_MULTI_DISPATCH, PROPERTY_INNER_MULTI_QUEUE_OFFSET
from raymq.names import LMQ_PREFIX
from raymq.record.crc import PROPERTY_CRC_LENGTH
from raymq.record.encode import EncodedBatch
from raymq.record.layout import decode_properties, record_ends
from raymq.record.stamp import is_sealed
from storage.append.put_check import PutMessageStatus, refusal
from storage.dispatch.multi_dispatch import LMQ_QUEUE_ID, SEPARATOR, QueueKey, can_be_queue, is_dispatched, split_names
from storage.log.append_plan import AppendSpan
from storage.queue.consume_queue import ConsumeQueue
from storage.queue.queue_table import QueueTable

_NAMES_MARK: Final = f"{PROPERTY_INNER_MULTI_DISPATCH}\x01".encode()
_OFFSETS_MARK: Final = f"{PROPERTY_INNER_MULTI_QUEUE_OFFSET}\x01".encode()

logger = logging.getLogger(__name__)


class MultiAppend:
    """What one append puts into other queues. Used under the append lock: first `dispatch` for each batch in the order
    they are written, then `counts`, then `write`."""

    def __init__(self, settings: StoreSettings, queues: QueueTable, record_max_bytes: int) -> None:
        self._queues = queues
        self._record_max_bytes = min(record_max_bytes, settings.max_message_size_bytes)
        self._max_queues = settings.max_lmq_consume_queue_num
        self._batches: list[EncodedBatch] = []
        self._rows: dict[QueueKey, list[tuple[int, int]]] = {}
        self._firsts: dict[QueueKey, int] = {}

    @staticmethod
    def is_enabled(settings: StoreSettings) -> bool:
        """Whether a store with these settings puts messages into other queues; else what they name means nothing."""
        return settings.enable_lmq and settings.enable_multi_dispatch

    def dispatch(self, batch: EncodedBatch, *, must: bool = True) -> EncodedBatch:
        """`batch` with the offsets of its messages in other queues; itself if none of them names one.

        MessageIllegalError: a name that is none of such a queue, more queues than there may be, or a record that gets
        too long. The append must be given up then; unless it `must`, the batch just goes to its own queue only.
        """
        data = bytes(batch.records)
        rows: dict[QueueKey, list[int]] = {}
        if len(batch) and _NAMES_MARK in data and is_dispatched(batch.topic):
            try:
                batch = self._with_offsets(batch, data, rows)
            except MessageIllegalError as error:
                if must:
                    raise
                logger.error("a message is put into %s:%d only: %s", batch.topic, batch.queue_id, error)
                rows = {}
        for key, added in rows.items():
            self._rows.setdefault(key, []).extend((len(self._batches), row) for row in added)
        self._batches.append(batch)
        return batch

    def counts(self) -> list[tuple[ConsumeQueue, int]]:
        """The queues that get messages, and how many. MessageIllegalError if messages are sent to one of them, too: the
        units would be out of order."""
        for batch in self._batches:
            if len(batch) and (batch.topic, batch.queue_id) in self._rows:
                raise MessageIllegalError(
                    f"one append sends messages to {batch.topic!r} and has others dispatched there"
                )
        return [(self._queues.get_or_create(*key), len(rows)) for key, rows in self._rows.items()]

    def write(self, places: Sequence[Sequence[AppendSpan]]) -> list[ConsumeQueue]:
        """Write the units of the batches, which lie at these places; returns the queues that got some."""
        queues = []
        starts = [
            starts_of(batch_places, batch.sizes.astype(np.int64))
            for batch_places, batch in zip(places, self._batches, strict=True)
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

    def _with_offsets(self, batch: EncodedBatch, data: bytes, rows: dict[QueueKey, list[int]]) -> EncodedBatch:
        """`batch`, whose records are `data`, with the offsets; which of its messages each queue gets goes to `rows`."""
        ends = record_ends(batch.sizes)
        places = find_fields(np.frombuffer(data, np.uint8), ends - batch.sizes)
        records: list[bytes] = []
        columns = (places.starts.tolist(), places.properties_at.tolist(), ends.tolist())
        for row, (start, at, end) in enumerate(zip(*columns, strict=True)):
            properties = data[at:end]
            names = split_names(decode_properties(properties).get(PROPERTY_INNER_MULTI_DISPATCH, ""))
            if not names:
                records.append(data[start:end])
                continue
            if batch.topic in names:
                raise MessageIllegalError(f"a message of {batch.topic!r} cannot be dispatched there, too")
            offsets = {name: self._offset_in((name, LMQ_QUEUE_ID), rows) for name in names}
            for name in offsets:
                rows.setdefault((name, LMQ_QUEUE_ID), []).append(row)
            text = SEPARATOR.join(str(offsets[name]) for name in names)
            records.append(self._record(data[start:at], _put_in(properties, text)))
        sizes = np.array([len(record) for record in records], np.int32)
        return replace(batch, records=b"".join(records), sizes=sizes)

    def _offset_in(self, key: QueueKey, rows: dict[QueueKey, list[int]]) -> int:
        """The offset that the next message gets in the queue `key`, behind those of this append."""
        if key not in self._firsts:
            self._firsts[key] = self._end_of(key)
        return self._firsts[key] + len(self._rows.get(key, ())) + len(rows.get(key, ()))

    def _end_of(self, key: QueueKey) -> int:
        name = key[0]
        if not name.startswith(LMQ_PREFIX) or not can_be_queue(name) or self._queues.holds_batches(*key):
            raise MessageIllegalError(
                f"{PROPERTY_INNER_MULTI_DISPATCH} names {name!r}, which cannot be such a queue: "
                f"their names begin with {LMQ_PREFIX}"
            )
        queue = self._queues.get_plain(*key)
        if queue is not None:
            return queue.next_offset
        new = sum(self._queues.get(*other) is None for other in self._firsts)
        if self._queues.count_topics(LMQ_PREFIX) + new >= self._max_queues:
            raise refusal(
                PutMessageStatus.LMQ_CONSUME_QUEUE_NUM_EXCEEDED,
                f"no more than {self._max_queues} {LMQ_PREFIX} queues (max_lmq_consume_queue_num): {name!r} is new",
            ).error
        return 0

    def _record(self, head: bytes, properties: bytes) -> bytes:
        """The record of which `head` is what comes before its properties."""
        size = len(head) + len(properties)
        if len(properties) > MAX_PROPERTIES_BYTES or size > self._record_max_bytes:
            raise MessageIllegalError(
                f"with its offsets in other queues a record has {size} bytes and properties of {len(properties)}; "
                f"{self._record_max_bytes} and {MAX_PROPERTIES_BYTES} are allowed"
            )
        return size.to_bytes(4) + head[4:-2] + len(properties).to_bytes(2) + properties


def starts_of(places: Sequence[AppendSpan], sizes: Ints) -> Ints:
    """The physical offset of each record of a batch that lies at `places`."""
    begins = np.cumsum(sizes) - sizes
    for place in places:
        part = slice(place.first, place.last)
        begins[part] += place.physical_offset - begins[place.first]
    return begins


def _put_in(properties: bytes, offsets: str) -> bytes:
    """Properties with these offsets behind the others, and before the room for a property CRC."""
    end = len(properties) - PROPERTY_CRC_LENGTH if is_sealed(properties) else len(properties)
    pieces = [*filter(None, properties[:end].split(b"\x02")), _OFFSETS_MARK + offsets.encode(), properties[end:]]
    return b"\x02".join(pieces)
