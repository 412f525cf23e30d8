"""Reading a store's files by calls, after a process could not read one of them through its map.

The kernel answers a failed read through a map with the signal SIGBUS, which ends the process. The same read by `pread`
is an error with a text. So whoever opens a store whose last process ended by SIGBUS reads the files by calls first, and
learns which file cannot be read.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from raymq.common.errors import StoreError
from storage.files import disk

CHECK_MAX_S: Final = 60.0
"""The longest time for the files of one store. The newest are read first."""
_STEP_BYTES: Final = 1 << 20


def require_readable(
    directories: Iterable[Path], *, max_s: float = CHECK_MAX_S, clock_s: Callable[[], float] = time.monotonic
) -> str:
    """Read the files below the directories, the newest first, for `max_s` at the most. Returns what was read, in words.

    StoreError names the first file that cannot be read. Nothing is changed.
    """
    paths = [path for directory in directories for path in directory.rglob("*") if path.is_file()]
    paths.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
    end_s, read = clock_s() + max_s, 0
    for path in paths:
        if clock_s() >= end_s:
            break
        _read(path, end_s, clock_s)
        read += 1
    return f"{read} of {len(paths)} files were read without an error"


def _read(path: Path, end_s: float, clock_s: Callable[[], float]) -> None:
    position = 0
    try:
        descriptor = disk.open_file(path, os.O_RDONLY)
        try:
            while clock_s() < end_s:
                read = len(disk.pread(descriptor, _STEP_BYTES, position))
                position += read
                if not read:
                    return
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        return
    except OSError as error:
        raise StoreError(
            f"{path} cannot be read from byte {position} on: {error}. The process before ended by a bus error (SIGBUS) "
            "for such a read. The store stays closed, and another replica leads. Replace the disk: drain the node "
            "(raymq drain), or move the store's directory away"
        ) from error
