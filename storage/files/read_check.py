"""Read a store's files with `pread`, to find a file that cannot be read through a memory map.

If a read through a map fails, the kernel sends SIGBUS, which ends the process. The same read by `pread` raises an error
with a text. So if a store's last process ended by SIGBUS, the next process first reads the files with `pread`.
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
"""Time limit in seconds for reading the files of one store. The newest files are read first."""
_STEP_BYTES: Final = 1 << 20


def require_readable(
    directories: Iterable[Path], *, max_s: float = CHECK_MAX_S, clock_s: Callable[[], float] = time.monotonic
) -> str:
    """Read the files below `directories`, newest first, for at most `max_s` seconds. Returns a description of the files
    that were read.

    Raises StoreError, with the name of the file, if a file cannot be read. No file is changed.
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
            f"file {path} cannot be read from byte {position} on: {error}. The previous process was killed by a "
            "bus error (SIGBUS) at such a read. The store stays closed, and another replica leads. Replace the "
            "disk: drain the node (raymq drain), or move the store's directory away"
        ) from error
