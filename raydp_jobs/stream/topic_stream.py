"""`stream_topic`: reads topics as a streaming DataFrame."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypedDict, Unpack

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from raydp_jobs.source.reader import read_ranges, spark_schema
from raydp_jobs.stream.cluster import TopicChoice, TopicCluster
from raydp_jobs.stream.planner import BatchLimits
from raydp_jobs.stream.source import MAX_TRIGGER_DELAY_S, TopicSource
from raydp_jobs.stream.spark_source import stream_frame
from raymq.client.client import Client
from raymq.client.consumer.subscription import ALL, Subscription
from raymq.client.scan.batches import check_unreadable
from raymq.client.scan.offsets import OffsetsOption, TimestampOption, TimestampsOption, TimestampStrategy
from raymq.client.scan.ranges import OffsetRange, check_options, text_of
from raymq.common.numbers import POSITIVE, bounded, checked
from raymq.records.filters.sql import SqlFilter
from raymq.records.kernels.columns import Unreadable


class StartingOptions(TypedDict, total=False):
    """The options that determine where a query without a checkpoint starts; by default at the latest offset. A
    restarted query ignores them and continues from its checkpoint."""

    starting_offsets: OffsetsOption | None
    starting_timestamp: TimestampOption | None
    starting_offsets_by_timestamp: TimestampsOption | None
    starting_offsets_by_timestamp_strategy: TimestampStrategy


@checked
@bounded(max_offsets_per_trigger=POSITIVE, min_offsets_per_trigger=POSITIVE, min_partitions=POSITIVE)
def stream_topic(
    spark: SparkSession,
    topic: str | Sequence[str] | None = None,
    *,
    topic_pattern: str | None = None,
    columns: Sequence[str] | None = None,
    tags: str = ALL,
    expression: SqlFilter | None = None,
    max_offsets_per_trigger: int | None = None,
    min_offsets_per_trigger: int | None = None,
    max_trigger_delay_s: float = MAX_TRIGGER_DELAY_S,
    min_partitions: int | None = None,
    fail_on_data_loss: bool = True,
    unreadable: Unreadable = "null",
    commit_group: str | None = None,
    client: Client | None = None,
    **starting: Unpack[StartingOptions],
) -> DataFrame:
    """Read topics continuously, as a streaming DataFrame with the columns of `read_topic`, or with only the given
    `columns`.

    Options are as in Spark's Kafka source. A new query begins at the position that the `starting` options give, by
    default at the latest offset. A restarted query continues from its checkpoint. It repeats an unfinished batch with
    the same rows in the same partitions. New queues, and new topics of a `topic_pattern`, are found within seconds and
    read from their first message. A batch has at most `max_offsets_per_trigger` offsets, and waits up to
    `max_trigger_delay_s` for `min_offsets_per_trigger`.

    `tags` filters like a subscription, ``"paid || refunded"``, and `expression` by properties, ``raymq.sql("price >
    5")``; a repeated batch keeps its filters. `unreadable`: as in `read_topic`. `commit_group`: the consumer group to
    which the offsets of finished batches are committed, so that `raymq group describe` shows the query's lag. `client`:
    the result of `raymq.connect()`, which must stay open while the queries run; without it, a connection is opened.

    The order of messages is kept within a queue and partition. Before anything starts, raises the errors of
    `select_topics` and `Subscription.parse`, and TopicNotExistError if a named topic does not exist. With
    `fail_on_data_loss` a query fails if messages that it has not read were deleted. Without it, the query skips these
    messages with a warning.
    """
    Subscription.parse("any", tags)
    check_options(starting, StartingOptions)
    check_unreadable(unreadable)
    limits = BatchLimits(
        max_offsets=max_offsets_per_trigger,
        min_offsets=min_offsets_per_trigger,
        min_partitions=min_partitions,
        parallelism=spark.sparkContext.defaultParallelism,
        tags=tags,
        sql=text_of(expression) or "",
        fail_on_data_loss=fail_on_data_loss,
    )
    return open_stream(
        spark,
        TopicChoice(topic, topic_pattern),
        starting,
        limits,
        columns=columns,
        max_trigger_delay_s=max_trigger_delay_s,
        unreadable=unreadable,
        commit_group=commit_group,
        client=client,
    )


def open_stream(
    spark: SparkSession,
    choice: TopicChoice,
    starting: StartingOptions,
    limits: BatchLimits,
    *,
    columns: Sequence[str] | None = None,
    max_trigger_delay_s: float = MAX_TRIGGER_DELAY_S,
    unreadable: Unreadable = "null",
    commit_group: str | None = None,
    client: Client | None = None,
    closes: bool = False,
) -> DataFrame:
    """Open the streaming DataFrame of `stream_topic` for chosen topics and limits. Raises the errors of
    `stream_topic`.

    `closes`: a query with the trigger availableNow closes its time windows after its last message
    (raydp_jobs.stream.source). The caller must remove the row with the time CLOSING_TIME_US after `withWatermark`.
    """
    schema = spark_schema(columns)
    cluster = TopicCluster(choice, starting, group=commit_group, client=client)
    try:
        # called only for its errors: an invalid start option must fail here, not when a query starts
        cluster.starts(cluster.queues())
        address = cluster.address()
    finally:
        cluster.close()
    names, fail_on_data_loss = schema.names, limits.fail_on_data_loss

    def read(ranges: Sequence[OffsetRange], tags: str, sql: str) -> Iterable[pa.RecordBatch]:
        wanted = Subscription.parse("any", tags).tags
        return read_ranges(ranges, address, wanted, fail_on_data_loss, names, sql=sql or None, unreadable=unreadable)

    source = TopicSource(cluster, limits, max_trigger_delay_s=max_trigger_delay_s, closes=closes)
    return stream_frame(spark, source, read, schema, str(choice))
