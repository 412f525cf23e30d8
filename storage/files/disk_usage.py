"""Computes the used share of a disk, for retention and for the checks before a put. Also creates the errors for a full
disk."""

from __future__ import annotations

import errno
import math
import os
from pathlib import Path
from typing import Final

UNKNOWN_USAGE: Final = -1.0


def disk_usage(path: Path) -> float:
    """Return the used share of the disk that contains `path`, from 0 to 1; UNKNOWN_USAGE if the path does not
    exist."""
    try:
        found = os.statvfs(path)
    except FileNotFoundError:
        return UNKNOWN_USAGE
    return usage_ratio((found.f_blocks - found.f_bfree) * found.f_frsize, found.f_bavail * found.f_frsize)


def disk_free_bytes(path: Path) -> int:
    """Return the free bytes on the disk that contains `path`, without blocks reserved for other users.

    Returns -1 if the path does not exist.
    """
    try:
        found = os.statvfs(path)
    except FileNotFoundError:
        return -1
    return found.f_bavail * found.f_frsize


class NoRoomError(OSError):
    """Raised if a small file beside the log could not be written because the disk is full. The disk works, and no data
    is lost."""


def is_want_of_space(error: OSError) -> bool:
    """Return True if `error` means that the disk, or this user's quota, is full. The disk itself works."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def no_space_text(root: Path, log_file_bytes: int, error: OSError) -> str:
    """Return the error text for a store in `root` that accepts no appends because its disk has no room for the next
    file."""
    free_mib = max(disk_free_bytes(root), 0) >> 20
    return (
        f"the disk of {root} has no space for another file ({error.strerror}): {free_mib:,} MiB are free, and a "
        f"log file takes {log_file_bytes >> 20:,} MiB; nothing was stored. Free some space, use another data_dir, "
        "or lower mapped_file_size_commit_log_bytes of a new store"
    )


def usage_ratio(used_bytes: int, available_bytes: int) -> float:
    """Return the used share of a disk, rounded up to whole percent. Blocks reserved for other users do not count.

    Returns UNKNOWN_USAGE for a disk of size 0.
    """
    total = used_bytes + available_bytes
    return math.ceil(100 * used_bytes / total) / 100 if total > 0 else UNKNOWN_USAGE
