"""The part that consume queues of both kinds have in common: their files, offsets, recovery and flushes.

A change belongs here if it holds for queues of single messages (consume_queue.py) and of inner batches
(batch_consume_queue.py) alike, whatever their units look like.
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
    """The units of one queue of one topic. One thread changes it (the store's append lock); offsets are plain reads."""

    store_directory: ClassVar[str]
    """The folder of the store in which queues of this kind are."""
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

        StoreCorruptError when they do not form a queue. With `repair` (after a crash) those that do not fit are deleted
        instead, and their units made again from the log.
        """
        self.topic, self.queue_id = topic, queue_id
        self.key = (topic, queue_id)
        self.directory = root / self.store_directory / topic / str(queue_id)
        self._file_size = file_size
        """Bytes of a file, which holds whole units."""
        self._units_per_file = file_size // self.unit_bytes
        self._reader = reader
        self._handles = handles
        """The files open for writing, of all queues of the store."""
        # A store may have thousands of light queues, with few units each.
        sparse = is_light_queue(topic)
        self._files = QueueFiles(root, self.directory, file_size, handles, repair=repair, sparse=sparse)
        self.min_offset = 0
        """The queue offset of the first message still held."""
        self.next_offset = 0
        """The queue offset that the next message gets."""
        self.visible_offset = 0
        """The queue offset up to which consumers may read."""
        self.max_physical_offset = -1
        """The physical offset at which the last record in the queue ends; -1 without one."""

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
        """The physical offset of the first unit's record; None for a queue that points to none."""

    def recover(self) -> None:
        """Find the queue's end: the first unit that was never written, looking from the third-last file on (spec §5).

        All units behind that end are removed.
        """
        self._keep_good_units(self._files.starts[-3:], NO_LIMIT)

    def recover_until(self, physical_limit: int) -> None:
        """Keep the units of records before `physical_limit`, which are on disk, and remove all others.

        After a crash those others may be anything. A sector that was not written is zero, and with it all of a unit or
        its beginning or end, between units that are good: where it points, and which tag it has, must be read from the
        log again.
        """
        starts = self._files.from_last(lambda start: self._starts_before(start, physical_limit))
        self._keep_good_units(starts, physical_limit)
        if self._files.starts and self._has_no_units():
            # The queue may begin anywhere, once the log is walked.
            self._remove_all_units()

    @abstractmethod
    def truncate_from(self, physical_limit: int) -> int:
        """Remove the units of records that start at or after `physical_limit`; returns how many there were."""

    @abstractmethod
    def truncate_to(self, queue_offset: int) -> None:
        """Remove the units that hold `queue_offset` or what is behind it, on disk too."""

    @abstractmethod
    def correct_min_offset(self, min_physical_offset: int) -> None:
        """Move `min_offset` to the first message whose record starts at or after the log's first byte."""

    @abstractmethod
    def drop_files_before_min(self) -> list[Path]:
        """Let the queue's files start at the one that holds `min_offset`; returns those before it, which are now the
        caller's to delete. Never the last one. Called under the append lock."""

    @abstractmethod
    def first_at_or_after(self, physical_offset: int) -> int:
        """The first queue offset, from `min_offset` on, whose record starts at or after `physical_offset`."""

    def take_dirty(self, least_pages: int = 0) -> set[Path]:
        """The files and directories to flush, which then count as flushed; none if they have fewer pages to flush."""
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
        """True if no unit is left in the files."""

    @abstractmethod
    def _remove_all_units(self) -> None:
        """Make the queue empty, on disk too: it may begin at any offset then."""

    @abstractmethod
    def _starts_before(self, start: int, physical_limit: int) -> bool:
        """True if the first unit of the file at `start` is good and of a record before `physical_limit`."""

    @abstractmethod
    def _keep_good_units(self, starts: list[int], physical_limit: int) -> None:
        """End the queue before the first unit that was never written, is out of order, or reaches the limit; `starts`
        are the files to look at, the last ones. They count as dirty: the process before may not have flushed them."""
