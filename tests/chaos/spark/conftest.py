"""Fixture: one Spark 4 session for the tests of `format("raymq")`. Makes pytest ignore PySpark's warnings in the tests
of this folder."""

from __future__ import annotations

import pytest

import raymq
from tests.conftest import SharedCluster
from tests.support.spark.spark4 import Spark4Session
from tests.support.spark.warnings import ignore_warnings


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ignore_warnings(items, __file__)


@pytest.fixture(scope="module")
def spark4(mq: raymq.Client, shared_cluster: SharedCluster, tmp_path_factory: pytest.TempPathFactory) -> Spark4Session:
    session: Spark4Session = shared_cluster.spark4(tmp_path_factory.mktemp("spark4"))
    return session
