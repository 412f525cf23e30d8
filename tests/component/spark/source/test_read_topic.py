"""Tests of `read_topic` with Spark and without Ray, on a store in the test process. Each option is checked with known
messages."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession, functions

import raymq
from raydp_jobs.source import locality, reader
from raydp_jobs.source.read_progress import ReadProgress
from raydp_jobs.source.reader import SPARK_SCHEMA, open_topic, read_topic
from raymq.client.scan.partitions import ScanPartition
from raymq.client.scan.ranges import OffsetRange, ScanOptions
from raymq.common.errors import InvalidArgumentError, TopicNotExistError
from raymq.common.protocol.route import BrokerData, TopicRoute
from raymq.records.format.encode import EncodedBatch
from storage.message_store import MessageStore
from storage.retention import cleaner
from tests.support.history.waiting import eventually
from tests.support.spark.near_store import NearStore
from tests.support.stores.clocks import let_pass
from tests.support.stores.lying_bodies import lying_batch, lying_bodies
from tests.support.stores.stores import make_batch, open_store

QUEUES = 2
COUNT = 240
TAGS = ("paid", "late", "refunded")
FIRST_MS = 1_700_000_000_000
LIARS = list(lying_bodies().values())


class Topics:
    """A store in which each topic has one message per second. Message number n is in queue n % 2 at offset n //
    2."""

    def __init__(self, directory: Path) -> None:
        self._now_ms = FIRST_MS
        self.store: MessageStore = open_store(directory / "store", clock_ms=lambda: self._now_ms)
        for number in range(COUNT):
            self._now_ms = FIRST_MS + number * 1000
            self.store.append([self._message(topic, number) for topic in ("orders", "orders-eu", "payments")])
        self.store.append([lying_batch([(b"before", 0), *LIARS, (b"after", 0)], topic="poisoned")])
        self.near = NearStore(self.store, directory / "cluster.json", QUEUES)

    def _message(self, topic: str, number: int) -> EncodedBatch:
        body = b"%s %d " % (topic.encode(), number) + b"x" * 200
        properties = {"price": str(number)}
        return make_batch(
            [body], topic=topic, queue_id=number % QUEUES, tags=TAGS[number % 3], extra_properties=properties
        )


@pytest.fixture(scope="module")
def topics(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Topics]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fdatasync", lambda descriptor: None)
        patch.setattr(cleaner, "DELETE_PAUSE_S", 0.0)
        topics = Topics(tmp_path_factory.mktemp("spark"))
        patch.setattr(reader, "address_of_cluster", lambda client: str(topics.near.path))
        yield topics
        topics.store.close()


def numbers(frame: DataFrame) -> list[int]:
    """Return the sorted numbers of the messages in a DataFrame. A message's number is computed from its queue id and
    queue offset."""
    rows = frame.select("queue_id", "queue_offset").collect()
    return sorted(row.queue_offset * QUEUES + row.queue_id for row in rows)


def test_every_message_comes_once_with_all_of_its_columns(spark: SparkSession, topics: Topics) -> None:
    rows = {
        row.queue_offset * QUEUES + row.queue_id: row
        for row in read_topic(spark, "orders", client=topics.near).collect()
    }
    assert sorted(rows) == list(range(COUNT))
    assert all(bytes(row.body).startswith(b"orders %d " % number) for number, row in rows.items())
    assert all(row.tags == TAGS[number % 3] and row.topic == "orders" for number, row in rows.items())


def test_a_job_learns_how_many_messages_are_planned_and_read(spark: SparkSession, topics: Topics) -> None:
    planned: list[int] = []
    read: list[int] = []
    with ReadProgress(planned.append, read.append) as progress:
        frame = open_topic(spark, "orders", tags="paid", min_partitions=4, client=topics.near, progress=progress)
        assert (planned, read) == ([COUNT], [])
        # Skipped messages count as read, so the progress ends at the planned number.
        assert frame.count() == COUNT // len(TAGS)
        eventually(lambda: sum(read) == COUNT, "the numbers of all tasks")
        assert len(read) >= 4
    frame.count()
    assert sum(read) == COUNT
    assert open_topic(spark, "orders", client=topics.near).count() == COUNT


def test_optional_columns_are_read_on_request(spark: SparkSession, topics: Topics) -> None:
    frame = read_topic(spark, "orders", columns=["body_size", "reconsume_times", "queue_offset"], client=topics.near)
    rows = [tuple(row) for row in frame.orderBy("queue_offset").limit(2).collect()]
    assert rows == [(len("orders 0 ") + 200, 0, 0), (len("orders 1 ") + 200, 0, 0)]
    assert frame.columns == ["body_size", "reconsume_times", "queue_offset"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"starting_timestamp": FIRST_MS + 50_000}, range(50, COUNT)),
        ({"starting_timestamp": datetime(2023, 11, 14, 22, 14, 10)}, range(50, COUNT)),
        ({"starting_timestamp": FIRST_MS + 50_001, "ending_timestamp": FIRST_MS + 60_000}, range(51, 60)),
        (
            {"starting_offsets_by_timestamp": {"a": {"0": FIRST_MS, "1": FIRST_MS + 230_500}}},
            [*range(0, COUNT, 2), *range(231, COUNT, 2)],
        ),
        (
            {
                "starting_offsets": {"a": {"0": 100, "1": -2}},
                "ending_offsets": {"orders": {"a": {"0": -1, "1": 3}}},
            },
            [1, 3, 5, *range(200, COUNT, 2)],
        ),
        ({"max_offsets": 10}, range(10)),
        ({"tags": "late || refunded"}, [number for number in range(COUNT) if number % 3]),
        ({"tags": "late", "columns": ["queue_offset", "queue_id"]}, range(1, COUNT, 3)),
        ({"expression": raymq.sql("price between 17 and 19 or price = 50.0")}, [17, 18, 19, 50]),
        ({"expression": raymq.sql("price < 30"), "tags": "late"}, range(1, 30, 3)),
        ({"expression": raymq.sql("price > 1000")}, []),
    ],
)
def test_each_option_selects_its_messages(
    spark: SparkSession, topics: Topics, options: dict[str, Any], expected: Any
) -> None:
    assert numbers(read_topic(spark, "orders", client=topics.near, **options)) == sorted(expected)


def test_a_filter_expression_says_the_same_as_pandas(spark: SparkSession, topics: Topics) -> None:
    expression = raymq.sql("TAGS <> 'late' and (price not between 20 and 200 or TAGS startswith 'ref')")
    few = read_topic(spark, "orders", expression=expression, client=topics.near).toPandas()
    whole = read_topic(spark, "orders", client=topics.near).toPandas()
    price = whole["properties"].map(lambda properties: int(properties["price"]))
    wanted = whole[(whole["tags"] != "late") & (~price.between(20, 200) | whole["tags"].str.startswith("ref"))]
    order = ["queue_id", "queue_offset"]
    assert 0 < len(wanted) < len(whole)
    assert few.sort_values(order).to_dict("records") == wanted.sort_values(order).to_dict("records")


@pytest.mark.parametrize(("topic", "pattern"), [(["orders", "orders-eu"], None), (None, "orders.*")])
def test_several_topics_are_one_frame(spark: SparkSession, topics: Topics, topic: Any, pattern: str | None) -> None:
    frame = read_topic(spark, topic, topic_pattern=pattern, client=topics.near)
    found = Counter(row.topic for row in frame.select("topic").collect())
    assert found == {"orders": COUNT, "orders-eu": COUNT}


def test_selected_columns_equal_the_columns_of_the_whole_frame(spark: SparkSession, topics: Topics) -> None:
    columns = ["store_timestamp", "tags", "queue_offset", "queue_id"]
    few = read_topic(spark, "orders", columns=columns, client=topics.near)
    assert few.columns == columns
    assert set(few.collect()) == set(read_topic(spark, "orders", client=topics.near).select(*columns).collect())


def test_partitions_are_made_by_bytes(spark: SparkSession, topics: Topics) -> None:
    def parts(**options: Any) -> list[int]:
        frame = read_topic(spark, "orders", client=topics.near, **options)
        found = Counter(row.part for row in frame.select(functions.spark_partition_id().alias("part")).collect())
        return [found[part] for part in sorted(found)]

    assert parts() == [COUNT]
    assert parts(min_partitions=4) == [COUNT // 4] * 4
    size = sum(map(sum, topics.near.bytes_of_spans([("orders", 0, 0, COUNT // 2)], 1.0)))  # type: ignore[list-item]  # a span
    assert parts(partition_bytes=size) == [COUNT // 2] * 2


@pytest.mark.parametrize(
    ("error", "options"),
    [
        (TopicNotExistError, {"topic_pattern": "nothing.*"}),
        (InvalidArgumentError, {"topic": "orders", "columns": ["bodies"]}),
        (InvalidArgumentError, {"topic": "orders", "tags": " || "}),
        (InvalidArgumentError, {"topic": "orders", "max_offsets": 0}),
        (InvalidArgumentError, {"topic": "orders", "partition_bytes": 0}),
        (InvalidArgumentError, {"topic": "orders", "starting_timestamp": FIRST_MS * 2}),
        (InvalidArgumentError, {"topic": "orders", "starting_offsets": {"a": {"0": 1}}}),
        (TypeError, {"topic": "orders", "startingOffsets": "earliest"}),
    ],
)
def test_errors_come_before_any_job(
    spark: SparkSession, topics: Topics, error: type[Exception], options: dict[str, Any]
) -> None:
    with pytest.raises(error):
        read_topic(spark, client=topics.near, **options)


def test_tasks_prefer_the_node_whose_disk_holds_their_part(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A topic's broker groups are on two nodes. Spark prefers to run each task on the node of its partition's broker
    group."""
    brokers = {
        name: BrokerData("raymq", name, {0: f"storage-{name}-0"}, {0: f"node-of-{name}"}) for name in ("a", "b", "c")
    }
    route = TopicRoute("orders", brokers, ())
    monkeypatch.setattr(locality, "node_hosts", lambda: {"node-of-a": "10.0.0.1", "node-of-b": "10.0.0.2"})
    parts = [ScanPartition((OffsetRange("orders", name, 0, 0, 10),), 100) for name in ("a", "b", "c", "a")]
    hosts = locality.preferred_hosts(_Route(route), parts)
    assert hosts == [["10.0.0.1"], ["10.0.0.2"], [], ["10.0.0.1"]]
    frame = locality.numbered_partitions(spark, hosts)
    read = frame.mapInArrow(lambda batches: batches, "partition int").filter("partition >= 0")
    rdd = read._jdf.queryExecution().toRdd()
    scheduler = spark.sparkContext._jsc.sc()
    assert [scheduler.getPreferredLocs(rdd, number).mkString(",") for number in range(4)] == [
        "10.0.0.1",
        "10.0.0.2",
        "",
        "10.0.0.1",
    ]
    assert [row.partition for row in read.collect()] == [0, 1, 2, 3]


class _Route:
    def __init__(self, route: TopicRoute) -> None:
        self._route = route

    def get(self, topic: str) -> TopicRoute:
        return self._route

    def get_or_create(self, topic: str, default_topic_queue_nums: int) -> TopicRoute:
        raise AssertionError("a read creates no topic")

    def invalidate(self, topic: str) -> None:
        raise AssertionError("nothing has failed")


# Comparison of the names of options and columns with Spark's Kafka source (Structured Streaming + Kafka Integration
# Guide, Spark 3.5)

KAFKA_COLUMNS = {"key", "value", "topic", "partition", "offset", "timestamp", "timestampType", "headers"}
KAFKA_OPTIONS = {
    *("assign", "subscribe", "subscribePattern", "kafka.bootstrap.servers"),
    *("startingTimestamp", "startingOffsetsByTimestamp", "startingOffsets"),
    *("endingTimestamp", "endingOffsetsByTimestamp", "endingOffsets"),
    *("failOnDataLoss", "kafkaConsumer.pollTimeoutMs", "fetchOffset.numRetries", "fetchOffset.retryIntervalMs"),
    *("maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay", "minPartitions", "groupIdPrefix"),
    *("kafka.group.id", "includeHeaders", "startingOffsetsByTimestampStrategy"),
}
OWN_OPTIONS = {
    "topic": "Kafka's subscribe",
    "topicPattern": "Kafka's subscribePattern",
    "maxOffsets": "a batch has no trigger: maxOffsetsPerTrigger of a stream",
    "columns": "the projection, which Spark does not tell a read that is written in Python",
    "tags": "RocketMQ's subscription expression",
    "expression": "RocketMQ's SQL92 subscription expression",
    "partitionBytes": "Spark's own files.maxPartitionBytes",
    "client": "Kafka's bootstrap servers",
    "unreadable": "Kafka's client fails at a damaged record",
}
OWN_COLUMNS = {
    "broker_name": "a queue is a broker group's, so partition is two columns",
    "queue_id": "partition",
    "queue_offset": "offset",
    "tags": "RocketMQ's",
    "keys": "key; a message has several",
    "body": "value",
    "properties": "headers",
    "born_timestamp": "timestamp, of CreateTime",
    "store_timestamp": "timestamp, of LogAppendTime",
    "message_id": "RocketMQ's",
}


def test_options_have_the_names_of_sparks_kafka_source_where_the_meaning_is_the_same() -> None:
    given = {*signature(read_topic).parameters, *ScanOptions.__annotations__} - {"spark", "options"}
    camel = {"".join([name.split("_")[0], *(part.title() for part in name.split("_")[1:])]) for name in given}
    assert camel - KAFKA_OPTIONS == OWN_OPTIONS.keys()
    assert KAFKA_OPTIONS - camel == {
        # Options of Spark's Kafka source that choose the topics and the cluster. `read_topic` has the options topic,
        # topic_pattern and client instead.
        *("assign", "subscribe", "subscribePattern", "kafka.bootstrap.servers"),
        # options of Spark's Kafka source that configure Kafka's client
        *("kafkaConsumer.pollTimeoutMs", "fetchOffset.numRetries", "fetchOffset.retryIntervalMs"),
        *("maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay"),  # options of streaming reads only
        *("groupIdPrefix", "kafka.group.id"),  # `read_topic` joins no consumer group, so it has no options for a group.
        "includeHeaders",  # `read_topic` always returns properties, unless `columns` omits them.
    }


def test_columns_have_the_names_of_sparks_kafka_source_where_they_are_the_same() -> None:
    assert set(SPARK_SCHEMA.names) - KAFKA_COLUMNS == OWN_COLUMNS.keys()
    assert set(SPARK_SCHEMA.names) & KAFKA_COLUMNS == {"topic"}


# The next test must stay the last test of this module, because it deletes the oldest messages of the store.


def test_messages_deleted_between_the_plan_and_the_job_fail_it_or_are_left_out_and_named(
    spark: SparkSession, topics: Topics, caplog: pytest.LogCaptureFixture
) -> None:
    strict = read_topic(spark, "orders", client=topics.near)
    lenient = read_topic(spark, "orders", fail_on_data_loss=False, client=topics.near)
    now = datetime(2023, 11, 15, 3)
    log = Path(topics.store.status().root) / "commitlog"
    oldest = sorted(log.iterdir())[0]
    os.utime(oldest, (now.timestamp() - 360_000,) * 2)
    topics.store.cleaner._by_hand = 1
    let_pass(topics.store)
    assert topics.store.cleaner.run_once(now) == 1
    topics.near.describe()
    kept = {queue_id: topics.store.queues.bounds("orders", queue_id).min_offset for queue_id in range(QUEUES)}
    assert all(offset > 0 for offset in kept.values())
    with pytest.raises(PySparkException, match=r"DataLossError: offsets 0 to 119 of queue orders@a:0 no longer exist"):
        strict.collect()
    expected = [number for number in range(COUNT) if number // QUEUES >= kept[number % QUEUES]]
    with caplog.at_level(logging.WARNING):
        assert numbers(lenient) == expected
    assert [record.getMessage() for record in caplog.records if record.name.endswith("losses")] == [
        f"queue orders@a:{queue_id}: a Spark task has skipped offsets 0 to {first - 1}, which no longer exist"
        for queue_id, first in kept.items()
    ]


def test_a_message_that_cannot_be_read_is_a_row_with_an_error(spark: SparkSession, topics: Topics) -> None:
    frame = read_topic(spark, "poisoned", columns=["queue_offset", "body", "error"], client=topics.near)
    rows = frame.orderBy("queue_offset").collect()
    assert [row.body and bytes(row.body) for row in rows] == [b"before", *[None] * len(LIARS), b"after"]
    assert [row.error is None for row in rows] == [True, *[False] * len(LIARS), True]
    assert read_topic(spark, "poisoned", client=topics.near).count() == len(rows)
    with pytest.raises(PySparkException, match=r"offset 1 of queue poisoned.* cannot be read"):
        read_topic(spark, "poisoned", unreadable="raise", client=topics.near).collect()
    with pytest.raises(InvalidArgumentError, match="must be one of null, raise"):
        read_topic(spark, "poisoned", unreadable="skip", client=topics.near)  # type: ignore[arg-type]  # the point
