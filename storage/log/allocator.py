"""Making the next commit-log file in a thread, before the log needs it.

At most one file is ready at a time. It has its final name and is all zero. RocketMQ does the same, so recovery accepts
such a file at the end of the log. A clean stop deletes it.
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
    """Makes files of `size` bytes, each behind those before it, at the paths that `paths` chooses."""

    def __init__(self, paths: LogPaths, size: int) -> None:
        self._paths = paths
        self._size = size
        self._made = -1
        """The start of the file made last; -1 before the first."""
        self._lock = threading.Lock()
        """Held while a file is made, and while the one made ready changes hands."""
        self._wanted: int | None = None
        """The start of the file that the thread is to make, or that was taken."""
        self._ready: MappedFile | None = None
        """The file made ready and not taken."""
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="raymq-allocate", daemon=True)
        self._thread.start()

    def prepare_file(self, start: int) -> None:
        """Have the file that starts at `start` made in the background, if it is not ready already."""
        if self._wanted != start:
            self._wanted = start
            self._wake.set()

    def is_ready(self, start: int) -> bool:
        """True if the file that starts at `start` is made and was not taken."""
        ready = self._ready
        return ready is not None and ready.start == start

    def make_ready(self, start: int) -> None:
        """Make the file that starts at `start` now, unless it is ready. OSError if it cannot be made."""
        with self._lock:
            self._wanted = start
            if not self.is_ready(start):
                self._ready = self._create(start)

    def take_file(self, start: int) -> MappedFile:
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
        path, scratch = self._paths.choose_path(start)
        try:
            file = MappedFile.create(path, start, self._size, scratch=scratch)
        finally:
            self._paths.remove_scratch(scratch)
        try:
            disk.sync_directory(path.parent)
        except BaseException:
            file.close()
            disk.unlink(path)
            raise
        self._made = start
        return file
