"""The warnings of PySpark that tests pass over."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

# PySpark's own warnings, from distutils; Py4J closes its sockets when it likes.
IGNORED = ["ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"]


def ignore_warnings(items: Iterable[pytest.Item], conftest: str) -> None:
    """Mark the tests beside and below a `conftest`, given as its `__file__`, to pass over PySpark's warnings."""
    folder = Path(conftest).parent
    for item in items:
        if item.path.is_relative_to(folder):
            for ignored in IGNORED:
                item.add_marker(pytest.mark.filterwarnings(ignored))
