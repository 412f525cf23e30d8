"""Fixtures that share one Spark session, in the test process and without Ray, among all tests in this folder. Spark
ends after the last test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.support.spark.local_spark import SharedSpark, runs, stop_queries
from tests.support.spark.warnings import ignore_warnings

HERE = Path(__file__).parent
SHARED = pytest.StashKey[SharedSpark]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ignore_warnings(items, __file__)


@pytest.hookimpl(trylast=True)  # run this hook last: the teardown of the last module's fixtures may still call Spark
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Stop Spark before the first test of another folder, which may start its own session with `spark_session`."""
    if SHARED in item.config.stash and (nextitem is None or not nextitem.path.is_relative_to(HERE)):
        item.config.stash[SHARED].close()


@pytest.fixture(scope="session")
def shared_spark(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[SharedSpark]:
    shared = pytestconfig.stash[SHARED] = SharedSpark(tmp_path_factory.mktemp("spark"))
    yield shared
    shared.close()


@pytest.fixture(scope="module")
def spark(shared_spark: SharedSpark) -> SparkSession:
    """Return the Spark session that all tests in this folder share. Fixtures of a subfolder may change the session's
    settings for each module."""
    return shared_spark.session()


@pytest.fixture(autouse=True)
def _no_query_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Stop any streaming query that a failed test has left running. It would occupy cores that other tests
    need."""
    yield
    if "spark" in request.fixturenames:
        session = request.getfixturevalue("spark")
        if runs(session):
            stop_queries(session)
