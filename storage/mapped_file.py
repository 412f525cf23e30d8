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

CHUNK_BYTES: Final = 1 << 20

_ZEROS: Final = bytes(CHUNK_BYTES)

Bytes = bytes | bytearray | memoryview | NDArray[np.uint8]


class MappedFile:
    """An open file of `size` bytes whose first byte has offset `start` in its queue of files. One thread writes."""

    def __init__(self, path: Path, start: int, size: int) -> None:
        """Open an existing file for writing. Its blocks are allocated if they are not, so that writing cannot fail."""
        self.path, self.start, self.size = path, start, size
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.posix_fallocate(self._descriptor, 0, size)
        except BaseException:
            self.close()
            raise

    @classmethod
    def create(cls, path: Path, start: int, size: int, *, scratch: Path) -> MappedFile:
        """Make a file of `size` zero bytes at `path`. `scratch`: a name in the same file system to make it under.

        OSError (a full disk, for one) leaves nothing behind. The name is on disk after `sync_directory`.
        """
        allocate(scratch, size)
        os.rename(scratch, path)
        return cls(path, start, size)

    def write(self, position: int, data: Bytes) -> None:
        """Write `data` at byte `position` of the file. On return it outlives this process, not a power cut."""
        pwrite_all(self._descriptor, position, data)

    def flush(self) -> None:
        """Wait until everything written is on disk. After an OSError it is not known what is."""
        os.fdatasync(self._descriptor)

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
            pwrite_all(self._descriptor, at, bytes(min(CHUNK_BYTES, end - at)))

    def close(self) -> None:
        """Close the descriptor; idempotent. Nothing is flushed."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def allocate(path: Path, size: int) -> None:
    """Make `path` a file of `size` zero bytes with all its blocks, or raise OSError and leave nothing."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        os.posix_fallocate(descriptor, 0, size)
    except BaseException:
        path.unlink()
        raise
    finally:
        os.close(descriptor)


def pwrite_all(descriptor: int, position: int, data: Bytes) -> None:
    """`os.pwrite` until all of `data` is written."""
    view = data.data if isinstance(data, np.ndarray) else memoryview(data)
    written = os.pwrite(descriptor, view, position)
    while written < len(view):
        written += os.pwrite(descriptor, view[written:], position + written)


def sync_directory(directory: Path) -> None:
    """Wait until the names in `directory` are on disk."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_path(path: Path) -> None:
    """Wait until everything written to the file at `path` is on disk; nothing to do if it is gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        os.fdatasync(descriptor)
    finally:
        os.close(descriptor)
