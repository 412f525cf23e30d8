"""Reads and writes of Ray Data under faults: workers are killed, and the storage master, too.

Each task of an execution is killed once. RAYMQ_CHAOS_DATA_KILLS (default 3, 10 with RAYMQ_SOAK) is the number of tasks,
RAYMQ_CHAOS_SEED repeats where those that write are killed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import ray.cloudpickle
import ray.data
from ray.data import DataContext
from ray.data.datasource import ReadTask

import raymq
from raymq.data import TopicDatasource, read_topic, write_topic
from raymq.data.shared_client import worker_client
from tests.support.clusters.cluster import one_group
from tests.support.history.waiting import eventually
from tests.support.replicas.ray_replicas import RayReplicas

SEED = int(os.environ.get("RAYMQ_CHAOS_SEED", str(random.SystemRandom().randrange(10**6))))
BROKER = "broker-a"
SETTINGS = one_group("{replicas: 2, spread: false, min_in_sync_replicas: 1}")
KILLS = int(os.environ.get("RAYMQ_CHAOS_DATA_KILLS", "10" if os.environ.get("RAYMQ_SOAK") == "1" else "3"))
ROWS = 20_000
BATCH_ROWS = 250
WAIT_S = 100.0

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import tests

pytestmark = [
    # All of Ray Data's own.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(autouse=True)
def _small_blocks() -> Iterator[None]:
    """Tasks hand over blocks before they are killed, and make them again."""
    context = DataContext.get_current()
    before = context.target_max_block_size, context.enable_progress_bars
    context.target_max_block_size, context.enable_progress_bars = 64 << 10, False
    yield
    context.target_max_block_size, context.enable_progress_bars = before


@pytest.fixture(scope="module")
def filled(mq: raymq.Client) -> str:
    """A topic with ROWS messages in several files; the body of each is its number, and some more."""
    mq.admin.create_topic("data-kills", queues=4)
    with mq.producer() as producer:
        producer.send_table("data-kills", pa.table({"body": [f"{number} {'x' * 200}" for number in range(ROWS)]}))
    return "data-kills"


def numbers(values: list[bytes]) -> Counter[int]:
    return Counter(int(value.split()[0]) for value in values)


def once_each() -> Counter[int]:
    return Counter(range(ROWS))


Read = Callable[[], Iterable[pa.Table]]


class FaultyTasks(TopicDatasource):
    """A datasource of which read task n reads by `faulty(n, read)`, where `read` is how it would read else."""

    def __init__(self, topic: str, faulty: Callable[[int, Read], Read]) -> None:
        super().__init__(topic, columns=["value"])
        self._faulty = faulty

    def get_read_tasks(self, *arguments: Any, **options: Any) -> list[ReadTask]:
        tasks = super().get_read_tasks(*arguments, **options)
        return [
            ReadTask(self._faulty(number, task.read_fn), task.metadata, task.schema)
            for number, task in enumerate(tasks)
        ]


def wait_for(path: Path) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not path.exists() and time.monotonic() < deadline_s:
        time.sleep(0.02)


def dying(read: Read, mark: Path, after: int) -> Read:
    """`read`, during which the process is killed after so many blocks, or at the end, unless `mark` exists."""

    def read_and_die() -> Iterator[pa.Table]:
        def die() -> None:
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

        for number, block in enumerate(read()):
            if number == after and not mark.exists():
                die()
            yield block
        if not mark.exists():
            die()

    return read_and_die


def test_rows_are_read_once_though_workers_are_killed(mq: raymq.Client, filled: str, tmp_path: Path) -> None:
    source = FaultyTasks(filled, lambda number, read: dying(read, tmp_path / str(number), number % 3))
    dataset = ray.data.read_datasource(source, override_num_blocks=KILLS)
    assert numbers([row["value"] for row in dataset.take_all()]) == once_each()
    assert len(list(tmp_path.iterdir())) == KILLS


def test_rows_are_stored_once_though_workers_are_killed(mq: raymq.Client, topic: str, tmp_path: Path) -> None:
    print(f"RAYMQ_CHAOS_SEED={SEED}")
    counts: dict[str, int] = {}

    def grow_and_die(batch: pa.Table) -> pa.Table:
        """Rows of which each batch is a block, so that it is written before the next one is made. The process of each
        task is killed once, at a batch of random number, when something is stored."""
        task = ray.get_runtime_context().get_task_id()
        counts[task] = counts.get(task, 0) + 1
        mark = tmp_path / task
        if counts[task] == random.Random(f"{SEED} {task}").randint(2, 6) and not mark.exists():
            deadline_s = time.monotonic() + 60
            stored = 0
            while not stored and time.monotonic() < deadline_s:
                with worker_client().use() as client:
                    stored = sum(queue.messages for queue in client.admin.describe_topic(topic))
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return batch.append_column("pad", pa.array(["x" * 400] * batch.num_rows))

    dataset = ray.data.range(ROWS, override_num_blocks=KILLS)
    summary = write_topic(dataset.map_batches(grow_and_die, batch_size=BATCH_ROWS, batch_format="pyarrow"), topic)
    assert len(list(tmp_path.iterdir())) == KILLS
    assert summary.rows == ROWS
    assert summary.stored_before > 0  # by attempts that were killed
    assert sum(one.count for one in summary.ranges) == ROWS - summary.stored_before
    bodies = [json.loads(row["value"])["id"] for row in read_topic(topic, columns=["value"]).take_all()]
    assert Counter(bodies) == once_each()


def test_the_same_rows_are_read_over_a_failover(mq: raymq.Client, filled: str, tmp_path: Path) -> None:
    replicas = RayReplicas(BROKER, 2)
    reading, failed_over = tmp_path / "reading", tmp_path / "failed over"

    def wait(batch: pa.Table) -> pa.Table:
        reading.touch()
        wait_for(failed_over)
        return batch

    replicas.settled()
    dataset = read_topic(filled, columns=["value"], override_num_blocks=8)
    with ThreadPoolExecutor(1) as pool:
        rows = pool.submit(dataset.map_batches(wait, batch_size=BATCH_ROWS, batch_format="pyarrow").take_all)
        eventually(reading.exists, "the begin of the read")
        replicas.fail_over()
        failed_over.touch()
        found = rows.result(120)
    assert numbers([row["value"] for row in found]) == once_each()
