"""The tasks of a write to a topic: each writes the rows of one partition, and tells how many and where to.

A task's rows are written under the producer id QUERY/PARTITION and the batch's number as epoch, so that the store
recognises them when the task, or the whole batch, is tried again (raymq.client.producer.repeatable). A task that fails
raises, and Spark tries it again; only an error that no repeat can mend is told to the driver as a row, at once.

Memory: one of Spark's Arrow batches, and the producer's buffer.

The cluster as a write to a topic uses it: in the driver, and in Spark's workers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import pyarrow as pa
from pyspark import TaskContext

from raydp_jobs.worker_client import ClusterAddress, address_of_cluster, worker_client
from raymq.client.client import Client, connect
from raymq.client.producer.repeatable.writer import RepeatableWriter, WriteResult, check_rows
from raymq.client.producer.settings import ProducerSettings
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
"""A row per queue that got rows; one without a queue says how many rows the partition had, or the error."""
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
"""Errors that a repeat of the task would meet again."""

logger = logging.getLogger(__name__)


class Writers(Protocol):
    """Makes the writers of a write's tasks, in Spark's workers; it is pickled to get there."""

    def open(self, producer_id: str, epoch: int, first_queue: int) -> RepeatableWriter: ...


@dataclass(frozen=True)
class TaskWrite:
    """The write of one batch, as its tasks carry it out: a function for `DataFrame.mapInArrow`.

    `query`: what is the same in each repeat of the query, `batch` the batch's number.
    """

    writers: Writers
    query: str
    batch: int

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write the rows of this task's partition; one batch of RESULT_SCHEMA."""
        context = TaskContext.get()
        partition = 0 if context is None else context.partitionId()
        try:
            # The first queue differs, so that partitions with few rows are spread.
            with self.writers.open(f"{self.query}/{partition}", self.batch, partition) as writer:
                for batch in batches:
                    if batch.num_rows:
                        writer.write(batch)
                result = writer.finish()
        except _FOR_GOOD as error:
            yield _rows([_failed(error, partition)])
            return
        yield _rows(_result_rows(result))


def check_partition(topic: str, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Check the rows of a partition without writing them: for `DataFrame.mapInArrow`."""
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
    """Rows that a write has stored in one queue: `rows` of the offsets from `first_offset` up to `end_offset`, among
    which other producers' messages may lie."""

    queue: MessageQueue
    rows: int
    first_offset: int
    end_offset: int


@dataclass(frozen=True, slots=True)
class WriteSummary:
    """The result of a write: all its `rows` are stored, `stored_before` of them by an earlier attempt, the others in
    `queues`, which are sorted. Rows with a deliver time are in the queues in which they wait."""

    rows: int
    stored_before: int
    queues: tuple[QueueRows, ...]

    @classmethod
    def of(cls, rows: Iterable[Any]) -> WriteSummary:
        """The summary of what the tasks have told. Raises the error that a task told."""
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


def _result_rows(result: WriteResult) -> Iterator[dict[str, Any]]:
    yield {"rows": result.count, "stored_before": result.stored_before}
    by_queue: dict[MessageQueue, list[tuple[int, int]]] = {}
    for piece in result.ranges:
        by_queue.setdefault(piece.queue, []).append((piece.first_offset, piece.count))
    for queue, pieces in by_queue.items():
        yield {
            "broker_name": queue.broker_name,
            "queue_topic": queue.topic,
            "queue_id": queue.queue_id,
            "rows": sum(count for _, count in pieces),
            "first_offset": pieces[0][0],
            "end_offset": pieces[-1][0] + pieces[-1][1],
        }


def _failed(error: RaymqError, partition: int) -> dict[str, Any]:
    return {"error": f"partition {partition}: {error}", "error_kind": type(error).__name__}


def _told(kind: str, text: str) -> RaymqError:
    """The error that a task told, as one of the same class where that takes a text."""
    found = getattr(errors, kind, RaymqError)
    return MessageIllegalError(text) if found is MessageIllegalError else InvalidArgumentError(text)


def _rows(rows: Iterable[dict[str, Any]] | Sequence[dict[str, Any]]) -> pa.RecordBatch:
    full = [{name: row.get(name) for name in _ARROW_SCHEMA.names} for row in rows]
    return pa.RecordBatch.from_pylist(full, _ARROW_SCHEMA)


class TopicConnection(Protocol):
    """A cluster with a topic, seen from the driver."""

    def queues(self, topic: str) -> tuple[MessageQueue, ...]:
        """The topic's queues now. TopicNotExistError, NoPermissionError, ServiceNotAvailableError."""
        ...

    def writers(self, topic: str, queues: tuple[MessageQueue, ...], now_ms: int | None) -> Writers:
        """The maker of the tasks' writers."""
        ...


@dataclass(frozen=True)
class ClusterConnection(TopicConnection):
    """The raymq of the Ray cluster that this process is connected to. `client` None: each use connects. `settings` are
    those of ProducerSettings. InvalidArgumentError."""

    client: Client | None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ProducerSettings(**self.settings)  # refuses here, before any job, what the tasks could not use

    def queues(self, topic: str) -> tuple[MessageQueue, ...]:
        with nullcontext(self.client) if self.client is not None else connect() as client:
            return client.write_queues(topic)

    def writers(self, topic: str, queues: tuple[MessageQueue, ...], now_ms: int | None) -> Writers:
        with nullcontext(self.client) if self.client is not None else connect() as client:
            address = address_of_cluster(client)
        return ClusterWriters(address, topic, queues, now_ms, dict(self.settings))


@dataclass(frozen=True)
class ClusterWriters(Writers):
    """Makes writers in a worker of the Ray cluster at `address`."""

    address: ClusterAddress
    topic: str
    queues: tuple[MessageQueue, ...]
    now_ms: int | None
    settings: Mapping[str, Any]

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
