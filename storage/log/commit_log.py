"""The commit log: every message of this store, in an append-only sequence of equal-sized files (spec/storage.md §1).

On disk
    commitlog/00000000000000000000      named after the physical offset of its first byte
    commitlog/00000000001073741824

    | record | record | ... | BLANK: remaining 4, magic 4 | unused |

    | ... | room for the broker's state: 32 MiB, or an eighth of a small file |

While the disk has no space for the next file, the end of the last file accepts only records of the broker's state. So
consumers can commit, join and receive although the disk is full.

A record never crosses a file boundary. 8 bytes always remain for the BLANK, which marks that the log continues in the
next file.

This module treats the log as a sequence of files: it tracks the end, and creates, cuts and flushes files. log_writer.py
writes bytes into a file; log_paths.py chooses the directory of a file.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from raymq.common.config.store import FlushDiskType, StoreSettings
from raymq.common.errors import InvalidArgumentError
from raymq.records.format.layout import BLANK_LENGTH
from storage.files import disk
from storage.files.disk import Bytes
from storage.files.mapped_file import MappedFile
from storage.log.allocator import Allocator
from storage.log.append_plan import AppendSpan, plan_append
from storage.log.log_paths import LogPaths
from storage.log.log_writer import LogWriter, Stamp

PREPARE_BYTES: Final = 64 << 20
"""Remaining size in bytes of the current log file at which the next log file is created in the background. The next
file is also created once the current file is half written."""
STATE_ROOM_MAX_BYTES: Final = 32 << 20
"""Maximum number of bytes at the end of a log file that are reserved for the broker's state. They are needed if the
next file cannot be created."""

logger = logging.getLogger(__name__)


class CommitLog:
    """The commit log in the directories `paths`. One thread appends (under the caller's lock) and one flushes; any
    thread can read offsets without a lock.

    Before anything is written, `open_for_append` must be called with the end that recovery found.
    """

    def __init__(self, paths: LogPaths, file_size: int, writer: LogWriter | None = None) -> None:
        """Find the log's files. Raises StoreCorruptError if the files do not form a log (spec §5, load).

        `writer` writes appends into the files. The default writer stores each append at once.
        """
        self.paths = paths
        """The directories of the log's files."""
        self.file_size = file_size
        self.starts = paths.find()
        """The physical offsets at which the log's files start, ascending."""
        self._writer = writer or LogWriter(file_size)
        self._files = self._writer.files
        """The log files that are open for writing, by start offset: all files that are not completely flushed."""
        self._allocator: Allocator | None = None
        """Creates the next log file in the background. None before `open_for_append` was called and after
        `close`."""
        self.end_offset = 0
        """The physical offset at which the written part of the log ends."""
        self.flushed_offset = 0
        """The physical offset up to which the log is on disk."""
        self._store_timestamp_ms = 0
        """The store time in ms of the last record written to the log."""
        self.flushed_store_timestamp_ms = 0
        """The store time in ms of the newest record that is on disk; 0 if nothing was flushed since the store was
        opened."""
        self._used_ends: dict[int, tuple[int, int]] = {}
        """Cached results of `used_end` for log files, by the start offset of the file: (position, result). The cache is
        used until the log is opened for appends."""
        self._staged_end = 0
        """The end of the staged bytes, which are written after the log's end and are not yet part of the log. If no
        bytes are staged, this value is not greater than `end_offset`."""
        self._easy_end = 0
        """Physical offset up to which records can be appended without a call of `reserve`. The record, and a BLANK
        (end-of-file marker) after it, must end before this offset."""
        self._begin(self.starts[-1] + file_size if self.starts else 0)

    @classmethod
    def of(cls, settings: StoreSettings) -> Self:
        """Open the log that `settings` describe, with the writer that the settings choose.

        Raises the errors of the constructor. Raises OSError if the address space is too small for the transient store
        pool.
        """
        file_size = settings.mapped_file_size_commit_log_bytes
        return cls(LogPaths.of(settings), file_size, _choose_writer(settings, file_size))

    @property
    def min_offset(self) -> int:
        """The physical offset at which the log's first file starts; 0 if the log has no files."""
        return self.starts[0] if self.starts else 0

    def _begin(self, end_offset: int) -> None:
        """Set the log's end to `end_offset`: everything before it is in the log files, and nothing follows."""
        self.end_offset = self.flushed_offset = end_offset
        self._staged_end = self._easy_end = 0
        self._writer.begin_at(end_offset)

    @property
    def committed_offset(self) -> int:
        """The physical offset up to which the log can be read from its files. Without a transient store pool this is
        the log's end."""
        return self._writer.committed_offset(self.end_offset)

    @property
    def has_pool(self) -> bool:
        """True if a transient store pool buffers appends, so that they are written to the files only at a
        commit."""
        return self._writer.is_buffered

    def call_on_commit(self, callback: Callable[[int], None]) -> None:
        """Register `callback`. Before a commit returns, it calls `callback` with the physical offset up to which the
        log is in its files."""
        self._writer.on_commit = callback

    def path(self, start: int) -> Path:
        """Return the path of the log file that starts at physical offset `start`."""
        return self.paths.path(start)

    def open_for_append(self, end_offset: int) -> int:
        """Cut the log at `end_offset` and prepare for appends there. Returns the number of bytes cut.

        Later files are deleted. The rest of old records after the end is zeroed (RocketMQ keeps it). Otherwise a new
        append could end exactly at the start of an old record, and the next recovery would treat the old record as new.
        """
        used_end = end_offset
        while self.starts and self.starts[-1] + self.file_size > end_offset:
            start = self.starts[-1]
            file = MappedFile(self.path(start), start, self.file_size)
            within = max(end_offset - start, 0)
            asked, used = self._used_ends.pop(start, (-1, 0))
            if asked != within:
                used = file.used_end(within)
            if used > within:
                used_end = max(used_end, start + used)
            if start <= end_offset:
                file.zero(within, used)
                self._files[start] = file
                break
            file.close()
            disk.unlink(file.path)
            # Sync the directory after each deletion: a power cut must not delete a file in the middle of the log and
            # keep a later file.
            disk.sync_directory(file.path.parent)
            self.paths.forget_file(self.starts.pop())
        self._begin(end_offset)
        self._allocator = Allocator(self.paths, self.file_size)
        self._writer.start(self.path)
        return used_end - end_offset

    def used_end(self, start: int, position: int) -> int:
        """Return the offset after the last non-zero byte of the log file that starts at `start`. Only bytes from
        `position` on are searched.

        Returns `position` if all these bytes are zero. Call this only before the log is open for appends. Raises
        OSError if the disk failed.
        """
        asked, used = self._used_ends.get(start, (-1, 0))
        if asked != position:
            file = MappedFile(self.path(start), start, self.file_size)
            try:
                used = file.used_end(position)
            finally:
                file.close()
            self._used_ends[start] = (position, used)
        return used

    def begin_at(self, physical_offset: int) -> None:
        """Set the physical offset at which an empty log begins. Raises InvalidArgumentError if the log is not empty, or
        if no log file may begin at this offset."""
        if self.starts or physical_offset % self.file_size:
            raise InvalidArgumentError(
                f"the log in {self.paths} cannot begin at physical offset {physical_offset}: the log already has "
                f"files, or no file of {self.file_size} bytes begins at this offset"
            )
        self._begin(physical_offset)

    def plan_append(self, batches: Sequence[NDArray[np.int64]]) -> tuple[list[list[AppendSpan]], int]:
        """Plan the log ranges (spans) of batches that are appended to the log's end. Also returns the log's new end.
        Writes nothing.

        `batches`: for each batch, the end of each record in bytes from the batch's start. Raises MessageIllegalError if
        a record is longer than a file.
        """
        return plan_append(batches, self.end_offset, self.file_size)

    def reserve(self, new_end: int, *, for_state: bool = False) -> None:
        """Create all log files up to offset `new_end`, so that writing up to this offset needs no more disk space.

        `for_state`: True if the append contains only the broker's state. Otherwise the append contains messages. Then
        this method also reserves space after `new_end` for the broker's state, in this file or the next.

        In both cases this method drops staged bytes (received parts of a damaged range), because an append is about to
        overwrite them.

        Raises OSError if a file cannot be created. The log is then unchanged, except for files that are still empty.
        """
        assert self._allocator is not None
        self.drop_staged()
        last = (new_end - 1) // self.file_size * self.file_size
        while not self.starts or self.starts[-1] < last:
            start = (
                self.starts[-1] + self.file_size if self.starts else self.end_offset - self.end_offset % self.file_size
            )
            file = self._allocator.take_file(start)
            self._files[start] = file
            self.starts.append(start)
        file_end = last + self.file_size
        prepare_from = file_end - max(self.file_size // 2, PREPARE_BYTES)
        easy_end = prepare_from
        if new_end > prepare_from:
            self._allocator.prepare_file(file_end)
            messages_end = file_end - min(self.file_size // 8, STATE_ROOM_MAX_BYTES)
            if new_end > messages_end and not for_state:
                self._allocator.make_ready(file_end)
            easy_end = file_end if self._allocator.is_ready(file_end) else messages_end
        self._easy_end = min(easy_end, self._writer.make_pages(self.end_offset, new_end))

    def has_room_for(self, size: int) -> bool:
        """Return True if a record of `size` bytes may be written at the log's end without calling `plan_append` and
        `reserve`."""
        return self.end_offset + size + BLANK_LENGTH <= self._easy_end

    def goes_on_in_file(self, size: int) -> bool:
        """Return True if the current log file has space for a record of `size` bytes. If not, the record starts the
        next file."""
        return self.end_offset % self.file_size + size + BLANK_LENGTH <= self.file_size

    def write_record(self, record: Bytes, queue_offset: int, store_timestamp_ms: int, store_host: bytes) -> bool:
        """Write one record at the log's end, on a faster path than `write`. The queue offset, physical offset, store
        time and store host are set in the record.

        The record must have no property CRC. The caller must have checked the free space (`has_room_for`, or
        `goes_on_in_file` and `reserve`). Returns False, and does nothing, if the caller must use `write` instead.
        """
        end_offset = self.end_offset
        if not self._writer.write_record(end_offset, record, queue_offset, store_timestamp_ms, store_host):
            return False
        self.end_offset = end_offset + len(record)
        self._store_timestamp_ms = store_timestamp_ms
        return True

    def has_buffer_for(self, size: int) -> bool:
        """Return True if an append of `size` bytes need not wait for a commit to free a buffer of the transient store
        pool."""
        return self._writer.has_buffer_for(self.end_offset, size)

    def write(
        self,
        physical_offset: int,
        records: memoryview,
        store_timestamp_ms: int,
        stamp: Stamp | None = None,
        *,
        whole: bool = True,
    ) -> None:
        """Write records at an offset from `plan_append`, into files that `reserve` created, then advance the log's end.

        `stamp` sets the fields that only the store can set, in a copy of the records; None: the records have these
        fields already. `whole` is False if `stamp` neither reads nor writes the first 8 bytes. On return the records
        survive the end of this process, but not a power cut. With a transient store pool they survive the end of this
        process only after a commit. After an OSError the log's end is unchanged.
        """
        self._writer.write(self.end_offset, physical_offset, records, stamp, whole=whole)
        self.end_offset = physical_offset + len(records)
        self._store_timestamp_ms = store_timestamp_ms

    def write_through(self, physical_offset: int, records: memoryview, store_timestamp_ms: int) -> None:
        """Write complete records (with offsets and store time) as `write` does, but directly into the log files even if
        the log has a transient store pool."""
        self._writer.write_through(self.end_offset, physical_offset, records, None)
        self.end_offset = physical_offset + len(records)
        self._store_timestamp_ms = store_timestamp_ms

    @property
    def staged_end(self) -> int:
        """The physical offset at which the staged bytes end; the log's end if nothing is staged. Staged bytes are
        written after the log's end, and are not yet part of the log."""
        return max(self._staged_end, self.end_offset)

    def stage(self, physical_offset: int, data: Bytes) -> None:
        """Write one part of an append that arrives in several parts, and flush the file. This is called staging.
        `reserve` must have created the file.

        The log's end does not change until `take_staged` is called after the last part. Recovery cuts off staged bytes.
        Raises OSError if the disk failed.
        """
        start = physical_offset - physical_offset % self.file_size
        # Force the next append to call `reserve`, which drops the staged bytes (parts of an append that was not
        # completed).
        self._easy_end = 0
        self._staged_end = physical_offset + len(data)
        self._files[start].write(physical_offset - start, data)
        self._files[start].flush()

    def staged_bytes(self, physical_offset: int, end_offset: int) -> bytes:
        """Read the staged bytes between two physical offsets. Staged bytes are written after the log's end, and are not
        yet part of the log. Raises OSError if they cannot be read."""
        start = physical_offset - physical_offset % self.file_size
        with self.path(start).open("rb") as file:
            file.seek(physical_offset - start)
            return file.read(end_offset - physical_offset)

    def take_staged(self) -> None:
        """Make the staged bytes part of the log: advance the log's end to the end of these bytes. Raises OSError if the
        disk failed."""
        self._writer.commit(self.end_offset)
        # First let the writer skip the staged bytes (bytes written after the log's end), then advance the log's end. In
        # the reverse order, a commit could overwrite the staged bytes with old content of a pool buffer.
        self._writer.skip_to(self._staged_end)
        self.end_offset = self._staged_end

    def drop_staged(self) -> None:
        """Discard the staged bytes, which are not yet part of the log: overwrite them with zeros. Raises OSError if the
        disk failed."""
        if self._staged_end > self.end_offset:
            start = self.end_offset - self.end_offset % self.file_size
            self._files[start].zero(self.end_offset - start, self._staged_end - start)
        self._staged_end = 0

    def commit(self) -> int:
        """Write everything appended so far into the log files, and return the log's end. Any thread may call this
        method.

        Raises OSError if the disk failed. Every later commit then raises this error too.
        """
        end_offset = self.end_offset
        self._writer.commit(end_offset)
        return end_offset

    def flush(self) -> int:
        """Wait until everything appended so far is on disk, and return the flushed offset. Only one thread at a time
        may call this method."""
        # Read the newest record's store time first, and the log's end afterwards. In the other order, the store time
        # could belong to a record that this flush does not cover.
        store_timestamp_ms = self._store_timestamp_ms
        target = self.commit()
        start = self.flushed_offset - self.flushed_offset % self.file_size
        while start < target:
            file = self._files[start]
            file.flush()
            if target >= start + self.file_size:
                # Close the file: it is full and flushed, so no thread writes to it again.
                del self._files[start]
                file.close()
            start += self.file_size
        self.flushed_store_timestamp_ms = store_timestamp_ms
        self.flushed_offset = target
        return target

    def drop_files_before(self, physical_offset: int) -> list[Path]:
        """Remove the log files that end at or before `physical_offset` from the log, and return their paths.

        The caller then deletes these files. The last file, and files that are not completely on disk, are kept. Called
        under the append lock.
        """
        limit = min(physical_offset, self.flushed_offset)
        kept = [start for start in self.starts[:-1] if start + self.file_size > limit] + self.starts[-1:]
        forgotten = self.starts[: len(self.starts) - len(kept)]
        self.starts = kept
        return [self.paths.forget_file(start) for start in forgotten]

    def close(self) -> None:
        """Close the open files, without a flush, and stop the allocator thread. Staged bytes (parts of an append that
        has not arrived completely) are dropped. Idempotent."""
        try:
            self.drop_staged()
        except OSError as error:
            logger.warning(
                "%s: cannot clear the bytes after the log's end; the next start tries again: %s", self.paths, error
            )
        self._writer.close()
        if self._allocator is not None:
            self._allocator.close()
            self._allocator = None
        while self._files:
            self._files.popitem()[1].close()


def _choose_writer(settings: StoreSettings, file_size: int) -> LogWriter:
    """Return the writer of log files that the settings need. An option's module is imported only if the option
    is on."""
    if settings.transient_store_pool_enable:
        from storage.log.pool_writer import PoolWriter
        from storage.log.transient_store_pool import TransientStorePool

        return PoolWriter(file_size, TransientStorePool(file_size, settings.transient_store_pool_size))
    is_async = settings.flush_disk_type is FlushDiskType.ASYNC_FLUSH
    if settings.warms_up_log:
        from storage.log.warm_up import WarmUp, WarmWriter

        if WarmUp.fits(file_size):
            return WarmWriter(file_size, makes_pages=True)
    return LogWriter(file_size, makes_pages=is_async)
