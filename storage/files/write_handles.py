"""A bounded cache of files that are open for writing. It is needed because a store may have more queues than its
process may have open descriptors."""

from __future__ import annotations

import mmap
import os
from collections import OrderedDict
from pathlib import Path
from typing import Final

from storage.files import disk

_BLOCK_BYTES: Final = 512
"""The size in bytes of a block in `st_blocks`, the system's count of a file's blocks."""


class WriteHandles:
    """Open files by path, for use by one thread at a time. If more than `max_open` files are open, the least recently
    used file is closed.

    Files are written through maps: storing a queue unit of 20 bytes takes less time than a call of `pwrite`, and does
    not release the interpreter to other threads. A file that cannot be mapped for writing (disk.map_for_writing), or
    that lacks blocks, is written with `pwrite`.
    """

    def __init__(self, max_open: int) -> None:
        self._max_open = max_open
        self._files: OrderedDict[Path, int | mmap.mmap] = OrderedDict()
        self.closed_count = 0
        """The number of files closed so far. While this number does not change, maps that `map_of` returned remain
        open."""

    def write(self, path: Path, position: int, data: disk.Bytes) -> None:
        """Write all of `data` at byte `position` of the existing file `path`."""
        file = self._opened(path)
        if isinstance(file, int):
            disk.pwrite_all(file, position, data)
        else:
            file[position : position + len(data)] = data

    def map_of(self, path: Path) -> mmap.mmap | None:
        """Return the writable map of the existing file `path`; None if the file must be written with `write`.

        The caller may use the map only until a file is closed (`closed_count` changes), and must not keep a view of it.
        Raises OSError if the disk failed.
        """
        file = self._opened(path)
        return None if isinstance(file, int) else file

    def complete_writes(self) -> None:
        """Make all written bytes readable in the queue files. In this class the bytes are readable at once, so this
        method does nothing.

        A store with a transient store pool has handles that keep written bytes in memory first
        (storage.dispatch.held_units).
        """

    def close_file(self, path: Path) -> None:
        """Close the file `path`, which is about to be deleted."""
        file = self._files.pop(path, None)
        if file is not None:
            self._close(file)

    def close(self) -> None:
        while self._files:
            self._close(self._files.popitem()[1])

    def _opened(self, path: Path) -> int | mmap.mmap:
        file = self._files.get(path)
        if file is None:
            file = self._files[path] = _open(path)
            if len(self._files) > self._max_open:
                self._close(self._files.popitem(last=False)[1])
        else:
            self._files.move_to_end(path)
        return file

    def _close(self, file: int | mmap.mmap) -> None:
        self.closed_count += 1
        if isinstance(file, int):
            os.close(file)
        else:
            file.close()


def _open(path: Path) -> int | mmap.mmap:
    descriptor = disk.open_file(path, os.O_RDWR)
    try:
        status = os.fstat(descriptor)
        has_blocks = status.st_blocks * _BLOCK_BYTES >= status.st_size
        mapped = disk.map_for_writing(descriptor, status.st_size) if has_blocks else None
    except BaseException:
        os.close(descriptor)
        raise
    if mapped is None:
        return descriptor
    os.close(descriptor)
    return mapped
