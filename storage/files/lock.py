"""Ensures that only one process at a time owns a store directory, by a lock on its file `lock` (spec/storage.md §4).

Two locks are taken. `flock` also excludes a second store in the same process, and is held until the last descriptor is
closed. The POSIX lock on byte 0 is the lock that RocketMQ's Java takes. The kernel releases both locks when the process
dies. The file contains the text `lock`, and below it the pid of the process that holds the locks.

Two stores with different roots could name the same log directory outside of their roots (store_path_commit_log). So
each log directory outside of the root is locked too, with `flock` on the directory itself, because RocketMQ would not
expect a lock file in it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from raymq.common.config.values import COMMIT_LOG_DIR
from raymq.common.errors import StoreLockedError
from storage.files import disk

LOCK_FILE: Final = "lock"


def stores_below(data_dir: Path) -> list[Path]:
    """Return the store directories directly below a data directory, sorted.

    A directory is a store if it contains a log or a lock file. The log may be in another place (store_path_commit_log).
    The lock file always exists, except in some copies of a store.
    """
    return sorted({path.parent for name in (COMMIT_LOG_DIR, LOCK_FILE) for path in data_dir.glob(f"*/{name}")})


class DirectoryLock:
    """The lock of a store, held from construction to `release`.

    Raises StoreLockedError if a directory is locked; the error names the directory and the holder of its lock. Missing
    `log_directories` are created.
    """

    def __init__(self, root: Path, log_directories: Iterable[Path] = ()) -> None:
        self._descriptors: list[int] = []
        try:
            self._lock_root(root)
            for directory in log_directories:
                self._lock_directory(directory)
        except BaseException:
            self.release()
            raise

    def _lock_root(self, root: Path) -> None:
        descriptor = disk.open_file(root / LOCK_FILE, os.O_RDWR | os.O_CREAT)
        self._descriptors.append(descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
        except BlockingIOError:
            holder = os.pread(descriptor, 64, 0).decode(errors="replace").split()
            pid = holder[1] if len(holder) > 1 else "unknown"
            raise StoreLockedError(str(root), f"the process with pid {pid}") from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"lock\n{os.getpid()}\n".encode(), 0)

    def _lock_directory(self, directory: Path) -> None:
        disk.make_directory(directory)
        descriptor = disk.open_file(directory, os.O_RDONLY | os.O_DIRECTORY)
        self._descriptors.append(descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreLockedError(str(directory), "another store that keeps its log there") from None

    def release(self) -> None:
        """Unlock the store's directories. Idempotent."""
        while self._descriptors:
            os.close(self._descriptors.pop())
