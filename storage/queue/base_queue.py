"""The common base of both kinds of consume queues: their files, offsets, recovery and flushes.

A change belongs in this module if it applies to both kinds: queues of single messages (consume_queue.py) and queues of
inner batches (batch_consume_queue.py). It must not depend on the layout of the queues' entries (units).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar, Final

from raymq.common.names import is_light_queue
from raymq.records.logfiles.log_reader import LogReader
from storage.files.write_handles import WriteHandles
from storage.queue.queue_files import QueueFiles

NO_LIMIT: Final = 2**63 - 1


class BaseConsumeQueue(ABC):
    """One consume queue: the entries (units) that point to the queue's records. Writers hold the store's append lock;
    offsets can be read without a lock."""

    store_directory: ClassVar[str]
    """Name of the store's subdirectory that holds queues of this kind."""
    unit_bytes: ClassVar[int]

    def __init__(
        self,
        root: Path,
        topic: str,
        queue_id: int,
        file_size: int,
        *,
        reader: LogReader,
        handles: WriteHandles,
        repair: bool = False,
    ) -> None:
        """Find the files of the queue; `recover` reads them later.

        Raises StoreCorruptError if the files do not form a queue. With `repair` (after a crash), files that do not fit
        the other files are deleted instead, and their entries (units) are rebuilt from the log.
        """
        self.topic, self.queue_id = topic, queue_id
        self.key = (topic, queue_id)
        self.directory = root / self.store_directory / topic / str(queue_id)
        self._file_size = file_size
        """Size in bytes of each file of the queue; a multiple of the size of a queue entry (unit)."""
        self._units_per_file = file_size // self.unit_bytes
        self._reader = reader
        self._handles = handles
        """The write handles that all queues of the store share."""
        # Use sparse files for light queues (RocketMQ's LMQ), to save disk space: a store may have thousands of light
        # queues, with few entries (units) in each queue.
        sparse = is_light_queue(topic)
        self._files = QueueFiles(root, self.directory, file_size, handles, repair=repair, sparse=sparse)
        self.min_offset = 0
        """Queue offset of the queue's first message that the log still contains."""
        self.next_offset = 0
        """Queue offset that the queue's next message will get."""
        self.visible_offset = 0
        """Queue offset up to which consumers may read."""
        self.max_physical_offset = -1
        """Physical offset at which the queue's last record ends; -1 if the queue is empty."""

    @property
    def exists(self) -> bool:
        """True if the queue has files on disk."""
        return bool(self._files.starts)

    @property
    def first_readable_offset(self) -> int:
        """First queue offset that consumers may read."""
        return self.min_offset

    @property
    @abstractmethod
    def first_physical_offset(self) -> int | None:
        """Physical offset of the first record to which a unit of the queue points; None if no unit points to a
        record."""

    def recover(self) -> None:
        """Find the queue's end: the position of the first entry (unit) that was never written. The search starts at the
        queue's third-last file (spec/storage.md §5).

        All entries after that end are removed.
        """
        self._keep_good_units(self._files.starts[-3:], NO_LIMIT)

    def recover_until(self, physical_limit: int) -> None:
        """Keep the queue's units of records before `physical_limit`, which are on disk, and remove all other units.

        After a crash the other units may be wrong. A sector that was not written is all zeros, even between correct
        sectors. So a unit in this sector is zero, as a whole or in part. Recovery must read the positions and tags of
        the removed units from the log again.
        """
        starts = self._files.from_last(lambda start: self._starts_before(start, physical_limit))
        self._keep_good_units(starts, physical_limit)
        if self._files.starts and self._has_no_units():
            # Remove all entries (units) of the queue, because after the log scan the queue may begin at any offset.
            self._remove_all_units()

    @abstractmethod
    def truncate_from(self, physical_limit: int) -> int:
        """Remove each entry (unit) of the queue whose record starts at or after physical offset `physical_limit`.
        Returns the number of removed entries."""

    @abstractmethod
    def truncate_to(self, queue_offset: int) -> None:
        """Remove the queue's units from `queue_offset` on, in memory and on disk."""

    @abstractmethod
    def correct_min_offset(self, min_physical_offset: int) -> None:
        """Move `min_offset` to the queue's first message whose record starts at or after the log's first byte."""

    @abstractmethod
    def drop_files_before_min(self) -> list[Path]:
        """Drop the queue's files before the file that contains `min_offset` from the file list, and return them.

        The caller then deletes the dropped files from disk. Never drops the last file. Called under the append lock.
        """

    @abstractmethod
    def first_at_or_after(self, physical_offset: int) -> int:
        """Return the first queue offset, from `min_offset` on, whose record starts at or after `physical_offset`."""

    def take_dirty(self, least_pages: int = 0) -> set[Path]:
        """Return the queue's dirty files and directories, and mark them as flushed. The caller must flush them. Returns
        an empty set if fewer than `least_pages` pages are dirty."""
        end = self._end_byte()
        return set() if least_pages and not self._files.is_flush_due(end, least_pages) else self._files.take_dirty(end)

    def used_bytes(self) -> tuple[int, int]:
        """Return the byte positions at which the queue's first message and the end of its last unit lie. Positions
        count from the byte at which the unit with number 0 begins."""
        end = self._end_byte()
        return min(self._begin_byte(), end), end

    def file_at(self, position: int) -> tuple[Path, int, int]:
        """Return the path of the file that contains a byte of the queue, and the positions at which the file begins and
        ends."""
        start = position - position % self._file_size
        return self._files.path(start), start, start + self._file_size

    def delete(self) -> None:
        """Delete the queue's files from the disk."""
        self._files.delete()

    @abstractmethod
    def _end_byte(self) -> int:
        """Byte position at which the queue's last entry (unit) ends. Positions count from the byte at which the unit
        with queue offset 0 begins."""

    @abstractmethod
    def _begin_byte(self) -> int:
        """Byte position at which the unit of the queue's first message begins."""

    @abstractmethod
    def _has_no_units(self) -> bool:
        """True if the queue's files hold no consume-queue entry (unit)."""

    @abstractmethod
    def _remove_all_units(self) -> None:
        """Remove all entries (units) of the queue, in memory and on disk. The queue may begin at any offset
        afterwards."""

    @abstractmethod
    def _starts_before(self, start: int, physical_limit: int) -> bool:
        """True if the first entry (unit) of the queue file at `start` is correct, and the entry's record lies before
        `physical_limit` in the log."""

    @abstractmethod
    def _keep_good_units(self, starts: list[int], physical_limit: int) -> None:
        """End the queue before its first bad entry (unit). A unit is bad if it was never written, is out of order, or
        reaches `physical_limit`.

        Checks the last files of the queue; `starts` are the positions of their first bytes. These files count as dirty,
        because the previous process may not have flushed them.
        """
