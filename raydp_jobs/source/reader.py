"""A topic as a DataFrame: its queues' ranges, one Spark partition each, read by Python workers in the executors.

    driver      plans the ranges (raymq.scan.ranges), so that every option is checked before a Spark job runs
    executor    a Python worker connects to the cluster once in its life, then for each range:
                mapped files or the storage actor → record bytes → Arrow columns → Spark

The plan is fixed when the DataFrame is made: reading it again reads the same offsets. Only numbers and names travel
from the driver to the workers; object references would not do there, for a worker has a Ray connection of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from functools import lru_cache
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import ray
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

from raymq.client import Client, connect
from raymq.consumer.subscription import ALL, Subscription
from raymq.kernels.byte_column import text_array
from raymq.kernels.columns import schema_with
from raymq.scan.batches import open_range
from raymq.scan.queue_bounds import ClusterQueues
from raymq.scan.ranges import OffsetRange, OffsetsOption, plan_ranges

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
"""The columns of `read_topic`. A queue is `broker_name` and `queue_id` together."""

_MICROSECONDS: Final = pa.timestamp("us", tz="UTC")
_ARROW_SCHEMA: Final = pa.schema(
    [field.with_type(_MICROSECONDS) if pa.types.is_timestamp(field.type) else field for field in schema_with("binary")]
)
"""The columns of raymq.kernels.columns with the only types of bodies and timestamps that Spark accepts."""

logger = logging.getLogger(__name__)


def read_topic(
    spark: SparkSession,
    topic: str,
    *,
    starting_offsets: OffsetsOption = "earliest",
    ending_offsets: OffsetsOption = "latest",
    min_partitions: int | None = None,
    fail_on_data_loss: bool = True,
    tags: str = ALL,
    client: Client | None = None,
) -> DataFrame:
    """The messages of a topic, between two offsets of each of its queues, as a DataFrame with `SPARK_SCHEMA`.

    Options as in Spark's Kafka source; offsets per queue are ``{"broker-a": {"0": 12, "1": -2}}`` or the same as JSON,
    with -2 for earliest and -1 for latest. ``"latest"`` is the end at the moment of this call. `tags` filters like a
    subscription, ``"paid || refunded"``. `client`: what `raymq.connect()` gave, else a connection is made for the plan.

    Order holds within a queue and partition. Raises as `plan_ranges` and `Subscription.parse` do, before any Spark job.
    With `fail_on_data_loss` a job fails when messages of the plan have been deleted meanwhile; without, it leaves them
    out with a warning in the executor's log.
    """
    subscription = Subscription.parse(topic, tags)
    with nullcontext(client) if client is not None else connect() as connection:
        ranges = plan_ranges(
            ClusterQueues(connection.routes, connection.storages),
            topic,
            starting_offsets=starting_offsets,
            ending_offsets=ending_offsets,
            min_partitions=min_partitions,
            fail_on_data_loss=fail_on_data_loss,
        )
        address = ray.get_runtime_context().gcs_address
    if not ranges:
        return spark.createDataFrame([], SPARK_SCHEMA)

    def read(rows: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        chosen = (ranges[index] for batch in rows for index in batch.column(0).to_pylist())
        return read_ranges(chosen, address, subscription.tags, fail_on_data_loss)

    return spark.range(0, len(ranges), 1, len(ranges)).mapInArrow(read, SPARK_SCHEMA)


def read_ranges(
    ranges: Iterable[OffsetRange], address: str, tags: frozenset[str], fail_on_data_loss: bool
) -> Iterator[pa.RecordBatch]:
    """In a Spark worker: the messages of some ranges, as Spark takes them. `tags` empty means all."""
    client = _worker_client(address)
    wanted = text_array(sorted(tags))
    for queue_range in ranges:
        for batch in open_range(client.routes, client.storages, queue_range, fail_on_data_loss=fail_on_data_loss):
            chosen = batch.filter(pc.is_in(batch.column("tags"), value_set=wanted)) if tags else batch
            if chosen.num_rows:
                yield chosen.cast(_ARROW_SCHEMA)


@lru_cache(maxsize=1)
def _worker_client(address: str) -> Client:
    """This process's client, connected once and kept for its life: Spark reuses its Python workers."""
    return connect(address)
