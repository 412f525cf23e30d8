"""A Spark of this process, without Ray, whose workers write to a store of this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark import SparkContext
from pyspark.sql import SparkSession

from raydp_jobs.session import _end_driver_jvm, spark_configs
from raydp_jobs.sink import writer
from raymq.cluster.java import java_environment
from tests.support.clients.dedup_store import DedupStore
from tests.support.clients.fakes import topic_route
from tests.support.spark.dedup_server import FarConnection, StoreServer

# PySpark's own warnings, from distutils; Py4J closes its sockets when it likes.
IGNORED = ["ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            for ignored in IGNORED:
                item.add_marker(pytest.mark.filterwarnings(ignored))


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in java_environment().items():
            patch.setenv(name, value)
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        patch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
        patch.setenv("PYTHONPATH", os.getcwd())
        builder = SparkSession.builder.master("local[2, 4]").appName("sink")
        for key, value in spark_configs({"spark.sql.shuffle.partitions": "3"}).items():
            builder = builder.config(key, value)
        session = builder.getOrCreate()
        session.sparkContext.setLogLevel("OFF")
        gateway = SparkContext._gateway
        yield session
        session.stop()
        _end_driver_jvm(gateway)


@pytest.fixture
def server() -> Iterator[StoreServer]:
    made = StoreServer(DedupStore())
    yield made
    made.close()


@pytest.fixture
def store(server) -> DedupStore:
    return server.store


@pytest.fixture(autouse=True)
def connection(server, monkeypatch) -> FarConnection:
    """Has all writes go to the store instead of a cluster."""
    made = FarConnection(server.address, topic_route(a=4))
    monkeypatch.setattr(writer, "ClusterConnection", lambda client, settings: made)
    return made
