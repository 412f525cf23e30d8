"""The files of one queue on disk: finds the files, creates the next file, cuts the end off, drops the oldest files.

The files lie end to end. Each file is named after the queue's byte position at which the file starts
(storage/files/file_names.py). The format of the queue's entries (units) is defined in storage/queue/consume_queue.py,
batch_consume_queue.py and, for extensions, consume_queue_ext.py. All files can be rebuilt from the log, or are
optional, so a crash may leave any of them short, torn or missing.
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
    """The sequence of files of one queue. It has no lock: only one thread at a time may change it, under the store's
    append lock."""

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
        """Find the queue's files on disk.

        Raises StoreCorruptError, whose text ends with `remedy`, if the files do not form a queue. With `repair` (after
        a crash), files that do not fit the other files are deleted instead. With `sparse`, a new file takes disk space
        only for the entries (units) that were written into it. On a full disk, creating such a file succeeds, but
        writing entries fails.
        """
        self.directory = directory
        self._file_size = file_size
        self._scratch = root / "consumequeue.new"
        self._handles, self._sparse = handles, sparse
        remedy = remedy or f"delete the directory {directory}: the queue is then rebuilt from the commit log"
        self.starts = list_starts(directory, file_size, remedy=remedy, repair=repair)
        """Byte position of the first byte of each queue file, ascending. Positions are counted from the queue's offset
        0."""
        self.dirty: set[Path] = set()
        """The queue's files and directories that the next flush writes."""
        self._flushed_end = 0
        """Byte position in the queue up to which the queue's files are flushed."""

    def path(self, start: int) -> Path:
        """Return the path of the file that starts at byte `start` of the queue."""
        return self.directory / file_name(start)

    def make(self, start: int) -> None:
        """Create the queue file that starts at byte `start`, after the existing files. Raises OSError if the disk fails
        or is full."""
        # The name of a new queue directory need not be on disk yet, so its parent directory is not flushed here. It is
        # flushed together with the queue file, before the checkpoint or a snapshot relies on the queue.
        disk.make_directory(self.directory, flush=False)
        allocate(self._scratch, self._file_size, sparse=self._sparse)
        disk.rename(self._scratch, self.path(start))
        self.starts.append(start)
        self.dirty.update((self.directory, self.directory.parent, self.directory.parent.parent))

    def from_last(self, is_good: Callable[[int], bool]) -> list[int]:
        """Return the start of the queue's last file for which `is_good` is true, and the starts of all later files. If
        `is_good` is true for no file, return the starts of all files."""
        index = len(self.starts) - 1
        while index > 0 and not is_good(self.starts[index]):
            index -= 1
        return self.starts[max(index, 0) :]

    def cut(self, end: int) -> None:
        """Cut the queue at byte `end`: delete later files, and zero the rest of the file that contains `end`."""
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
        """Drop the queue files before the file that contains byte `position`, and return the dropped files.

        The caller then deletes the dropped files from disk. Never drops the last file.
        """
        forgotten: list[Path] = []
        while len(self.starts) > 1 and self.starts[0] + self._file_size <= position:
            path = self.path(self.starts.pop(0))
            self._handles.close_file(path)
            self.dirty.discard(path)
            forgotten.append(path)
        return forgotten

    def is_flush_due(self, end: int, least_pages: int) -> bool:
        """True if the queue must be flushed (spec §6): it has at least `least_pages` dirty pages, or it has filled a
        file. `end`: the byte position of the queue's end."""
        pages = end // disk.PAGE_BYTES - self._flushed_end // disk.PAGE_BYTES
        return pages >= least_pages or end // self._file_size > self._flushed_end // self._file_size

    def take_dirty(self, end: int = 0) -> set[Path]:
        """Return the queue's dirty files and directories, and mark the queue as flushed up to byte `end`. The caller
        must flush them."""
        dirty, self.dirty = self.dirty, set()
        self._flushed_end = end
        return dirty

    def delete(self) -> None:
        """Delete the queue's files and directory from the disk."""
        for start in self.starts:
            self._handles.close_file(self.path(start))
        disk.remove_tree(self.directory)
