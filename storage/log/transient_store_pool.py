"""The memory to which appends are copied before a commit writes them to the log's files in large ranges
(spec/storage.md §12).

Each buffer contains a range of the log: whole appends of one file, back to back, until a commit copies them to the
file. Uncommitted records exist only in this process, and are lost when it dies. A commit writes either all bytes that
it takes from a buffer, or nothing: the first 8 bytes are written last. So a process killed during the commit leaves the
log unchanged.

RocketMQ's buffers are as large as a log file, so five of them lock 5 GiB of memory. The buffers of this pool have 16
MiB each, and are reused while their pages are in memory. The pages are locked in memory as they are filled, if the
process is allowed to lock memory; otherwise the kernel may swap them out.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import threading
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from typing import Final

from storage.files.mapped_file import MappedFile

BUFFER_BYTES: Final = 16 << 20

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_MLOCK_ONFAULT: Final = 1

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _BufferedRange:
    """A range of the log, from offset `start` to `end`, that is in one buffer of the pool. A part of the range may be
    committed already."""

    start: int
    end: int
    buffer: memoryview


class TransientStorePool:
    """The buffers in which appends to a log wait until a commit writes them to the log's files. `file_size`: the size
    of a log file. One thread writes; any thread may commit.

    An append of more than `buffer_bytes` is not written to the pool.
    """

    def __init__(self, file_size: int, count: int) -> None:
        """Allocate `count` buffers of the pool, but at least two. Raises OSError if the address space is too
        small."""
        self._file_size = file_size
        self.buffer_bytes = min(BUFFER_BYTES, file_size)
        maps = [mmap.mmap(-1, self.buffer_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(count)]
        refused = next((reason for reason in map(_lock_in_memory, maps) if reason), "")
        if refused:
            logger.warning(
                "the transient store pool, %d buffers of %d bytes, is not locked in memory: %s; it may be swapped out "
                "unless the limit of locked memory is raised (ulimit -l)",
                count,
                self.buffer_bytes,
                refused,
            )
        self._free = [memoryview(one) for one in maps]
        self._stretches: list[_BufferedRange] = []
        """The ranges of the log that are in buffers, ascending. The writer adds ranges and extends the last one; a
        commit removes earlier ranges."""
        self._lock = threading.Lock()
        self._failure: OSError | None = None
        self.committed_offset = 0
        """The physical offset up to which the log's bytes are in the log files, not only in the pool. This offset is
        always the end of an append."""

    def begin_at(self, physical_offset: int) -> None:
        """Start to buffer the log at `physical_offset`. Everything before this offset is already in the log
        files."""
        self.committed_offset = physical_offset

    def has_buffer_for(self, physical_offset: int, size: int) -> bool:
        """Return True if a buffer of the pool is free, or if the log's next `size` bytes fit into the last written
        buffer."""
        in_one_file = physical_offset % self._file_size + size <= self._file_size
        return bool(self._free) or (in_one_file and self._fitting(physical_offset, size) is not None)

    def window(self, physical_offset: int, size: int) -> memoryview | None:
        """Return the part of a buffer into which the log's next `size` bytes must be written. `size` is at most
        `buffer_bytes`.

        Returns None if no buffer is free. After a commit all buffers but the last one are free.
        """
        stretch = self._fitting(physical_offset, size)
        if stretch is None:
            if not self._free:
                return None
            stretch = _BufferedRange(physical_offset, physical_offset, self._free.pop())
            self._stretches.append(stretch)
        position = physical_offset - stretch.start
        stretch.end = physical_offset + size
        return stretch.buffer[position : position + size]

    def _fitting(self, physical_offset: int, size: int) -> _BufferedRange | None:
        """Return the pool's last buffered range if `size` bytes at `physical_offset` can be written into its buffer.
        Otherwise returns None. The bytes must continue the range or replace its end, and fit into its buffer and its
        log file."""
        last = self._stretches[-1] if self._stretches else None
        fits = (
            last is not None
            and last.start <= physical_offset <= last.end
            and physical_offset + size <= last.start + self.buffer_bytes
            and physical_offset // self._file_size == last.start // self._file_size
        )
        return last if fits else None

    def commit(self, end_offset: int, files: Mapping[int, MappedFile]) -> None:
        """Write the buffered bytes up to `end_offset`, the end of an append, to the log files `files` (by start
        offset).

        On return the bytes survive the end of this process, but not a power cut. After an OSError nothing more is
        committed: every later call raises the error again.
        """
        with self._lock:
            if self._failure is not None:
                # Raise a copy: each raise of one error object makes its traceback longer.
                raise copy(self._failure) from self._failure
            try:
                for stretch in self._stretches.copy():
                    start, end = max(stretch.start, self.committed_offset), min(stretch.end, end_offset)
                    if start < end:
                        file = files[start - start % self._file_size]
                        data = stretch.buffer[start - stretch.start : end - stretch.start]
                        file.write_whole(start - file.start, data)
            except OSError as error:
                self._failure = error
                raise
            self._committed_to(end_offset)

    def skip_to(self, physical_offset: int) -> None:
        """Record that everything before `physical_offset` is in the log files. The caller must have committed the
        pool's bytes, and written the bytes after them directly to the log files."""
        with self._lock:
            self._committed_to(physical_offset)

    def _committed_to(self, end_offset: int) -> None:
        self.committed_offset = max(self.committed_offset, end_offset)
        # Free the buffers of all committed ranges except the last range, to which the writer may be adding bytes.
        while len(self._stretches) > 1 and self._stretches[0].end <= self.committed_offset:
            self._free.append(self._stretches.pop(0).buffer)


def _lock_in_memory(mapped: mmap.mmap) -> str:
    """Make the kernel lock the pages of a map in memory. Each page is locked when it is first written. Returns the
    reason if the kernel refuses, else an empty text."""
    lock = getattr(_LIBC, "mlock2", None)
    if lock is None:
        return "this system has no mlock2"
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    if lock(ctypes.c_void_p(address), ctypes.c_size_t(len(mapped)), _MLOCK_ONFAULT):
        return os.strerror(ctypes.get_errno())
    return ""
