"""The files of one queue on disk: finding them, making the next, cutting the end off, letting go of the oldest.

They lie end to end, each named after the byte of the queue at which it starts (storage/files/file_names.py). Their
units are the queue's matter: storage/queue/consume_queue.py, storage/queue/batch_consume_queue.py, and for its
extension storage/queue/consume_queue_ext.py. All of them can be made again from the log, or done without, so a crash
may leave any of them short, torn or missing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from raymq.records.logfiles.directory import file_name
from storage.files import disk
from storage.files.file_names import list_starts
from storage.files.mapped_file import MappedFile, allocate
from storage.files.write_handles import WriteHandles


class QueueFiles:
    """The row of files of one queue. Not locked: one thread changes it (the store's append lock)."""

    def __init__(
        self,
        root: Path,
        directory: Path,
        file_size: int,
        handles: WriteHandles,
        *,
        repair: bool,
        remedy: str = "",
        sparse: bool = False,
    ) -> None:
        """Find the files. StoreCorruptError, which ends with `remedy`, when they do not form a queue; with `repair`
        (after a crash) those that do not fit are deleted instead. With `sparse` a new file takes space on the disk only
        for the units in it: a full disk is an error when these are written, not when the file is made."""
        self.directory = directory
        self._file_size = file_size
        self._scratch = root / "consumequeue.new"
        self._handles, self._sparse = handles, sparse
        remedy = remedy or f"delete the directory {directory} and the queue is made again from the commit log"
        self.starts = list_starts(directory, file_size, remedy=remedy, repair=repair)
        """The files' first bytes, ascending."""
        self.dirty: set[Path] = set()
        """The files and directories to be flushed."""
        self._flushed_end = 0
        """The byte of the queue up to which it is flushed."""

    def path(self, start: int) -> Path:
        """The path of the file that starts at byte `start`."""
        return self.directory / file_name(start)

    def make(self, start: int) -> None:
        """Make the file that starts there, behind the others. OSError: the disk failed or is full."""
        # Its name is flushed with the file's, before the checkpoint or the snapshot counts on the queue.
        disk.make_directory(self.directory, flush=False)
        allocate(self._scratch, self._file_size, sparse=self._sparse)
        disk.rename(self._scratch, self.path(start))
        self.starts.append(start)
        self.dirty.update((self.directory, self.directory.parent, self.directory.parent.parent))

    def from_last(self, is_good: Callable[[int], bool]) -> list[int]:
        """The last file whose start is good, or else the first, and those behind it."""
        index = len(self.starts) - 1
        while index > 0 and not is_good(self.starts[index]):
            index -= 1
        return self.starts[max(index, 0) :]

    def cut(self, end: int) -> None:
        """Leave nothing at or behind byte `end`: files that start behind it go, the one that holds it ends in zeros."""
        while self.starts and self.starts[-1] > end:
            path = self.path(self.starts.pop())
            self._handles.close_file(path)
            disk.unlink(path)
            self.dirty.add(self.directory)
        if self.starts and self.starts[-1] + self._file_size > end:
            start = self.starts[-1]
            path = self.path(start)
            file = MappedFile(path, start, self._file_size)
            try:
                file.zero(end - start, file.used_end(end - start))
            finally:
                file.close()
            self.dirty.add(path)

    def drop_files_before(self, position: int) -> list[Path]:
        """Let the files start at the one that holds byte `position`; returns those before it, which are now the
        caller's to delete. Never the last one."""
        forgotten: list[Path] = []
        while len(self.starts) > 1 and self.starts[0] + self._file_size <= position:
            path = self.path(self.starts.pop(0))
            self._handles.close_file(path)
            self.dirty.discard(path)
            forgotten.append(path)
        return forgotten

    def is_flush_due(self, end: int, least_pages: int) -> bool:
        """True if a queue that ends at byte `end` has so many pages to flush, or has filled a file (spec §6)."""
        pages = end // disk.PAGE_BYTES - self._flushed_end // disk.PAGE_BYTES
        return pages >= least_pages or end // self._file_size > self._flushed_end // self._file_size

    def take_dirty(self, end: int = 0) -> set[Path]:
        """The files and directories to be flushed, which then count as flushed: the queue up to byte `end`."""
        dirty, self.dirty = self.dirty, set()
        self._flushed_end = end
        return dirty

    def delete(self) -> None:
        """Remove the queue from the disk."""
        for start in self.starts:
            self._handles.close_file(self.path(start))
        disk.remove_tree(self.directory)
