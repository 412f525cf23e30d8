"""Topics as a data source of Spark 4 in Python: ``spark.read.format("raymq")``. Other modules have the stream's reader
and the writers.

Spark calls this module in several processes. None of them is the user's program:

    load()            a planning process: `TopicDataSource.schema` checks the options
    first action      a planning process: `partitions` plans the read (raymq.client.scan); Spark keeps the plan
    pushed filters    a planning process for each query: `pushFilters`, then `partitions`
    each task         a Python worker: `read`, which returns Arrow batches
    each stream       a process for the time of the query (raydp_jobs.data_source.stream_reader)
    each write        the processes in raydp_jobs.data_source.topic_writers

A planning process connects to the cluster and ends after the plan. The objects of this module travel between the
processes as pickles, so they contain only plain values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamWriter, DataSourceWriter
from pyspark.sql.types import StructType

from raydp_jobs.data_source.options import (
    batch_options,
    batch_write_options,
    parse_options,
    scan_options,
    stream_options,
    stream_write_options,
)
from raydp_jobs.data_source.partitions import SourceSettings, TopicPartition, read_partition
from raydp_jobs.data_source.pushed_filters import Conditions, conditions_of, narrow_ranges, tags_of
from raydp_jobs.data_source.topic_writers import TopicBatchWriter, TopicStreamWriter, row_write
from raydp_jobs.data_source.versions import STREAM_SPARK, check_spark4
from raydp_jobs.source.reader import SMALL_COLUMNS_BYTES, spark_schema
from raymq.client.client import connect
from raymq.client.consumer.subscription import ALL, Subscription
from raymq.client.scan.partitions import plan_partitions
from raymq.client.scan.queue_bounds import ClusterQueues
from raymq.client.scan.ranges import plan_ranges, text_of
from raymq.common.errors import InvalidArgumentError
from raymq.common.identity import acting_as


class TopicReader(DataSourceReader):
    """A batch read of topics. `options`: the converted options. `names`: the columns of the result."""

    def __init__(self, settings: SourceSettings, options: Mapping[str, Any], names: Sequence[str]) -> None:
        self._settings, self._options, self._names = settings, dict(options), list(names)
        self._conditions: Conditions = conditions_of((), self._wanted_tags())

    def partitions(self) -> list[TopicPartition]:
        """Plan the read: connect to the cluster, and divide the messages that the options and the pushed filters leave.
        Raises the errors of `plan_ranges`."""
        options, at = self._options, self._settings.address
        with acting_as(at.user), connect(at.address, namespace=at.namespace) as client:
            source = ClusterQueues(client.routes, client.storages, client.names)
            planned = plan_ranges(source, options.get("topic"), **scan_options(options))
            parts = plan_partitions(
                source,
                narrow_ranges(source, planned, self._conditions),
                partition_bytes=options.get("partition_bytes"),
                min_partitions=options.get("min_partitions"),
                parallelism=self._settings.parallelism,
                message_bytes_max=None if "body" in self._names else SMALL_COLUMNS_BYTES,
            )
            creations = source.creations({one.topic for part in parts for one in part.ranges}) if parts else {}
        tags, sql = tags_of(self._conditions), text_of(options.get("expression")) or ""
        return [TopicPartition(part.ranges, tags, sql, creations) for part in parts]

    def read(self, partition: Any) -> Iterator[pa.RecordBatch]:
        """Return the messages of a partition, as Arrow batches.

        If the read has no partitions, Spark starts one task, and passes None or an InputPartition without content.
        """
        if not isinstance(partition, TopicPartition):
            return iter(())
        return read_partition(partition, self._settings, self._options, self._names)

    def _wanted_tags(self) -> frozenset[str]:
        return Subscription.parse("any", self._options.get("tags", ALL)).tags


class FilteringTopicReader(TopicReader):
    """A batch read of topics to which Spark pushes filters down."""

    def pushFilters(self, filters: list[Any]) -> Iterable[Any]:  # noqa: N802  # Spark's name
        """Use a query's filters to read fewer messages. Returns all filters, because Spark evaluates each filter again:
        the pushed filters may leave messages that do not pass."""
        self._conditions = conditions_of(filters, self._wanted_tags())
        return filters


class TopicDataSource(DataSource):
    """The data source ``format("raymq")``. `register_raymq` makes a subclass for each session."""

    settings: ClassVar[SourceSettings]

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "raymq"

    def schema(self) -> StructType:
        """Check the options, and return the columns that they choose. Raises the errors of `parse_options`."""
        return spark_schema(parse_options(self.options).get("columns"))

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of a batch. Raises the errors of `batch_options` and `chosen_columns`."""
        options = batch_options(self.options)
        kind = FilteringTopicReader if self.settings.push_filters else TopicReader
        return kind(self.settings, options, chosen_columns(schema, options))

    def streamReader(self, schema: StructType) -> Any:  # noqa: N802  # Spark's name
        """Return the reader of a stream. Raises ClientStateError for Spark 4.1, and the errors of `stream_options` and
        `chosen_columns`."""
        check_spark4(STREAM_SPARK, 'spark.readStream.format("raymq")')
        from raydp_jobs.data_source.stream_reader import TopicStreamReader

        options = stream_options(self.options)
        return TopicStreamReader(self.settings, options, chosen_columns(schema, options))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:  # Spark's arguments
        """Return the writer of a batch. Raises the errors of `batch_write_options` and `row_write`."""
        options = batch_write_options(self.options)
        return TopicBatchWriter(row_write(self.settings.address, schema, overwrite, options))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        """Return the writer of a stream. Raises the errors of `stream_write_options` and `row_write`."""
        options = stream_write_options(self.options)
        return TopicStreamWriter(row_write(self.settings.address, schema, overwrite, options))


def chosen_columns(schema: StructType, options: Mapping[str, Any]) -> list[str]:
    """Return the names of the columns of `schema`: the columns of the options, or a schema that the user gave with
    ``.schema("tags string")``.

    Raises InvalidArgumentError if a column does not exist or has another type, or if the user also gave other
    `columns`.
    """
    names: list[str] = list(schema.names)
    columns = options.get("columns")
    if columns is not None and columns != names:
        raise InvalidArgumentError(
            f"columns {', '.join(columns)} and the columns {', '.join(names)} of schema(...) exclude each other: pass "
            "only one of them"
        )
    for given, right in zip(schema.fields, spark_schema(names).fields, strict=True):
        if given.dataType.simpleString() != right.dataType.simpleString():
            raise InvalidArgumentError(
                f"column {given.name} of schema(...) has type {given.dataType.simpleString()}, but its type is "
                f"{right.dataType.simpleString()}"
            )
    return names
