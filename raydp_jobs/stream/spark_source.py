"""A streaming source for Spark that is written in Python. It needs no raymq class on the JVM's class path.

Spark's engine uses a source through the JVM interfaces `Source`, `SupportsTriggerAvailableNow` and
`ReportsSourceMetrics`. Py4J lets a Python object implement them, as PySpark does for `foreachBatch`. Spark does
everything else, as with its Kafka source: triggers, checkpoints, replay, watermarks, joins, output modes, progress.

    Spark's stream thread ──Py4J──→ SparkSource ──→ TopicSource    offsets, which Spark writes to its log
                                        └─────────→ BatchFrames    a DataFrame with the messages between two offsets

The DataFrame of one batch has a Spark task for each part of the batch. A Python worker reads the part, if possible on
the node whose disk holds the part's messages.

    driver      RDD with one row per part (JSON text), each with its preferred hosts → mapInArrow
    executor    Python worker: row → ranges → Arrow columns → Spark

The batch that closes a query's time windows has one part without ranges, and one row: no values, and a time far ahead.

The leaf of the batch's Spark plan is the step that yields messages, not the RDD with one row per part. So Spark reports
the number of messages as the query's number of input rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StringType, StructField, StructType

from raydp_jobs.spark_internals import (
    SOURCE_INTERFACES,
    ArrowFunction,
    arrow_columns,
    batch_frame,
    check_spark,
    default_read_limit,
    jvm_schema,
    metrics_of,
    offset_of,
    placed_rows,
    reads_everything,
    serve_callbacks,
    source_frame,
)
from raydp_jobs.stream.progress import CLOSING_TIME_US, DESCRIPTION
from raydp_jobs.stream.source import TopicSource
from raymq.client.scan.partitions import ScanPartition
from raymq.client.scan.ranges import OffsetRange


def stream_frame(
    spark: SparkSession, source: TopicSource, read: ReadRanges, schema: StructType, name: str
) -> DataFrame:
    """Return the streaming DataFrame of a source, with the columns of `schema`. `read`: a function that Spark's workers
    call to read the messages. `name`: the topics' names, for Spark's progress."""
    check_spark()
    serve_callbacks(spark)
    return SparkSource(spark, source, BatchFrames(spark, read, schema), f"{DESCRIPTION}[{name}]").frame()


class SparkSource:
    """Adapts a TopicSource to Spark's interfaces. Py4J looks up the interfaces' methods by their Java names, which
    `__getattr__` provides."""

    class Java:
        """Lists the Java interfaces that SparkSource implements, in the form that Py4J requires."""

        implements: ClassVar[list[str]] = SOURCE_INTERFACES

    def __init__(self, spark: SparkSession, source: TopicSource, frames: BatchFrames, description: str) -> None:
        self._spark = spark
        self._source, self._frames = source, frames
        self._empty = frames.frame([], "*", "")
        self._methods: dict[str, Callable[..., Any]] = {
            "schema": self._empty.schema,
            "getDefaultReadLimit": self._default_read_limit,
            "prepareForTriggerAvailableNow": lambda: source.prepare_available_now(self._query_id()),
            "latestOffset": self._latest_offset,
            "reportLatestOffset": lambda: self._offset(source.report_latest_offset(self._query_id())),
            "getBatch": self._batch,
            "metrics": self._metrics,
            # Spark's commit call needs no action, because TopicSource already commits the offsets in `latest_offset`.
            "commit": lambda end: None,
            "stop": lambda: source.stop(self._query_id()),
            "toString": lambda: description,
            "hashCode": lambda: hash(id(self)) & 0x7FFFFFFF,
            "equals": lambda other: other is self,
        }

    def __getattr__(self, name: str) -> Callable[..., Any]:
        methods: dict[str, Callable[..., Any]] = self.__dict__.get("_methods", {})
        if name not in methods:
            raise AttributeError(f"Spark's source has no method {name!r}")
        return methods[name]

    def frame(self) -> DataFrame:
        """Return the streaming DataFrame of this source."""
        return source_frame(self._spark, self, self._empty)

    def _default_read_limit(self) -> Any:
        return default_read_limit(self._spark, limited=self._source.limited)

    def _latest_offset(self, start: Any, limit: Any) -> Any:
        before = start.json() if start is not None else None
        end = self._source.latest_offset(self._query_id(), before, unlimited=reads_everything(limit))
        return start if end is None or end == before else self._offset(end)

    def _batch(self, start: Any, end: Any) -> Any:
        if self._source.is_closing_row(end.json()):
            return self._frames.closing_row()
        return self._frames.frame(*self._source.batch(start.get().json() if start.isDefined() else None, end.json()))

    def _metrics(self, end: Any) -> Any:
        values = self._source.metrics(self._query_id(), end.get().json() if end.isPresent() else None)
        return metrics_of(self._spark, values)

    def _offset(self, text: str) -> Any:
        return offset_of(self._spark, text)

    def _query_id(self) -> str:
        """Return the id of the query that runs in the calling thread."""
        return str(self._spark.sparkContext.getLocalProperty("sql.streaming.queryId"))


ReadRanges = Callable[[Sequence[OffsetRange], str, str], Iterable[pa.RecordBatch]]
"""Type of a function that reads the messages of offset ranges in a Spark worker, in order.

Besides the offset ranges, the function has two arguments: a subscription's tag expression and an SQL filter expression.
An empty filter expression selects all messages.
"""

_CLOSING_PART: Final = '{"closing":true}'
"""The text of the part whose only row closes a query's time windows."""
_PART: Final = StructType([StructField("part", StringType())])


class BatchFrames:
    """Creates the DataFrames of a stream's batches, with the columns of `schema`. `read`: a function that Spark's
    workers call to read the messages."""

    def __init__(self, spark: SparkSession, read: ReadRanges, schema: StructType) -> None:
        self._spark = spark
        self._part_schema = jvm_schema(spark, _PART)
        columns = arrow_columns(schema)

        def worker(rows: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for rows_of_parts in rows:
                for text in rows_of_parts.column(0).to_pylist():
                    part = _read_part(text)
                    yield from read(*part) if part is not None else [_closing_row(columns)]

        self._function = ArrowFunction(worker, schema)

    def frame(self, parts: Sequence[tuple[ScanPartition, Sequence[str]]], tags: str, sql: str) -> Any:
        """Return the JVM's streaming DataFrame with the messages of several parts, in order. Each part has the
        preferred hosts of its Spark task."""
        return self._frame([(_part_text(part.ranges, tags, sql), hosts) for part, hosts in parts])

    def closing_row(self) -> Any:
        """Return the JVM's streaming DataFrame of the row that closes a query's time windows. Each timestamp of the row
        is CLOSING_TIME_US, and each other column is null."""
        return self._frame([(_CLOSING_PART, ())])

    def _frame(self, texts: Sequence[tuple[str, Sequence[str]]]) -> Any:
        rows = placed_rows(self._spark, self._part_schema, texts)
        return batch_frame(self._spark, self._function.map(rows))


def _part_text(ranges: Sequence[OffsetRange], tags: str, sql: str) -> str:
    fields = [[one.topic, one.broker_name, one.queue_id, one.start_offset, one.end_offset] for one in ranges]
    return json.dumps({"ranges": fields, "tags": tags, "sql": sql})


def _read_part(text: str) -> tuple[list[OffsetRange], str, str] | None:
    """Return what a part contains; None for the part with the row that closes time windows."""
    if text == _CLOSING_PART:
        return None
    fields = json.loads(text)
    return [OffsetRange(*one) for one in fields["ranges"]], fields["tags"], fields["sql"]


def _closing_row(columns: pa.Schema) -> pa.RecordBatch:
    values = [[CLOSING_TIME_US if pa.types.is_timestamp(column.type) else None] for column in columns]
    arrays = [pa.array(value, column.type) for value, column in zip(values, columns, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=columns)
