"""The DataFrame of one batch: a Spark task for each part, near the disk that holds it, read by a Python worker.

    driver      RDD with one row per part (JSON text), each with the hosts that hold it → mapInArrow
    executor    Python worker: row → ranges → Arrow columns → Spark

The rows become the leaf of the batch's plan, so Spark counts messages, not parts, as the query's input.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import pyarrow as pa
from pyspark.rdd import PythonEvalType
from pyspark.sql import SparkSession
from pyspark.sql.pandas.functions import pandas_udf
from pyspark.sql.types import StringType, StructField, StructType

from raydp_jobs.source.locality import placed_rows
from raymq.client.scan.partitions import ScanPartition
from raymq.client.scan.ranges import OffsetRange

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
