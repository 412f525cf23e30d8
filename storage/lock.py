"""One process owns a store directory at a time, by a lock on its file `lock` (spec/storage.md §4).

Two locks are taken: `flock`, which also keeps apart two stores in one process and ends only with the last descriptor,
and the POSIX lock on byte 0, which is the one that RocketMQ's Java takes. The kernel releases both when the process
dies. The file's text is `lock`, and below it the holder's pid.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Final

from raymq.errors import StoreLockedError
from storage import disk

LOCK_FILE: Final = "lock"


class DirectoryLock:
    """The lock, held from construction to `release`. StoreLockedError names who holds it."""

    def __init__(self, root: Path) -> None:
        path = root / LOCK_FILE
        self._descriptor = disk.open_file(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
        except BlockingIOError:
            holder = os.pread(self._descriptor, 64, 0).decode(errors="replace").split()
            self.release()
            pid = holder[1] if len(holder) > 1 else "unknown"
            raise StoreLockedError(str(root), f"the process with pid {pid}") from None
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"lock\n{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Give the directory free; idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
