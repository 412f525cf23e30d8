"""Tests of streaming queries over topics in a real Spark: the rows of a batch, of a repeated batch, and operations on
the rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import chain, groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession, functions
from pyspark.sql.streaming import StreamingQuery

from raydp_jobs.stream.planner import BatchLimits
from raydp_jobs.stream.progress import stream_progress
from raydp_jobs.stream.source import TopicSource
from raydp_jobs.stream.spark_source import BatchFrames, stream_frame
from raymq.common.message import MessageQueue
from tests.support.history.waiting import eventually
from tests.support.spark.fake_topics import BORN, SCHEMA, FakeTopics, Row, read, read_but_lost, rows

A0, A1, B0 = MessageQueue("orders", "a", 0), MessageQueue("orders", "a", 1), MessageQueue("orders", "b", 0)
BATCH_S = 30.0


def stream(
    spark: SparkSession, topics: FakeTopics, *, reader: Any = read, max_trigger_delay_s: float = 900.0, **limits: Any
) -> DataFrame:
    source = TopicSource(topics, BatchLimits(**limits), max_trigger_delay_s=max_trigger_delay_s)
    return stream_frame(spark, source, reader, SCHEMA, "orders")


class Batches:
    """A `foreachBatch` sink that stores the rows and partitions of each batch. It fails if a repeated batch has other
    rows or partitions than before."""

    def __init__(self) -> None:
        self.rows: dict[int, list[Row]] = {}
        self.partitions: dict[int, list[list[Row]]] = {}
        self.fail_at: int | None = None

    def __call__(self, batch: DataFrame, number: int) -> None:
        wanted = batch.select("topic", "broker_name", "queue_id", "queue_offset", functions.spark_partition_id())
        found = [tuple(row) for row in wanted.collect()]
        parts = [[row[:4] for row in part] for _, part in groupby(found, key=lambda row: row[4])]
        again = self.partitions.get(number)
        self.partitions[number] = parts
        assert again is None or again == parts, f"batch {number} was {again} and is {parts}"
        self.rows[number] = [row for part in parts for row in part]
        if number == self.fail_at:
            raise RuntimeError(f"the sink fails in batch {number}")

    @property
    def all_rows(self) -> list[Row]:
        return [row for number in sorted(self.rows) for row in self.rows[number]]


def start(frame: DataFrame, sink: Callable[[DataFrame, int], None], checkpoint: Path, **trigger: Any) -> StreamingQuery:
    writer = frame.writeStream.foreachBatch(sink).option("checkpointLocation", str(checkpoint))
    return (writer.trigger(**trigger) if trigger else writer).start()


def run_available(frame: DataFrame, sink: Callable[[DataFrame, int], None], checkpoint: Path) -> None:
    query = start(frame, sink, checkpoint, availableNow=True)
    assert query.awaitTermination(BATCH_S)


def test_available_now_reads_existing_messages_and_a_restart_continues(spark: SparkSession, tmp_path: Path) -> None:
    topics, batches = FakeTopics({A0: (3, 250), A1: (0, 40), B0: (0, 0)}), Batches()
    run_available(stream(spark, topics, max_offsets=100), batches, tmp_path / "checkpoint")
    assert sorted(batches.all_rows) == sorted(topics.messages)
    assert [len(batches.rows[number]) for number in sorted(batches.rows)] == [100, 100, 87]
    before = topics.messages
    topics.append(B0, 30)
    topics.append(A0, 1)
    run_available(stream(spark, topics, max_offsets=100), batches, tmp_path / "checkpoint")
    assert sorted(batches.rows[3]) == sorted(topics.messages - before)
    assert sorted(batches.all_rows) == sorted(topics.messages)
    run_available(stream(spark, topics), batches, tmp_path / "checkpoint")
    assert sorted(batches.rows) == [0, 1, 2, 3]


def test_a_batch_that_was_not_finished_is_read_again_as_it_was_whatever_has_changed(
    spark: SparkSession, tmp_path: Path
) -> None:
    """An unfinished batch is repeated with the same rows in the same partitions, even if topics and options have
    changed. The sink compares the repeated batch with its first run."""
    topics, batches = FakeTopics({A0: (0, 120), B0: (0, 30)}), Batches()
    for failing in (0, 1, 2):
        batches.fail_at = failing
        with pytest.raises(StreamingQueryException, match=f"the sink fails in batch {failing}"):
            run_available(stream(spark, topics, max_offsets=50, min_partitions=3), batches, tmp_path / "checkpoint")
        assert sum(map(len, batches.rows.values())) == 50 * (failing + 1)
        topics.append(A0, 7)
        topics.append(A1, 20)
        topics.held[B0] = topics.held[B0][0], topics.held[B0][1] + 5
    batches.fail_at = None
    changed = stream(spark, topics, max_offsets=1000, min_partitions=5, parallelism=2, tags="paid", sql="offset <> 60")
    run_available(changed, batches, tmp_path / "checkpoint")
    unfiltered = [row for number in range(3) for row in batches.rows[number]]
    later = topics.messages - set(unfiltered)
    assert len(unfiltered) == len(set(unfiltered)) == 150
    assert sorted(batches.rows[3]) == sorted(row for row in later if row[3] % 2 == 0 and row[3] != 60)


def test_a_running_query_picks_up_messages_new_queues_and_broker_groups_that_come_back(
    spark: SparkSession, tmp_path: Path
) -> None:
    topics, batches = FakeTopics({A0: (0, 10), B0: (0, 10)}), Batches()
    query = start(stream(spark, topics), batches, tmp_path / "checkpoint", processingTime="50 milliseconds")
    eventually(lambda: set(batches.all_rows) == topics.messages, "the first messages", BATCH_S)
    topics.silent.add("b")
    topics.append(B0, 10)
    topics.append(A1, 10)
    eventually(lambda: set(batches.all_rows) >= rows(A1, 0, 10), "the messages of the new queue", BATCH_S)
    assert not rows(B0, 10, 20) & set(batches.all_rows)
    topics.silent.clear()
    eventually(lambda: set(batches.all_rows) == topics.messages, "the messages of the group that is back", BATCH_S)
    eventually(lambda: topics.committed[-1] == {A0: 10, A1: 10, B0: 20}, "the last commit", BATCH_S)
    query.stop()
    assert query.exception() is None
    assert len(batches.all_rows) == len(topics.messages)
    assert topics.closed == 1
    for before, after in zip(topics.committed, topics.committed[1:], strict=False):
        assert all(after[queue] >= offset for queue, offset in before.items())


def test_the_trigger_once_reads_everything_in_one_batch(spark: SparkSession, tmp_path: Path) -> None:
    topics, batches = FakeTopics({A0: (0, 60)}), Batches()
    query = start(stream(spark, topics, max_offsets=10), batches, tmp_path / "checkpoint", once=True)
    assert query.awaitTermination(BATCH_S)
    assert {number: set(found) for number, found in batches.rows.items()} == {0: topics.messages}


def test_progress_has_offsets_messages_and_lag(spark: SparkSession, tmp_path: Path) -> None:
    topics, batches = FakeTopics({A0: (5, 105), B0: (0, 40)}), Batches()
    query = start(stream(spark, topics, max_offsets=70), batches, tmp_path / "checkpoint", availableNow=True)
    assert query.awaitTermination(BATCH_S)
    first, second = (stream_progress(SimpleNamespace(lastProgress=one))[0] for one in query.recentProgress)
    latest = {"orders": {"a": {"0": 105}, "b": {"0": 40}}}
    assert (first.source, first.batch_id, first.messages, first.lag) == ("raymq[orders]", 0, 70, 70)
    assert (first.start_offsets, first.latest_offsets) == (None, latest)
    assert (second.batch_id, second.messages, second.lag) == (1, 70, 0)
    assert second.start_offsets == first.end_offsets != second.end_offsets == latest
    assert stream_progress(query) == [second]
    assert json.loads(second.to_json())["end_offsets"] == latest
    metrics = query.recentProgress[0]["sources"][0]["metrics"]
    assert (metrics["offsetsBehindLatest"], metrics["avgOffsetsBehindLatest"]) == ("70", "35.0")


def test_windows_with_a_watermark_are_appended_once_they_are_closed(spark: SparkSession, tmp_path: Path) -> None:
    """100 messages, one per second, form ten windows of 10 s. The watermark is 20 s before the newest row. Spark closes
    each window that ends before the watermark, and returns it once."""
    topics = FakeTopics({A0: (0, 60)})
    frame = stream(spark, topics).withWatermark("born_timestamp", "20 seconds")
    counts = frame.groupBy(functions.window("born_timestamp", "10 seconds"), "tags").count()

    def run() -> dict[tuple[int, str], int]:
        writer = counts.select(functions.col("window.start").cast("long").alias("start"), "tags", "count").writeStream
        query = (
            writer.format("parquet")
            .option("path", str(tmp_path / "windows"))
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(BATCH_S)
        found = spark.read.parquet(str(tmp_path / "windows")).collect()
        begin = int(BORN.timestamp())
        assert len(found) == len({(row["start"], row["tags"]) for row in found})
        return {(row["start"] - begin, row["tags"]): row["count"] for row in found}

    assert run() == {(start, tag): 5 for start in (0, 10, 20) for tag in ("paid", "late")}
    topics.append(A0, 40)
    assert run() == {(start, tag): 5 for start in range(0, 70, 10) for tag in ("paid", "late")}


@pytest.mark.parametrize("mode", ["append", "update", "complete"])
def test_every_output_mode_works(spark: SparkSession, tmp_path: Path, mode: str) -> None:
    topics = FakeTopics({A0: (0, 30), A1: (0, 10)})
    frame = stream(spark, topics, max_offsets=25)
    result = frame.select("queue_id", "queue_offset") if mode == "append" else frame.groupBy("queue_id").count()
    written: list[list[tuple[int, int]]] = []
    query = (
        result.writeStream.outputMode(mode)
        .foreachBatch(lambda batch, number: written.append(sorted(tuple(row) for row in batch.collect())))
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(BATCH_S)
    if mode == "append":
        assert sorted(chain(*written)) == [(0, offset) for offset in range(30)] + [(1, offset) for offset in range(10)]
    else:
        assert written[-1] == [(0, 30), (1, 10)]
    assert len(written) == 2


def test_two_topics_join_as_streams(spark: SparkSession, tmp_path: Path) -> None:
    """Two topics are joined as streams: orders with offsets 0 to 49, and payments with offsets 20 to 79. A payment must
    be at most 5 s later than its order."""
    orders, payments = MessageQueue("orders", "a", 0), MessageQueue("payments", "a", 0)
    left, right = FakeTopics({orders: (0, 50)}), FakeTopics({payments: (20, 20)})
    ordered = stream(spark, left).select(functions.col("queue_offset").alias("ordered"), "born_timestamp")
    ordered = ordered.withWatermark("born_timestamp", "1 minute")
    paid = stream(spark, right).select(
        functions.col("queue_offset").alias("paid"), functions.col("born_timestamp").alias("paid_at")
    )
    paid = paid.withWatermark("paid_at", "1 minute")
    near = functions.expr("ordered = paid and paid_at between born_timestamp and born_timestamp + interval 5 seconds")
    found: list[int] = []
    writer = ordered.join(paid, near).writeStream.foreachBatch(
        lambda batch, number: found.extend(row.paid for row in batch.collect())
    )
    writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True)
    assert writer.start().awaitTermination(BATCH_S)
    assert found == []
    right.append(payments, 60)
    assert writer.start().awaitTermination(BATCH_S)
    assert sorted(found) == list(range(20, 50))


def test_lost_messages_fail_the_query_or_are_left_out(spark: SparkSession, tmp_path: Path) -> None:
    topics, batches = FakeTopics({A0: (0, 50), B0: (0, 10)}), Batches()
    run_available(stream(spark, topics, max_offsets=30), batches, tmp_path / "checkpoint")
    topics.held = {A0: (80, 100), B0: (0, 15)}
    with pytest.raises(
        StreamingQueryException, match=r"orders@a:0: offsets 50 to 79 no longer exist.*fail_on_data_loss=False"
    ):
        run_available(stream(spark, topics), batches, tmp_path / "checkpoint")
    before = set(batches.all_rows)
    run_available(stream(spark, topics, fail_on_data_loss=False), batches, tmp_path / "checkpoint")
    assert set(batches.all_rows) - before == rows(A0, 80, 100) | rows(B0, 10, 15)
    topics.append(A0, 10)
    with pytest.raises(StreamingQueryException, match="offsets 100 to 109 are not on disk"):
        run_available(stream(spark, topics, reader=read_but_lost), batches, tmp_path / "checkpoint")


def test_queries_of_one_dataframe_are_independent(spark: SparkSession, tmp_path: Path) -> None:
    topics, running, available = FakeTopics({A0: (0, 20)}), Batches(), Batches()
    frame = stream(spark, topics, max_offsets=15)
    query = start(frame, running, tmp_path / "running")
    eventually(lambda: len(running.all_rows) == 20, "the first messages", BATCH_S)
    topics.append(A0, 20)
    run_available(frame, available, tmp_path / "available")
    eventually(lambda: len(running.all_rows) == 40, "the other messages", BATCH_S)
    topics.append(A0, 20)
    eventually(lambda: len(running.all_rows) == 60, "messages after the end of the other query", BATCH_S)
    query.stop()
    assert set(running.all_rows) == topics.messages
    assert set(available.all_rows) == rows(A0, 0, 40)
    assert topics.closed == 1


def test_spark_is_asked_to_read_a_part_where_it_is(spark: SparkSession) -> None:
    topics = FakeTopics({A0: (0, 10), B0: (0, 10)})
    topics.near = {"a": ["10.0.0.1"], "b": ["10.0.0.2", "10.0.0.3"]}
    source = TopicSource(topics, BatchLimits(min_partitions=2), max_trigger_delay_s=1.0)
    end = source.latest_offset("query", None, unlimited=False)
    assert end is not None
    frame = BatchFrames(spark, read, SCHEMA).frame(*source.batch(None, end))
    rdd = frame.queryExecution().logical().rdd()
    # Ask Spark's scheduler for the preferred hosts of each partition. If a parent RDD has declared the hosts, the
    # scheduler finds them through the narrow dependencies.
    hosts = [spark.sparkContext._jsc.sc().getPreferredLocs(rdd, index).mkString(",") for index in range(2)]
    assert hosts == ["10.0.0.1", "10.0.0.2,10.0.0.3"]
