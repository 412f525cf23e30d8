"""One cluster and one Spark session for all modules of this folder: to start them takes longer than their tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import raymq
from tests.conftest import SharedCluster

# PySpark's own warnings, from distutils; Py4J closes its sockets when it likes.
IGNORED = ["ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            for ignored in IGNORED:
                item.add_marker(pytest.mark.filterwarnings(ignored))


@pytest.fixture(scope="module")
def spark(mq: raymq.Client, shared_cluster: SharedCluster) -> SparkSession:
    return shared_cluster.spark()
