"""Writes of ``format("raymq")``: ``df.write`` and ``writeStream`` of Spark 4. Each row becomes a message, stored once.

Spark calls this module in these processes:

    batch     a planning process makes the writer, which looks up the topic's queues; Spark pickles the writer
    stream    the same for each batch. Spark tells neither the query nor the batch
    task      a Python worker: `write`. The task's properties contain the query and the batch
    end       a process: `commit` gets the messages of all tasks, and raises the error that a task returned

A row is identified by query, batch, partition and row number, as in raydp_jobs.sink: the query and the partition are
the producer id, and the batch is the epoch. If Spark repeats a task or a batch, the store leaves out the rows that it
has. `abort` does nothing: a repeat continues after the stored rows.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from raydp_jobs.data_source.options import producer_options
from raydp_jobs.sink.columns import check_fields
from raydp_jobs.sink.content_order import in_content_order
from raydp_jobs.sink.partitions import (
    BATCH_ID,
    QUERY_ID,
    ClusterWriters,
    ResultRow,
    TaskWrite,
    WriteSummary,
    short_id,
)
from raydp_jobs.sink.plans import PlanDirectory, WritePlan
from raydp_jobs.worker_client import ClusterAddress
from raymq.client.client import connect
from raymq.common.errors import ClientStateError, InvalidArgumentError
from raymq.common.identity import acting_as
from raymq.common.message import MessageQueue

SPOOL_VARIABLE: Final = "SPARK_LOCAL_DIRS"
"""Environment variable of Spark's Python workers: the directories for temporary files, with commas between them."""

logger = logging.getLogger(__name__)


class TaskRows(WriterCommitMessage):
    """The result of one task: the number of rows in each queue, or the task's error."""

    def __init__(self, rows: Sequence[ResultRow]) -> None:
        self.rows = tuple(rows)


@dataclass(frozen=True)
class RowWrite:
    """The facts that the tasks of a write need. `sorts`: give the rows of a partition an order by their content.
    `place`: the directory of the plan files, if the user has chosen one."""

    address: ClusterAddress
    topic: str
    options: Mapping[str, Any]
    sorts: bool
    place: Path | None

    def queues(self) -> tuple[MessageQueue, ...]:
        """Return the queues of the topic at present. Raises the errors of `Client.write_queues`."""
        with acting_as(self.address.user), connect(self.address.address, namespace=self.address.namespace) as client:
            return client.write_queues(self.topic)

    def fixed(self, query: str, batch: int, plan: WritePlan) -> WritePlan:
        """Return the plan of a batch: the stored plan, if `place` has one, or `plan`, which is then stored."""
        if self.place is None:
            return plan
        return PlanDirectory(self.place / short_id(query, self.topic)).fix(self.topic, batch, plan)

    def write(self, query: str, batch: int, plan: WritePlan, rows: Iterable[pa.RecordBatch]) -> TaskRows:
        """Write the rows of this task's partition."""
        writers = ClusterWriters(self.address, self.topic, plan.queues, plan.time_ms, producer_options(self.options))
        task = TaskWrite(writers, short_id(query, self.topic), batch, plan.first_queue)
        return TaskRows(task.write(in_content_order(rows, _spool_directory()) if self.sorts else rows))


def row_write(address: ClusterAddress, schema: StructType, overwrite: bool, options: Mapping[str, Any]) -> RowWrite:
    """Check the columns and the mode of a write. `options`: the converted options.

    Raises InvalidArgumentError for illegal columns, for every mode but append, and if the order of rows with a sharding
    key is not known.
    """
    if overwrite:
        raise InvalidArgumentError(
            'format("raymq") only appends, because a topic keeps its messages: use .mode("append") for a batch, '
            '.outputMode("append") for a stream'
        )
    check_fields(schema.fields)
    if options["sort"] == "auto" and "sharding_key" in schema.names:
        raise InvalidArgumentError(
            "rows with a sharding_key keep their order in their queue, and Spark does not tell this format whether the "
            'order is fixed: pass .option("sort", "never") if each attempt has the rows in the same order (no exchange '
            'in the plan, or sortWithinPartitions by unique columns), or .option("sort", "always") to order rows by '
            "their content"
        )
    return RowWrite(address, options["topic"], options, options["sort"] != "never", options.get("plan_location"))


class TopicBatchWriter(DataSourceArrowWriter):
    """Writes a DataFrame to a topic: the writer of ``df.write``."""

    def __init__(self, write: RowWrite) -> None:
        """Look up the queues of the topic, in the planning process. Raises the errors of `Client.write_queues`."""
        write_id = write.options.get("write_id")
        self._write = write
        self._query = f"batch/{write_id if write_id is not None else uuid.uuid4().hex}"
        fixes_time = write_id is None or write.place is not None
        queues = write.queues()
        # As for write_topic: only a write that may be repeated without a plan must begin with a certain queue.
        first_queue = uuid.uuid4().int % len(queues) if fixes_time else 0
        plan = WritePlan(queues, time.time_ns() // 1_000_000 if fixes_time else None, 0, first_queue)
        self._plan = write.fixed(self._query, 0, plan)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write the rows of a partition, in a Spark worker."""
        return self._write.write(self._query, 0, self._plan, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Add up the results of the tasks. Raises the error that a task returned."""
        _summary(self._write.topic, messages)


class TopicStreamWriter(DataSourceStreamArrowWriter):
    """Writes the batches of a streaming query to a topic: the writer of ``df.writeStream``."""

    def __init__(self, write: RowWrite) -> None:
        self._write = write
        self._plan: WritePlan | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Look up the queues of the topic when Spark pickles the writer for the tasks of a batch. The process that
        calls `commit` pickles no writer, and needs no connection. Raises the errors of `Client.write_queues`."""
        if self._plan is None:
            fixes_time = self._write.place is not None
            now_ms = time.time_ns() // 1_000_000 if fixes_time else None
            self._plan = WritePlan(self._write.queues(), now_ms, 0)
        return self.__dict__

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write the rows of a partition of a batch, in a Spark worker. Raises ClientStateError if Spark does not tell
        the query and the batch."""
        context = TaskContext.get()
        query = context.getLocalProperty(QUERY_ID) if context is not None else None
        number = context.getLocalProperty(BATCH_ID) if context is not None else None
        if not query or not number or self._plan is None:
            raise ClientStateError(
                f'writeStream.format("raymq") needs the properties {QUERY_ID} and {BATCH_ID} of a task, and this '
                "Spark does not set them: write in foreachBatch with df.write, and a write_id with the batch's number"
            )
        batch, name = int(number), f"stream/{query}/"
        # Each batch begins with another queue, so that small batches use all queues equally.
        planned = replace(self._plan, first_queue=batch % len(self._plan.queues))
        return self._write.write(name, batch, self._write.fixed(name, batch, planned), iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803  # Spark's name
        """Add up the results of the tasks of a batch. Raises the error that a task returned."""
        _summary(self._write.topic, messages)


def _summary(topic: str, messages: Iterable[WriterCommitMessage | None]) -> WriteSummary:
    summary = WriteSummary.of(row for one in messages if isinstance(one, TaskRows) for row in one.rows)
    logger.info(
        "%d rows are in topic %s; an earlier attempt stored %d of them", summary.rows, topic, summary.stored_before
    )
    return summary


def _spool_directory() -> str | None:
    """Return Spark's directory for temporary files; None for the system's."""
    return next((one for one in os.environ.get(SPOOL_VARIABLE, "").split(",") if os.path.isdir(one)), None)
