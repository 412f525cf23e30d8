"""The tasks of a write to a topic. Each task writes the rows of one partition, and returns the number of rows per
queue.

A task's rows are written under the producer id QUERY/PARTITION, with the batch's number as epoch. So the store
recognises the rows if the task or the whole batch is repeated (raymq.client.producer.repeatable). If a task raises an
error, Spark repeats the task. A task does not raise an error that would occur again: it returns the error to the driver
immediately, as a row.

A task holds one of Spark's Arrow batches and the producer's buffer in memory.

The module also contains the connection to the cluster, for the driver and for Spark's workers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Protocol

import pyarrow as pa
from pyspark import TaskContext

from raydp_jobs.worker_client import ClusterAddress, address_of_cluster, worker_client
from raymq.client.client import Client, connect
from raymq.client.producer.repeatable.writer import RepeatableWriter, WriteResult, check_rows
from raymq.client.producer.settings import ProducerOptions, check_repeatable
from raymq.common import errors
from raymq.common.errors import (
    IllegalNameError,
    InvalidArgumentError,
    MessageIllegalError,
    NoPermissionError,
    RaymqError,
    TopicNotExistError,
)
from raymq.common.message import MessageQueue

RESULT_SCHEMA: Final = (
    "stored_before long, broker_name string, queue_topic string, queue_id int, rows long, first_offset long, "
    "end_offset long, error string, error_kind string"
)
"""Schema of the rows that a Spark task returns: one row for each queue to which it wrote. One more row has no queue; it
contains the partition's total number of rows, or the task's error."""
_ARROW_SCHEMA: Final = pa.schema(
    [
        ("stored_before", pa.int64()),
        ("broker_name", pa.string()),
        ("queue_topic", pa.string()),
        ("queue_id", pa.int32()),
        ("rows", pa.int64()),
        ("first_offset", pa.int64()),
        ("end_offset", pa.int64()),
        ("error", pa.string()),
        ("error_kind", pa.string()),
    ]
)
_FOR_GOOD: Final = (
    InvalidArgumentError,
    MessageIllegalError,
    IllegalNameError,
    NoPermissionError,
    TopicNotExistError,
)
"""Classes of errors that would occur again if Spark repeated the task."""

QUERY_ID: Final = "sql.streaming.queryId"
"""Name of the job property in which Spark gives the id of a streaming query, which the query's checkpoint stores."""
BATCH_ID: Final = "streaming.sql.batchId"
"""Name of the job property in which Spark gives the number of a streaming query's batch."""


@dataclass(frozen=True, slots=True)
class ResultRow:
    """A row of the schema RESULT_SCHEMA. A field that does not apply is None."""

    stored_before: int | None = None
    broker_name: str | None = None
    queue_topic: str | None = None
    queue_id: int | None = None
    rows: int | None = None
    first_offset: int | None = None
    end_offset: int | None = None
    error: str | None = None
    error_kind: str | None = None


def short_id(query: str, topic: str) -> str:
    """Return a short id of a query for its producer ids. Each record contains the producer id, so the id must be
    short."""
    return hashlib.blake2b(f"{query}\n{topic}".encode(), digest_size=8).hexdigest()


class Writers(Protocol):
    """Interface of an object that opens a topic writer for each Spark task of a write. The object is pickled and sent
    to Spark's workers."""

    def open(self, producer_id: str, epoch: int, first_queue: int) -> RepeatableWriter: ...


@dataclass(frozen=True)
class TaskWrite:
    """A function for `DataFrame.mapInArrow` that writes one batch to a topic. Each Spark task writes one partition.

    `query`: the query's id, which stays the same if the query is repeated. `batch`: the batch's number. `first_queue`:
    the index of the queue for the first rows of partition 0.
    """

    writers: Writers
    query: str
    batch: int
    first_queue: int = 0

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write the rows of this task's partition. Yields one Arrow batch with the schema RESULT_SCHEMA."""
        yield _rows(self.write(batches))

    def write(self, batches: Iterable[pa.RecordBatch]) -> list[ResultRow]:
        """Write the rows of this task's partition. Returns one row for each queue and one row for the partition, or one
        row with an error that would occur again."""
        context = TaskContext.get()
        partition = 0 if context is None else context.partitionId()
        try:
            producer_id = f"{self.query}/{partition}"
            # The partition's number determines the queue to which the writer writes first. So all queues are used, even
            # if each partition has only a few rows.
            with self.writers.open(producer_id, self.batch, self.first_queue + partition) as writer:
                for batch in batches:
                    if batch.num_rows:
                        writer.write(batch)
                result = writer.finish()
        except _FOR_GOOD as error:
            return [_failed(error, partition)]
        return list(_result_rows(result))


def check_partition(topic: str, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Check that the rows of a partition can be written to a topic, without writing them. Used with
    `DataFrame.mapInArrow`."""
    context = TaskContext.get()
    partition = 0 if context is None else context.partitionId()
    for batch in batches:
        try:
            check_rows(topic, batch)
        except _FOR_GOOD as error:
            yield _rows([_failed(error, partition)])
            return


@dataclass(frozen=True, slots=True)
class QueueRows:
    """The rows that a write has stored in one queue: `rows` rows at offsets from `first_offset` up to, not including,
    `end_offset`.

    This offset range may also contain messages of other producers.
    """

    queue: MessageQueue
    rows: int
    first_offset: int
    end_offset: int


@dataclass(frozen=True, slots=True)
class WriteSummary:
    """The result of a write. `rows`: the number of rows, which are all stored. `stored_before`: the number of rows that
    an earlier attempt stored. `queues`: the rows that this attempt stored, by queue, sorted.

    Rows with a deliver time are listed under the queues in which they wait for delivery.
    """

    rows: int
    stored_before: int
    queues: tuple[QueueRows, ...]

    @classmethod
    def of(cls, rows: Iterable[Any]) -> WriteSummary:
        """Add up the results that the tasks of a write to a topic returned. If a task returned an error, raises this
        error. `rows`: objects with the fields of ResultRow."""
        count = before = 0
        queues: dict[MessageQueue, QueueRows] = {}
        for row in rows:
            if row.error is not None:
                raise _told(row.error_kind, row.error)
            if row.queue_id is None:
                count += row.rows
                before += row.stored_before
                continue
            queue = MessageQueue(row.queue_topic, row.broker_name, row.queue_id)
            known = queues.get(queue, QueueRows(queue, 0, row.first_offset, row.end_offset))
            queues[queue] = QueueRows(
                queue,
                known.rows + row.rows,
                min(known.first_offset, row.first_offset),
                max(known.end_offset, row.end_offset),
            )
        return cls(count, before, tuple(queues[queue] for queue in sorted(queues)))


def _result_rows(result: WriteResult) -> Iterator[ResultRow]:
    yield ResultRow(rows=result.count, stored_before=result.stored_before)
    by_queue: dict[MessageQueue, list[tuple[int, int]]] = {}
    for piece in result.ranges:
        by_queue.setdefault(piece.queue, []).append((piece.first_offset, piece.count))
    for queue, pieces in by_queue.items():
        yield ResultRow(
            broker_name=queue.broker_name,
            queue_topic=queue.topic,
            queue_id=queue.queue_id,
            rows=sum(count for _, count in pieces),
            first_offset=pieces[0][0],
            end_offset=pieces[-1][0] + pieces[-1][1],
        )


def _failed(error: RaymqError, partition: int) -> ResultRow:
    return ResultRow(error=f"partition {partition}: {error}", error_kind=type(error).__name__)


def _told(kind: str, text: str) -> RaymqError:
    """Create the error that a Spark task has returned as the name of its class and its text. The result is a
    MessageIllegalError or, for every other class, an InvalidArgumentError."""
    found = getattr(errors, kind, RaymqError)
    return MessageIllegalError(text) if found is MessageIllegalError else InvalidArgumentError(text)


def _rows(rows: Iterable[ResultRow]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([asdict(row) for row in rows], _ARROW_SCHEMA)


class TopicConnection(Protocol):
    """Interface of the driver's connection to the cluster that stores a topic."""

    def queues(self, topic: str) -> tuple[MessageQueue, ...]:
        """Return the topic's present queues.

        Raises TopicNotExistError if the topic does not exist, NoPermissionError if it is not writable, and
        ServiceNotAvailableError if its route is not available.
        """
        ...

    def writers(self, topic: str, queues: tuple[MessageQueue, ...], now_ms: int | None) -> Writers:
        """Return an object that opens one topic writer for each Spark task of a write."""
        ...


@dataclass(frozen=True)
class ClusterConnection(TopicConnection):
    """The connection to the raymq of the Ray cluster to which this process is connected.

    `client` None: each call opens its own connection. `settings`: the keyword arguments of ProducerSettings. Raises
    InvalidArgumentError if a setting is invalid.
    """

    client: Client | None
    settings: ProducerOptions = field(default_factory=ProducerOptions)

    def __post_init__(self) -> None:
        check_repeatable(self.settings)  # Raise the error for invalid settings now, before any Spark job starts.

    def queues(self, topic: str) -> tuple[MessageQueue, ...]:
        with nullcontext(self.client) if self.client is not None else connect() as client:
            return client.write_queues(topic)

    def writers(self, topic: str, queues: tuple[MessageQueue, ...], now_ms: int | None) -> Writers:
        with nullcontext(self.client) if self.client is not None else connect() as client:
            address = address_of_cluster(client)
        return ClusterWriters(address, topic, queues, now_ms, self.settings)


@dataclass(frozen=True)
class ClusterWriters(Writers):
    """Opens the topic writers of Spark tasks, in a worker that connects to the Ray cluster at `address`."""

    address: ClusterAddress
    topic: str
    queues: tuple[MessageQueue, ...]
    now_ms: int | None
    settings: ProducerOptions

    def open(self, producer_id: str, epoch: int, first_queue: int) -> RepeatableWriter:
        return worker_client(self.address).repeatable_writer(
            self.topic,
            producer_id=producer_id,
            epoch=epoch,
            queues=self.queues,
            first_queue=first_queue,
            now_ms=self.now_ms,
            **self.settings,
        )
