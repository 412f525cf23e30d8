"""Spark on two threads of this process's JVM, without RayDP."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pyspark.sql import SparkSession

import raydp_jobs
from raydp_jobs.session import _end_driver_jvm, _environment
from raymq.cluster.java import java_environment


@contextmanager
def local_spark(directory: Path) -> Iterator[SparkSession]:
    """A session that keeps its files below `directory`. At the end its queries are stopped, and the JVM ends."""
    directory.mkdir(parents=True, exist_ok=True)
    java = f"-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -XX:-UsePerfData -Djava.io.tmpdir={directory}"
    configs = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.codegen.wholeStage": "false",  # compiling takes longer than the rows of a test
        "spark.sql.session.timeZone": "UTC",
        "spark.local.dir": str(directory),
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
        "spark.driver.extraJavaOptions": java,
        "spark.log4j.config.file.name": str(Path(raydp_jobs.__file__).with_name("log4j2.properties")),
    }
    with _environment({**java_environment(), "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}):
        builder = SparkSession.builder.master("local[2]")
        for key, value in configs.items():
            builder = builder.config(key, value)
        session = builder.getOrCreate()
        session.sparkContext.setLogLevel("OFF")
        try:
            yield session
        finally:
            for query in session.streams.active:
                query.stop()
            gateway = session.sparkContext._gateway
            session.stop()
            _end_driver_jvm(gateway)
