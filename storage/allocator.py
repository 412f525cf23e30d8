"""The next commit-log file, made ready by a thread before the log needs it.

At most one file is ready at a time. It is in place under its final name, all zero: what RocketMQ does too, so recovery
accepts such a file at the end of the log. A clean stop deletes it.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from raymq.log_reader import file_name
from storage import disk
from storage.mapped_file import MappedFile

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 30.0


class Allocator:
    """Makes files of `size` bytes in `directory`. `scratch` is the name under which a file grows to its size."""

    def __init__(self, directory: Path, size: int, scratch: Path) -> None:
        self._directory = directory
        self._size = size
        self._scratch = scratch
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
        self._thread.join(STOP_TIMEOUT_S)
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
                path = self._directory / file_name(start or 0)
                if start is None or self._ready is not None or path.exists():
                    continue
                try:
                    self._ready = self._create(start)
                except OSError as error:
                    # Not fatal yet: the append that needs the file tries again, and reports.
                    logger.warning("cannot prepare %s: %s", path, error)

    def _create(self, start: int) -> MappedFile:
        file = MappedFile.create(self._directory / file_name(start), start, self._size, scratch=self._scratch)
        try:
            disk.sync_directory(self._directory)
        except BaseException:
            file.close()
            disk.unlink(file.path)
            raise
        return file
