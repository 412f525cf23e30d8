"""A bounded number of files open for writing: a store may have more queues than the process may have descriptors."""

from __future__ import annotations

import mmap
import os
from collections import OrderedDict
from pathlib import Path

from storage.files import disk


class WriteHandles:
    """Open files by path; beyond `max_open` the least recently used is closed. For one thread at a time.

    With `mapped` they are written through maps: a unit of 20 bytes is stored in less time than a call of `pwrite`
    takes, and without giving the interpreter away to other threads. The files' blocks must be allocated.
    """

    def __init__(self, max_open: int, *, mapped: bool = False) -> None:
        self._max_open, self._mapped = max_open, mapped
        self._files: OrderedDict[Path, int | mmap.mmap] = OrderedDict()

    def write(self, path: Path, position: int, data: disk.Bytes) -> None:
        """Write all of `data` at byte `position` of the existing file `path`."""
        file = self._files.get(path)
        if file is None:
            file = self._open(path)
            self._files[path] = file
            if len(self._files) > self._max_open:
                _close(self._files.popitem(last=False)[1])
        else:
            self._files.move_to_end(path)
        if isinstance(file, int):
            disk.pwrite_all(file, position, data)
        else:
            file[position : position + len(data)] = data

    def complete_writes(self) -> None:
        """Have all that was written in the files, so that it can be read there. Here it is already: a store with a
        transient store pool has handles that hold it back (storage.dispatch.held_units)."""

    def close_file(self, path: Path) -> None:
        """Close `path`, which is about to be deleted."""
        file = self._files.pop(path, None)
        if file is not None:
            _close(file)

    def close(self) -> None:
        """Close everything."""
        while self._files:
            _close(self._files.popitem()[1])

    def _open(self, path: Path) -> int | mmap.mmap:
        if not self._mapped:
            return disk.open_file(path, os.O_WRONLY)
        descriptor = disk.open_file(path, os.O_RDWR)
        try:
            mapped = mmap.mmap(descriptor, 0)
        finally:
            os.close(descriptor)
        # Else the first store into a new file reads megabytes of it ahead.
        mapped.madvise(mmap.MADV_RANDOM)
        return mapped


def _close(file: int | mmap.mmap) -> None:
    if isinstance(file, int):
        os.close(file)
    else:
        file.close()
