"""Lists a directory while a running server writes to it. Files that are removed or renamed during the listing are left
out."""

from __future__ import annotations

import os
from pathlib import Path


def stats_below(root: Path) -> dict[Path, os.stat_result]:
    """Return the file status of a directory and of everything below the directory, by path. Symbolic links are not
    followed.

    Files and directories that are removed during this call are left out. Without this care, a removal would raise
    FileNotFoundError, as `Path.rglob` and `Path.stat` do.
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
