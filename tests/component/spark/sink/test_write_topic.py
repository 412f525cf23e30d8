"""Tests of `write_topic` with Spark and without Ray. Each row is stored once, with its columns; each mistake of the
caller raises one clear error."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from pyspark.sql import functions as f

from raydp_jobs import write_topic
from raydp_jobs.sink import writer
from raymq.common.delay import TIMER_TOPIC
from raymq.common.errors import (
    InvalidArgumentError,
    MessageIllegalError,
    SystemBusyError,
    TopicNotExistError,
)
from tests.support.clients.fakes import topic_route
from tests.support.spark.dedup_server import FarConnection


def frame(spark, count: int, partitions: int = 4):
    return spark.range(0, count, 1, partitions).select(f.col("id").cast("string").alias("body"))


def numbers(store) -> list[int]:
    return sorted(int(body) for bodies in store.bodies().values() for body in bodies)


def test_every_row_arrives_once_and_the_summary_says_where(spark, store):
    summary = write_topic(frame(spark, 10_000), "orders")
    assert (summary.rows, summary.stored_before) == (10_000, 0)
    assert numbers(store) == list(range(10_000))
    assert sum(queue.rows for queue in summary.queues) == 10_000
    held = {queue_id: len(bodies) for queue_id, bodies in store.bodies().items()}
    assert {one.queue.queue_id: one.end_offset for one in summary.queues} == held


def test_every_column_arrives(spark, store):
    when = datetime.now(UTC) + timedelta(hours=2)
    rows = spark.createDataFrame(
        [
            (bytearray(b"a"), "paid", ["k1", "k2"], {"shop": "Zürich"}, "user-1", None),
            (bytearray(b"b"), None, None, None, None, when),
        ],
        "body binary, tags string, keys array<string>, properties map<string,string>, sharding_key string, "
        "deliver_time timestamp",
    )
    assert write_topic(rows, "orders").rows == 2
    [message] = [message for (topic, _), ones in store.queues.items() if topic == "orders" for message in ones]
    assert (message.body, message.tags, message.keys) == (b"a", "paid", ("k1", "k2"))
    assert dict(message.properties) == {"shop": "Zürich"}
    [waiting] = [message for (topic, _), ones in store.queues.items() if topic == TIMER_TOPIC for message in ones]
    assert waiting.body == b"b"


def test_a_repeat_with_a_write_id_adds_nothing(spark, store):
    for repeats in range(3):
        summary = write_topic(frame(spark, 5000), "orders", write_id="load-7")
        assert summary.stored_before == (5000 if repeats else 0)
    assert numbers(store) == list(range(5000))
    write_topic(frame(spark, 5000), "orders")
    assert len(numbers(store)) == 10_000


def test_a_repeat_after_a_shuffle_finds_its_rows(spark, store):
    rows = frame(spark, 5000).withColumn("properties", f.create_map(f.lit("n"), f.col("body"))).repartition(3, "body")
    assert write_topic(rows, "orders", write_id="load-8").rows == 5000
    assert write_topic(rows, "orders", write_id="load-8").stored_before == 5000
    assert numbers(store) == list(range(5000))


def test_a_plan_location_keeps_the_queues_of_the_first_attempt(spark, store, connection, tmp_path, monkeypatch):
    place = str(tmp_path / "plans")
    write_topic(frame(spark, 5000), "orders", write_id="load-9", plan_location=place)
    grown = FarConnection(connection.address, topic_route(a=9))
    monkeypatch.setattr(writer, "ClusterConnection", lambda client, settings: grown)
    again = write_topic(frame(spark, 5000), "orders", write_id="load-9", plan_location=place)
    assert again.stored_before == 5000
    assert numbers(store) == list(range(5000))


def test_workers_that_are_killed_lose_and_double_nothing(spark, server, store):
    """A Spark worker is killed while it writes. Spark repeats its task on a new worker; no row is lost or
    stored twice."""
    killed = []

    def kill(number: int, pid: int) -> None:
        if len(killed) < 3 and pid not in killed:
            killed.append(pid)
            os.kill(pid, signal.SIGKILL)

    server.on_append = kill
    summary = write_topic(frame(spark, 20_000), "orders")
    assert summary.rows == 20_000
    assert len(killed) == 3
    assert numbers(store) == list(range(20_000))


@pytest.mark.parametrize(
    ("columns", "error"),
    [
        (["'x' AS text"], "column 'body' is missing: rename a column with"),
        (["3 AS body"], r"column 'body' is int, not binary or string: use F\.to_json"),
        (["'x' AS body", "'y' AS tag"], r"a message has no 'tag': leave columns out with df\.select\('body'\)"),
        (["'x' AS body", "array(1) AS keys"], "column 'keys' is array<int>, not string or array of"),
        (["'x' AS body", "'y' AS properties"], "column 'properties' is string, not map of string to string"),
        (["'x' AS body", "1.5D AS sharding_key"], "column 'sharding_key' is double, not string or whole"),
        (["'x' AS body", "1 AS deliver_time"], "column 'deliver_time' is int, not timestamp"),
        (["'x' AS body", "'y' AS body"], "column 'body' exists twice"),
    ],
)
def test_columns_that_do_not_fit_are_an_error_before_any_job(spark, store, columns, error):
    with pytest.raises(InvalidArgumentError, match=error):
        write_topic(spark.range(3).selectExpr(*columns), "orders")
    assert store.appends == 0


@pytest.mark.parametrize("nulls", ["id = 77", "id >= 50", "true"], ids=["one row", "a whole partition", "all rows"])
def test_null_bodies_are_refused_whatever_else_their_partition_holds(spark, store, nulls):
    rows = spark.range(0, 100, 1, 2).selectExpr(f"IF({nulls}, NULL, 'ok') AS body")
    with pytest.raises(MessageIllegalError, match="the message body is null"):
        write_topic(rows, "orders", check_first=True)
    assert store.appends == 0


def test_an_unknown_topic_is_an_error_before_any_job(spark, store):
    with pytest.raises(TopicNotExistError):
        write_topic(frame(spark, 3), "nowhere")
    with pytest.raises(InvalidArgumentError, match="sort must be 'auto'"):
        write_topic(frame(spark, 3), "orders", sort="sometimes")
    assert store.appends == 0


def test_a_row_that_is_too_large_is_one_error_before_anything_is_written(spark, store):
    rows = spark.range(0, 100, 1, 2).select(
        f.when(f.col("id") == 77, f.repeat(f.lit("x"), 5_000_000)).otherwise(f.lit("ok")).alias("body")
    )
    with pytest.raises(MessageIllegalError, match=r"partition 1: row 27: .*4194304"):
        write_topic(rows, "orders", check_first=True)
    assert store.appends == 0
    with pytest.raises(MessageIllegalError, match="partition 1: row 27"):
        write_topic(rows, "orders")
    assert all(body == b"ok" for bodies in store.bodies().values() for body in bodies)


def test_a_broker_that_does_not_come_back_is_one_error(spark, server, store, connection, monkeypatch):
    impatient = replace(connection, send_timeout_s=0.5)
    monkeypatch.setattr(writer, "ClusterConnection", lambda client, settings: impatient)

    def refuse(number: int, pid: int) -> None:
        raise SystemBusyError("the disk is full", 0.0)

    server.on_append = refuse
    with pytest.raises(SystemBusyError, match=r"not sent within 0\.5 s"):
        write_topic(frame(spark, 10, 1), "orders")
    server.on_append = None
    assert store.bodies() == {}


def test_a_streaming_frame_raises_an_error_that_names_topic_sink(spark):
    rows = spark.readStream.format("rate").load().select(f.lit("x").alias("body"))
    with pytest.raises(InvalidArgumentError, match=r"foreachBatch\(topic_sink\('orders'\)\)"):
        write_topic(rows, "orders")
