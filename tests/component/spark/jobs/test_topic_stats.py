"""Tests of the Spark steps of the topic_stats job, on a few rows with known results."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import octet_length

from raydp_jobs.jobs import topic_stats
from raydp_jobs.jobs.times import Period
from raydp_jobs.jobs.topic_figures import Bucket
from raydp_jobs.source import reader
from raydp_jobs.source.reader import SPARK_SCHEMA
from raymq.common.errors import InvalidArgumentError

NOON = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
Row = tuple[str, int, str | None, list[str], bytes]
ROWS: list[Row] = [
    ("orders", 0, "paid", ["a", "b"], b"12345"),
    ("orders", 59, "paid", ["a"], b"1"),
    ("orders", 60, None, [], b""),
    ("orders", 61, "late", ["c", "a"], b"123"),
    ("orders", 200, "paid", ["a"], b"12"),
    ("bills", 30, "new", ["z"], b"1234567"),
]


def frame(spark: SparkSession, rows: list[Row]) -> DataFrame:
    """Return a DataFrame with the columns of `read_topic`. `rows`: tuples of (topic, seconds after noon, tag, keys,
    body)."""
    full = [
        (topic, "broker-a", 0, offset, tags, keys, body, {}, NOON, NOON + timedelta(seconds=seconds), f"{offset:032X}")
        for offset, (topic, seconds, tags, keys, body) in enumerate(rows)
    ]
    return spark.createDataFrame(full, SPARK_SCHEMA)


@pytest.fixture
def topics(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(spark: SparkSession, topics: list[str], *, columns: list[str], **options: Any) -> DataFrame:
        rows = frame(spark, [row for row in ROWS if row[0] in topics])
        return rows.withColumn("body_size", octet_length("body")).select(columns)

    monkeypatch.setattr(reader, "open_topic", read)


def run(spark: SparkSession, *names: str, **options: Any) -> list[Any]:
    client: Any = None
    return topic_stats.run(spark, client, names, **options)


@pytest.mark.usefixtures("topics")
def test_a_topics_totals_match_its_rows(spark: SparkSession) -> None:
    [orders] = run(spark, "orders")
    assert (orders.messages, orders.bytes, orders.largest, orders.keys) == (5, 11, 5, 3)
    assert (orders.first, orders.last) == (NOON, NOON + timedelta(seconds=200))
    assert orders.tags == {"paid": 3, None: 1, "late": 1}
    assert orders.other_tags == 0
    assert orders.per_second(orders.messages) == 0.025


@pytest.mark.usefixtures("topics")
def test_buckets_have_messages_bytes_keys_and_tags_of_their_minute(spark: SparkSession) -> None:
    [orders] = run(spark, "orders")
    minute = timedelta(minutes=1)
    assert orders.buckets == [
        Bucket(NOON, 2, 6, 2, {"paid": 2, None: 0, "late": 0}),
        Bucket(NOON + minute, 2, 3, 2, {"paid": 0, None: 1, "late": 1}),
        Bucket(NOON + 3 * minute, 1, 2, 1, {"paid": 1, None: 0, "late": 0}),
    ]


@pytest.mark.usefixtures("topics")
def test_tags_beyond_the_most_common_are_counted_together(spark: SparkSession) -> None:
    [orders] = run(spark, "orders", top=1)
    assert (orders.tags, orders.other_tags) == ({"paid": 3}, 2)
    assert [bucket.tags for bucket in orders.buckets] == [{"paid": 2}, {"paid": 0}, {"paid": 1}]
    [untagged] = run(spark, "orders", top=0)
    assert (untagged.tags, untagged.other_tags) == ({}, 5)


@pytest.mark.usefixtures("topics")
def test_several_topics_keep_their_order_and_an_empty_one_is_there(spark: SparkSession) -> None:
    found = run(spark, "orders", "empty", "bills", every_s=3600)
    assert [(one.topic, one.messages, len(one.buckets)) for one in found] == [
        ("orders", 5, 1),
        ("empty", 0, 0),
        ("bills", 1, 1),
    ]
    assert found[2].tags == {"new": 1}
    assert found[2].per_second(1) is None


@pytest.mark.usefixtures("topics")
def test_a_period_has_its_first_moment_and_not_its_last(spark: SparkSession) -> None:
    start_ms = int(NOON.timestamp() * 1000)
    [orders] = run(spark, "orders", period=Period(start_ms + 59_000, start_ms + 61_000))
    assert orders.messages == 2


@pytest.mark.usefixtures("topics")
def test_more_buckets_than_can_be_held_are_refused(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topic_stats, "BUCKETS_MAX", 2)
    with pytest.raises(InvalidArgumentError, match="choose longer intervals with --every"):
        run(spark, "orders")
    assert not spark.sparkContext._jsc.getPersistentRDDs()
