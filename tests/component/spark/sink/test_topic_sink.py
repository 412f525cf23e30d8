"""Tests of `topic_sink` in streaming queries without Ray. Each row of each batch is stored once, despite failures and
restarts."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as f

from raydp_jobs import topic_sink
from raydp_jobs.sink import writer
from raymq.common.errors import ClientStateError
from tests.support.clients.fakes import topic_route
from tests.support.spark.dedup_server import FarConnection
from tests.support.spark.local_spark import changed


@pytest.fixture
def source(spark, tmp_path):
    """Return a streaming DataFrame that reads the text files of a directory, and a function that adds a file to the
    directory."""
    directory = tmp_path / "in"
    directory.mkdir()
    added = []

    def add(first: int, count: int) -> None:
        part = directory / f".{len(added)}"
        part.write_text("\n".join(map(str, range(first, first + count))))
        part.rename(directory / f"{len(added)}.txt")
        added.append(count)

    return spark.readStream.text(str(directory)).select(f.col("value").alias("body")), add


def run(frame, sink, place: Path, mode: str = "append"):
    query = (
        frame.writeStream.foreachBatch(sink)
        .option("checkpointLocation", str(place))
        .outputMode(mode)
        .trigger(availableNow=True)
        .start()
    )
    try:
        query.awaitTermination(120)
    finally:
        query.stop()


def numbers(store) -> list[int]:
    return sorted(int(body) for bodies in store.bodies().values() for body in bodies)


def test_each_batch_arrives_once_and_a_failed_one_is_repeated(source, server, store, tmp_path):
    frame, add = source
    told = []
    add(0, 3000)
    run(frame, topic_sink("orders", on_batch=lambda batch, summary: told.append((batch, summary.rows))), tmp_path / "c")
    add(3000, 3000)

    def fail(df, batch):
        topic_sink("orders")(df, batch)
        raise RuntimeError("the driver dies before the batch is committed")

    for _ in range(2):
        with pytest.raises(StreamingQueryException, match="the driver dies"):
            run(frame, fail, tmp_path / "c")
    run(frame, topic_sink("orders", on_batch=lambda batch, summary: told.append((batch, summary))), tmp_path / "c")
    assert told[0] == (0, 3000)
    assert (told[1][0], told[1][1].rows, told[1][1].stored_before) == (1, 3000, 3000)
    assert numbers(store) == list(range(6000))


def test_small_batches_use_all_queues_equally(source, store, tmp_path):
    frame, add = source
    for batch in range(4):
        add(100 * batch, 100)
        run(frame, topic_sink("orders"), tmp_path / "c")
    assert {queue: len(bodies) for queue, bodies in store.bodies().items()} == dict.fromkeys(range(4), 100)


def test_a_repeated_batch_keeps_its_queues_when_the_topic_has_grown(source, server, store, tmp_path, monkeypatch):
    frame, add = source
    add(0, 30_000)

    def refuse(number: int, pid: int) -> None:
        if number > 1:
            raise ClientStateError("stop here")

    server.on_append = refuse
    with pytest.raises(StreamingQueryException):
        run(frame, topic_sink("orders"), tmp_path / "c")
    begun = len(numbers(store))
    assert 0 < begun < 30_000
    server.on_append = None
    grown = FarConnection(server.address, topic_route(a=9))
    monkeypatch.setattr(writer, "ClusterConnection", lambda client, settings: grown)
    run(frame, topic_sink("orders"), tmp_path / "c")
    assert numbers(store) == list(range(30_000))
    assert set(store.bodies()) == {0, 1, 2, 3}
    add(30_000, 9000)
    run(frame, topic_sink("orders"), tmp_path / "c")
    assert numbers(store) == list(range(39_000))
    assert set(store.bodies()) > {0, 1, 2, 3}


def test_an_aggregation_is_written_once_though_its_rows_come_in_another_order(source, server, store, tmp_path):
    frame, add = source
    counted = frame.groupBy((f.col("body").cast("int") % 1000).alias("key")).count()
    rows = counted.select(f.col("key").cast("string").alias("body"))
    add(0, 3000)
    killed = []

    def kill(number: int, pid: int) -> None:
        if number == 2:
            killed.append(pid)
            os.kill(pid, signal.SIGKILL)

    server.on_append = kill
    run(rows, topic_sink("orders"), tmp_path / "c", "update")
    assert killed
    assert numbers(store) == list(range(1000))


def test_a_batch_that_is_written_twice_needs_two_names(source, store, tmp_path):
    frame, add = source
    add(0, 10)
    sink = topic_sink("orders")

    def twice(df, batch):
        sink(df, batch)
        sink(df, batch)

    with pytest.raises(StreamingQueryException, match="another name"):
        run(frame, twice, tmp_path / "c")
    other = topic_sink("orders", name="other")

    def named(df, batch):
        sink(df, batch)
        other(df, batch)

    run(frame, named, tmp_path / "c")
    assert numbers(store) == sorted([*range(10), *range(10)])


def test_a_repeat_with_other_partitions_is_an_error(spark, source, tmp_path):
    frame, add = source
    add(0, 10)

    def fail(df, batch):
        topic_sink("orders")(df.repartition(2), batch)
        raise RuntimeError("the driver dies")

    with pytest.raises(StreamingQueryException, match="the driver dies"):
        run(frame, fail, tmp_path / "c")
    with changed(spark, {"spark.sql.adaptive.enabled": "false"}):
        with pytest.raises(StreamingQueryException, match="the driver dies"):
            run(frame, fail, tmp_path / "d")
        with pytest.raises(StreamingQueryException, match="was begun with 2 partitions and now has 1"):
            run(frame, topic_sink("orders"), tmp_path / "d")


def test_outside_a_query_it_is_an_error(spark):
    with pytest.raises(ClientStateError, match="foreachBatch"):
        topic_sink("orders")(spark.range(1).selectExpr("'x' AS body"), 0)
