"""Messages that a consumer sent back because it could not consume them (spec/messaging.md §5.9).

This module decides when and from which topic such a message is delivered again.

    consumed record ──┬── SCHEDULE_TOPIC_XXXX, queue level - 1 ── after the level's delay ──→ %RETRY%group
                      ├── rmq_sys_timer ── after the group's own retry interval ────────────→ %RETRY%group
                      └── %DLQ%group ── tried often enough, or must not be retried            ↑
                              └── replayed, on request, as if never tried ─────┘

Body, flags, born host and time, tags, keys and the message id stay unchanged, even after several returns. RETRY_TOPIC
names the topic that the message was first sent to, and ORIGIN_MESSAGE_ID its first position in a log. `reconsume_times`
grows by one, or is set to the count of a consumer that counts attempts itself. No body is decompressed. A dead letter
also has DLQ_ORIGIN_TOPIC and DLQ_ORIGIN_MESSAGE_ID, which RocketMQ's programs use to find its origin, and
DLQ_ORIGIN_ERROR, the reason of its last failure.

A message that cannot be read becomes a dead letter at once, because no other attempt can succeed; DLQ_ORIGIN_ERROR has
the reason. If the CRC of its body is wrong, the dead letter has the same bytes with a new, correct CRC, so that the log
stays intact. It also has the flag of an unknown compression, so that no reader mistakes the body for the original
(raymq/records/format/rewrite.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import numpy as np

from raymq.common.delay import TIMER_TOPIC, timer_queue
from raymq.common.errors import InvalidArgumentError, MessageIllegalError
from raymq.common.message import (
    DELAY_LEVELS_MAX,
    PROPERTY_DELAY,
    PROPERTY_DLQ_ORIGIN_ERROR,
    PROPERTY_DLQ_ORIGIN_MESSAGE_ID,
    PROPERTY_DLQ_ORIGIN_TOPIC,
    PROPERTY_ORIGIN_MESSAGE_ID,
    PROPERTY_REAL_QUEUE_ID,
    PROPERTY_REAL_TOPIC,
    PROPERTY_RETRY_TOPIC,
    PROPERTY_TAGS,
    PROPERTY_TIMER_DELIVER_MS,
    PROPERTY_UNIQ_KEY,
    PROPERTY_WAIT,
)
from raymq.common.names import SCHEDULE_TOPIC, dlq_topic, retry_topic
from raymq.common.protocol.group import GroupConfig, SendBackAnswer, retry_interval_s
from raymq.records.format.check import check_record, record_starts
from raymq.records.format.decode import CRC_WRONG
from raymq.records.format.encode import EncodedBatch, ProducerSequence
from raymq.records.format.hashing import tags_code
from raymq.records.format.layout import (
    RecordError,
    decode_properties,
)
from raymq.records.format.rewrite import RecordParts, build_record, split_record

FIRST_RETRY_LEVEL: Final = 3
"""The delay level of the first retry; each later retry waits one level longer (golden fact 13 of
spec/messaging.md)."""

DLQ_ORIGIN_ERROR_MAX: Final = 500
"""Maximum number of characters of the error text in a dead letter."""
_OF_DEAD_LETTERS: Final = (PROPERTY_DLQ_ORIGIN_TOPIC, PROPERTY_DLQ_ORIGIN_MESSAGE_ID, PROPERTY_DLQ_ORIGIN_ERROR)

TopicQueue = tuple[str, int]
"""A topic and a queue id."""


@dataclass(frozen=True, slots=True)
class RetryTimer:
    """The time in ms since 1970 at which a record enters the retry topic, and the queue of the timer topic in which the
    record waits."""

    deliver_at_ms: int
    queue_id: int


@dataclass(frozen=True, slots=True)
class ReturnedRecord:
    """A record that a consumer sent back, and the queue to which it is appended.

    `level`: the delay level with which the record waits before it enters the retry topic; 0 for no delay. None sends
    the record to the dead-letter topic. `reason`: for a dead letter, why it failed last, or why it cannot be read.
    `timer`: when the record enters the retry topic, if the group has retry intervals of its own; the level is 0 then.
    """

    parts: RecordParts
    level: int | None
    reconsume_times: int
    reason: str = ""
    timer: RetryTimer | None = None


def read_returned(
    records: bytes,
    config: GroupConfig,
    *,
    delay_level: int,
    max_reconsume_times: int,
    now_ms: int,
    reason: str = "",
    failure: str = "",
    attempts: int = 0,
) -> tuple[list[ReturnedRecord], SendBackAnswer]:
    """Decide for each of several returned records whether it is retried or becomes a dead letter. Raises
    InvalidArgumentError if the records are damaged.

    A message becomes a dead letter if it was sent back `max_reconsume_times` times before (negative: the group's
    retry_max_times), if `delay_level` is negative, or if its body's CRC is wrong. With `delay_level` 0 the message
    waits for the group's next retry interval, counted from `now_ms`. `reason`: why the messages cannot be read.
    `failure`: why they failed; dead letters store this text. `attempts`: how often each message was delivered, if the
    consumer counts deliveries (0: use `reconsume_times`).
    """
    most = config.retry_max_times if max_reconsume_times < 0 else max_reconsume_times
    returned = []
    for record in _split(records):
        parts, why = split_record(record), reason
        if not parts.body_is_intact:
            why = reason or CRC_WRONG
        times = parts.header.reconsume_times
        level = delay_level or FIRST_RETRY_LEVEL + times
        dead = delay_level < 0 or times >= most or bool(why)
        tried = max(attempts, times + 1)
        if not dead and not delay_level and config.retry_intervals_s:
            interval_s = retry_interval_s(config.retry_intervals_s, tried)
            returned.append(ReturnedRecord(parts, 0, tried, "", _timer(interval_s, now_ms)))
        else:
            returned.append(
                ReturnedRecord(parts, None if dead else min(level, DELAY_LEVELS_MAX), tried, why or failure)
            )
    dead_count = sum(item.level is None for item in returned)
    return returned, SendBackAnswer(len(returned) - dead_count, dead_count)


def _timer(interval_s: float, now_ms: int) -> RetryTimer:
    deliver_at_ms = now_ms + round(interval_s * 1000)
    return RetryTimer(deliver_at_ms, timer_queue(deliver_at_ms, now_ms))


def reason_line(reason: str) -> str:
    """Shorten the reason of a failure to one line of at most DLQ_ORIGIN_ERROR_MAX characters. A traceback is reduced to
    its last line."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    text = lines[-1] if lines and lines[0].startswith("Traceback") else " ".join(lines)
    text = "".join(char if char.isprintable() else " " for char in text)
    return text if len(text) <= DLQ_ORIGIN_ERROR_MAX else text[: DLQ_ORIGIN_ERROR_MAX - 1] + "…"


def read_replayed(records: bytes) -> list[ReturnedRecord]:
    """Parse dead letters that a replay will deliver again. They get no delay and a retry count of 0, like messages that
    were never delivered. Raises InvalidArgumentError if the records are damaged."""
    return [ReturnedRecord(split_record(record), 0, 0) for record in _split(records)]


def _split(records: bytes) -> list[bytes]:
    try:
        ends = [*record_starts(records).tolist(), len(records)]
        parts = [records[start:end] for start, end in pairwise(ends)]
        if not all(check_record(part, check_crc=False).ok for part in parts):
            raise RecordError("a record is damaged")
    except RecordError as error:
        raise InvalidArgumentError(
            f"cannot send back messages: the bytes are not whole, unchanged records: {error}"
        ) from None
    return parts


@dataclass(slots=True)
class ReturnWriter:
    """Encodes returned records as batches for an append.

    Producer sequence numbers grow per queue. So the caller must append the batches of one call before it makes the next
    call. `choose` gets a number n and returns a number below n.
    """

    producer_id: str
    choose: Callable[[int], int]
    store_host_ipv6: bool = False
    _sequences: dict[TopicQueue, int] = field(default_factory=dict)

    def batches(self, group: str, returned: Sequence[ReturnedRecord], retry_queue_nums: int) -> list[EncodedBatch]:
        """Return the batches for one append: one batch for each queue that receives some of the records.

        Raises MessageIllegalError if the properties of a record, including the added properties, are too long.
        """
        by_queue: dict[TopicQueue, list[tuple[ReturnedRecord, int]]] = {}
        for item in returned:
            retry_queue = self.choose(retry_queue_nums)
            by_queue.setdefault(_queue_of(item, group, retry_queue), []).append((item, retry_queue))
        return [self._batch(queue, items, group) for queue, items in by_queue.items()]

    def _batch(self, queue: TopicQueue, items: Sequence[tuple[ReturnedRecord, int]], group: str) -> EncodedBatch:
        first = self._sequences.get(queue, 0)
        records, codes = [], []
        for index, (item, retry_queue) in enumerate(items):
            properties = decode_properties(item.parts.properties)
            target = (retry_topic(group), retry_queue) if item.level or item.timer else None
            producer = ProducerSequence(self.producer_id, 0, first + index)
            records.append(self._record(item, queue, _exchanged(item, properties, target), producer))
            codes.append(_unit_code(item, properties.get(PROPERTY_TAGS)))
        self._sequences[queue] = first + len(items)
        return EncodedBatch(
            *queue,
            b"".join(records),
            np.array([len(record) for record in records], np.int32),
            np.array(codes, np.int64),
            ProducerSequence(self.producer_id, 0, first),
            (),
        )

    def _record(
        self, item: ReturnedRecord, queue: TopicQueue, exchanged: dict[str, str], producer: ProducerSequence
    ) -> bytes:
        """Build the record to append to `queue`. A dead letter omits the properties that name its origin if they do not
        fit."""

        def build(properties: dict[str, str]) -> bytes:
            return build_record(
                item.parts,
                *queue,
                properties,
                producer=producer,
                reconsume_times=item.reconsume_times,
                store_host_ipv6=self.store_host_ipv6,
            )

        try:
            return build(exchanged)
        except MessageIllegalError:
            if item.level is not None:
                raise
            return build(exchanged | dict.fromkeys(_OF_DEAD_LETTERS, ""))


def _queue_of(item: ReturnedRecord, group: str, retry_queue: int) -> TopicQueue:
    """Return the queue to which a record that a consumer sent back is appended next: a delay queue, a queue of the
    retry topic, or the queue of the dead-letter topic."""
    if item.level is None:
        return dlq_topic(group), 0
    if item.timer is not None:
        return TIMER_TOPIC, item.timer.queue_id
    return (SCHEDULE_TOPIC, item.level - 1) if item.level else (retry_topic(group), retry_queue)


def _unit_code(item: ReturnedRecord, tags: str | None) -> int:
    """Return the third field of a record's unit: the delivery time in a timer queue, otherwise the tags code. The store
    computes the field itself in a queue of a delay level."""
    if item.timer is not None:
        return item.timer.deliver_at_ms
    return 0 if item.level else tags_code(tags)


def _exchanged(item: ReturnedRecord, properties: dict[str, str], target: TopicQueue | None) -> dict[str, str]:
    """Return the properties that change in the stored copy of a record that a consumer has sent back. An empty value
    removes a property. `target`: the queue to which the copy is moved after its delay; None if it has no delay."""
    offset_message_id = _offset_message_id(item.parts)
    origin = properties.get(PROPERTY_RETRY_TOPIC, item.parts.topic)
    message_id = properties.get(PROPERTY_UNIQ_KEY, offset_message_id)
    of_dead_letter = (origin, message_id, reason_line(item.reason)) if item.level is None else ("", "", "")
    return {
        **dict(zip(_OF_DEAD_LETTERS, of_dead_letter, strict=True)),
        PROPERTY_RETRY_TOPIC: origin,
        PROPERTY_ORIGIN_MESSAGE_ID: properties.get(PROPERTY_ORIGIN_MESSAGE_ID, offset_message_id),
        PROPERTY_UNIQ_KEY: message_id,
        PROPERTY_WAIT: "false",
        PROPERTY_TIMER_DELIVER_MS: "" if item.timer is None else str(item.timer.deliver_at_ms),
        PROPERTY_DELAY: str(item.level) if item.level else "",
        PROPERTY_REAL_TOPIC: target[0] if target else "",
        PROPERTY_REAL_QUEUE_ID: str(target[1]) if target else "",
    }


def _offset_message_id(parts: RecordParts) -> str:
    return f"{parts.header.store_host.hex().upper()}{parts.header.physical_offset:016X}"
