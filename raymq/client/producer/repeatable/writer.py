"""RepeatableWriter: writes Arrow tables. A write may be repeated, and stores each row once.

    rows ──► RowPlacement ──► parts with sequences ──► a Producer with this identity ──► the store's dedup table
                                  └── stored rows are left out (StoredSequences)

The caller gives the identity by which the store recognises rows: a producer id and an epoch. A row's sequence is the
number of earlier rows in its queue. A repeat with the same identity, the same rows and the same order stores no row a
second time. This holds in any process, and beside any number of concurrent attempts:

- At its start, a writer asks each broker which sequences of its producer id are stored, and leaves these rows out.
- The store decides between concurrent attempts, row by row. In each queue an attempt writes in order and stops at its
  first failure (QueueSends.failure), so the stored rows have no gap.
- A greater epoch fences smaller epochs: their writers end with ClientStateError.

The store remembers `dedup_producers_max` pairs of producer and queue, by default 20,000, across restarts and failovers.
If there are more pairs, the store forgets the pair that was idle longest. A later repeat then stores the rows of that
pair again. Retention does not make the store forget a pair: rows that were deleted by their age count as written.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from raymq.client.producer.checks.topic_types import check_rows as check_rows_type
from raymq.client.producer.producer import Producer
from raymq.client.producer.queue_selector import Destination, named_queue
from raymq.client.producer.repeatable.placement import RowPlacement, RowRange, check_deliver_times
from raymq.client.producer.repeatable.stored import SEQUENCES_CALL_TIMEOUT_S, StoredSequences
from raymq.client.producer.results import Acknowledged, Outcome
from raymq.client.producer.table import CHECK_ROWS, TABLE_SLICE_ROWS, AcknowledgedRows, QueueRange
from raymq.client.producer.table_rows import TableRows
from raymq.common.closing import Closing
from raymq.common.errors import (
    ClientStateError,
    InvalidArgumentError,
    MessageIllegalError,
    RaymqError,
    SendUnknownError,
)
from raymq.common.message import MAX_MESSAGE_SIZE_BYTES, MessageQueue, SendStatus
from raymq.common.names import SYSTEM_PREFIX, check_user_topic
from raymq.common.protocol.route import TopicRoute
from raymq.common.retry import persist_until
from raymq.remoting.master_locator import RouteSource

DELIVER_TIME: Final = "deliver_time"
_PRODUCER_ID_MAX: Final = 64
_EPOCH_MAX: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class WriteResult:
    """The result of a repeatable write. All `count` rows are stored; an earlier attempt stored `stored_before` of them.

    `ranges`: the offset ranges of the rows that this attempt stored, sorted by queue and offset. Rows with a deliver
    time are in the ranges of the system queues in which they wait.
    """

    count: int
    stored_before: int
    ranges: tuple[QueueRange, ...]


class RepeatableWriter(Closing):
    """Writes tables of rows to a topic, each row once. Made by `Client.repeatable_writer`.

        with client.repeatable_writer("orders", producer_id="load-7/3", epoch=0, queues=queues) as writer:
            for batch in batches:
                writer.write(batch)
            result = writer.finish()

    A repeat must give the same `queues`, `first_queue` and `now_ms`, and the same rows in the same order. The division
    of the rows into tables may differ. Only one thread may use a writer. The producer's buffer (`max_buffered_bytes`)
    limits the memory that is used in addition to the table.
    """

    def __init__(
        self,
        topic: str,
        queues: Sequence[MessageQueue],
        *,
        stored: StoredSequences,
        routes: RouteSource,
        producer: Callable[[], Producer],
        first_queue: int = 0,
        now_ms: int | None = None,
    ) -> None:
        """Create the writer, and query the brokers for the sequence numbers that are already stored under its producer
        identity. Raises the errors of `StoredSequences.ask`.

        `producer` makes producers with this identity. `Client.repeatable_writer` explains the other arguments.
        """
        self.topic = check_user_topic(topic)
        self._queues = _checked_queues(topic, queues)
        self._stored, self._routes, self._make_producer = stored, routes, producer
        self._now_ms = now_ms
        self._placement = RowPlacement(self._queues, first_queue, now_ms)
        self._producer = producer()
        self._timeout_s = self._producer.settings.send_timeout_s
        self._in_flight = _PartsInFlight()
        self._known: dict[MessageQueue, int] = {}
        """For each queue whose stored sequences were queried, the first sequence after the rows that earlier attempts
        of this write stored."""
        self._left_out = 0
        self._finished = False
        self._broken: BaseException | None = None
        try:
            self._known = stored.ask(self._queues, self._timeout_s)
        except BaseException:
            self._producer.close()
            raise

    def write(self, table: pa.Table | pa.RecordBatch) -> None:
        """Write the next rows. Returns when all rows are in the producer's buffer; `finish` waits until they are
        stored.

        Columns: the columns of `Producer.send_table`, and `deliver_time` (timestamp, null for a row without a deliver
        time). All rows of the table are checked before the first is sent. Raises InvalidArgumentError if a column is
        invalid, and MessageIllegalError if a row is invalid. Rows with one sharding key go to one queue in their order.

        Waits while the buffer is full. Also raises the failure of earlier rows: ServiceNotAvailableError if a broker
        stayed unreachable for the send timeout, SendUnknownError if a broker did not answer, ClientStateError if a
        newer epoch has written. After an error the writer accepts no more rows. The rows that are then stored in a
        queue are the queue's first rows, without a gap; a repeat continues after them.
        """
        self._check_open()
        try:
            self._write(table)
        except BaseException as error:
            self._broken = error
            raise

    def _write(self, table: pa.Table | pa.RecordBatch) -> None:
        longest = self._producer.settings.max_message_size_bytes
        rows, times = check_rows(self.topic, table, longest, fixed=self._now_ms is not None)
        delayed = 0 if times is None else rows.count - times.null_count
        route = self._route()
        check_rows_type(route, rows.table, delayed)
        if delayed:
            self._ask_timers()
        for first in range(0, rows.count, TABLE_SLICE_ROWS):
            due = None if times is None else times.slice(first, TABLE_SLICE_ROWS)
            for part in self._placement.place(*rows.read(first, TABLE_SLICE_ROWS), due):
                left = part.rows_from(self._known.get(part.stored, 0))
                self._left_out += len(part.messages) - (0 if left is None else len(left.messages))
                if left is not None:
                    self._hand_over(route, left)

    def finish(self) -> WriteResult:
        """Wait until all rows are stored as durably as the cluster's settings require. Raises the errors of `write`.

        Raises ClientStateError if an earlier attempt stored more rows than this attempt wrote: then the two attempts
        wrote different rows.
        """
        self._check_open()
        try:
            while self._in_flight.settle() is not None:
                self._continue_after_failure()
        except BaseException as error:
            self._broken = error
            raise
        self._finished = True
        done = self._in_flight.acknowledged
        for queue, stored in self._known.items():
            here = self._placement.next_sequences.get(queue, 0)
            if stored > here:
                raise ClientStateError(
                    f"an earlier attempt of this write stored {stored} rows in queue {queue}, and this attempt "
                    f"has {here} rows: repeat the write with the same rows in the same order"
                )
        return WriteResult(self._placement.rows, self._left_out, done.ranges())

    def close(self) -> None:
        """Stop the writer's threads after the rows in flight have an outcome. Idempotent."""
        self._finished = True
        self._producer.close()

    @property
    def left_out(self) -> int:
        """Number of rows that this writer has skipped so far, because an earlier attempt has stored them."""
        return self._left_out

    def _check_open(self) -> None:
        if self._broken is not None:
            raise ClientStateError(f"this write has failed ({self._broken}); repeat the write with a new writer")
        if self._finished:
            raise ClientStateError("this write is finished or closed; create a new writer for more rows")

    def _hand_over(self, route: TopicRoute, part: RowRange) -> None:
        while self._in_flight.failure is not None:
            self._continue_after_failure()
        pipeline, count = self._producer.pipeline, len(part.messages)
        where = Destination(queue=part.queue)
        request = pipeline.begin(part.messages, where, self._timeout_s, before_end=self._in_flight.add(part))
        request.first_sequence, request.stored = part.first_sequence, part.stored
        try:
            request.generation = pipeline.buffer.allocate(request.cost_bytes, count, self._timeout_s)
            pipeline.put(route, request)
        except BaseException as error:
            self._in_flight.not_taken(part, error)
            raise

    def _continue_after_failure(self) -> None:
        """Continue the write after a failure, if another attempt of the same write has stored some of the failed rows
        in the meantime. Only the other failed rows are sent again. In all other cases, raise the failure."""
        failure = self._in_flight.settle()
        assert failure is not None
        if not isinstance(failure, (MessageIllegalError, SendUnknownError)):
            raise failure
        failed = sorted(self._in_flight.failed, key=lambda part: part.first_sequence)
        try:
            known = self._stored.ask({part.stored for part in failed}, SEQUENCES_CALL_TIMEOUT_S)
        except RaymqError as error:
            raise failure from error
        left = [rest for part in failed if (rest := part.rows_from(known[part.stored])) is not None]
        before, after = _rows_of(failed), _rows_of(left)
        if after == before:
            raise failure
        self._left_out += before - after
        self._producer.close()
        self._producer = self._make_producer()
        self._in_flight.forget_failure()
        route = self._route()
        for rest in left:
            self._hand_over(route, rest)

    def _ask_timers(self) -> None:
        timers = [queue for queue in self._placement.timer_queues() if queue not in self._known]
        if timers:
            self._known.update(self._stored.ask(timers, self._timeout_s))

    def _route(self) -> TopicRoute:
        """Return the topic's route. Waits until the route has all queues to which this writer writes."""

        def look(left_s: float) -> TopicRoute:
            route = self._routes.get(self.topic)
            for queue in self._queues:
                named_queue(route, queue)
            return route

        return persist_until(time.monotonic() + self._timeout_s, look)


def check_rows(
    topic: str,
    table: pa.Table | pa.RecordBatch,
    max_body_bytes: int = MAX_MESSAGE_SIZE_BYTES,
    *,
    fixed: bool = True,
) -> tuple[TableRows, pa.Array | None]:
    """Check the rows of a table as `RepeatableWriter.write` does. Returns the rows, and their deliver times in ms since
    1970. `fixed`: True if the reference time for deliver times is given."""
    plain, times = _split_times(table)
    rows = TableRows(topic, plain)
    for first in range(0, rows.count, CHECK_ROWS):
        rows.check(first, CHECK_ROWS, max_body_bytes)
    if times is not None:
        check_deliver_times(times, fixed=fixed)
    return rows, times


class _PartsInFlight:
    """Counts the parts of a repeatable write that have no outcome yet, and collects the outcomes of the other parts.
    Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = 0
        self.acknowledged = AcknowledgedRows()
        self.failure: BaseException | None = None
        self.failed: list[RowRange] = []

    def add(self, part: RowRange) -> Callable[[int, int, Outcome], None]:
        """Count `part`, a range of rows that is about to be sent. Returns the function that the producer calls with the
        outcome of these rows."""
        with self._changed:
            self._count += 1
        return lambda first, end, outcome: self._ended(part, outcome)

    def not_taken(self, part: RowRange, error: BaseException) -> None:
        """Record that a part of the rows has failed because the producer did not accept the part for sending."""
        self._ended(part, error)

    def settle(self) -> BaseException | None:
        """Wait until each part of the rows has been stored or has failed; a part fails at its deadline at the latest.
        Returns the first failure; None if all parts were stored."""
        with self._changed:
            self._changed.wait_for(lambda: not self._count)
            return self.failure

    def forget_failure(self) -> None:
        """Forget the ranges of rows that failed, and the first failure, before the writer sends these rows
        again."""
        with self._changed:
            self.failure = None
            self.failed = []

    def _ended(self, part: RowRange, outcome: Outcome) -> None:
        with self._changed:
            if isinstance(outcome, Acknowledged) and outcome.status is SendStatus.SEND_OK:
                self.acknowledged.add(outcome)
            else:
                self.failed.append(part)
                error = outcome if isinstance(outcome, BaseException) else _not_safe(part, outcome.status)
                # Keep only the first failure: after a failure in a queue, all later rows of the queue fail as a
                # consequence, with the same failure.
                self.failure = self.failure or error
            self._count -= 1
            if not self._count:
                self._changed.notify_all()


def _not_safe(part: RowRange, status: SendStatus) -> SendUnknownError:
    return SendUnknownError(str(part.stored), len(part.messages), 0.0, f"the store answered {status.name}", False)


def _rows_of(parts: Sequence[RowRange]) -> int:
    return sum(len(part.messages) for part in parts)


def _checked_queues(topic: str, queues: Sequence[MessageQueue]) -> tuple[MessageQueue, ...]:
    chosen = tuple(queues)
    if not chosen or len(set(chosen)) < len(chosen) or any(queue.topic != topic for queue in chosen):
        raise InvalidArgumentError(
            f"a write to topic {topic!r} needs a list of the topic's queues, each once; get the list from "
            f"client.write_queues({topic!r})"
        )
    return chosen


def check_identity(producer_id: str, epoch: int) -> None:
    """Raise InvalidArgumentError unless the producer id and the epoch are valid, so that a record's properties can hold
    them."""
    long = len(producer_id.encode()) > _PRODUCER_ID_MAX
    if not producer_id or long or not producer_id.isprintable() or producer_id.startswith(SYSTEM_PREFIX):
        raise InvalidArgumentError(
            f"a producer id must be 1 to {_PRODUCER_ID_MAX} bytes of printable text that does not begin with "
            f"{SYSTEM_PREFIX}, not {producer_id!r}"
        )
    if not 0 <= epoch <= _EPOCH_MAX:
        raise InvalidArgumentError(f"an epoch must be a number from 0 to 2**63 - 1, not {epoch}")


def _split_times(table: pa.Table | pa.RecordBatch) -> tuple[pa.Table | pa.RecordBatch, pa.Array | None]:
    """Return the table without its column of deliver times, and the deliver times in ms since 1970. The times are None
    if the table has no such column."""
    if not isinstance(table, (pa.Table, pa.RecordBatch)) or table.schema.names.count(DELIVER_TIME) != 1:
        return table, None  # return the table unchanged: TableRows checks it and reports an invalid table
    if isinstance(table, pa.RecordBatch):
        table = pa.Table.from_batches([table])
    column = table.column(DELIVER_TIME)
    rest = table.drop_columns([DELIVER_TIME])
    if pa.types.is_null(column.type):
        return rest, None
    if not pa.types.is_timestamp(column.type):
        raise InvalidArgumentError(f"the table cannot be sent: column 'deliver_time' is {column.type}, not timestamp")
    times = column.cast(pa.timestamp("ms", column.type.tz), safe=False).cast(pa.int64())
    return rest, times.combine_chunks() if times.num_chunks != 1 else times.chunk(0)
