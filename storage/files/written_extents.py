"""Finding the parts of a file that can hold bytes other than zero by asking the file system, without reading them.

A preallocated file has blocks that were never written. They read as zeros, and the file system knows which they are;
reading them takes seconds for a file of 1 GiB, and fills the page cache with nothing.
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
"""start, length, flags, extents found, extents that fit into the answer, reserved (linux/fiemap.h)."""
_EXTENT: Final = struct.Struct("=QQQ16xL12x")
"""logical start, physical start, length, flags."""
_LAST: Final = 0x1
_UNWRITTEN: Final = 0x800
_NOT_SUPPORTED: Final = frozenset(
    {errno.EOPNOTSUPP, errno.ENOTTY, errno.ENOSYS, errno.EINVAL, errno.EBADR, errno.EPERM}
)


def written_extents(descriptor: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    """The ranges of the file between bytes `start` and `end` outside of which all is zero, ascending.

    Nobody else may write to the file meanwhile. It is flushed: the file system counts a block as written only when
    it is on disk. Where it keeps no such record (tmpfs, for one) ranges that are all zero may be among them. OSError
    when the disk fails.
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
    """The extents from byte `start` on, as (first byte, length, flags): at most _EXTENTS_PER_CALL."""
    answer = bytearray(_REQUEST.size + _EXTENTS_PER_CALL * _EXTENT.size)
    _REQUEST.pack_into(answer, 0, start, end - start, 0, 0, _EXTENTS_PER_CALL, 0)
    fcntl.ioctl(descriptor, _FS_IOC_FIEMAP, answer)
    count = _REQUEST.unpack_from(answer)[3]
    rows = [_EXTENT.unpack_from(answer, _REQUEST.size + index * _EXTENT.size) for index in range(count)]
    return [(at, length, flags) for at, _, length, flags in rows]


def data_ranges(descriptor: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    """The ranges of the file between bytes `start` and `end` that are no holes, ascending.

    Unlike `written_extents` it needs no flush, and takes a block for written if it was ever read. It is for files that
    are read quickly.
    """
    while start < end:
        try:
            start = os.lseek(descriptor, start, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:  # ENXIO: nothing but holes up to the end
                raise
            return
        stop = min(os.lseek(descriptor, start, os.SEEK_HOLE), end)
        if start < stop:
            yield start, stop
        start = max(start, stop)
