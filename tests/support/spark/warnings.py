"""The warnings of PySpark that tests ignore."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

# PySpark warns about distutils. Py4J closes its sockets at any time.
IGNORED = ["ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"]


def ignore_warnings(items: Iterable[pytest.Item], conftest: str) -> None:
    """Make all tests in and below the folder of `conftest` ignore PySpark's warnings. `conftest`: a conftest's
    `__file__`."""
    folder = Path(conftest).parent
    for item in items:
        if item.path.is_relative_to(folder):
            for ignored in IGNORED:
                item.add_marker(pytest.mark.filterwarnings(ignored))
