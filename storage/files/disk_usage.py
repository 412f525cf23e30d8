"""How full the disk of a directory is, as retention and the put checks count it."""

from __future__ import annotations

import os
from pathlib import Path

from storage.retention.rules import UNKNOWN_USAGE, usage_ratio


def disk_usage(path: Path) -> float:
    """How full the disk of `path` is, from 0 to 1; -1 if there is no such path."""
    try:
        found = os.statvfs(path)
    except FileNotFoundError:
        return UNKNOWN_USAGE
    return usage_ratio((found.f_blocks - found.f_bfree) * found.f_frsize, found.f_bavail * found.f_frsize)
