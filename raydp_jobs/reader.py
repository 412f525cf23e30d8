"""A topic as a DataFrame: its queues' ranges, one Spark partition each, read by Python workers in the executors.

    driver      plans the ranges (raydp_jobs.ranges), so that every option is checked before a Spark job runs
    executor    a Python worker connects to the cluster once in its life, then for each range:
                mapped files or the storage actor → record bytes → Arrow columns → Spark

The plan is fixed when the DataFrame is made: reading it again reads the same offsets. Only numbers and names travel
from the driver to the workers; object references would not do there, for a worker has a Ray connection of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import ray
from numpy.typing import NDArray
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

from raydp_jobs.ranges import OffsetRange, OffsetsOption, QueueBoundsSource, plan_ranges
from raymq.client import Client, connect
from raymq.consumer.range_reader import RangeReader
from raymq.consumer.subscription import ALL, Subscription
from raymq.errors import DataLossError
from raymq.kernels.byte_column import text_array
from raymq.kernels.columns import decode_columns, schema_with
from raymq.message import MessageQueue
from raymq.protocol.store import QueueBounds
from raymq.remoting.storage_clients import call_master

BATCH_BYTES: Final = 4 * 1024 * 1024
"""The bytes of records in one Arrow batch, which bounds the memory of a worker and of its executor."""
READ_CALL_TIMEOUT_S: Final = 5.0
BOUNDS_TIMEOUT_S: Final = 20.0
"""The timeout for reading a queue's bounds, over a restart of its storage actor."""

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
            _ClusterQueues(connection),
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
        for batch in open_range(client, queue_range, fail_on_data_loss=fail_on_data_loss):
            chosen = batch.filter(pc.is_in(batch.column("tags"), value_set=wanted)) if tags else batch
            if chosen.num_rows:
                yield chosen.cast(_ARROW_SCHEMA)


def open_range(client: Client, queue_range: OffsetRange, *, fail_on_data_loss: bool) -> Iterator[pa.RecordBatch]:
    """The messages of one range, in order, with the columns of `raymq.kernels.columns.SCHEMA` and copied bodies.

    DataLossError when some of them are gone; without `fail_on_data_loss` the rest of the range is read instead.
    """
    position = queue_range.start_offset
    while position < queue_range.end_offset:
        try:
            records = RangeReader(client.routes, client.storages).read(
                queue_range.queue, position, queue_range.end_offset
            )
            for buffer, starts in records:
                for some in _slices(starts):
                    batch = decode_columns(buffer, some, broker_name=queue_range.broker_name, body_type="binary")
                    position = batch.column("queue_offset")[-1].as_py() + 1
                    yield batch
            return
        except DataLossError as error:
            kept = _ClusterQueues(client).bounds(queue_range.queue).min_offset
            if fail_on_data_loss or kept <= position:
                raise
            logger.warning("%s: offsets %d to %d are gone: %s", queue_range.queue, position, kept - 1, error)
            position = kept


def _slices(starts: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Neighbouring records, BATCH_BYTES at a time but one at least; a chunk may be a whole file, and Spark copies."""
    first = 0
    while first < len(starts):
        last = max(first + 1, int(np.searchsorted(starts, starts[first] + BATCH_BYTES)))
        yield starts[first:last]
        first = last


class _ClusterQueues(QueueBoundsSource):
    """The queues and bounds that planning needs, from a client."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def queues(self, topic: str) -> Sequence[MessageQueue]:
        return self._client.admin.topic_route(topic).subscribe_queues

    def bounds(self, queue: MessageQueue) -> QueueBounds:
        return call_master(
            self._client.routes,
            self._client.storages,
            queue,
            BOUNDS_TIMEOUT_S,
            lambda storage, left_s: storage.queue_bounds(queue.topic, queue.queue_id, min(left_s, READ_CALL_TIMEOUT_S)),
        )


@lru_cache(maxsize=1)
def _worker_client(address: str) -> Client:
    """This process's client, connected once and kept for its life: Spark reuses its Python workers."""
    return connect(address)
