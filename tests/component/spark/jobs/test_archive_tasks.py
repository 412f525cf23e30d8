"""Tests of the Spark tasks of an archive run: workers write offset ranges to files, and the driver renames the files
into the archive."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark import cloudpickle
from pyspark.sql import SparkSession

from raydp_jobs.jobs.archive import archive, locked, stage_with
from raydp_jobs.jobs.archive_check import verify
from raydp_jobs.jobs.spark_job import clear_errors
from raymq.client.scan.ranges import OffsetRange
from raymq.common.errors import DataLossError
from raymq.common.message import MessageQueue
from raymq.common.protocol.store import QueueBounds
from tests.support.stores import topic_batches

QUEUES = {MessageQueue("orders", "broker-a", queue_id): QueueBounds(0, 40, 0) for queue_id in range(3)}


@pytest.fixture(autouse=True)
def _workers_get_the_test_modules_code() -> Iterator[None]:
    cloudpickle.register_pickle_by_value(topic_batches)
    yield
    cloudpickle.unregister_pickle_by_value(topic_batches)


def test_ranges_read_in_tasks_are_archived_and_spark_reads_them_by_day(spark: SparkSession, tmp_path: Path) -> None:
    stage = stage_with(spark, topic_batches.messages_of, lambda ranges: [["127.0.0.1"] for _ in ranges])
    with locked(tmp_path / "orders") as folder:
        done = archive(folder, "orders", QUEUES, stage, parallelism=2)
    assert (done.messages, done.files) == (120, 6)
    assert verify(tmp_path, "orders").problems == ()
    counts = spark.read.parquet(str(tmp_path / "orders")).groupBy("day").count().collect()
    assert {str(row["day"]): row["count"] for row in counts} == {"2026-03-01": 72, "2026-03-02": 48}


def test_a_task_that_loses_messages_ends_the_run_with_its_error_in_one_line(
    spark: SparkSession, tmp_path: Path
) -> None:
    def read(item: OffsetRange) -> Iterator[pa.RecordBatch]:
        raise DataLossError(f"offsets 0 to 17 of queue {item.queue} no longer exist")

    with (
        locked(tmp_path / "orders") as folder,
        pytest.raises(DataLossError, match=r"^offsets 0 to 17 of queue orders@broker-a:0 no longer exist$"),
        clear_errors(),
    ):
        archive(folder, "orders", dict(list(QUEUES.items())[:1]), stage_with(spark, read))
    assert [path.name for path in (tmp_path / "orders").iterdir()] == [".lock"]
