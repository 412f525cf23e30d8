"""Test that Spark reads a topic on one machine: the DataFrame has exactly the sent messages, and no process is left
afterwards."""

from __future__ import annotations

from collections import defaultdict

import pytest
from pyspark.sql import SparkSession

import raymq
from raydp_jobs import read_topic
from raymq.common.message import MessageQueue

TOPIC = "spark-orders"
QUEUES = 4
MESSAGES = 2000


@pytest.fixture(scope="module")
def sent(mq: raymq.Client) -> dict[MessageQueue, dict[int, bytes]]:
    """Send messages to a topic and return their bodies, by queue and queue offset. Message number 3 has an empty set of
    keys and no tag."""
    mq.admin.create_topic(TOPIC, queues=QUEUES)
    messages = [
        raymq.Message(
            TOPIC,
            b"order %d" % number,
            tags=None if number == 3 else ("paid", "refunded", "late")[number % 3],
            keys=() if number == 3 else (f"o-{number}", f"c-{number % 7}"),
            properties={"number": str(number)},
        )
        for number in range(MESSAGES)
    ]
    bodies: dict[MessageQueue, dict[int, bytes]] = defaultdict(dict)
    with mq.producer("spark-test") as producer:
        for start in range(0, MESSAGES, 100):
            some = messages[start : start + 100]
            for message, result in zip(some, producer.send_batch(some), strict=True):
                bodies[result.queue][result.queue_offset] = message.body
    return bodies


def test_the_dataframe_has_every_message_once_at_its_queue_and_offset(
    mq: raymq.Client, spark: SparkSession, sent: dict[MessageQueue, dict[int, bytes]]
) -> None:
    rows = read_topic(spark, TOPIC, client=mq).collect()
    got: dict[MessageQueue, dict[int, bytes]] = defaultdict(dict)
    for row in rows:
        got[MessageQueue(row.topic, row.broker_name, row.queue_id)][row.queue_offset] = bytes(row.body)
    assert got == sent
    assert len(rows) == MESSAGES
    by_body = {bytes(row.body): row for row in rows}
    assert by_body[b"order 4"].keys == ["o-4", "c-4"]
    assert by_body[b"order 4"].properties == {"number": "4"}
    assert by_body[b"order 4"].tags == "refunded"
    assert by_body[b"order 3"].tags is None
    assert len({row.message_id for row in rows}) == MESSAGES


def test_the_dataframe_keeps_its_offsets_when_more_messages_come(
    mq: raymq.Client, spark: SparkSession, sent: dict[MessageQueue, dict[int, bytes]]
) -> None:
    topic = "spark-growing"
    mq.admin.create_topic(topic, queues=1)
    with mq.producer("spark-test") as producer:
        producer.send_batch([raymq.Message(topic, b"before")] * 10)
        frame = read_topic(spark, topic, client=mq)
        producer.send_batch([raymq.Message(topic, b"after")] * 10)
    assert frame.count() == 10
    assert {bytes(row.body) for row in frame.collect()} == {b"before"}
    assert read_topic(spark, topic, client=mq).count() == 20


def test_tags_select_as_a_subscription_does(
    mq: raymq.Client, spark: SparkSession, sent: dict[MessageQueue, dict[int, bytes]]
) -> None:
    counts = read_topic(spark, TOPIC, tags="paid || refunded", client=mq).groupBy("tags").count().collect()
    expected = {
        tag: sum(1 for number in range(MESSAGES) if number != 3 and number % 3 == index)
        for index, tag in enumerate(("paid", "refunded"))
    }
    assert {row["tags"]: row["count"] for row in counts} == expected


def test_min_partitions_and_offsets_per_queue_bound_the_read(
    mq: raymq.Client, spark: SparkSession, sent: dict[MessageQueue, dict[int, bytes]]
) -> None:
    starts: dict[str, dict[str, int]] = defaultdict(dict)
    for queue, bodies in sent.items():
        starts[queue.broker_name][str(queue.queue_id)] = max(bodies) - 9
    frame = read_topic(spark, TOPIC, starting_offsets=starts, min_partitions=8, client=mq)
    assert frame.rdd.getNumPartitions() == 8
    assert frame.count() == 10 * QUEUES


def test_an_unknown_topic_is_refused_before_spark_does_anything(mq: raymq.Client, spark: SparkSession) -> None:
    with pytest.raises(raymq.TopicNotExistError):
        read_topic(spark, "spark-nothing", client=mq)


def test_an_empty_topic_is_an_empty_dataframe_with_the_same_columns(mq: raymq.Client, spark: SparkSession) -> None:
    mq.admin.create_topic("spark-empty", queues=1)
    frame = read_topic(spark, "spark-empty", client=mq)
    assert frame.schema == read_topic(spark, TOPIC, client=mq).schema
    assert frame.collect() == []
