"""Writes DataFrames to a topic: `write_topic` writes one DataFrame, `topic_sink` writes the batches of a streaming
query.

    driver    check columns ▶ fix queues, time and partitions (plans.py) ▶ sort if the order is not fixed ▶ one job
    tasks     Arrow batches ▶ RepeatableWriter ▶ a row per queue, which the driver adds up (partitions.py)

A row is identified by query, batch, partition and row number, and is stored once. Query and partition form the producer
id, the batch is the epoch, and the row number determines queue and sequence.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final, Unpack

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame

from raydp_jobs.sink.columns import Sort, check_columns, check_sort, in_fixed_order, partitions_of
from raydp_jobs.sink.partitions import (
    QUERY_ID,
    RESULT_SCHEMA,
    ClusterConnection,
    TaskWrite,
    TopicConnection,
    WriteSummary,
    check_partition,
    short_id,
)
from raydp_jobs.sink.plans import PlanFiles, WritePlan
from raydp_jobs.spark_internals import JVM_ERRORS, checkpoint_of, known_sessions
from raydp_jobs.task_errors import raymq_error
from raymq.client.client import Client
from raymq.client.producer.settings import ProducerOptions
from raymq.common.errors import ClientStateError, InvalidArgumentError
from raymq.common.names import check_user_topic
from raymq.common.protocol.route import QUEUE_NUMS_MAX

_RUN_ID: Final = "spark.jobGroup.id"
"""Name of the job property that contains a streaming query's run id. Spark uses the run id as the job group of the
query's jobs."""
_QUERIES_MAX: Final = 1000
"""Maximum number of streaming queries for which this process stores the last written batch. The limit protects
memory."""
_NAME: Final = re.compile("[A-Za-z0-9_-]*")

Progress = Callable[[int, WriteSummary], object]


def write_topic(
    df: DataFrame,
    topic: str,
    *,
    write_id: str | None = None,
    plan_location: str | None = None,
    sort: Sort = "auto",
    check_first: bool = False,
    client: Client | None = None,
    **settings: Unpack[ProducerOptions],
) -> WriteSummary:
    """Write each row of `df` as a message of `topic`. On return all rows are stored, as durably as the cluster's
    settings require.

    Columns: `body` (binary or string); optional, and null if a row has none: `tags` (string), `keys` (string or array
    of strings), `properties` (map of string to string), `sharding_key` (string or whole number), `deliver_time`
    (timestamp). Rows of a partition with the same sharding key are sent to one queue, in order; other rows are sent to
    all queues in turn. Executors write the partitions in parallel; no row passes through the driver.

    If Spark repeats a task, or runs it twice, each row is still stored once. `write_id` is a text that names this
    write. With `write_id`, each row is also stored once if the whole write is repeated, even in another process, as
    long as `df` has the same rows in the same partitions. `plan_location`, a directory on a file system that Spark
    supports, stores the topic's queues and the time of the first attempt for repeats. Without `plan_location`, the
    topic must not get more queues before the repeat, and no `deliver_time` may be more than a day ahead.

    `sort`: rows after an exchange (a join, an aggregation, a repartition) have a different order each time. "auto"
    sorts such rows within their partition, "always" sorts all rows, "never" sorts no rows (use this if your rows have a
    fixed order). `check_first` reads `df` twice, the first time to check its rows; otherwise an illegal row ends the
    write in the middle. `settings` are as in ProducerSettings: `send_timeout_s`, `max_buffered_bytes`, `compression` ….

    Before any job, raises InvalidArgumentError for illegal columns or options, TopicNotExistError if the topic does not
    exist, and NoPermissionError if it is not writable. Later raises MessageIllegalError for an illegal row (too large,
    empty body …), and ServiceNotAvailableError if a broker did not answer while Spark repeated each task several times.
    After such a later error a part of the rows is stored.
    """
    if df.isStreaming:
        raise InvalidArgumentError(
            "write_topic writes a batch DataFrame; for a streaming DataFrame use "
            f"df.writeStream.foreachBatch(topic_sink({topic!r})).option('checkpointLocation', …).start()"
        )
    check_user_topic(topic)
    check_columns(df)
    name = write_id if write_id is not None else uuid.uuid4().hex
    if not name:
        raise InvalidArgumentError(
            "write_id must be a text that names the write; leave write_id out for a write that is not repeated"
        )
    write = _BatchWrite(ClusterConnection(client, settings), topic, sort, check_first=check_first)
    # A repeated write must begin with the same queue as the first attempt. With a plan file, the first queue is random,
    # because the file stores it for repeats. A write that can be repeated, but has no plan file, begins with queue 0.
    first_queue = secrets.randbelow(QUEUE_NUMS_MAX) if write_id is None or plan_location is not None else 0
    return write.write(df, f"batch/{name}", 0, plan_location, fixes_time=write_id is None, first_queue=first_queue)


def topic_sink(
    topic: str,
    *,
    name: str = "",
    plan_location: str | None = None,
    sort: Sort = "auto",
    check_first: bool = False,
    client: Client | None = None,
    on_batch: Progress | None = None,
    **settings: Unpack[ProducerOptions],
) -> Callable[[DataFrame, int], None]:
    """Return a function for `foreachBatch` that writes each batch of a streaming query to `topic`, each row once:

        query = (
            df.writeStream.foreachBatch(topic_sink("totals"))
            .option("checkpointLocation", path).outputMode("update").start()
        )

    The query determines trigger, output mode and checkpoint. Columns, errors, `sort`, `check_first` and `settings` are
    as for `write_topic`. A repeated batch, even after a restart from the checkpoint, adds no row that is already
    stored. A row is identified by the query's id (from the checkpoint), the batch, the partition and the row's number.

    The topic's queues, the number of partitions and the time are fixed per batch in `raymq-sink/` of the checkpoint, or
    in `plan_location`. A query that the default SparkSession did not start needs `plan_location`. `on_batch` is called
    with the batch's number and the WriteSummary of each stored batch. If a query has several sinks for one topic, each
    sink needs another `name`.
    """
    check_user_topic(topic)
    if not _NAME.fullmatch(name):
        raise InvalidArgumentError(
            f"the name of a sink may have letters, digits, - and _ only, because it names a directory; got {name!r}"
        )
    write = _BatchWrite(ClusterConnection(client, settings), topic, sort, check_first=check_first)
    return _StreamWrite(write, name, plan_location, on_batch)


class _BatchWrite:
    """Writes the batches of DataFrames to one topic."""

    def __init__(self, connection: TopicConnection, topic: str, sort: Sort, *, check_first: bool) -> None:
        check_sort(sort)
        self.topic = topic
        self._connection, self._sort, self._check_first = connection, sort, check_first

    def write(
        self, df: DataFrame, query: str, batch: int, place: str | None, *, fixes_time: bool, first_queue: int
    ) -> WriteSummary:
        """Write the rows of a batch of `query` to the topic, and store the batch's plan in directory `place`.
        `fixes_time`: use the present time as the reference time for deliver times, even if `place` is None.

        `first_queue`: a number that chooses the queue for the first rows, so that small writes together use all queues
        equally. If `place` already has a plan, the plan's queue is used instead.
        """
        check_columns(df)
        rows = in_fixed_order(df, self._sort)
        now_ms = time.time_ns() // 1_000_000
        queues = self._connection.queues(self.topic)
        plan = WritePlan(queues, now_ms if fixes_time or place else None, 0, first_queue % len(queues))
        if place is not None:
            plan = self._fixed(rows, batch, plan, place)
        if self._check_first:
            _collect(rows.mapInArrow(partial(_check, self.topic), RESULT_SCHEMA))
        writers = self._connection.writers(self.topic, plan.queues, plan.time_ms)
        task = TaskWrite(writers, short_id(query, self.topic), batch, plan.first_queue)
        return _collect(rows.mapInArrow(task, RESULT_SCHEMA))

    def _fixed(self, df: DataFrame, batch: int, plan: WritePlan, place: str) -> WritePlan:
        partitions = partitions_of(df)
        files = PlanFiles(df.sparkSession, place)
        fixed = files.fix(self.topic, batch, replace(plan, partitions=partitions))
        if partitions and fixed.partitions and partitions != fixed.partitions:
            raise ClientStateError(
                f"batch {batch} was begun with {fixed.partitions} partitions and now has {partitions}, so its "
                "rows cannot be compared with the stored rows: restart the query with the former cores and "
                "settings (spark.default.parallelism, spark.sql.files.*), or put a repartition before the write"
            )
        return fixed


class _StreamWrite:
    """The function that `topic_sink` returns. It writes the batches of a streaming query to a topic."""

    _lock: Final = threading.Lock()
    _written: Final[dict[tuple[str, str, str], tuple[str, int]]] = {}
    """For each streaming query, topic and sink name (the key): the last batch that this process has written. The value
    is the id of the query's run, and the batch's number."""

    def __init__(self, write: _BatchWrite, name: str, place: str | None, on_batch: Progress | None) -> None:
        self._write, self._name, self._place, self._on_batch = write, name, place, on_batch

    def __call__(self, df: DataFrame, batch: int) -> None:
        """Write a batch of the streaming query to the topic."""
        query, run = _present_query(df)
        self._refuse_second(query, run, batch)
        root = self._place if self._place is not None else f"{_checkpoint_of(query)}/raymq-sink"
        place = "/".join(filter(None, (root.rstrip("/"), self._write.topic, self._name)))
        name = f"stream/{query}/{self._name}"
        summary = self._write.write(df, name, batch, place, fixes_time=True, first_queue=batch)
        with self._lock:
            self._written[query, self._write.topic, self._name] = run, batch
            if len(self._written) > _QUERIES_MAX:
                del self._written[next(iter(self._written))]
        if self._on_batch is not None:
            self._on_batch(batch, summary)

    def _refuse_second(self, query: str, run: str, batch: int) -> None:
        """Raise ClientStateError if this run of the query has already written this batch to the topic. A batch whose
        write failed may be written again."""
        with self._lock:
            if self._written.get((query, self._write.topic, self._name)) == (run, batch):
                raise ClientStateError(
                    f"batch {batch} of this query is written to topic {self._write.topic!r} twice, and the second "
                    "write would count as a repeat of the first: use a separate topic_sink with another name=… "
                    "for each write"
                )


def _check(topic: str, batches: Any) -> Any:
    return check_partition(topic, batches)


def _present_query(df: DataFrame) -> tuple[str, str]:
    """Return the id of the streaming query whose batch is `df`, and the id of the query's run."""
    context = df.sparkSession.sparkContext
    query, run = context.getLocalProperty(QUERY_ID), context.getLocalProperty(_RUN_ID)
    if not query:
        raise ClientStateError(
            "a topic_sink is a function for df.writeStream.foreachBatch; for a batch DataFrame use write_topic"
        )
    return query, run or ""


def _checkpoint_of(query: str) -> str:
    """Return the checkpoint directory of a running streaming query."""
    for spark in known_sessions():
        found = checkpoint_of(spark, query)
        if found is not None:
            return found
    raise ClientStateError(
        "cannot find the checkpoint of this query, because another SparkSession started the query: pass "
        "plan_location=… to topic_sink, a directory beside the checkpoint"
    )


def _collect(df: DataFrame) -> WriteSummary:
    """Run the Spark job of a write, and add up the results of its tasks. If a raymq error in a task makes the job fail,
    raises that error."""
    try:
        rows = df.collect()
    except (PySparkException, *JVM_ERRORS) as error:
        raised = raymq_error(str(error))
        if raised is None:
            raise
        raise raised from error
    return WriteSummary.of(rows)
