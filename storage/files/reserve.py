"""Disk space reserved for the broker's state: one file that is deleted if the disk is full.

On disk
    reserve                 zeros with all their blocks; missing if it was used, or if the disk had no room for it

A full disk must not stop consumers: their offsets, leases and memberships are records of the broker's state. The log
reserves space for these records in its own files (storage/log/commit_log.py). In addition, the state needs the next
file of its queue, and small texts in `config/`. If the disk has no space for one of these files, the reserve is
deleted, and the write is retried once. The cleaner creates the reserve again as soon as the disk has space.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar
from weakref import WeakValueDictionary

from storage.files import disk
from storage.files.disk_usage import is_want_of_space
from storage.files.mapped_file import allocate

RESERVE_FILE: Final = "reserve"
SMALL_FILES_MAX_BYTES: Final = 8 << 20
"""Number of bytes of the reserved disk space that are meant for small files outside the log. A store with small log
files reserves less."""

T = TypeVar("T")

logger = logging.getLogger(__name__)


class SpaceReserve:
    """The reserved disk space of the store in `root`. Thread-safe."""

    def __init__(self, root: Path, size: int) -> None:
        """Find the reserve file of `size` bytes, or create it. If the disk is full, no error is raised: the store then
        has no reserve."""
        self._path, self._size = root / RESERVE_FILE, size
        self._lock = threading.Lock()
        self._is_reported = False
        """True if the store has reported that the reserve file is missing, and the file is still missing."""
        _reserves[root.resolve()] = self
        self.make()

    def make(self) -> None:
        """Create the reserve file, unless it exists with the right size or the disk has no space for it. Raises OSError
        if the disk failed."""
        with self._lock:
            if self._path.exists() and self._path.stat().st_size == self._size:
                return
            scratch = self._path.with_name(f"{RESERVE_FILE}.new")
            try:
                allocate(scratch, self._size)
                disk.rename(scratch, self._path)
            except OSError as error:
                if not is_want_of_space(error):
                    raise
                if not self._is_reported:
                    logger.error(
                        "the disk of %s has no space for a reserve of %d bytes: %s",
                        self._path.parent,
                        self._size,
                        error,
                    )
                    self._is_reported = True
                return
            if self._is_reported:
                logger.warning("the disk of %s has a reserve of %d bytes again", self._path.parent, self._size)
            self._is_reported = False

    def release(self) -> bool:
        """Delete the reserve file, so that its space can be used. Returns False if the file did not exist. Raises
        OSError if the disk failed."""
        with self._lock:
            if not self._path.exists():
                return False
            disk.unlink(self._path)
            logger.error("the disk of %s is full: its reserve of %d bytes is now used", self._path.parent, self._size)
            self._is_reported = True
            return True

    def write(self, write: Callable[[], T]) -> T:
        """Call the function `write`. If it fails because the disk is full, delete the reserve file, which frees its
        bytes, and call `write` once more.

        Raises the OSError of the last call.
        """
        try:
            return write()
        except OSError as error:
            if not is_want_of_space(error) or not self.release():
                raise
        return write()


_reserves: Final[WeakValueDictionary[Path, SpaceReserve]] = WeakValueDictionary()
"""The SpaceReserve of each open store, by store directory."""


def write_with_reserve(root: Path, write: Callable[[], T]) -> T:
    """Call `write` with the reserve of the store in `root` (`SpaceReserve.write`). If no store is open in `root`, only
    call `write`."""
    reserve = _reserves.get(root.resolve())
    return write() if reserve is None else reserve.write(write)


def reserve_bytes(queue_file_bytes: int, log_file_bytes: int) -> int:
    """Return the size, in bytes, of the disk space that a store reserves for the broker's state. It is enough for one
    queue file and some small files."""
    return queue_file_bytes + min(SMALL_FILES_MAX_BYTES, log_file_bytes // 8)
