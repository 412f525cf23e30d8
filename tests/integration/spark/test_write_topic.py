"""Tests of writing Spark DataFrames to a cluster's topics: each row is stored exactly once, even if a task writes the
row twice."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import raymq
from raydp_jobs import read_topic, topic_sink, write_topic
from raymq.common.errors import TopicNotExistError
from tests.support.history.waiting import eventually


def test_a_frame_is_written_once_with_all_its_columns(mq: raymq.Client, spark: SparkSession, topic: str) -> None:
    rows = spark.range(0, 5000, 1, 3).selectExpr(
        "cast(id AS string) AS body",
        "if(id % 2 = 0, 'even', null) AS tags",
        "array(concat('k-', id)) AS keys",
        "map('third', cast(id % 3 AS string)) AS properties",
        "cast(id % 7 AS int) AS sharding_key",
    )
    summary = write_topic(rows, topic, write_id="load-1", client=mq)
    assert (summary.rows, summary.stored_before) == (5000, 0)
    assert write_topic(rows, topic, write_id="load-1", client=mq).stored_before == 5000
    read = read_topic(spark, topic, client=mq)
    assert read.count() == 5000
    there = {int(bytes(row.body)): row for row in read.collect()}
    assert sorted(there) == list(range(5000))
    for number in (0, 1, 4999):
        row = there[number]
        assert (row.tags, list(row.keys)) == ("even" if number % 2 == 0 else None, [f"k-{number}"])
        assert row.properties == {"third": str(number % 3)}
    places = {(number % 7, row.broker_name, row.queue_id) for number, row in there.items()}
    assert len(places) == 7  # all messages of a key are in the same queue
    ends = {(queue.queue.broker_name, queue.queue.queue_id): queue.end_offset for queue in summary.queues}
    assert sum(ends.values()) == 5000


def test_a_row_is_delivered_at_its_time(mq: raymq.Client, spark: SparkSession, topic: str) -> None:
    when = datetime.now(UTC) + timedelta(seconds=2)
    rows = spark.createDataFrame([("now", None), ("later", when)], "body string, deliver_time timestamp")
    for _ in range(2):
        write_topic(rows, topic, write_id="load-2", client=mq)

    def stored_bodies() -> list[bytes]:
        found: list[bytes] = []
        for entry in mq.admin.describe_topic(topic):
            found += [message.body for message in mq.admin.pull(entry.queue, 0).messages]
        return sorted(found)

    assert eventually(lambda: len(stored_bodies()) == 2 and stored_bodies(), "both rows") == [b"later", b"now"]


def test_a_streaming_query_is_written_once_over_a_restart(
    mq: raymq.Client, spark: SparkSession, topic: str, tmp_path: Path
) -> None:
    directory, told = tmp_path / "in", []
    directory.mkdir()
    lines = spark.readStream.text(str(directory)).withColumnRenamed("value", "body")
    counted = lines.groupBy("body").count().select("body")
    for first in (0, 1000):
        (directory / f"{first}.txt").write_text("\n".join(map(str, range(first, first + 1000))))
        sink = topic_sink(topic, client=mq, on_batch=lambda batch, summary: told.append((batch, summary.rows)))
        query = (
            counted.writeStream.foreachBatch(sink)
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .outputMode("update")
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(120)
    assert told == [(0, 1000), (1, 1000)]
    bodies = sorted(int(bytes(row.body)) for row in read_topic(spark, topic, client=mq).collect())
    assert bodies == list(range(2000))


def test_an_unknown_topic_is_an_error_before_any_job(mq: raymq.Client, spark: SparkSession) -> None:
    with pytest.raises(TopicNotExistError):
        write_topic(spark.range(1).selectExpr("'x' AS body"), "never-created", client=mq)
