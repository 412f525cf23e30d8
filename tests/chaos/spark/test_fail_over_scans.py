"""Tests of a long read, by `read_ranges` or by Spark, during which the storage master fails over. The read returns the
same rows from the store's files and over lanes (direct socket connections)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark import TaskContext

import raymq
from raydp_jobs import read_topic, spark_session
from raydp_jobs.source import reader
from raydp_jobs.worker_client import worker_client
from raymq.client.scan import range_reader
from raymq.client.scan.batches import open_ranges
from raymq.client.scan.partitions import plan_partitions
from raymq.client.scan.queue_bounds import ClusterQueues
from raymq.client.scan.ranges import OffsetRange, plan_ranges
from raymq.remoting.storage_clients import StorageClients
from tests.support.clusters.cluster import Sandbox, one_group
from tests.support.history.waiting import eventually
from tests.support.replicas.ray_replicas import RayReplicas

REPLICAS = 3
MESSAGES = 6000
FAILOVERS = 2
CHUNK_MESSAGES = 50
"""Number of messages that a read requests in one step. It is small, so that an offset range is read in many
steps."""
CORES, TASKS = 2, 4
WAIT_S = 100.0
SETTINGS = one_group("{replicas: 3, spread: false, min_in_sync_replicas: 2}")

Row = tuple[int, int, bytes]


def rows(batches: Iterator[Any]) -> list[Row]:
    return [
        (row["queue_id"], row["queue_offset"], row["body"])
        for batch in batches
        for row in batch.select(["queue_id", "queue_offset", "body"]).to_pylist()
    ]


def send(mq: raymq.Client, topic: str) -> list[Row]:
    """Send MESSAGES messages to the topic. Returns the rows that a read of the topic must return, sorted."""
    with mq.producer() as producer:
        results = producer.send_batch([raymq.Message(topic, b"%d" % number) for number in range(MESSAGES)])
    return sorted((one.queue.queue_id, one.queue_offset, b"%d" % number) for number, one in enumerate(results))


def test_a_long_read_continues_at_the_new_master_with_the_same_rows(
    mq: raymq.Client, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(range_reader, "RANGE_CHUNK_MESSAGES", CHUNK_MESSAGES)
    replicas = RayReplicas("broker-a", REPLICAS)
    replicas.settled()
    sent = send(mq, topic)
    source = ClusterQueues(mq.routes, mq.storages)
    ranges = plan_ranges(source, topic)
    assert sum(part.size for part in plan_partitions(source, ranges, min_partitions=5)) == MESSAGES

    with closing(StorageClients("another-node")) as far:

        def read(storages: StorageClients) -> Iterator[Any]:
            return open_ranges(mq.routes, storages, ranges, fail_on_data_loss=True)

        reads: list[tuple[Iterator[Any], list[Row]]] = [(read(mq.storages), []), (read(far), [])]
        for _ in range(FAILOVERS):
            for batches, seen in reads:
                seen.extend(rows(iter([next(batches)])))
            replicas.fail_over()
        for batches, seen in reads:
            assert 0 < len(seen) < MESSAGES
            seen.extend(rows(batches))
            assert sorted(seen) == sent
            assert len(seen) == len(set(seen)) == MESSAGES


def pausing(marks: Path) -> Callable[..., Iterator[pa.RecordBatch]]:
    """Return a variant of `read_ranges` that reads in small steps. It pauses after the first step until the file
    MARKS/"go on" exists.

    A paused read creates a file in MARKS. Tasks with an odd number read over lanes (direct socket connections), not
    from files.
    """
    read_ranges = reader.read_ranges

    def paused(
        ranges: Iterable[OffsetRange], address: str, *arguments: Any, **options: Any
    ) -> Iterator[pa.RecordBatch]:
        task = TaskContext.get()
        assert task is not None
        number = task.partitionId()
        # Only the Spark worker that runs this task reads in smaller steps.
        range_reader.RANGE_CHUNK_MESSAGES = CHUNK_MESSAGES
        if number % 2:
            worker_client(address).storages = StorageClients("another-node")
        for step, batch in enumerate(read_ranges(ranges, address, *arguments, **options)):
            yield batch
            if step == 0:
                (marks / f"task {number}").touch()
                deadline_s = time.monotonic() + WAIT_S
                while not (marks / "go on").exists() and time.monotonic() < deadline_s:
                    time.sleep(0.02)

    return paused


def test_a_long_spark_read_continues_at_the_new_master_with_the_same_rows(
    mq: raymq.Client, box: Sandbox, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "read_ranges", pausing(tmp_path))
    replicas = RayReplicas("broker-a", REPLICAS)
    replicas.settled()
    sent = send(mq, topic)
    # Choose the temporary directory of the JVMs. Ray kills JVMs, and a killed JVM leaves its unpacked libraries in this
    # directory.
    temporary = f"-Djava.io.tmpdir={box.java}"
    roles = ("spark.driver", "spark.executor", "spark.ray.raydp_app_master")
    configs = {f"{role}.extraJavaOptions": temporary for role in roles}
    session = spark_session("failover", executor_cores=CORES, executor_memory="512m", configs=configs)

    def begun() -> set[str]:
        return {path.name for path in tmp_path.glob("task *")}

    with session as spark, ThreadPoolExecutor(1) as pool:
        frame = read_topic(spark, topic, columns=["queue_id", "queue_offset", "body"], min_partitions=TASKS, client=mq)
        reading = pool.submit(frame.collect)
        try:
            eventually(lambda: reading.done() or len(begun()) == CORES, "the begin of the first tasks", WAIT_S)
            assert not reading.done(), reading.result()
            replicas.fail_over()
        finally:
            (tmp_path / "go on").touch()
        found = sorted((row.queue_id, row.queue_offset, bytes(row.body)) for row in reading.result(WAIT_S))
    assert begun() == {f"task {number}" for number in range(TASKS)}
    assert found == sent
