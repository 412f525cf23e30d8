"""One Spark of this process, without Ray, for all tests in this folder. It ends after the last test."""

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


@pytest.hookimpl(trylast=True)  # after the fixtures of the last module, which may call Spark
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End Spark before tests of other folders, which may start their own with `spark_session`."""
    if SHARED in item.config.stash and (nextitem is None or not nextitem.path.is_relative_to(HERE)):
        item.config.stash[SHARED].close()


@pytest.fixture(scope="session")
def shared_spark(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[SharedSpark]:
    shared = pytestconfig.stash[SHARED] = SharedSpark(tmp_path_factory.mktemp("spark"))
    yield shared
    shared.close()


@pytest.fixture(scope="module")
def spark(shared_spark: SharedSpark) -> SparkSession:
    """Return the session of all tests here. A folder may change its settings for each of its modules."""
    return shared_spark.session()


@pytest.fixture(autouse=True)
def _no_query_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """End a query that a failed test leaves behind, because it would take the cores from other tests."""
    yield
    if "spark" in request.fixturenames:
        session = request.getfixturevalue("spark")
        if runs(session):
            stop_queries(session)
