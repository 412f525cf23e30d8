"""A local Spark session for tests: two threads of one JVM, without RayDP."""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

import raydp_jobs
from raydp_jobs.session import _environment, _interrupts_as_before
from raydp_jobs.spark_internals import end_driver_jvm, forget_context
from raymq.client.cluster.java import java_environment

ROOT = Path(__file__).parents[3]
END_S = 10.0


@contextmanager
def local_spark(
    directory: Path, *, task_tries: int = 1, configs: Mapping[str, str] | None = None
) -> Iterator[SparkSession]:
    """Yield a Spark session that keeps its files below `directory`. `configs` override the default settings, which make
    tests fast and their output short.

    At the end the session's queries stop and the JVM ends, unless the JVM was killed before.
    """
    directory.mkdir(parents=True, exist_ok=True)
    java = f"-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -XX:-UsePerfData -Djava.io.tmpdir={directory}"
    final = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.adaptive.enabled": "false",
        # code generation is off, because compiling takes longer than running a test's query
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.local.dir": str(directory),
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
        "spark.driver.extraJavaOptions": java,
        "spark.log4j.config.file.name": str(Path(raydp_jobs.__file__).with_name("log4j2.properties")),
        **(configs or {}),
    }
    variables = {
        **java_environment(),
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    with _environment(variables), _interrupts_as_before():
        builder = SparkSession.builder.master(f"local[2, {task_tries}]")
        for key, value in final.items():
            builder = builder.config(key, value)
        session = builder.getOrCreate()
        session.sparkContext.setLogLevel("OFF")
        try:
            yield session
        finally:
            _end(session)


def runs(session: SparkSession) -> bool:
    """Return whether the JVM of a session still runs."""
    return _gateway(session).proc.poll() is None


def _gateway(session: SparkSession) -> Any:
    return session.sparkContext._gateway


def _end(session: SparkSession) -> None:
    gateway = _gateway(session)
    if runs(session):
        stop_queries(session)
        session.stop()
    else:
        forget_context()
    end_driver_jvm(gateway, END_S)


def stop_queries(session: SparkSession) -> None:
    """Stop the streaming queries of a session."""
    for query in session.streams.active:
        query.stop()


@contextmanager
def changed(session: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    """Change settings of a running Spark session inside the block, and restore them afterwards. Spark must allow each
    setting to change at run time, and each setting must already have a value."""
    before = {key: session.conf.get(key) for key in settings}
    for key, value in settings.items():
        session.conf.set(key, value)
    try:
        yield
    finally:
        if runs(session):
            for key, value in before.items():
                session.conf.set(key, value)


class SharedSpark:
    """A local Spark session that all test modules share, one module after another, because a process can have only one
    session.

    Spark starts for the first module that needs it. Spark tries each task four times, for tests that kill its Python
    workers. The workers read a store's files (tests.support.spark.near_store) instead of connecting to a cluster.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open = ExitStack()
        self._session: SparkSession | None = None

    def session(self) -> SparkSession:
        """The shared Spark session. A new session starts if no session runs, or if the JVM of the last session was
        killed."""
        if self._session is not None and not runs(self._session):
            self.close()
        if self._session is None:
            configs = {"spark.python.daemon.module": "tests.support.spark.daemon"}
            self._session = self._open.enter_context(local_spark(self._directory, task_tries=4, configs=configs))
        return self._session

    def close(self) -> None:
        """End Spark, and close the sockets that Py4J leaves to the garbage collector."""
        if self._session is None:
            return
        opened, self._open = self._open, ExitStack()
        self._session = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            opened.close()
            gc.collect()
