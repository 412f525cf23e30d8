"""The warnings of PySpark that tests ignore."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

# The warnings are not raymq's fault: PySpark uses distutils, which is deprecated, and Py4J leaves its sockets open
# until the garbage collector closes them.
IGNORED = ["ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"]


def ignore_warnings(items: Iterable[pytest.Item], conftest: str) -> None:
    """Make all tests in and below the folder of a conftest.py ignore PySpark's warnings. `conftest`: the `__file__` of
    that conftest.py."""
    folder = Path(conftest).parent
    for item in items:
        if item.path.is_relative_to(folder):
            for ignored in IGNORED:
                item.add_marker(pytest.mark.filterwarnings(ignored))
