"""Making the next commit-log file in a thread, before the log needs it.

At most one file is prepared at a time. It has its final name, and all its bytes are zero. RocketMQ does the same, so
recovery accepts such a file at the end of the log. A clean stop deletes it.
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
    """Makes files of `size` bytes, each one after the log's existing files, at the paths that `paths` chooses."""

    def __init__(self, paths: LogPaths, size: int) -> None:
        self._paths = paths
        self._size = size
        self._made = -1
        """The start of the last file made; -1 before the first."""
        self._lock = threading.Lock()
        """Held while a file is made, and while the prepared file is set or taken."""
        self._wanted: int | None = None
        """The start of the file that the thread should make, or of the file that was taken."""
        self._ready: MappedFile | None = None
        """The prepared file, until it is taken."""
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="raymq-allocate", daemon=True)
        self._thread.start()

    def prepare_file(self, start: int) -> None:
        """Prepare the file that starts at `start` in the background, if it is not ready already."""
        if self._wanted != start:
            self._wanted = start
            self._wake.set()

    def is_ready(self, start: int) -> bool:
        """True if the file that starts at `start` is made and not taken yet."""
        ready = self._ready
        return ready is not None and ready.start == start

    def make_ready(self, start: int) -> None:
        """Make the file that starts at `start` now, unless it is ready. OSError if it cannot be made."""
        with self._lock:
            self._wanted = start
            if not self.is_ready(start):
                self._ready = self._create(start)

    def take_file(self, start: int) -> MappedFile:
        """Return the file that starts at `start`: the prepared one, or one made now. OSError if it cannot be made."""
        with self._lock:
            ready, self._ready = self._ready, None
            self._wanted = start
            if ready is not None and ready.start == start:
                return ready
            return self._create(start)

    def close(self) -> None:
        """Stop the thread, and delete a prepared file that was not taken. Idempotent."""
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
                # The file is all zero, as after a crash: the next open takes or deletes it.
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
                    # Not fatal yet: the append that needs the file retries, and reports an error.
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
