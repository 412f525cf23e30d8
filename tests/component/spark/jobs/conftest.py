"""Spark on two threads of this process, without Ray: what the jobs' steps need."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark import SparkContext
from pyspark.sql import SparkSession

from raydp_jobs.session import _end_driver_jvm
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
    variables = {**java_environment(), "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    session = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "1")
        .config("spark.sql.adaptive.enabled", "false")
        .config("spark.sql.codegen.wholeStage", "false")  # compiling takes longer than counting five rows
        .config("spark.local.dir", str(directory))
        .config("spark.sql.warehouse.dir", str(directory / "warehouse"))
        .config("spark.driver.extraJavaOptions", "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -XX:-UsePerfData")
        .config("spark.log4j.config.file.name", str(Path(__file__).parents[4] / "raydp_jobs/log4j2.properties"))
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("OFF")
    yield session
    gateway = SparkContext._gateway
    session.stop()
    _end_driver_jvm(gateway)
    for name, value in before.items():
        if value is None:
            os.environ.pop(name)
        else:
            os.environ[name] = value
