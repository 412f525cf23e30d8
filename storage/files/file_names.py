"""The rules for a directory of equal-sized files, each named after the offset of its first byte (spec/storage.md §5).

The commit log and the consume queues are such directories. The names of consecutive files differ by one file size.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from raymq.common.errors import StoreCorruptError
from raymq.records.logfiles.directory import file_name
from storage.files import disk

logger = logging.getLogger(__name__)


def list_starts(directory: Path, size: int, *, remedy: str, repair: bool = False) -> list[int]:
    """Return the start offsets of the files in `directory`, ascending. Checks and repairs the files as `list_files`
    does."""
    return list(list_files([directory], size, remedy=remedy, repair=repair))


def list_files(directories: Sequence[Path], size: int, *, remedy: str, repair: bool = False) -> dict[int, Path]:
    """Return the files in `directories`, ascending by start offset; empty if the directories do not exist.

    Skips sub-directories. Deletes an empty last file, which a crash left. Raises StoreCorruptError if any other file
    has a wrong size, if a name is not an offset or occurs twice, or if a file is missing between two others. The error
    text ends with `remedy`.

    With `repair` (for files that can be rebuilt) a wrong size or a gap does not raise. Instead that file and all later
    files are deleted, because a power cut can keep a later file and lose an earlier one. On return all deletions are on
    disk.
    """
    found = [path for directory in directories if directory.is_dir() for path in directory.iterdir()]
    paths = sorted([path for path in found if not path.is_dir()], key=lambda path: path.name)
    if paths and paths[-1].stat().st_size == 0:
        _delete([paths.pop()])
    files: dict[int, Path] = {}
    expected = -1
    for path in paths:
        start = int(path.name) if path.name.isdecimal() else -1
        if start < 0 or start % size or path.name != file_name(start):
            raise StoreCorruptError(f"file {path} does not belong in a directory of files of {size} bytes; {remedy}")
        misfit = ""
        if path.stat().st_size != size:
            misfit = f"file {path} has {path.stat().st_size} bytes instead of {size}"
        elif start in files:
            misfit = f"file {path} also exists in {files[start].parent}"
        elif files and start != expected:
            misfit = f"file {' or '.join(str(directory / file_name(expected)) for directory in directories)} is missing"
        if misfit and not repair:
            raise StoreCorruptError(f"{misfit}; {remedy}")
        if misfit:
            logger.warning("%s; file %s and the later files are deleted and rebuilt", misfit, path)
            _delete(paths[len(files) :])
            break
        files[start] = path
        expected = start + size
    return files


def _delete(paths: Sequence[Path]) -> None:
    """Delete files and sync their directories. Without the sync, a power cut could bring back a deleted file after a
    clean stop, and nothing would delete the file again."""
    for path in paths:
        disk.unlink(path)
    for directory in {path.parent for path in paths}:
        disk.sync_directory(directory)
