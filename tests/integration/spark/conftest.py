"""Fixtures: one cluster and one Spark session for all test modules of this folder, because starting them takes longer
than the tests."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

import raymq
from tests.conftest import SharedCluster
from tests.support.spark.warnings import ignore_warnings


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ignore_warnings(items, __file__)


@pytest.fixture(scope="module")
def spark(mq: raymq.Client, shared_cluster: SharedCluster) -> SparkSession:
    return shared_cluster.spark()
