"""A sink for `foreachBatch` that a test may kill at any time. The sink writes one file per batch; the file is complete
or missing.

DIRECTORY/17.begun exists if the sink was called for batch 17. DIRECTORY/17.json has the rows of batch 17 in one line:
[[broker_name, queue_id, queue_offset, body], …]. DIRECTORY/17.different exists if batch 17 was repeated with other
rows.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Final

from pyspark.sql import DataFrame

Row = tuple[str | int, ...]
"""A message as the sink stores it: broker name, queue id, queue offset, and the body if the sink keeps bodies."""

PLACE: Final = ("broker_name", "queue_id", "queue_offset")
PLACE_AND_BODY: Final = (*PLACE, "cast(body as string)")


class BatchFiles:
    """A `foreachBatch` sink that writes batch files into `directory`, and creates the directory. `columns`: SQL
    expressions of the columns to store."""

    def __init__(self, directory: Path, columns: Sequence[str] = PLACE_AND_BODY) -> None:
        self._directory, self._columns = directory, columns
        directory.mkdir(parents=True, exist_ok=True)

    def __call__(self, batch: DataFrame, number: int) -> None:
        (self._directory / f"{number}.begun").touch()
        found = batch.selectExpr(*self._columns).collect()
        text = json.dumps([list(row) for row in found])
        whole = self._directory / f"{number}.json"
        if whole.exists():
            if whole.read_text() != text:
                (self._directory / f"{number}.different").write_text(text)
            return
        part = self._directory / f"{number}.part"
        part.write_text(text)
        os.replace(part, whole)

    def forget_unfinished(self) -> None:
        """Remove the `.begun` files of batches that the sink began but did not finish."""
        for begun in self._directory.glob("*.begun"):
            if not begun.with_suffix(".json").exists():
                begun.unlink()

    def count(self, suffix: str) -> int:
        """Return the number of batch files whose names have the given suffix."""
        return sum(1 for _ in self._directory.glob(f"*.{suffix}"))

    def rows(self) -> list[Row]:
        """Return the rows of all batches in the order of the batches. Fails if a batch is missing."""
        numbers = sorted(int(path.stem) for path in self._directory.glob("*.json"))
        assert numbers == list(range(len(numbers)))
        texts = [(self._directory / f"{number}.json").read_text() for number in numbers]
        return [tuple(row) for row in chain(*map(json.loads, texts))]
