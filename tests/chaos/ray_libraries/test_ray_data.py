"""Reads and writes of Ray Data under faults: workers are killed, the storage master, too, and files are deleted.

Each task of an execution is killed once, after some of its rows. RAYMQ_CHAOS_SEED repeats where.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest
import ray.data
from ray.data import DataContext

import raymq
from raymq.data import read_topic, write_topic
from raymq.data.shared_client import worker_client
from tests.support.clusters.cluster import Sandbox, one_group
from tests.support.history.waiting import eventually
from tests.support.replicas.ray_replicas import RayReplicas

SEED = int(os.environ.get("RAYMQ_CHAOS_SEED", str(random.SystemRandom().randrange(10**6))))
BROKER = "broker-a"
SETTINGS = one_group("{replicas: 2, spread: false, min_in_sync_replicas: 1}")
KILLS = 10
ROWS = 20_000
BATCH_ROWS = 250

pytestmark = [
    # All of Ray Data's own.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

Batches = Callable[[pa.Table], pa.Table]


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
    mq.admin.create_topic("data-chaos", queues=4)
    with mq.producer() as producer:
        producer.send_table("data-chaos", pa.table({"body": [f"{number} {'x' * 200}" for number in range(ROWS)]}))
    return "data-chaos"


def numbers(values: list[bytes]) -> Counter[int]:
    return Counter(int(value.split()[0]) for value in values)


def once_each() -> Counter[int]:
    return Counter(range(ROWS))


def killing(marks: Path, ready: Callable[[], bool]) -> Batches:
    """A function of batches with which each task is killed once, at a batch of random number. `marks` is an empty
    directory. It waits for `ready` before."""
    counts: dict[str, int] = {}

    def pass_on(batch: pa.Table) -> pa.Table:
        task = ray.get_runtime_context().get_task_id()
        counts[task] = counts.get(task, 0) + 1
        mark = marks / str(task)
        if counts[task] == random.Random(f"{SEED} {task}").randint(2, 6) and not mark.exists():
            eventually(ready, "something to be stored")
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return batch

    return pass_on


def test_rows_are_read_once_though_workers_are_killed(mq: raymq.Client, filled: str, tmp_path: Path) -> None:
    print(f"RAYMQ_CHAOS_SEED={SEED}")
    dataset = read_topic(filled, columns=["value"], override_num_blocks=KILLS)
    killed = dataset.map_batches(killing(tmp_path, lambda: True), batch_size=BATCH_ROWS, batch_format="pyarrow")
    assert numbers([row["value"] for row in killed.take_all()]) == once_each()
    assert len(list(tmp_path.iterdir())) == KILLS


def test_rows_are_stored_once_though_workers_are_killed(mq: raymq.Client, topic: str, tmp_path: Path) -> None:
    print(f"RAYMQ_CHAOS_SEED={SEED}")

    def stored() -> bool:
        with worker_client().use() as client:
            return sum(queue.messages for queue in client.admin.describe_topic(topic)) > 0

    dataset = ray.data.range(ROWS, override_num_blocks=KILLS)
    killed = dataset.map_batches(killing(tmp_path, stored), batch_size=BATCH_ROWS, batch_format="pyarrow")
    summary = write_topic(killed, topic)
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
        eventually(failed_over.exists, "the failover")
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


def test_messages_deleted_by_age_fail_the_read_or_are_left_out(mq: raymq.Client, filled: str, box: Sandbox) -> None:
    """This is the last test of the module: the topic is not whole after it."""
    RayReplicas(BROKER, 2).settled()
    strict = read_topic(filled, columns=["value"])
    lenient = read_topic(filled, columns=["value"], fail_on_data_loss=False)
    assert strict.count() == ROWS
    old_s = time.time() - 100 * 3600
    for log in box.data.rglob("commitlog"):
        for file in sorted(log.iterdir())[:2]:
            os.utime(file, (old_s, old_s))
    mq.admin.clean_store(BROKER)

    def first_kept() -> int:
        return max(queue.min_offset for queue in mq.admin.describe_topic(filled))

    eventually(lambda: first_kept() > 0, "the deletion")
    with pytest.raises(Exception, match="DataLossError"):
        strict.take_all()
    kept = sum(queue.messages for queue in mq.admin.describe_topic(filled))
    found = numbers([row["value"] for row in lenient.take_all()])
    assert 0 < len(found) == kept < ROWS
    assert set(found.values()) == {1}
    with pytest.raises(raymq.DataLossError, match="are gone"):
        read_topic(filled, start_offset=0)
    assert read_topic(filled).count() == kept
