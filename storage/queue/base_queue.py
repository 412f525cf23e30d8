"""The common part of both kinds of consume queues: their files, offsets, recovery and flushes.

A change belongs here if it holds both for queues of single messages (consume_queue.py) and for queues of inner batches
(batch_consume_queue.py), whatever their units look like.
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
    """The units of one queue of one topic. One thread changes it (under the store's append lock); offsets can be read
    without a lock.
    """

    store_directory: ClassVar[str]
    """The folder of the store that holds queues of this kind."""
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
        """Find the files of the queue, which `recover` reads.

        StoreCorruptError: the files do not form a queue. With `repair` (after a crash) files that do not fit are
        deleted instead, and their units rebuilt from the log.
        """
        self.topic, self.queue_id = topic, queue_id
        self.key = (topic, queue_id)
        self.directory = root / self.store_directory / topic / str(queue_id)
        self._file_size = file_size
        """The bytes of a file, which holds whole units."""
        self._units_per_file = file_size // self.unit_bytes
        self._reader = reader
        self._handles = handles
        """The files open for writing, of all queues of the store."""
        # A store may have thousands of light queues, with few units each.
        sparse = is_light_queue(topic)
        self._files = QueueFiles(root, self.directory, file_size, handles, repair=repair, sparse=sparse)
        self.min_offset = 0
        """The queue offset of the first message that the log still has."""
        self.next_offset = 0
        """The queue offset of the next message."""
        self.visible_offset = 0
        """The queue offset up to which consumers may read."""
        self.max_physical_offset = -1
        """The physical offset at which the queue's last record ends; -1 if the queue is empty."""

    @property
    def exists(self) -> bool:
        """True if the queue is on disk."""
        return bool(self._files.starts)

    @property
    def first_readable_offset(self) -> int:
        """The first offset that consumers may read."""
        return self.min_offset

    @property
    @abstractmethod
    def first_physical_offset(self) -> int | None:
        """The physical offset of the first unit's record; None if no unit points to a record."""

    def recover(self) -> None:
        """Find the queue's end: the first unit that was never written, from the third-last file on (spec §5).

        All units after that end are removed.
        """
        self._keep_good_units(self._files.starts[-3:], NO_LIMIT)

    def recover_until(self, physical_limit: int) -> None:
        """Keep the units of records before `physical_limit`, which are on disk, and remove all others.

        After a crash the other units may be wrong. An unwritten sector is zero, and so is a unit in it, or the unit's
        beginning or end, even between correct units. The positions and tags of such units must be read from the log
        again.
        """
        starts = self._files.from_last(lambda start: self._starts_before(start, physical_limit))
        self._keep_good_units(starts, physical_limit)
        if self._files.starts and self._has_no_units():
            # The queue may then begin at any offset, after the walk of the log.
            self._remove_all_units()

    @abstractmethod
    def truncate_from(self, physical_limit: int) -> int:
        """Remove the units of records that start at or after `physical_limit`. Returns the number of units removed."""

    @abstractmethod
    def truncate_to(self, queue_offset: int) -> None:
        """Remove the units from `queue_offset` on, on disk too."""

    @abstractmethod
    def correct_min_offset(self, min_physical_offset: int) -> None:
        """Move `min_offset` to the first message whose record starts at or after the log's first byte."""

    @abstractmethod
    def drop_files_before_min(self) -> list[Path]:
        """Let the queue's files start at the one that holds `min_offset`, and return the earlier files.

        The caller then deletes those files. Never drops the last file. Called under the append lock.
        """

    @abstractmethod
    def first_at_or_after(self, physical_offset: int) -> int:
        """Return the first queue offset, from `min_offset` on, whose record starts at or after `physical_offset`."""

    def take_dirty(self, least_pages: int = 0) -> set[Path]:
        """Return the files and directories to flush, which then count as flushed. Empty if fewer than `least_pages` are
        dirty.
        """
        end = self._end_byte()
        return set() if least_pages and not self._files.is_flush_due(end, least_pages) else self._files.take_dirty(end)

    def delete(self) -> None:
        """Remove the queue from the disk."""
        self._files.delete()

    @abstractmethod
    def _end_byte(self) -> int:
        """The byte of the queue at which its units end."""

    @abstractmethod
    def _has_no_units(self) -> bool:
        """True if the files hold no unit."""

    @abstractmethod
    def _remove_all_units(self) -> None:
        """Remove all units, on disk too. The queue may begin at any offset afterwards."""

    @abstractmethod
    def _starts_before(self, start: int, physical_limit: int) -> bool:
        """True if the first unit of the file at `start` is correct and its record lies before `physical_limit`."""

    @abstractmethod
    def _keep_good_units(self, starts: list[int], physical_limit: int) -> None:
        """End the queue before the first unit that was never written, is out of order, or reaches the limit.

        Checks the files `starts`, the last ones. They count as dirty: the previous process may not have flushed them.
        """
