"""Spark's structured streaming with a source in Python: no class of ours is on the JVM's class path.

Spark's engine knows a source as an object with the interfaces `Source`, `SupportsTriggerAvailableNow` and
`ReportsSourceMetrics`. They are the JVM's, so Py4J can have a Python object implement them, as PySpark itself does for
`foreachBatch`. What happens with it is Spark's own work, as with its Kafka source: triggers, checkpoints, replay,
watermarks, joins, output modes, progress.

    Spark's stream thread ──Py4J──→ SparkSource ──→ TopicSource    offsets, which Spark writes to its log
                                        └─────────→ BatchFrames    a DataFrame with the messages between two of them

The DataFrame of one batch: a Spark task for each part, near the disk that holds it, read by a Python worker.

    driver      RDD with one row per part (JSON text), each with the hosts that hold it → mapInArrow
    executor    Python worker: row → ranges → Arrow columns → Spark

The rows become the leaf of the batch's plan, so Spark counts messages, not parts, as the query's input.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Final

import pyarrow as pa
from pyspark.java_gateway import ensure_callback_server_started
from pyspark.rdd import PythonEvalType
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.functions import pandas_udf
from pyspark.sql.types import StringType, StructField, StructType

from raydp_jobs.source.locality import placed_rows
from raydp_jobs.stream.progress import DESCRIPTION
from raydp_jobs.stream.source import TopicSource
from raymq.client.scan.partitions import ScanPartition
from raymq.client.scan.ranges import OffsetRange

_READ_ALL: Final = "ReadAllAvailable"
"""The limit that Spark gives a query whose trigger wants everything in one batch."""


def stream_frame(
    spark: SparkSession, source: TopicSource, read: ReadRanges, schema: StructType, name: str
) -> DataFrame:
    """The streaming DataFrame of a source, with the columns `schema`, which `read` fills in Spark's workers. `name` is
    that of the topics, for Spark's progress."""
    ensure_callback_server_started(spark.sparkContext._gateway)
    return SparkSource(spark, source, BatchFrames(spark, read, schema), f"{DESCRIPTION}[{name}]").frame(spark)


class SparkSource:
    """A TopicSource as Spark sees it. Py4J looks the interfaces' methods up by their Java names, in `__getattr__`."""

    class Java:
        """The interfaces, as Py4J wants them named."""

        implements: ClassVar[list[str]] = [
            "org.apache.spark.sql.execution.streaming.Source",
            "org.apache.spark.sql.connector.read.streaming.SupportsTriggerAvailableNow",
            "org.apache.spark.sql.connector.read.streaming.ReportsSourceMetrics",
        ]

    def __init__(self, spark: SparkSession, source: TopicSource, frames: BatchFrames, description: str) -> None:
        self._context, self._jvm = spark.sparkContext, spark.sparkContext._jvm
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
            "commit": lambda end: None,  # TopicSource commits earlier
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

    def frame(self, spark: SparkSession) -> DataFrame:
        """The streaming DataFrame of this source."""
        relation = self._jvm.org.apache.spark.sql.execution.streaming.StreamingExecutionRelation(
            self,
            self._empty.queryExecution().analyzed().output(),
            self._jvm.scala.Option.empty(),
            spark._jsparkSession,
        )
        return DataFrame(self._jvm.org.apache.spark.sql.Dataset.ofRows(spark._jsparkSession, relation), spark)

    def _default_read_limit(self) -> Any:
        limits = self._jvm.org.apache.spark.sql.connector.read.streaming.ReadLimit
        # The number does not count here: it tells a trigger that bounds its batches from one that does not.
        return limits.maxRows(1) if self._source.limited else limits.allAvailable()

    def _latest_offset(self, start: Any, limit: Any) -> Any:
        before = start.json() if start is not None else None
        unlimited = limit.getClass().getSimpleName() == _READ_ALL
        end = self._source.latest_offset(self._query_id(), before, unlimited=unlimited)
        return start if end is None or end == before else self._offset(end)

    def _batch(self, start: Any, end: Any) -> Any:
        return self._frames.frame(*self._source.batch(start.get().json() if start.isDefined() else None, end.json()))

    def _metrics(self, end: Any) -> Any:
        values = self._source.metrics(self._query_id(), end.get().json() if end.isPresent() else None)
        result = self._jvm.java.util.HashMap()
        for name, value in values.items():
            result.put(name, value)
        return result

    def _offset(self, text: str) -> Any:
        return self._jvm.org.apache.spark.sql.execution.streaming.SerializedOffset(text)

    def _query_id(self) -> str:
        """The id of the query whose thread calls."""
        return str(self._context.getLocalProperty("sql.streaming.queryId"))


ReadRanges = Callable[[Sequence[OffsetRange], str, str], Iterable[pa.RecordBatch]]
"""In a Spark worker: the messages of ranges, in order, whose tags match a subscription's expression, and that pass a
filter expression, unless that is empty."""

_PART: Final = StructType([StructField("part", StringType())])


class BatchFrames:
    """Makes the DataFrames of batches, with columns `schema`, which `read` fills. `read` goes to the workers."""

    def __init__(self, spark: SparkSession, read: ReadRanges, schema: StructType) -> None:
        self._spark = spark
        self._part_schema = spark._jsparkSession.parseDataType(_PART.json())

        def worker(rows: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for rows_of_parts in rows:
                for text in rows_of_parts.column(0).to_pylist():
                    yield from read(*_read_part(text))

        # Made once: what a batch costs in the driver is a few calls to the JVM, and no pickling.
        self._function = pandas_udf(worker, returnType=schema, functionType=PythonEvalType.SQL_MAP_ARROW_ITER_UDF)

    def frame(self, parts: Sequence[tuple[ScanPartition, Sequence[str]]], tags: str, sql: str) -> Any:
        """The JVM's streaming DataFrame with the messages of some parts, in this order. Each comes with the hosts that
        its task should run on."""
        texts = [(_part_text(part.ranges, tags, sql), hosts) for part, hosts in parts]
        rows = placed_rows(self._spark, self._part_schema, texts)
        function = self._function(rows["part"])._jc.expr()
        messages = rows._jdf.pythonMapInArrow(function, False)
        session = self._spark._jsparkSession
        return session.internalCreateDataFrame(messages.queryExecution().toRdd(), messages.schema(), True)


def _part_text(ranges: Sequence[OffsetRange], tags: str, sql: str) -> str:
    fields = [[one.topic, one.broker_name, one.queue_id, one.start_offset, one.end_offset] for one in ranges]
    return json.dumps({"ranges": fields, "tags": tags, "sql": sql})


def _read_part(text: str) -> tuple[list[OffsetRange], str, str]:
    fields = json.loads(text)
    return [OffsetRange(*one) for one in fields["ranges"]], fields["tags"], fields["sql"]
