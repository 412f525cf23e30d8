"""The warnings of PySpark that the tests of this folder pass over."""

from __future__ import annotations

from pathlib import Path

import pytest

# PySpark's own warnings, from distutils; Py4J closes its sockets when it likes.
IGNORED = ["ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            for ignored in IGNORED:
                item.add_marker(pytest.mark.filterwarnings(ignored))
