"""How full the disk of a directory is, as retention and the put checks count it."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Final


def disk_usage(path: Path) -> float:
    """How full the disk of `path` is, from 0 to 1; -1 if there is no such path."""
    try:
        found = os.statvfs(path)
    except FileNotFoundError:
        return UNKNOWN_USAGE
    return usage_ratio((found.f_blocks - found.f_bfree) * found.f_frsize, found.f_bavail * found.f_frsize)


UNKNOWN_USAGE: Final = -1.0


def usage_ratio(used_bytes: int, available_bytes: int) -> float:
    """How full the part of a disk is that this process may use, without blocks reserved for others: rounded up to
    whole percent; -1 for a disk of no size."""
    total = used_bytes + available_bytes
    return math.ceil(100 * used_bytes / total) / 100 if total > 0 else UNKNOWN_USAGE
