"""Find the parts of a file that can contain bytes other than zero, by a request to the file system instead of reading.

A preallocated file has blocks that were never written. These blocks read as zeros, and the file system records which
blocks they are. Reading these blocks would take seconds for a file of 1 GiB, and fill the page cache with zeros.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from typing import Final

from storage.files import disk

_FS_IOC_FIEMAP: Final = 0xC020660B
_EXTENTS_PER_CALL: Final = 512
_REQUEST: Final = struct.Struct("=QQLLLL")
"""Layout of a FIEMAP request: start, length, flags, extents found, extents that fit into the reply, reserved
(linux/fiemap.h)."""
_EXTENT: Final = struct.Struct("=QQQ16xL12x")
"""Layout of one extent in the FIEMAP reply: logical start, physical start, length, flags."""
_LAST: Final = 0x1
_UNWRITTEN: Final = 0x800
_NOT_SUPPORTED: Final = frozenset(
    {errno.EOPNOTSUPP, errno.ENOTTY, errno.ENOSYS, errno.EINVAL, errno.EBADR, errno.EPERM}
)


def written_extents(descriptor: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges between bytes `start` and `end` of the file that can contain bytes other than zero, ascending.

    No other thread or process may write to the file during the iteration. The file is flushed first, because the file
    system counts a block as written only when it is on disk. On a file system that does not record written blocks (such
    as tmpfs), some ranges may be all zeros. Raises OSError if the disk failed.
    """
    disk.flush(descriptor)
    position = start
    while position < end:
        try:
            extents = _next_extents(descriptor, position, end)
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:
                raise
            yield from data_ranges(descriptor, position, end)
            return
        for at, length, flags in extents:
            if not flags & _UNWRITTEN:
                yield max(at, start), min(at + length, end)
            position = end if flags & _LAST else at + length
        if not extents:
            return


def _next_extents(descriptor: int, start: int, end: int) -> list[tuple[int, int, int]]:
    """Return the extents of the file from byte `start` on, as (first byte, length, flags): at most
    _EXTENTS_PER_CALL."""
    answer = bytearray(_REQUEST.size + _EXTENTS_PER_CALL * _EXTENT.size)
    _REQUEST.pack_into(answer, 0, start, end - start, 0, 0, _EXTENTS_PER_CALL, 0)
    fcntl.ioctl(descriptor, _FS_IOC_FIEMAP, answer)
    count = _REQUEST.unpack_from(answer)[3]
    rows = [_EXTENT.unpack_from(answer, _REQUEST.size + index * _EXTENT.size) for index in range(count)]
    return [(at, length, flags) for at, _, length, flags in rows]


def data_ranges(descriptor: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges between bytes `start` and `end` of the file that are not holes (SEEK_DATA), ascending.

    Unlike `written_extents` this function needs no flush, but it counts a block as written if the block was ever read.
    Use it for files that are fast to read.
    """
    while start < end:
        try:
            start = os.lseek(descriptor, start, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:  # ENXIO means that the rest of the file has no data.
                raise
            return
        stop = min(os.lseek(descriptor, start, os.SEEK_HOLE), end)
        if start < stop:
            yield start, stop
        start = max(start, stop)
