"""Tests of Ray Data reads and writes under faults: retention deletes log files, and workers and the storage master are
killed.

Each task of an execution is killed once. RAYMQ_CHAOS_DATA_KILLS (default 3, 10 with RAYMQ_SOAK) is the number of tasks.
RAYMQ_CHAOS_SEED repeats the moments at which the test kills writing tasks.
"""

from __future__ import annotations

import json
import os
import random
import re
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
from raymq.common.errors import DataLossError
from raymq.data import TopicDatasource, read_topic, write_topic
from raymq.data.shared_client import worker_client
from tests.support.cases import chaos_seed
from tests.support.clusters.cluster import Sandbox, one_group
from tests.support.history.waiting import eventually
from tests.support.replicas.ray_replicas import RayReplicas

BROKER = "broker-a"
SETTINGS = one_group("{replicas: 2, spread: false, min_in_sync_replicas: 1}")
KILLS = int(os.environ.get("RAYMQ_CHAOS_DATA_KILLS", "10" if os.environ.get("RAYMQ_SOAK") == "1" else "3"))
ROWS = 20_000
BATCH_ROWS = 250
OLD_FILES = 4
WAIT_S = 100.0

# Pickle this module by value, because Ray's workers cannot import test modules.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = [
    # The warnings of these classes all come from Ray Data, so the tests ignore them.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(autouse=True)
def _small_blocks() -> Iterator[None]:
    """Make Ray Data's tasks return small blocks. A task then returns some blocks before it is killed, and its next
    attempt returns these blocks again."""
    context = DataContext.get_current()
    before = context.target_max_block_size, context.enable_progress_bars
    context.target_max_block_size, context.enable_progress_bars = 64 << 10, False
    yield
    context.target_max_block_size, context.enable_progress_bars = before


def fill(mq: raymq.Client, topic: str) -> str:
    """Create a topic with ROWS messages. A body is a number followed by padding. Returns the topic's name.

    The messages fill several log files, and each file has messages of all queues.
    """
    mq.admin.create_topic(topic, queues=4)
    with mq.producer() as producer:
        for first in range(0, ROWS, BATCH_ROWS):
            numbers = range(first, first + BATCH_ROWS)
            producer.send_table(topic, pa.table({"body": [f"{number} {'x' * 200}" for number in numbers]}))
    return topic


@pytest.fixture(scope="module")
def filled(mq: raymq.Client) -> str:
    return fill(mq, "data-kills")


def numbers(values: list[bytes]) -> Counter[int]:
    return Counter(int(value.split()[0]) for value in values)


def once_each() -> Counter[int]:
    return Counter(range(ROWS))


Read = Callable[[], Iterable[pa.Table]]


class FaultyTasks(TopicDatasource):
    """A Ray Data datasource with faulty read tasks: task n reads with `faulty(n, read)`, where `read` is the normal
    read function."""

    def __init__(self, topic: str, faulty: Callable[[int, Read], Read], *, fail_on_data_loss: bool = True) -> None:
        super().__init__(topic, columns=["value"], fail_on_data_loss=fail_on_data_loss)
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
    """Return a function that reads blocks as `read` does, but kills its own process once: after `after` blocks, or at
    the end of a shorter read. If the file `mark` exists, the process was already killed, and the function only reads.
    """

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


def delete_oldest_files(mq: raymq.Client, box: Sandbox, topic: str) -> None:
    """Make retention delete the first files of the store's log. Returns after each queue of the topic has lost
    messages."""
    # Without a reserved time, only the times of the files decide. The file after the old ones has a future time.
    for log in box.data.glob("*/commitlog"):
        following = sorted(log.iterdir())[OLD_FILES]
        os.utime(following, (time.time() + 100 * 3600,) * 2)
    mq.admin.set_config("store.file_reserved_time_hours", "0")

    def gone() -> bool:
        # Call `clean_store` until the old files are deleted. Retention keeps log files with the broker's state until
        # two snapshots contain this state.
        mq.admin.clean_store(BROKER)
        return all(one.min_offset for one in mq.admin.describe_topic(topic))

    eventually(gone, "messages of each queue that are gone")
    mq.admin.unset_config("store.file_reserved_time_hours")


class PausedRead:
    """A Ray Data read of a topic that pauses after the first block of task 0, and before the first block of every other
    task.

    `marks`: a new directory for the files that signal the pause.
    """

    def __init__(self, topic: str, marks: Path, *, fail_on_data_loss: bool) -> None:
        marks.mkdir()
        self._begun, self._go_on = marks / "begun", marks / "go on"
        source = FaultyTasks(topic, self._pausing, fail_on_data_loss=fail_on_data_loss)
        # The data set has two blocks, and each read task needs a tenth of a CPU. Therefore all read tasks can run at
        # the same time.
        self._dataset = ray.data.read_datasource(source, override_num_blocks=2, num_cpus=0.1)

    def _pausing(self, number: int, read: Read) -> Read:
        begun, go_on = self._begun, self._go_on

        def read_and_pause() -> Iterator[pa.Table]:
            if number:
                wait_for(go_on)
            for block in read():
                yield block
                begun.touch()
                wait_for(go_on)

        return read_and_pause

    def rows(self) -> Counter[int]:
        """Read the topic. Returns how often each number occurs in the rows."""
        return numbers([row["value"] for row in self._dataset.take_all()])

    def pause(self) -> None:
        """Wait until the Ray Data read has returned its first block. After this block the read pauses."""
        eventually(self._begun.exists, "the first block")

    def go_on(self) -> None:
        """Let the Ray Data read that this test has paused continue."""
        self._go_on.touch()


# The next test deletes the oldest log files, so it must run before the tests with failovers. After a failover, a reader
# may still read the files of the former master.


def test_a_read_of_messages_that_are_deleted_during_the_read_fails_or_reports_the_gap(
    mq: raymq.Client, box: Sandbox, tmp_path: Path
) -> None:
    topic = fill(mq, "data-loss")
    strict = PausedRead(topic, tmp_path / "strict", fail_on_data_loss=True)
    lenient = PausedRead(topic, tmp_path / "lenient", fail_on_data_loss=False)
    with ThreadPoolExecutor(2) as pool:
        failing, going_on = pool.submit(strict.rows), pool.submit(lenient.rows)
        try:
            strict.pause()
            lenient.pause()
            delete_oldest_files(mq, box, topic)
        finally:
            strict.go_on()
            lenient.go_on()
        with pytest.raises(DataLossError) as failure:
            failing.result(WAIT_S)
        found = going_on.result(WAIT_S)
    kept = {one.queue.queue_id: one.min_offset for one in mq.admin.describe_topic(topic)}
    lost = re.search(
        rf"offsets (\d+) to \d+ of queue {topic}@{BROKER}:(\d) no longer exist; the queue has offsets (\d+)",
        str(failure.value),
    )
    assert lost is not None, failure.value
    assert int(lost[1]) < int(lost[3]) == kept[int(lost[2])]
    assert found < once_each()
    missing = (once_each() - found).total()
    eventually(lambda: said_to_be_left_out(box, topic) == missing, f"warnings that name {missing} offsets")
    left = numbers([row["value"] for row in read_topic(topic, columns=["value"]).take_all()])
    # The paused read returned more rows than this new read. One of its tasks had begun before the files were deleted,
    # and could still read the deleted files.
    assert left < found


def said_to_be_left_out(box: Sandbox, topic: str) -> int:
    """Return the total number of lost offsets. Ray's workers report lost offsets as warnings in their log
    files."""
    logs = "".join(path.read_text(errors="replace") for path in box.tmp.glob("rmq*/session_2*/logs/worker-*.err"))
    named = re.findall(rf"queue {topic}@{BROKER}:\d: offsets (\d+) to (\d+) no longer exist: ", logs)
    return sum(int(last) - int(first) + 1 for first, last in named)


def test_rows_are_read_once_though_workers_are_killed(mq: raymq.Client, filled: str, tmp_path: Path) -> None:
    source = FaultyTasks(filled, lambda number, read: dying(read, tmp_path / str(number), number % 3))
    dataset = ray.data.read_datasource(source, override_num_blocks=KILLS)
    assert numbers([row["value"] for row in dataset.take_all()]) == once_each()
    assert len(list(tmp_path.iterdir())) == KILLS


def test_rows_are_stored_once_though_workers_are_killed(mq: raymq.Client, topic: str, tmp_path: Path) -> None:
    seed = chaos_seed()
    counts: dict[str, int] = {}

    def grow_and_die(batch: pa.Table) -> pa.Table:
        """Return the batch with padding, so that it fills a block of its own. Ray Data writes this block before it
        calls the function with the next batch.

        Once in each task, this function kills the task's process. It chooses a random batch, but not before some
        message was stored.
        """
        task = ray.get_runtime_context().get_task_id()
        counts[task] = counts.get(task, 0) + 1
        mark = tmp_path / task
        if counts[task] == random.Random(f"{seed} {task}").randint(2, 6) and not mark.exists():
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
    # The killed attempts of the write had already stored some rows. The write counted these rows, and did not store
    # them again.
    assert summary.stored_before > 0
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
