"""One file of the store: equal-sized, preallocated, written by position, read through maps.

A file appears under its name only when it has its full size and its blocks: it is allocated under another name and
renamed. So a full disk is an OSError before anything is written, and a crash leaves no file of a wrong size.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from storage import disk

CHUNK_BYTES: Final = 1 << 20

_ZEROS: Final = bytes(CHUNK_BYTES)

Bytes = disk.Bytes | NDArray[np.uint8]


class MappedFile:
    """An open file of `size` bytes whose first byte has offset `start` in its queue of files. One thread writes."""

    def __init__(self, path: Path, start: int, size: int) -> None:
        """Open an existing file for writing. Its blocks are allocated if they are not, so that writing cannot fail."""
        self.path, self.start, self.size = path, start, size
        self._descriptor = disk.open_file(path, os.O_RDWR)
        try:
            disk.preallocate(self._descriptor, size)
        except BaseException:
            self.close()
            raise

    @classmethod
    def create(cls, path: Path, start: int, size: int, *, scratch: Path) -> MappedFile:
        """Make a file of `size` zero bytes at `path`. `scratch`: a name in the same file system to make it under.

        OSError (a full disk, for one) leaves nothing behind. The size is on disk, the name after `disk.sync_directory`:
        a power cut leaves the whole file or none.
        """
        allocate(scratch, size, flush=True)
        disk.rename(scratch, path)
        return cls(path, start, size)

    def write(self, position: int, data: Bytes) -> None:
        """Write `data` at byte `position` of the file. On return it outlives this process, not a power cut."""
        disk.pwrite_all(self._descriptor, position, data.data if isinstance(data, np.ndarray) else data)

    def flush(self) -> None:
        """Wait until everything written is on disk. After an OSError it is not known what is."""
        disk.flush(self._descriptor)

    def used_end(self, position: int) -> int:
        """Where, from `position` on, the last byte that is not zero ends; `position` if all are zero.

        Only blocks that were ever written are read.
        """
        end = at = position
        while at < self.size:
            try:
                at = os.lseek(self._descriptor, at, os.SEEK_DATA)
            except OSError as error:
                if error.errno != errno.ENXIO:  # ENXIO: nothing but holes up to the end
                    raise
                break
            data = os.pread(self._descriptor, min(CHUNK_BYTES, self.size - at), at)
            if data != _ZEROS[: len(data)]:
                end = at + len(data.rstrip(b"\0"))
            at += len(data)
        return end

    def zero(self, position: int, end: int) -> None:
        """Overwrite the bytes from `position` up to `end` with zeros."""
        for at in range(position, end, CHUNK_BYTES):
            disk.pwrite_all(self._descriptor, at, bytes(min(CHUNK_BYTES, end - at)))

    def close(self) -> None:
        """Close the descriptor; idempotent. Nothing is flushed."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def allocate(path: Path, size: int, *, flush: bool = False) -> None:
    """Make `path` a file of `size` zero bytes with all its blocks, or raise OSError and leave nothing. With `flush` its
    size is on disk on return."""
    descriptor = disk.open_file(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        disk.preallocate(descriptor, size)
        if flush:
            disk.flush(descriptor)
    except BaseException:
        disk.unlink(path)
        raise
    finally:
        os.close(descriptor)
