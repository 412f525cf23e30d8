"""Spark on two threads of this process, without Ray, for streams of topics that are nothing but numbers."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import raydp_jobs
from raydp_jobs.session import _end_driver_jvm, _environment
from raymq.cluster.java import java_environment

# PySpark's own warnings, from distutils; Py4J closes its sockets when it likes.
IGNORED = ["ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            for ignored in IGNORED:
                item.add_marker(pytest.mark.filterwarnings(ignored))


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    directory = tmp_path_factory.mktemp("spark")
    configs = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.codegen.wholeStage": "false",  # compiling takes longer than the rows of a test
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.streaming.minBatchesToRetain": "5",
        "spark.local.dir": str(directory),
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
        "spark.driver.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -XX:-UsePerfData",
        "spark.log4j.config.file.name": str(Path(raydp_jobs.__file__).with_name("log4j2.properties")),
    }
    with _environment({**java_environment(), "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}):
        builder = SparkSession.builder.master("local[2]")
        for key, value in configs.items():
            builder = builder.config(key, value)
        session = builder.getOrCreate()
        session.sparkContext.setLogLevel("OFF")
        yield session
        for query in session.streams.active:
            query.stop()
        session.stop()
        _end_driver_jvm()
    assert not os.listdir(directory / "warehouse") if (directory / "warehouse").exists() else True
