"""`Producer.send_table`: sends the rows of an Arrow table as messages.

One pass checks all rows before the first row is sent. After that, slices of rows, as columns, wait in the producer's
buffer like other messages. Even a very large table therefore needs only a limited amount of additional memory. The
result has ranges of offsets instead of one result per row.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import pyarrow as pa

from raymq.client.producer.checks.topic_types import check_rows
from raymq.client.producer.pipeline import SendPipeline
from raymq.client.producer.queue_selector import ANYWHERE, TURN_MAX_MESSAGES, Destination
from raymq.client.producer.results import Acknowledged, Outcome
from raymq.client.producer.table_rows import Mask, TableRows
from raymq.common.errors import SendUnknownError
from raymq.common.message import Message, MessageQueue, SendStatus
from raymq.common.protocol.route import TopicRoute
from raymq.records.kernels.fields import Ints
from raymq.records.kernels.message_columns import MessageColumns

TABLE_SLICE_ROWS: Final = 4096
"""Number of table rows that are converted to messages at a time."""
PART_MAX_BYTES: Final = 1024 * 1024
"""Maximum bytes of bodies and properties in one part of a table. A part with a single message may be larger."""
CHECK_ROWS: Final = 32 * 1024
"""Number of table rows that are checked at a time."""


@dataclass(frozen=True, slots=True)
class QueueRange:
    """A range of `count` messages at consecutive offsets of a queue, from `first_offset` on."""

    queue: MessageQueue
    first_offset: int
    count: int


@dataclass(frozen=True, slots=True)
class TableResult:
    """The result of sending a table of `count` rows. `ranges`: the offsets of the rows, sorted by queue and offset.
    `statuses`: the number of rows by status."""

    count: int
    ranges: tuple[QueueRange, ...]
    statuses: Mapping[SendStatus, int]


def send_table(pipeline: SendPipeline, topic: str, table: pa.Table | pa.RecordBatch) -> TableResult:
    """Send each row of `table` as a message, and wait until all are stored (`Producer.send_table`)."""
    rows = TableRows(topic, table)
    if rows.count:
        pipeline.check([Message(topic, b"x")])
    for first in range(0, rows.count, CHECK_ROWS):
        rows.check(first, CHECK_ROWS, pipeline.settings.max_message_size_bytes)
    if rows.count:
        check_rows(pipeline.route(topic, pipeline.settings.send_timeout_s, keyed=rows.keyed), rows.table)
    progress = _TableProgress(rows.count)
    turns: _RowTurns | None = None
    try:
        for first in range(0, rows.count, TABLE_SLICE_ROWS):
            if progress.failure is not None:
                break
            route = pipeline.route(topic, pipeline.settings.send_timeout_s, keyed=rows.keyed)
            turns = turns or _RowTurns(pipeline, rows.unkeyed, len(route.publish_queues))
            for part in _split_by_queue(route, *rows.read(first, TABLE_SLICE_ROWS), turns):
                _hand_over(pipeline, route, *part, progress)
    # Keep the error: `progress.result` raises it after all rows that are already in flight have an outcome.
    except Exception as error:
        progress.stop(error)
    return progress.result()


def _hand_over(
    pipeline: SendPipeline,
    route: TopicRoute,
    messages: MessageColumns,
    destination: Destination,
    queue: MessageQueue | None,
    progress: _TableProgress,
) -> None:
    timeout_s = pipeline.settings.send_timeout_s
    request = pipeline.begin(messages, destination, timeout_s, before_end=progress.ended)
    request.turn_queue = queue
    # Wait for buffer space even if `when_full` is "raise", so that a table is sent as fast as space becomes free.
    try:
        request.generation = pipeline.buffer.allocate(request.cost_bytes, len(messages), timeout_s)
    except BaseException as error:
        request.fail(error)
        raise
    progress.handed_over(len(messages))
    try:
        pipeline.put(route, request)
    except BaseException as error:
        request.fail(error)
        progress.not_taken(len(messages))
        raise


class _RowTurns:
    """Divides the rows of a table that have no key among a topic's queues. A *turn* is a run of consecutive rows that
    go to one queue.

    All turns have equally many rows. If each queue gets at least TURN_MAX_MESSAGES rows, all queues have equally many
    turns. The queue of a turn is a queue with the fewest rows of this table. `rows`: number of rows without a key.
    """

    def __init__(self, pipeline: SendPipeline, rows: int, queues: int) -> None:
        queues = max(queues, 1)
        turns = -(-rows // TURN_MAX_MESSAGES)
        if turns >= queues:
            turns = queues * -(-rows // (queues * TABLE_SLICE_ROWS))
        self._pipeline, self._rows, self._turns = pipeline, rows, turns
        self._number = self._left = 0
        self._queue: MessageQueue | None = None
        self._counts: Counter[MessageQueue] = Counter()

    def parts(self, route: TopicRoute, messages: MessageColumns) -> Iterator[_Part]:
        """Divide the table's next messages into parts of about PART_MAX_BYTES each. Consecutive messages of the same
        turn go to one queue. A part never contains messages of two turns, so all its messages go to one queue."""
        first = 0
        while first < len(messages):
            if not self._left:
                self._begin_turn(route)
            count = min(self._left, len(messages) - first)
            for part in parts_of(messages[first : first + count], count):
                yield part, ANYWHERE, self._queue
            first, self._left = first + count, self._left - count

    def _begin_turn(self, route: TopicRoute) -> None:
        number, self._number = self._number, self._number + 1
        self._left = self._rows * (number + 1) // self._turns - self._rows * number // self._turns
        # All rows of a small table go to one queue: the queue to which the producer sends its other messages at the
        # time. Only a large table is divided into runs of consecutive rows (turns), and a queue is chosen for each
        # turn.
        if self._turns > 1:
            self._queue = self._pipeline.queue_with_fewest(route, self._counts)
            self._counts[self._queue] += self._left


_Part = tuple[MessageColumns, Destination, MessageQueue | None]
"""A part of a table to send: the messages for one queue, their destination, and a queue or None. The queue is set only
for rows without a key in a large table. It is the queue to which the current turn (a run of consecutive rows) goes."""


def _split_by_queue(
    route: TopicRoute, messages: MessageColumns, hashes: Ints | None, keyed: Mask | None, turns: _RowTurns
) -> Iterator[_Part]:
    """Divide messages into parts for one queue each. Messages that are `keyed` keep their order and go to the queue
    that the hash of their key selects. The other messages go to the queues that `turns` selects."""
    if hashes is None or keyed is None:
        yield from turns.parts(route, messages)
        return
    queues = route.require_all_queues()
    # Sort the messages by queue, as the hashes of their sharding keys select it, without changing the order within a
    # queue. Messages without a sharding key come first.
    numbers = np.where(keyed, np.abs(hashes) % len(queues), -1)
    messages = messages.take(np.argsort(numbers, kind="stable"))
    counts = np.bincount(numbers + 1, minlength=len(queues) + 1)
    ends = np.cumsum(counts).tolist()
    for number, (first, end) in enumerate(pairwise([0, *ends]), start=-1):
        if number < 0:
            yield from turns.parts(route, messages[first:end])
            continue
        for part in parts_of(messages[first:end], TABLE_SLICE_ROWS):
            yield part, Destination(queue=queues[number]), None


def parts_of(messages: MessageColumns, rows_max: int) -> Iterator[MessageColumns]:
    """Divide messages into parts of 1 to `rows_max` messages and about PART_MAX_BYTES."""
    ends = messages.sizes.cumsum()
    first = 0
    while first < len(messages):
        start = int(ends[first - 1]) if first else 0
        fitting = int(np.searchsorted(ends, start + PART_MAX_BYTES, side="right"))
        end = min(max(fitting, first + 1), first + rows_max, len(messages))
        yield messages[first:end]
        first = end


class AcknowledgedRows:
    """The rows of a table that stores have acknowledged so far: their number, their statuses and their offset
    ranges."""

    def __init__(self) -> None:
        self.count = 0
        self.statuses: Counter[SendStatus] = Counter()
        # each offset range of a queue is a list [first offset, offset after the last]
        self._ranges: dict[MessageQueue, list[list[int]]] = {}

    def add(self, rows: Acknowledged) -> None:
        """Add acknowledged rows of one queue to the totals."""
        self.count += len(rows.queue_offsets)
        self.statuses[rows.status] += len(rows.queue_offsets)
        ranges = self._ranges.setdefault(rows.queue, [])
        for first, end in _runs(rows.queue_offsets):
            if ranges and ranges[-1][1] == first:
                ranges[-1][1] = end
            else:
                ranges.append([first, end])

    def ranges(self) -> tuple[QueueRange, ...]:
        """Return the offset ranges of the acknowledged rows, sorted by queue and offset."""
        return tuple(
            QueueRange(queue, first, end - first)
            for queue in sorted(self._ranges)
            for first, end in sorted(self._ranges[queue])
        )


class _TableProgress:
    """The outcomes of a table's rows so far. Thread-safe, because the threads of several senders report
    outcomes."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._changed = threading.Condition()
        self._under_way = 0
        self._acknowledged = AcknowledgedRows()
        self.failure: BaseException | None = None

    def handed_over(self, count: int) -> None:
        with self._changed:
            self._under_way += count

    def ended(self, first: int, end: int, outcome: Outcome) -> None:
        """Record one outcome for the rows from `first` up to, but not including, `end`."""
        with self._changed:
            if isinstance(outcome, Acknowledged):
                self._acknowledged.add(outcome)
            elif self.failure is None or isinstance(outcome, SendUnknownError):
                # a SendUnknownError replaces any other first error, because rows whose outcome is unknown may be stored
                self.failure = outcome
            self._end(end - first)

    def not_taken(self, count: int) -> None:
        """Count `count` rows as finished, because they could not be enqueued for sending."""
        with self._changed:
            self._end(count)

    def stop(self, error: BaseException) -> None:
        """Record `error`, so that no more rows of the table are sent. If a row failed earlier, that row's error stays
        recorded instead."""
        with self._changed:
            self.failure = self.failure or error

    def result(self) -> TableResult:
        """Wait until all rows in flight have an outcome, and return the result. Each row has an outcome by its
        deadline. If rows failed, raises one of the failures instead: a SendUnknownError if there is one, because its
        rows may be stored; otherwise the first failure."""
        with self._changed:
            self._changed.wait_for(lambda: not self._under_way)
        if self.failure is not None:
            self.failure.add_note(f"{self._acknowledged.count} of the table's {self._rows} rows were acknowledged")
            raise self.failure
        done = self._acknowledged
        return TableResult(done.count, done.ranges(), dict(done.statuses))

    def _end(self, count: int) -> None:
        self._under_way -= count
        if not self._under_way:
            self._changed.notify_all()


def _runs(offsets: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield `offsets` as ranges [first, end). A `range` object gives one range; any other sequence gives one range for
    each offset."""
    if isinstance(offsets, range):
        yield offsets.start, offsets.stop
        return
    for offset in offsets:
        yield offset, offset + 1
