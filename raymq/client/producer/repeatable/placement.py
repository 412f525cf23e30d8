"""RowPlacement: assigns a queue and a sequence number to each row of a repeatable write. It uses only the rows, their
numbers and values that were fixed before the first attempt.

    row number, sharding key ──► one of the queues, which were fixed in advance
    deliver time             ──► the queue of rmq_sys_timer in which the row waits, at the same broker
    earlier rows there       ──► the row's sequence

If the write is repeated, each row therefore gets the same queue and sequence number, even if the topic has changed
between the attempts. The reference time for deliver times is also fixed before the first attempt.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from raymq.client.producer.table import parts_of
from raymq.client.producer.table_rows import Mask
from raymq.common.delay import TIMER_BUCKETS, TIMER_ROLL_MARGIN_MS, TIMER_ROLL_MS, TIMER_ROLL_QUEUE, TIMER_TOPIC
from raymq.common.errors import InvalidArgumentError, MessageIllegalError
from raymq.common.message import (
    PROPERTY_REAL_QUEUE_ID,
    PROPERTY_REAL_TOPIC,
    PROPERTY_TIMER_DELIVER_MS,
    TIMER_DELAY_MAX_MS,
    MessageQueue,
)
from raymq.common.numbers import POINT_IN_TIME_MS, SECONDS_HINT
from raymq.records.kernels.byte_column import ByteColumn
from raymq.records.kernels.fields import Ints
from raymq.records.kernels.message_columns import MessageColumns

BLOCK_ROWS: Final = 1024
"""Number of consecutive rows without a key that go to one queue. The number must never change, because repeated writes
rely on it."""
PART_MAX_ROWS: Final = 4096
_BUCKET_MS: Final = 3_600_000
_TIMER_QUEUES: Final = TIMER_BUCKETS + 1


class RowRange(NamedTuple):
    """Consecutive rows, as `messages`, that were written to one queue, `queue`. The rows are stored in the queue
    `stored`: `queue` itself, or the timer queue in which rows with a deliver time wait. Their sequences begin at
    `first_sequence`."""

    queue: MessageQueue
    stored: MessageQueue
    first_sequence: int
    messages: MessageColumns

    @property
    def end_sequence(self) -> int:
        """The sequence number that follows the sequence number of the range's last row."""
        return self.first_sequence + len(self.messages)

    def rows_from(self, sequence: int) -> RowRange | None:
        """Return the part of this range from sequence number `sequence` on; None if this part is empty."""
        if sequence <= self.first_sequence:
            return self
        if sequence >= self.end_sequence:
            return None
        return RowRange(self.queue, self.stored, sequence, self.messages[sequence - self.first_sequence :])


class RowPlacement:
    """Assigns queues and sequences to the rows of one producer, in their order. A repeat of the same rows gets the same
    result.

    `queues`: all queues for rows, in a fixed order. `first_queue`: the index of the queue for the first rows without a
    key. `now_ms`: the reference time for deliver times, in ms since 1970. It may be None if each row is due within a
    day.
    """

    def __init__(self, queues: Sequence[MessageQueue], first_queue: int, now_ms: int | None) -> None:
        self._queues = tuple(queues)
        self._first, self._now_ms = first_queue, now_ms
        self._brokers = sorted({queue.broker_name for queue in queues})
        numbers = {name: index for index, name in enumerate(self._brokers)}
        self._broker_of = np.array([numbers[queue.broker_name] for queue in queues], np.int64)
        self.rows = 0
        """Number of rows that were assigned to a queue so far."""
        self.next_sequences: dict[MessageQueue, int] = {}
        """For each queue that stores rows: the next sequence that no row uses."""

    def timer_queues(self) -> list[MessageQueue]:
        """Return the timer queues of all brokers, in which rows with a deliver time wait."""
        return [MessageQueue(TIMER_TOPIC, name, number) for name in self._brokers for number in range(_TIMER_QUEUES)]

    def place(
        self, messages: MessageColumns, hashes: Ints | None, keyed: Mask | None, deliver_ms: pa.Array | None
    ) -> Iterator[RowRange]:
        """Divide the next rows into ranges of one queue each. Rows of one queue keep their order.

        `hashes`: hashes of the sharding keys, shape (n,); valid for rows for which `keyed` is true. `deliver_ms`:
        deliver times in ms since 1970, null for a row without a deliver time.
        """
        count = len(messages)
        numbers = (np.arange(self.rows, self.rows + count) // BLOCK_ROWS + self._first) % len(self._queues)
        self.rows += count
        if hashes is not None and keyed is not None:
            numbers = np.where(keyed, np.abs(hashes) % len(self._queues), numbers)
        if deliver_ms is None or deliver_ms.null_count == count:
            yield from self._parts(messages, numbers)
            return
        waits = np.asarray(deliver_ms.is_valid())
        at_once = np.flatnonzero(~waits)
        if len(at_once):
            yield from self._parts(messages.take(at_once), numbers[at_once])
        chosen = np.flatnonzero(waits)
        times = np.maximum(np.asarray(deliver_ms.fill_null(0))[chosen], 0)
        yield from self._waiting(messages.take(chosen), numbers[chosen], times)

    def _parts(self, messages: MessageColumns, numbers: Ints) -> Iterator[RowRange]:
        for number, group in _grouped(messages, numbers):
            queue = self._queues[number]
            yield from self._numbered(queue, queue, group)

    def _waiting(self, messages: MessageColumns, numbers: Ints, times: Ints) -> Iterator[RowRange]:
        texts = _waiting_texts(messages.topic, [self._queues[number].queue_id for number in numbers.tolist()], times)
        own = messages.properties
        joined = texts if own is None else ByteColumn.joined([own, texts])
        waiting = MessageColumns(messages.topic, messages.bodies, joined, times)
        buckets = times // _BUCKET_MS % TIMER_BUCKETS
        if self._now_ms is not None:
            buckets = np.where(times - self._now_ms > TIMER_ROLL_MS + TIMER_ROLL_MARGIN_MS, TIMER_ROLL_QUEUE, buckets)
        places = self._broker_of[numbers] * _TIMER_QUEUES + buckets
        for place, group in _grouped(waiting, places):
            broker = self._brokers[place // _TIMER_QUEUES]
            target = next(queue for queue in self._queues if queue.broker_name == broker)
            yield from self._numbered(target, MessageQueue(TIMER_TOPIC, broker, place % _TIMER_QUEUES), group)

    def _numbered(self, queue: MessageQueue, stored: MessageQueue, messages: MessageColumns) -> Iterator[RowRange]:
        for part in parts_of(messages, PART_MAX_ROWS):
            first = self.next_sequences.get(stored, 0)
            self.next_sequences[stored] = first + len(part)
            yield RowRange(queue, stored, first, part)


def _grouped(messages: MessageColumns, numbers: Ints) -> Iterator[tuple[int, MessageColumns]]:
    """Group messages by number, where `numbers[i]` is the number of message i. The messages of a group keep their
    order. Consecutive messages with equal numbers are not copied."""
    changes = np.flatnonzero(np.diff(numbers)) + 1
    # The messages follow the order of the rows. Sharding keys scatter adjacent rows over many numbers, so adjacent
    # messages rarely have the same number. In this case sort the messages by number, so that each group is one range.
    if len(changes) > len(numbers) // 64:
        order = np.argsort(numbers, kind="stable")
        messages, numbers = messages.take(order), numbers[order]
        changes = np.flatnonzero(np.diff(numbers)) + 1
    for first, end in pairwise([0, *changes.tolist(), len(numbers)]):
        yield int(numbers[first]), messages[first:end]


def _waiting_texts(topic: str, queue_ids: Sequence[int], times: Ints) -> ByteColumn:
    """Return the encoded properties of each delayed row: the time at which the row is due, and the queue of `topic` to
    which it is then delivered."""
    return ByteColumn.of(
        [
            b"%b\x01%d\x02%b\x01%b\x02%b\x01%d\x02"
            % (
                *(PROPERTY_TIMER_DELIVER_MS.encode(), time_ms, PROPERTY_REAL_TOPIC.encode(), topic.encode()),
                *(PROPERTY_REAL_QUEUE_ID.encode(), queue_id),
            )
            for queue_id, time_ms in zip(queue_ids, times.tolist(), strict=True)
        ]
    )


def check_deliver_times(times_ms: pa.Array, *, fixed: bool) -> None:
    """Check the rows' deliver times, given in ms since 1970. Raises MessageIllegalError if a time is too far ahead, or
    is before 2001 and not 0.

    A write chooses the queue of a delayed row by the row's deliver time and a reference time. `fixed`: True if the
    caller has given the reference time. If not, a repeated write has another reference time, and might put a row that
    is more than a day ahead into another queue. So for such a row raises InvalidArgumentError.
    """
    times = np.asarray(times_ms.fill_null(0))
    if len(seconds := np.flatnonzero((times != 0) & (times < POINT_IN_TIME_MS.low))):
        row = int(seconds[0])
        raise MessageIllegalError(
            f"row {row}: its deliver_time is {int(times[row])} ms after 1970, which is before 2001 ({SECONDS_HINT})"
        )
    ahead_ms = times - time.time_ns() // 1_000_000
    row = int(ahead_ms.argmax()) if len(ahead_ms) else 0
    if len(ahead_ms) and ahead_ms[row] > TIMER_DELAY_MAX_MS:
        raise MessageIllegalError(
            f"the deliver_time of row {row} is {ahead_ms[row] / TIMER_ROLL_MS:.1f} days ahead; at most "
            f"{TIMER_DELAY_MAX_MS // TIMER_ROLL_MS} days are allowed"
        )
    if len(ahead_ms) and not fixed and ahead_ms[row] > TIMER_ROLL_MS:
        raise InvalidArgumentError(
            f"row {row} has a deliver_time more than a day ahead: a repeatable write accepts such rows only with "
            "now_ms, which must be the same in each repeat of the write"
        )
