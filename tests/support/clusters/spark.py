"""Starts a Spark session on a sandbox's Ray cluster, with the settings of the sessions of `raymq job`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil

from raydp_jobs.jobs.spark_job import SessionSize, spark_job
from tests.support.clusters.cluster import Sandbox, assert_gone, descendants


@contextmanager
def session_without_leftovers(box: Sandbox) -> Iterator[Any]:
    """Yield a Spark session with one executor. Checks at the end that all four Java processes of the session have
    ended."""
    # Let the JVMs use a temporary directory of the sandbox. Ray kills the session's JVMs, and a killed JVM leaves its
    # unpacked libraries in java.io.tmpdir.
    temporary = f"-Djava.io.tmpdir={box.java}"
    roles = ("spark.driver", "spark.executor", "spark.ray.raydp_app_master")
    configs = {f"{role}.extraJavaOptions": temporary for role in roles}
    size = SessionSize(executor_memory="512m")
    with spark_job("tests", None, size, quiet=True, configs=configs) as (session, _):
        session.range(1).count()  # run a small Spark job, so that Spark starts its executor
        started = java_processes()
        yield session
    assert len(started) == 4
    assert_gone(started)


def java_processes() -> list[psutil.Process]:
    """Return the Java processes among this process's descendants."""
    found = []
    for process in descendants():
        try:
            if process.name() == "java":
                found.append(process)
        except psutil.NoSuchProcess:
            continue  # the process ended after the list of processes was taken
    return found
