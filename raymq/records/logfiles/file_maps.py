"""A bounded table of read-only memory maps of whole files.

A map shows bytes that other processes write to the file. An array from the table keeps its map alive. So the array
stays readable after the table has dropped the map, and after the file has been deleted.

LogDirectory maps the files of a commit log in one directory. LogDirectories does so for a log that alternates between
several directories. A reader uses one of these classes, and requests a file by its first physical offset.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from raymq.common.config.values import COMMIT_LOG_DIR
from raymq.common.errors import ServiceNotAvailableError
from raymq.records.logfiles.directory import file_name

DISK_FAILED: Final = frozenset({errno.EIO, errno.ENXIO, errno.ENODEV, errno.EUCLEAN, errno.EBADMSG, errno.ESTALE})
"""Error numbers (errno) which mean that a disk or a file system cannot be read."""
SWEEP_INTERVAL_S: Final = 1.0
"""Minimum time in s between two searches for memory maps of deleted files. A search makes one system call per map, and
runs when a new file is mapped."""


class _Map(NamedTuple):
    device: int
    inode: int
    size: int
    data: NDArray[np.uint8]


class FileMaps:
    """Read-only memory maps of files, by path. If the maps exceed `max_bytes` of address space or `max_files`, the
    least recently used maps are dropped. Thread-safe.

    If another file has replaced a mapped file under the same name, the inode or size differs, and the new file is
    mapped.
    """

    def __init__(self, *, max_bytes: int, max_files: int, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes = max_bytes
        self._max_files = max_files
        self._clock_s = clock_s
        self._swept_s = clock_s()
        self._lock = threading.Lock()
        self._maps: OrderedDict[str, _Map] = OrderedDict()
        self._bytes = 0
        _all_maps[id(self)] = self
        self.on_failure: Callable[[OSError], None] | None = None
        """Callback that any thread calls when it finds that the disk cannot be read. It must not block. If it is None,
        `get` instead raises the OSError to its caller."""

    def get(self, path: str, *, at_random: bool = False) -> NDArray[np.uint8]:
        """Return the bytes of a file as a read-only array over a memory map; an empty array for an empty file.

        Raises FileNotFoundError if the file does not exist. If the disk cannot be read, calls `on_failure` and raises
        ServiceNotAvailableError. Raises OSError for other failures, or if `on_failure` is None. If a part of the map
        cannot be read later, no error is raised: the signal SIGBUS ends the process.

        `at_random`: the caller reads small parts at random positions, so the kernel must not read ahead. On a disk with
        a read-ahead of 8 MiB, the first read of a consume-queue file would otherwise load all of its 6 MB.
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
                f"file {path} cannot be read: {error}. Retry later: another replica takes over, or the store "
                "opens again"
            ) from error

    def drop_map(self, path: str) -> None:
        """Drop the memory map of a file that is being deleted. The file's disk blocks stay in use while the file is
        mapped."""
        with self._lock:
            found = self._maps.pop(path, None)
            if found is not None:
                self._bytes -= found.size

    def drop_maps_below(self, directory: str) -> None:
        """Drop the memory maps of all files in or below `directory`."""
        prefix = directory.rstrip("/") + "/"
        with self._lock:
            for path in [path for path in self._maps if path.startswith(prefix)]:
                self._bytes -= self._maps.pop(path).size

    def close(self) -> None:
        """Drop every memory map. Arrays from earlier calls stay readable."""
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
        # Search the tables of all stores: a consumer maps nothing more of a former master, but has mapped its log.
        for reference in _all_maps.valuerefs():
            if (maps := reference()) is not None:
                maps._drop_deleted()
        with self._lock:
            replaced = self._maps.pop(path, None)
            self._bytes += stat.st_size - (replaced.size if replaced is not None else 0)
            self._maps[path] = _Map(stat.st_dev, stat.st_ino, stat.st_size, data)
            while len(self._maps) > 1 and (self._bytes > self._max_bytes or len(self._maps) > self._max_files):
                self._bytes -= self._maps.popitem(last=False)[1].size
        return data

    def _drop_deleted(self) -> None:
        """Drop this table's memory maps of deleted files. No reader requests these files again, and a map keeps the
        file's disk blocks in use."""
        with self._lock:
            now_s = self._clock_s()
            if now_s - self._swept_s >= SWEEP_INTERVAL_S:
                self._swept_s = now_s
                for path in [path for path in self._maps if not os.path.exists(path)]:
                    self._bytes -= self._maps.pop(path).size


_all_maps: WeakValueDictionary[int, FileMaps] = WeakValueDictionary()
"""All tables of this process, by their ids. Each of its methods that is used here makes one step under Python's global
lock, so no lock is needed, which a forked child could find locked."""


class LogDirectory:
    """Maps the files of a commit log that are in one directory."""

    def __init__(self, maps: FileMaps, directory: str) -> None:
        self._maps, self._directory = maps, directory

    def __str__(self) -> str:
        return self._directory

    def map_file(self, start: int) -> memoryview:
        """Return the bytes of the commit log file that starts at physical offset `start`. Raises FileNotFoundError if
        the file does not exist."""
        return self._maps.get(f"{self._directory}/{file_name(start)}").data


class LogDirectories:
    """Maps the files of a commit log that are in several directories. The directories are in alphabetical
    order."""

    def __init__(self, maps: FileMaps, directories: Sequence[str], file_size: int) -> None:
        self._directories = [LogDirectory(maps, directory) for directory in directories]
        self._file_size = file_size

    def __str__(self) -> str:
        return ", ".join(map(str, self._directories))

    def map_file(self, start: int) -> memoryview:
        """Return the bytes of the commit log file that starts at physical offset `start`. Raises FileNotFoundError if
        the file does not exist.

        Files are assigned to the directories in turn. If the assigned directory was full, the file is in another
        directory (storage.log.log_paths).
        """
        turn = start // self._file_size % len(self._directories)
        for directory in self._directories[turn:] + self._directories[:turn]:
            try:
                return directory.map_file(start)
            except FileNotFoundError:
                continue
        raise FileNotFoundError(f"log file {file_name(start)} is not in {self}")


def open_log_directories(
    maps: FileMaps, root: Path | str, directories: Sequence[Path | str], file_size: int
) -> LogDirectory | LogDirectories:
    """Return an object that maps the commit log files of the store at `root`. The files are in `directories`; if
    `directories` is empty, they are in the default directory below `root`."""
    names = sorted(map(str, directories)) or [f"{root}/{COMMIT_LOG_DIR}"]
    return LogDirectory(maps, names[0]) if len(names) == 1 else LogDirectories(maps, names, file_size)
