"""Keeps read-only maps of whole files, a bounded number of them.

A map shows what other processes write to the file. An array handed out keeps its map alive: it stays readable after
the map has left this table, and after the file has been unlinked.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raymq.common.errors import ServiceNotAvailableError

DISK_FAILED: Final = frozenset({errno.EIO, errno.ENXIO, errno.ENODEV, errno.EUCLEAN, errno.EBADMSG, errno.ESTALE})
"""The errors of a disk, or of a file system, that cannot be read."""
SWEEP_INTERVAL_S: Final = 1.0
"""Maps of deleted files are looked for at most this often, when a new file is mapped: that takes a call per map."""


class _Map(NamedTuple):
    device: int
    inode: int
    size: int
    data: NDArray[np.uint8]


class FileMaps:
    """Maps by path, the least recently used dropped beyond `max_bytes` of address space or `max_files`. Thread-safe.

    A file that was replaced by another of the same name is noticed (by its inode) and mapped anew.
    """

    def __init__(self, *, max_bytes: int, max_files: int, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes = max_bytes
        self._max_files = max_files
        self._clock_s = clock_s
        self._swept_s = clock_s()
        self._lock = threading.Lock()
        self._maps: OrderedDict[str, _Map] = OrderedDict()
        self._bytes = 0
        self.on_failure: Callable[[OSError], None] | None = None
        """Called by any thread that finds that the disk cannot be read. It must not block. None where the files are
        only read: then the error is the caller's."""

    def get(self, path: str, *, at_random: bool = False) -> NDArray[np.uint8]:
        """The bytes of the file, read-only; empty for an empty file. FileNotFoundError if there is none.
        ServiceNotAvailableError if the disk cannot be read and `on_failure` was called; other errors are OSError. A
        part that cannot be read later is no error: the process ends by SIGBUS.

        `at_random`: the file is read in small parts anywhere, so that the kernel must not read ahead. On a disk that
        reads 8 MiB ahead, the first look at a queue's file would else make pages of all its 6 MB.
        """
        try:
            stat = os.stat(path)
            with self._lock:
                found = self._maps.get(path)
                if found is not None and found[:3] == (stat.st_dev, stat.st_ino, stat.st_size):
                    self._maps.move_to_end(path)
                    return found.data
            return self._insert(path, at_random=at_random)
        except OSError as error:
            if self.on_failure is None or error.errno not in DISK_FAILED:
                raise
            self.on_failure(error)
            raise ServiceNotAvailableError(
                f"{path} cannot be read: {error}. Ask again: another replica takes over, or the store is opened anew"
            ) from error

    def drop_map(self, path: str) -> None:
        """Drop the map of a file, which is being deleted: its blocks stay in use for as long as it is mapped."""
        with self._lock:
            found = self._maps.pop(path, None)
            if found is not None:
                self._bytes -= found.size

    def drop_maps_below(self, directory: str) -> None:
        """Drop the maps of all files in or below `directory`."""
        prefix = directory.rstrip("/") + "/"
        with self._lock:
            for path in [path for path in self._maps if path.startswith(prefix)]:
                self._bytes -= self._maps.pop(path).size

    def close(self) -> None:
        """Drop every map. Arrays handed out before stay readable."""
        with self._lock:
            self._maps.clear()
            self._bytes = 0

    def _insert(self, path: str, *, at_random: bool) -> NDArray[np.uint8]:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            stat = os.fstat(descriptor)
            if stat.st_size == 0:
                return np.empty(0, np.uint8)
            mapped = mmap.mmap(descriptor, stat.st_size, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
        if at_random:
            mapped.madvise(mmap.MADV_RANDOM)
        data = np.frombuffer(mapped, np.uint8)
        with self._lock:
            replaced = self._maps.pop(path, None)
            self._bytes += stat.st_size - (replaced.size if replaced is not None else 0)
            self._maps[path] = _Map(stat.st_dev, stat.st_ino, stat.st_size, data)
            self._drop_deleted()
            while len(self._maps) > 1 and (self._bytes > self._max_bytes or len(self._maps) > self._max_files):
                self._bytes -= self._maps.popitem(last=False)[1].size
        return data

    def _drop_deleted(self) -> None:
        """Drop the maps of deleted files: no reader asks for them again, and a map keeps its file's blocks in use."""
        now_s = self._clock_s()
        if now_s - self._swept_s >= SWEEP_INTERVAL_S:
            self._swept_s = now_s
            for path in [path for path in self._maps if not os.path.exists(path)]:
                self._bytes -= self._maps.pop(path).size
