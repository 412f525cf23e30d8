"""Create the next commit-log file in a background thread, before the log needs it.

At most one file is prepared at a time. The prepared file has its final name, and all of its bytes are zero. RocketMQ
does the same, so recovery accepts such a file at the end of the log. A clean stop deletes the file.
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
    """Creates log files of `size` bytes. Each new file follows the log's existing files. `paths` chooses the path of
    each file."""

    def __init__(self, paths: LogPaths, size: int) -> None:
        self._paths = paths
        self._size = size
        self._made = -1
        """The start offset of the last log file that was created; -1 before the first file."""
        self._lock = threading.Lock()
        """Lock that is held while a log file is created, and while the log file that was prepared in advance is set or
        taken."""
        self._wanted: int | None = None
        """The start offset of the log file that was requested last. The allocator's thread creates this file, unless
        the log has already taken it."""
        self._ready: MappedFile | None = None
        """The prepared log file, until the log takes it; None if no file is prepared."""
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="raymq-allocate", daemon=True)
        self._thread.start()

    def prepare_file(self, start: int) -> None:
        """Create the log file that starts at offset `start` in the background, unless it is created already."""
        if self._wanted != start:
            self._wanted = start
            self._wake.set()

    def is_ready(self, start: int) -> bool:
        """Return True if the log file that starts at offset `start` is created, but was not yet handed to the log by
        `take_file`."""
        ready = self._ready
        return ready is not None and ready.start == start

    def make_ready(self, start: int) -> None:
        """Create, in this thread, the log file that starts at offset `start`, unless it is created already. Raises
        OSError if the file cannot be created."""
        with self._lock:
            self._wanted = start
            if not self.is_ready(start):
                self._ready = self._create(start)

    def take_file(self, start: int) -> MappedFile:
        """Return the log file that starts at offset `start`. It is the prepared file, or a file that is created now.
        Raises OSError if the file cannot be created."""
        with self._lock:
            ready, self._ready = self._ready, None
            self._wanted = start
            if ready is not None and ready.start == start:
                return ready
            return self._create(start)

    def close(self) -> None:
        """Stop the allocator thread, and delete a prepared file that the log has not taken. Idempotent."""
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
                # Only log the error: the file contains only zeros, as after a crash. The next open of the log uses or
                # deletes it.
                logger.warning("cannot delete the prepared log file %s: %s", ready.path, error)

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
                    # This error is not fatal yet: the append that needs the log file tries again to create it, and
                    # reports an error if that fails.
                    logger.warning("cannot prepare the next log file %s: %s", self._paths.path(start), error)

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
