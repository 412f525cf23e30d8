"""The next commit-log file, made ready by a thread before the log needs it.

At most one file is ready at a time. It is in place under its final name, all zero: what RocketMQ does too, so recovery
accepts such a file at the end of the log. A clean stop deletes it.
"""

from __future__ import annotations

import logging
import threading

from storage.files import disk
from storage.files.mapped_file import MappedFile
from storage.log.log_paths import LogPaths

logger = logging.getLogger(__name__)

ALLOCATOR_STOP_TIMEOUT_S = 30.0


class Allocator:
    """Makes files of `size` bytes, each behind those before it, where `paths` has them."""

    def __init__(self, paths: LogPaths, size: int) -> None:
        self._paths = paths
        self._size = size
        self._made = -1
        self._lock = threading.Lock()
        self._wanted: int | None = None
        self._ready: MappedFile | None = None
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="raymq-allocate", daemon=True)
        self._thread.start()

    def prepare(self, start: int) -> None:
        """Have the file that starts at `start` made in the background, if it is not ready already."""
        if self._wanted != start:
            self._wanted = start
            self._wake.set()

    def take(self, start: int) -> MappedFile:
        """The file that starts at `start`: the one made ready, or made now. OSError if it cannot be made."""
        with self._lock:
            ready, self._ready = self._ready, None
            self._wanted = start
            if ready is not None and ready.start == start:
                return ready
            return self._create(start)

    def close(self) -> None:
        """Stop the thread and delete the file that was made ready and not taken. Idempotent."""
        self._stopping = True
        self._wake.set()
        self._thread.join(ALLOCATOR_STOP_TIMEOUT_S)
        with self._lock:
            ready, self._ready = self._ready, None
        if ready is not None:
            ready.close()
            try:
                disk.unlink(ready.path)
            except OSError as error:
                # All zero, as a crash may leave it too: the next open takes or deletes it.
                logger.warning("cannot delete %s: %s", ready.path, error)

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            if self._stopping:
                return
            with self._lock:
                start = self._wanted
                if start is None or self._ready is not None or start <= self._made:
                    continue
                try:
                    self._ready = self._create(start)
                except OSError as error:
                    # Not fatal yet: the append that needs the file tries again, and reports.
                    logger.warning("cannot prepare %s: %s", self._paths.path(start), error)

    def _create(self, start: int) -> MappedFile:
        path, scratch = self._paths.choose(start)
        try:
            file = MappedFile.create(path, start, self._size, scratch=scratch)
        finally:
            self._paths.clear(scratch)
        try:
            disk.sync_directory(path.parent)
        except BaseException:
            file.close()
            disk.unlink(path)
            raise
        self._made = start
        return file
