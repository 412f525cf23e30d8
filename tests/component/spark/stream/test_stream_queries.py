"""Streaming queries over topics, in Spark itself: what a batch has, again and again, and what can be done with it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

from raydp_jobs.stream.planner import BatchLimits
from raydp_jobs.stream.source import TopicSource
from raydp_jobs.stream.spark_source import stream_frame
from raymq.message import MessageQueue
from tests.support.spark.fake_topics import SCHEMA, FakeTopics, Row, read

A0, A1, B0 = MessageQueue("orders", "a", 0), MessageQueue("orders", "a", 1), MessageQueue("orders", "b", 0)
BATCH_S = 30.0


def stream(
    spark: SparkSession, topics: FakeTopics, *, reader: Any = read, max_trigger_delay_s: float = 900.0, **limits: Any
) -> DataFrame:
    source = TopicSource(topics, BatchLimits(**limits), max_trigger_delay_s=max_trigger_delay_s)
    return stream_frame(spark, source, reader, SCHEMA, "orders")


class Batches:
    """A sink for `foreachBatch` that keeps the rows of each batch and the partitions that they came in."""

    def __init__(self) -> None:
        self.rows: dict[int, list[Row]] = {}
        self.partitions: dict[int, list[list[Row]]] = {}
        self.fail_at: int | None = None
        self.seen = threading.Condition()

    def __call__(self, batch: DataFrame, number: int) -> None:
        found = batch.select("topic", "broker_name", "queue_id", "queue_offset").rdd.glom().collect()
        parts = [[tuple(row) for row in part] for part in found]
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


def test_available_now_reads_what_there_is_in_batches_and_a_restart_goes_on_there(
    spark: SparkSession, tmp_path: Path
) -> None:
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
