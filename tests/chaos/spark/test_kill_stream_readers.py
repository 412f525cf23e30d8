"""Test of a streaming query whose executor is killed, and then its storage master: its sink has every message exactly
once.

RAYMQ_CHAOS_SPARK_KILLS (default 1, 10 with RAYMQ_SOAK) is the number of kills of executors. A kill takes about 15 s.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import raymq
from raydp_jobs import spark_session, stream_topic
from tests.support.clusters.cluster import Sandbox, descendants, one_group
from tests.support.history.waiting import eventually
from tests.support.replicas.ray_replicas import RayReplicas
from tests.support.spark.batch_files import BatchFiles
from tests.support.spark.live_topic import check_sink, sending

KILLS = int(os.environ.get("RAYMQ_CHAOS_SPARK_KILLS", "10" if os.environ.get("RAYMQ_SOAK") else "1"))
SETTINGS = one_group("{replicas: 2, spread: false, min_in_sync_replicas: 2}")

pytestmark = pytest.mark.timeout(240 + 40 * KILLS)


def test_a_query_whose_executor_and_store_are_killed_reads_the_same_rows(
    mq: raymq.Client, box: Sandbox, topic: str, tmp_path: Path
) -> None:
    replicas, sink = RayReplicas("broker-a", 2), BatchFiles(tmp_path / "sink")
    # Choose the temporary directory of the JVMs. Ray kills JVMs, and a killed JVM leaves its unpacked libraries in this
    # directory.
    temporary = f"-Djava.io.tmpdir={box.java}"
    roles = ("spark.driver", "spark.executor", "spark.ray.raydp_app_master")
    configs = {f"{role}.extraJavaOptions": temporary for role in roles}
    with spark_session("stream-kills", executor_memory="512m", configs=configs) as spark:
        frame = stream_topic(spark, topic, starting_offsets="earliest", max_offsets_per_trigger=400, client=mq)
        writer = frame.writeStream.foreachBatch(sink).option("checkpointLocation", str(tmp_path / "checkpoint"))
        query = writer.start()

        def wait_for(condition: Callable[[], bool], what: str) -> None:
            eventually(lambda: query.exception() or condition(), what, 120)
            assert query.exception() is None

        def more_batches(count: int) -> None:
            enough = sink.count("json") + count
            wait_for(lambda: sink.count("json") >= enough, f"{count} more batches")
            wait_for(lambda: sink.count("begun") > sink.count("json"), "a batch under way")

        with sending(mq, topic):
            more_batches(1)
            for _ in range(KILLS):
                kill_executor()
                # Wait for two more batches of the stream. The data of the first batch may have been read before the
                # executor was killed. Only the second batch proves that reading continues.
                more_batches(2)
            replicas.fail_over()
            more_batches(2)
        query.stop()
        rest = writer.trigger(availableNow=True).start()
        assert rest.awaitTermination(120)
    check_sink(mq, topic, sink)


def kill_executor() -> None:
    """Send SIGKILL to the executor's JVM, whose Python workers read topics, and wait until the JVM has ended."""
    daemon = eventually(only_daemon, "the daemon of one executor's Python workers", 120)
    executor = daemon.parent()
    assert executor is not None
    os.kill(executor.pid, signal.SIGKILL)
    psutil.wait_procs([executor, daemon], timeout=30)


def only_daemon() -> psutil.Process | None:
    """Return the daemon that starts Spark's Python workers. Returns None before it starts, and while the daemon of a
    killed executor has not ended."""
    found = [process for process in descendants() if runs_workers(process)]
    return found[0] if len(found) == 1 else None


def runs_workers(process: psutil.Process) -> bool:
    """Return True if the process is the daemon that starts Spark's Python workers. The daemon is a child of the
    executor's JVM."""
    try:
        parent = process.parent()
        return "pyspark.daemon" in process.cmdline() and parent is not None and parent.name() == "java"
    except psutil.NoSuchProcess:
        return False  # The process ended after the list of processes was taken.
