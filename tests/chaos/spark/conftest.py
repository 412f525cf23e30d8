"""The tests of this folder ignore the warnings of PySpark."""

from __future__ import annotations

import pytest

from tests.support.spark.warnings import ignore_warnings


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ignore_warnings(items, __file__)
