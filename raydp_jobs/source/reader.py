"""Reads topics as a DataFrame. Each Spark partition has offset ranges of the topics' queues. Python workers in the
executors read them.

    driver      plans the ranges (raymq.client.scan.ranges), so that every option is checked before a Spark job runs
    executor    a Python worker connects to the cluster once, at its first task, then for each range:
                mapped files or the storage actor → record bytes → Arrow columns → Spark

The plan is fixed when the DataFrame is created: if the DataFrame is read again, the same offsets are read. The driver
sends only numbers and names to the workers. Ray object references would not work, because each worker has its own Ray
connection.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Final, Unpack

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from raydp_jobs.source.locality import numbered_partitions, preferred_hosts
from raydp_jobs.source.losses import count_losses
from raydp_jobs.source.read_progress import ReadProgress, counted
from raydp_jobs.worker_client import ClusterAddress, address_of_cluster, worker_client
from raymq.client.client import Client, connect
from raymq.client.consumer.subscription import ALL, Subscription
from raymq.client.scan.batches import OnLoss, check_unreadable, open_ranges
from raymq.client.scan.partitions import plan_partitions
from raymq.client.scan.queue_bounds import ClusterQueues
from raymq.client.scan.ranges import NO_CREATIONS, Creations, OffsetRange, ScanOptions, plan_ranges, text_of
from raymq.common.numbers import POSITIVE, bounded, checked
from raymq.records.filters.sql import SqlFilter
from raymq.records.kernels.columns import Unreadable, schema_with
from raymq.remoting.namespaced_routes import NamespacedRoutes

_TEXT: Final = StringType()
SPARK_SCHEMA: Final = StructType(
    [
        StructField("topic", _TEXT),
        StructField("broker_name", _TEXT),
        StructField("queue_id", IntegerType()),
        StructField("queue_offset", LongType()),
        StructField("tags", _TEXT),
        StructField("keys", ArrayType(_TEXT)),
        StructField("body", BinaryType()),
        StructField("properties", MapType(_TEXT, _TEXT)),
        StructField("born_timestamp", TimestampType()),
        StructField("store_timestamp", TimestampType()),
        StructField("message_id", _TEXT),
    ]
)
"""The default columns of `read_topic`. `broker_name` and `queue_id` together identify a queue."""
MORE_SPARK_COLUMNS: Final = StructType(
    [
        StructField("reconsume_times", IntegerType()),
        StructField("body_size", IntegerType()),
        StructField("error", _TEXT),
    ]
)
"""Additional columns of `read_topic`, which returns these columns only if the caller requests them by name
(raymq.records.kernels.columns)."""
_FIELDS: Final = {field.name: field for field in (*SPARK_SCHEMA, *MORE_SPARK_COLUMNS)}

_MICROSECONDS: Final = pa.timestamp("us", tz="UTC")

SMALL_COLUMNS_BYTES: Final = 256
"""Maximum size in bytes that is assumed for a message when a read without `body` is divided into partitions. Such a
read transfers only the small columns of a message."""


@checked
@bounded(min_partitions=POSITIVE, partition_bytes=POSITIVE)
def read_topic(
    spark: SparkSession,
    topic: str | Sequence[str] | None = None,
    *,
    columns: Sequence[str] | None = None,
    tags: str = ALL,
    expression: SqlFilter | None = None,
    unreadable: Unreadable = "null",
    min_partitions: int | None = None,
    partition_bytes: int | None = None,
    client: Client | None = None,
    **options: Unpack[ScanOptions],
) -> DataFrame:
    """Read the messages of topics as a DataFrame, between two offsets of each queue.

    `columns`: by default `SPARK_SCHEMA`; else columns of `SPARK_SCHEMA` and `MORE_SPARK_COLUMNS`. A query that does not
    use `body` is several times faster if `columns` omits `body`. `options` are as in `plan_ranges` and in Spark's Kafka
    source. Offsets per queue are given as ``{"broker-a": {"0": 12, "1": -2}}``, or as the same in JSON, with -2 for
    earliest and -1 for latest. ``"latest"`` is the end at the moment of this call. `tags` filters like a subscription,
    ``"paid || refunded"``, and `expression` by properties, ``raymq.sql("price > 5")``; both filter before a body is
    read.

    A message that cannot be read has a null `body`, and the column `error` has the reason. With `unreadable` "raise"
    the job instead fails with BodyUnreadableError. Partitions have about `partition_bytes` bytes of records; there are
    at least `min_partitions` partitions. `client`: the result of `raymq.connect()`; without it, a connection is opened
    for the plan.

    The order of messages is kept within a queue and partition. Raises the errors of `plan_ranges`, `plan_partitions`
    and `Subscription.parse` before any Spark job. With `fail_on_data_loss` a job fails if messages of the plan were
    deleted before they were read. Without it, the job skips these messages, and a warning in the driver's log
    (`raydp_jobs.source.losses`) names their offsets.
    """
    return open_topic(
        spark,
        topic,
        columns=columns,
        tags=tags,
        expression=expression,
        unreadable=unreadable,
        min_partitions=min_partitions,
        partition_bytes=partition_bytes,
        client=client,
        **options,
    )


def open_topic(
    spark: SparkSession,
    topic: str | Sequence[str] | None = None,
    *,
    columns: Sequence[str] | None = None,
    tags: str = ALL,
    expression: SqlFilter | None = None,
    unreadable: Unreadable = "null",
    min_partitions: int | None = None,
    partition_bytes: int | None = None,
    client: Client | None = None,
    progress: ReadProgress | None = None,
    **options: Unpack[ScanOptions],
) -> DataFrame:
    """Return the DataFrame of `read_topic`. `progress`: receives the number of messages in the plan, and later the
    numbers that the tasks have read. Raises the errors of `read_topic`."""
    wanted = Subscription.parse("any", tags).tags
    sql = text_of(expression)
    schema = spark_schema(columns)
    check_unreadable(unreadable)
    fail_on_data_loss = options.get("fail_on_data_loss", True)
    with nullcontext(client) if client is not None else connect() as connection:
        source = ClusterQueues(connection.routes, connection.storages, connection.names)
        partitions = plan_partitions(
            source,
            plan_ranges(source, topic, **options),
            partition_bytes=partition_bytes,
            min_partitions=min_partitions,
            parallelism=spark.sparkContext.defaultParallelism,
            message_bytes_max=None if "body" in schema.names else SMALL_COLUMNS_BYTES,
        )
        hosts = preferred_hosts(NamespacedRoutes(connection.routes, connection.names), partitions)
        address = address_of_cluster(connection)
        creations = source.creations({one.topic for part in partitions for one in part.ranges}) if partitions else {}
    if progress is not None:
        progress.on_plan(sum(one.size for part in partitions for one in part.ranges))
    if not partitions:
        return spark.createDataFrame([], schema)

    losses = count_losses(spark)
    done = None if progress is None else progress.counter(spark)

    def read(rows: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        parts = (partitions[index] for batch in rows for index in batch.column(0).to_pylist())
        chosen: Iterable[OffsetRange] = (one for part in parts for one in part.ranges)
        if done is not None:
            chosen = counted(chosen, done.add)
        return read_ranges(
            chosen,
            address,
            wanted,
            fail_on_data_loss,
            schema.names,
            lambda lost: losses.add([lost]),
            sql=sql,
            unreadable=unreadable,
            creations=creations,
        )

    return numbered_partitions(spark, hosts).mapInArrow(read, schema)


def spark_schema(columns: Sequence[str] | None = None) -> StructType:
    """Return the Spark schema of the given columns, in the given order; SPARK_SCHEMA if `columns` is None.

    Raises InvalidArgumentError if a column is neither in SPARK_SCHEMA nor in MORE_SPARK_COLUMNS.
    """
    return StructType([_FIELDS[name] for name in schema_with("binary", columns).names])


def read_ranges(
    ranges: Iterable[OffsetRange],
    address: ClusterAddress,
    tags: frozenset[str],
    fail_on_data_loss: bool,
    columns: Sequence[str] | None = None,
    on_loss: OnLoss = lambda lost: None,
    *,
    sql: str | None = None,
    unreadable: Unreadable = "null",
    creations: Creations = NO_CREATIONS,
) -> Iterator[pa.RecordBatch]:
    """Read the messages of offset ranges in a Spark worker, as Arrow batches that Spark accepts.

    Empty `tags` and an empty `sql` select all messages. `on_loss` is called with each range of lost messages.
    `creations`: as for `open_ranges`.
    """
    client = worker_client(address)
    schema = _arrow_schema(columns)
    batches = open_ranges(
        client.routes,
        client.storages,
        ranges,
        fail_on_data_loss=fail_on_data_loss,
        columns=columns,
        tags=tags,
        sql=sql,
        on_loss=on_loss,
        names=client.names,
        unreadable=unreadable,
        creations=creations,
    )
    for batch in batches:
        yield batch.cast(schema)


def _arrow_schema(columns: Sequence[str] | None) -> pa.Schema:
    """Return the Arrow schema of the given columns (raymq.records.kernels.columns). Bodies and timestamps have types
    that Spark accepts."""
    return pa.schema(
        [
            field.with_type(_MICROSECONDS) if pa.types.is_timestamp(field.type) else field
            for field in schema_with("binary", columns)
        ]
    )
