"""Holds back consume-queue entries (units) while their records are only in the transient store pool, not yet in the
log's files.

If the process is killed, the records in the pool are lost (transient_store_pool.py). If the disk then had units of
these records, the units would point to nothing. After RocketMQ has appended at the same positions, the units would
point to other messages. So the units are held back, and written after each commit of the log.
"""

from __future__ import annotations

import mmap
import threading
from collections import deque
from pathlib import Path
from typing import NamedTuple

from storage.files import disk
from storage.files.write_handles import WriteHandles
from storage.log.commit_log import CommitLog


class _Held(NamedTuple):
    """Bytes that are held back in memory, and written to a queue file once the log is committed up to
    `end_offset`."""

    end_offset: int
    path: Path
    position: int
    data: bytes


class HeldUnits(WriteHandles):
    """The write handles of the queue files in a store with a transient store pool. A queue unit is held back in memory
    until its record in the log is committed (written to the log file). Thread-safe.

    If a commit fails, the units that are still held back are never written.
    """

    def __init__(self, max_open: int, *, log: CommitLog) -> None:
        super().__init__(max_open)
        self._log = log
        self._lock = threading.Lock()
        self._held: deque[_Held] = deque()
        log.call_on_commit(self._write_committed)

    def write(self, path: Path, position: int, data: disk.Bytes) -> None:
        end_offset = self._log.end_offset
        with self._lock:
            if self._log.committed_offset < end_offset:
                self._held.append(_Held(end_offset, path, position, bytes(data)))
            else:
                super().write(path, position, data)

    def map_of(self, path: Path) -> mmap.mmap | None:
        """Return None, as if the file could not be mapped. The caller then calls `write` instead, and `write` keeps the
        bytes in memory until the log is committed."""
        return None

    def complete_writes(self) -> None:
        if self._held:
            self._log.commit()

    def close_file(self, path: Path) -> None:
        with self._lock:
            self._held = deque(one for one in self._held if one.path != path)
            super().close_file(path)

    def _write_committed(self, end_offset: int) -> None:
        with self._lock:
            while self._held and self._held[0].end_offset <= end_offset:
                # Write the held bytes first, and only then remove them from `_held`. As long as `_held` is not empty,
                # other threads (`complete_writes`) wait for this write to end.
                super().write(*self._held[0][1:])
                self._held.popleft()
