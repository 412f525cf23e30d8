"""Fixtures that make Spark's workers write to a store in the test process instead of a cluster."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from raydp_jobs.sink import writer
from tests.support.clients.dedup_store import DedupStore
from tests.support.clients.fakes import topic_route
from tests.support.spark.dedup_server import FarConnection, StoreServer
from tests.support.spark.local_spark import changed


@pytest.fixture(scope="module")
def spark(spark: SparkSession) -> Iterator[SparkSession]:
    with changed(spark, {"spark.sql.shuffle.partitions": "3", "spark.sql.adaptive.enabled": "true"}):
        yield spark


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
    """Make all Spark writes go to the test's store instead of a cluster."""
    made = FarConnection(server.address, topic_route(a=4))
    monkeypatch.setattr(writer, "ClusterConnection", lambda client, settings: made)
    return made
