"""Makes pytest ignore PySpark's warnings in the tests of this folder."""

from __future__ import annotations

import pytest

from tests.support.spark.warnings import ignore_warnings


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ignore_warnings(items, __file__)
