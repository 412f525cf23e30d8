"""Tests of killed Spark writers: Spark's executors or the driver are killed while they write to a topic. No row is lost
or stored twice.

RAYMQ_CHAOS_SPARK_KILLS (default 3, 10 with RAYMQ_SOAK) is the number of kills in each of the two tests.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
import ray

import raymq
from raydp_jobs import spark_session, write_topic
from raydp_jobs.sink.partitions import WriteSummary
from raymq.common.protocol.store import QueueBounds
from tests.support.clusters.cluster import Sandbox, descendants
from tests.support.history.waiting import eventually
from tests.support.spark.stream_driver import FILES_PER_BATCH

KILLS = int(os.environ.get("RAYMQ_CHAOS_SPARK_KILLS", "10" if os.environ.get("RAYMQ_SOAK") else "3"))
ROWS_PER_KILL = 2000
PAUSE_S = 0.1
"""Seconds for which an executor pauses before each Arrow batch of 100 rows. The pauses make a write so slow that the
test can kill it."""
BODY_BYTES = 1000
"""Length in bytes of the message bodies that executors write. PySpark's workers buffer 64 KiB, so with shorter bodies a
batch of 100 rows would stay in the buffer."""
ROOT = Path(__file__).parents[3]
FIRST = raymq.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET

pytestmark = pytest.mark.timeout(120 + 40 * KILLS)


def bounds(mq: raymq.Client, topic: str) -> list[QueueBounds]:
    queues = mq.write_queues(topic)
    route = mq.routes.get(topic)
    storages = {queue.broker_name: mq.storages.get(route.master_storage(queue.broker_name)) for queue in queues}
    return [storages[queue.broker_name].queue_bounds(topic, queue.queue_id, 10.0) for queue in queues]


def stored(mq: raymq.Client, topic: str) -> int:
    """Return the number of messages in a topic."""
    return sum(one.max_offset for one in bounds(mq, topic))


def all_numbers(mq: raymq.Client, topic: str, group: str) -> Counter[int]:
    """Read all messages of a topic. Returns how often each number occurs in the messages' bodies."""
    count, found = stored(mq, topic), Counter[int]()
    with mq.pull_consumer(group, consume_from=FIRST) as consumer:
        consumer.subscribe(topic)

        def all_read() -> bool:
            found.update(int(message.body) for message in consumer.poll(timeout_s=1.0))
            return found.total() >= count

        eventually(all_read, "all messages of the topic", 60)
    return found


def executor_pids() -> set[int]:
    """Return the process ids of the executors that have Python workers. Such an executor is the parent of a PySpark
    daemon process."""
    found = set()
    for process in descendants():
        try:
            if "pyspark.daemon" in process.cmdline():
                parent = process.parent()
                if parent is not None and parent.name() == "java":
                    found.add(parent.pid)
        except psutil.NoSuchProcess:
            continue  # The process ended after the list of processes was taken.
    return found


def test_executors_are_killed_while_they_write(mq: raymq.Client, box: Sandbox, topic: str, group: str) -> None:
    count = (KILLS + 1) * ROWS_PER_KILL
    temporary = f"-Djava.io.tmpdir={box.java}"
    roles = ("spark.driver", "spark.executor", "spark.ray.raydp_app_master")
    configs = {f"{role}.extraJavaOptions": temporary for role in roles}
    configs |= {"spark.task.maxFailures": "50", "spark.sql.execution.arrow.maxRecordsPerBatch": "100"}
    with spark_session("kills", executors=2, executor_memory="512m", configs=configs) as spark:

        def slowly(batches):  # This function is nested, so that it is pickled by value for the executors.
            for batch in batches:
                time.sleep(PAUSE_S)
                yield batch

        rows_per_partition = ROWS_PER_KILL // 2
        body = f"lpad(cast(id AS string), {BODY_BYTES}, '0') AS body"
        numbers = spark.range(0, count, 1, count // rows_per_partition).selectExpr(body)
        rows = numbers.mapInArrow(slowly, "body string")
        summaries: list[WriteSummary] = []
        writing = threading.Thread(target=lambda: summaries.append(write_topic(rows, topic, client=mq)))
        writing.start()
        for kill in range(KILLS):
            # Wait until half of a partition was written since the last kill, then kill an executor. So a task is
            # running at the moment of the kill, even if only one executor writes.
            goal = kill * ROWS_PER_KILL + rows_per_partition // 2
            eventually(lambda goal=goal: stored(mq, topic) >= goal, f"{goal} rows in the topic", 90)
            victim = sorted(eventually(executor_pids, "an executor with a worker", 90))[0]
            os.kill(victim, signal.SIGKILL)
            print(f"killed executor {victim} at {stored(mq, topic)} rows")
            psutil.wait_procs([process for process in descendants() if process.pid == victim], timeout=30)
        writing.join(60 + 20 * KILLS)
        assert [summary.rows for summary in summaries] == [count]
    print(summaries)
    assert summaries[0].stored_before > 0, "no executor was killed in the middle of a task"
    assert all_numbers(mq, topic, group) == Counter(range(count))


def test_drivers_are_killed_and_their_query_restarted(
    mq: raymq.Client, box: Sandbox, topic: str, group: str, tmp_path: Path
) -> None:
    batches = KILLS + 1
    directory = tmp_path / "in"
    directory.mkdir()
    per_file = ROWS_PER_KILL // FILES_PER_BATCH
    for file in range(batches * FILES_PER_BATCH):
        lines = range(file * per_file, (file + 1) * per_file)
        (directory / f"{file:03}.txt").write_text("\n".join(map(str, lines)))
    program = (sys.executable, "-m", "tests.support.spark.stream_driver", ray.get_runtime_context().gcs_address)
    arguments = (str(directory), str(tmp_path / "checkpoint"), topic)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for run in range(batches):
        driver = psutil.Popen([*program, *arguments], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL)
        goal = run * ROWS_PER_KILL + ROWS_PER_KILL // 2 if run < KILLS else batches * ROWS_PER_KILL
        try:
            eventually(
                lambda goal=goal, driver=driver: driver.poll() is not None or stored(mq, topic) >= goal,
                f"{goal} rows in the topic",
                90,
            )
            assert driver.poll() is None, "the driver has ended by itself"
        finally:
            family = [driver, *(descendants(driver.pid) if driver.is_running() else ())]
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(family, timeout=30)
        print(f"killed driver {driver.pid} at {stored(mq, topic)} rows")
    assert all_numbers(mq, topic, group) == Counter(range(batches * ROWS_PER_KILL))
