"""A directory that a running server writes: what is removed or renamed while a test looks at it is left out."""

from __future__ import annotations

import os
from pathlib import Path


def stats_below(root: Path) -> dict[Path, os.stat_result]:
    """The file status of a directory and of everything below it, by path; links are not followed.

    `Path.rglob` raises FileNotFoundError for a directory that is gone before it is read, and `Path.stat` for a path
    that is gone since it was listed.
    """
    found = {root: root.stat()}
    for directory, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = Path(directory, name)
            try:
                found[path] = path.lstat()
            except FileNotFoundError:
                continue
    return found
