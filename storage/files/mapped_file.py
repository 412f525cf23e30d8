"""One file of the log or of a queue. The file is preallocated, written through a memory map or by position, and read
through maps.

A file is allocated under another name and renamed. So it gets its final name only after it has its full size and all
its blocks. A full disk raises OSError before anything is written, and a crash leaves no file of a wrong size.
"""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from storage.files import disk
from storage.files.written_extents import data_ranges, written_extents

ZEROING_CHUNK_BYTES: Final = 1 << 20
HEAD_BYTES: Final = 8

_ZEROS: Final = bytes(ZEROING_CHUNK_BYTES)
_FLUSH_FIRST_BYTES: Final = 16 << 20
"""Size, in bytes, of the part that `used_end` searches: from a position to the file's end. If the part is larger than
this size, `used_end` flushes the file before the search. After the flush the file system can report which blocks were
written."""

Bytes = disk.Bytes | NDArray[np.uint8]


class MappedFile:
    """A file of the log or of a queue, with `size` bytes, that is open for writing. `start`: the offset of the file's
    first byte in the whole log or queue. Only one thread may write."""

    def __init__(self, path: Path, start: int, size: int) -> None:
        """Open an existing file for writing, and allocate its missing blocks, so that no later write fails for lack of
        space."""
        self.path, self.start, self.size = path, start, size
        self._descriptor = disk.open_file(path, os.O_RDWR)
        self.mapped: mmap.mmap | None = None
        """The file's writable map. None if the file cannot safely be written through a map, so that `write` must be
        used.

        On close the map is dropped, not closed: it remains valid for threads that still use it.
        """
        try:
            disk.preallocate(self._descriptor, size)
            self.mapped = disk.map_for_writing(self._descriptor, size)
        except BaseException:
            self.close()
            raise

    @classmethod
    def create(cls, path: Path, start: int, size: int, *, scratch: Path) -> MappedFile:
        """Create a file of `size` zero bytes at `path`. The file is first created under the name `scratch` in the same
        file system, and then renamed.

        After an OSError (for example, a full disk) no file is left. On return the file's size is on disk, but its name
        may not be. The caller makes the name durable with `disk.sync_directory`. A power cut leaves the whole file or
        none.
        """
        allocate(scratch, size, flush=True)
        disk.rename(scratch, path)
        return cls(path, start, size)

    def write(self, position: int, data: Bytes) -> None:
        """Write `data` at byte `position` of the file. On return the data survives the end of this process, but not a
        power cut."""
        disk.pwrite_all(self._descriptor, position, data.data if isinstance(data, np.ndarray) else data)

    def write_whole(self, position: int, data: memoryview) -> None:
        """Write `data` as `write` does, but write its first 8 bytes last. Until these bytes are written, every reader
        finds the log's end at `position`."""
        self.write(position + HEAD_BYTES, data[HEAD_BYTES:])
        self.write(position, data[:HEAD_BYTES])

    def flush(self) -> None:
        """Wait until everything written to the file is on disk. After an OSError it is unknown what is on disk.

        Also raises OSError if the file was deleted and has no name any more: its bytes would be lost when this process
        ends.
        """
        disk.flush(self._descriptor)
        if not os.fstat(self._descriptor).st_nlink:
            raise OSError(errno.ENOENT, "the file was deleted while the store had the file open", str(self.path))

    def used_end(self, position: int) -> int:
        """Return the offset after the file's last byte that is not zero. Only bytes from `position` on count; return
        `position` if all of them are zero.

        Reads only blocks that were ever written. A large file is flushed first, so that the file system can report
        these blocks.
        """
        find = written_extents if self.size - position > _FLUSH_FIRST_BYTES else data_ranges
        end = position
        for start, stop in find(self._descriptor, position, self.size):
            end = max(end, self._used_end_within(start, stop))
        return end

    def _used_end_within(self, start: int, stop: int) -> int:
        """Return the offset after the last byte of the file range that is not zero; 0 if all bytes of the range are
        zero."""
        end, at = 0, start
        buffer = bytearray(min(ZEROING_CHUNK_BYTES, stop - start))
        while at < stop:
            read = os.preadv(self._descriptor, [memoryview(buffer)[: stop - at]], at)
            if not read:
                raise OSError(
                    errno.EIO, f"file {self.path} ends at byte {at}, before its full size of {self.size} bytes"
                )
            data = buffer if read == len(buffer) else buffer[:read]
            if data != _ZEROS[:read]:
                end = at + len(data.rstrip(b"\0"))
            at += read
        return end

    def zero(self, position: int, end: int) -> None:
        """Overwrite the bytes of the file from `position` up to `end` with zeros."""
        for at in range(position, end, ZEROING_CHUNK_BYTES):
            disk.pwrite_all(self._descriptor, at, bytes(min(ZEROING_CHUNK_BYTES, end - at)))

    def close(self) -> None:
        """Close the file's descriptor and drop its map, without a flush. Idempotent."""
        self.mapped = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def allocate(path: Path, size: int, *, flush: bool = False, sparse: bool = False) -> None:
    """Create the file `path` with `size` zero bytes and all of its blocks, or raise OSError and leave no file.

    With `flush` the size is on disk on return. A `sparse` file has no blocks yet, so it must not be written through a
    map.
    """
    descriptor = disk.open_file(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        if sparse:
            os.truncate(descriptor, size)
        else:
            disk.preallocate(descriptor, size)
        if flush:
            disk.flush(descriptor)
    except BaseException:
        disk.unlink(path)
        raise
    finally:
        os.close(descriptor)
