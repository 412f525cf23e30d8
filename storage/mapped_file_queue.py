"""The rules for a directory of equal-sized files, each named after the offset of its first byte (spec/storage.md §5).

Commit log and consume queues are such directories. Neighbouring files differ by exactly one file size.
"""

from __future__ import annotations

import logging
from pathlib import Path

from raymq.errors import StoreCorruptError
from raymq.log_reader import file_name
from storage import disk

logger = logging.getLogger(__name__)


def list_starts(directory: Path, size: int, *, remedy: str, repair: bool = False) -> list[int]:
    """The start offsets of the files in `directory`, ascending; none if there is no such directory.

    Sub-directories are skipped. An empty last file is deleted: a crash left it. StoreCorruptError for any other wrong
    size, for a name that is not an offset, and for a gap between two files; its text ends with `remedy`. With `repair`
    (what the files hold can be made again) the files from a wrong size or a gap on are deleted instead: a power cut
    can leave that, as it may keep a later file and lose an earlier one.
    """
    if not directory.is_dir():
        return []
    paths = sorted(path for path in directory.iterdir() if not path.is_dir())
    if paths and paths[-1].stat().st_size == 0:
        disk.unlink(paths.pop())
    starts: list[int] = []
    for path in paths:
        start = int(path.name) if path.name.isdecimal() else -1
        if start < 0 or start % size or path.name != file_name(start):
            raise StoreCorruptError(f"{path} does not belong into a directory of files of {size} bytes; {remedy}")
        misfit = ""
        if path.stat().st_size != size:
            misfit = f"{path} has {path.stat().st_size} bytes where files have {size}"
        elif starts and start != starts[-1] + size:
            misfit = f"{directory / file_name(starts[-1] + size)} is missing"
        if misfit and not repair:
            raise StoreCorruptError(f"{misfit}; {remedy}")
        if misfit:
            logger.warning("%s; deleting %s and the files behind it, to make them again", misfit, path)
            for misplaced in paths[len(starts) :]:
                disk.unlink(misplaced)
            break
        starts.append(start)
    return starts
