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
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.functions import pandas_udf
from pyspark.sql.types import StringType, StructField, StructType

from raymq.scan.partitions import ScanPartition
from raymq.scan.ranges import OffsetRange

ReadRanges = Callable[[Sequence[OffsetRange], str], Iterable[pa.RecordBatch]]
"""In a Spark worker: the messages of ranges, in order, whose tags match a subscription's expression."""

_PART: Final = StructType([StructField("part", StringType())])


class BatchFrames:
    """Makes the DataFrames of batches, with columns `schema`, which `read` fills. `read` goes to the workers."""

    def __init__(self, spark: SparkSession, read: ReadRanges, schema: StructType) -> None:
        self._spark = spark
        self._jvm = spark.sparkContext._jvm
        self._part_schema = spark._jsparkSession.parseDataType(_PART.json())

        def worker(rows: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for rows_of_parts in rows:
                for text in rows_of_parts.column(0).to_pylist():
                    yield from read(*_read_part(text))

        # Made once: what a batch costs in the driver is a few calls to the JVM, and no pickling.
        self._function = pandas_udf(worker, returnType=schema, functionType=PythonEvalType.SQL_MAP_ARROW_ITER_UDF)

    def frame(self, parts: Sequence[tuple[ScanPartition, Sequence[str]]], tags: str) -> Any:
        """The JVM's streaming DataFrame with the messages of some parts, in this order. Each comes with the hosts that
        its task should run on."""
        conversions = self._jvm.scala.collection.JavaConverters
        items = self._jvm.java.util.ArrayList()
        for part, hosts in parts:
            row = self._jvm.org.apache.spark.sql.RowFactory.create(self._array([_part_text(part.ranges, tags)]))
            near = conversions.asScalaBuffer(self._list(hosts)).toSeq()
            items.add(self._jvm.scala.Tuple2(row, near))
        context = self._spark.sparkContext._jsc.sc()
        class_tag = getattr(self._jvm, "scala.reflect.ClassTag$").__getattr__("MODULE$").Any()
        rdd = context.makeRDD(conversions.asScalaBuffer(items).toSeq(), class_tag).toJavaRDD()
        session = self._spark._jsparkSession
        rows = session.createDataFrame(rdd, self._part_schema)
        function = self._function(DataFrame(rows, self._spark)["part"])._jc.expr()
        messages = rows.pythonMapInArrow(function, False)
        return session.internalCreateDataFrame(messages.queryExecution().toRdd(), messages.schema(), True)

    def _array(self, values: Sequence[object]) -> Any:
        array = self._spark.sparkContext._gateway.new_array(self._jvm.java.lang.Object, len(values))
        for index, value in enumerate(values):
            array[index] = value
        return array

    def _list(self, values: Sequence[str]) -> Any:
        result = self._jvm.java.util.ArrayList()
        for value in values:
            result.add(value)
        return result


def _part_text(ranges: Sequence[OffsetRange], tags: str) -> str:
    fields = [[one.topic, one.broker_name, one.queue_id, one.start_offset, one.end_offset] for one in ranges]
    return json.dumps({"ranges": fields, "tags": tags})


def _read_part(text: str) -> tuple[list[OffsetRange], str]:
    fields = json.loads(text)
    return [OffsetRange(*one) for one in fields["ranges"]], fields["tags"]
