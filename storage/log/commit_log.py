"""Every message of this store, in one append-only log of equal-sized files (spec/storage.md §1).

On disk
    commitlog/00000000000000000000      named after the physical offset of its first byte
    commitlog/00000000001073741824

    | record | record | ... | BLANK: remaining 4, magic 4 | unused |

    | ... | room for the broker's state: 32 MiB, or an eighth of a small file |

While the disk has no room for the next file, the end of a file takes only records of the broker's state. So consumers
can commit, join and receive on a full disk.

A record never crosses a file end; 8 bytes always remain for the BLANK, which marks that the log continues in the next
file.

This module treats the log as a sequence of files: it tracks the end, and makes, cuts and flushes files. log_writer.py
puts bytes into a file; log_paths.py chooses the directory of a file.
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
"""The next file is made when the current one has at most this many bytes left, or is half written."""
STATE_ROOM_MAX_BYTES: Final = 32 << 20
"""The most bytes at the end of a file that only the broker's state may use while no next file exists."""

logger = logging.getLogger(__name__)


class CommitLog:
    """The log at `paths`. One thread appends (under the caller's lock) and one flushes; offsets can be read without a
    lock.

    `open_for_append` must be called, with the end that recovery found, before anything is written.
    """

    def __init__(self, paths: LogPaths, file_size: int, writer: LogWriter | None = None) -> None:
        """Find the files. StoreCorruptError if they do not form a log (spec §5, load).

        `writer` puts appends into the files; by default each append is stored at once.
        """
        self.paths = paths
        """The directories of the files."""
        self.file_size = file_size
        self.starts = paths.find()
        """The physical offsets at which the files start, ascending."""
        self._writer = writer or LogWriter(file_size)
        self._files = self._writer.files
        """The files open for writing: those that are not completely flushed."""
        self._allocator: Allocator | None = None
        """Makes the next file; None before `open_for_append` and after `close`."""
        self.end_offset = 0
        """The end of the written part of the log."""
        self.flushed_offset = 0
        """The end of the part of the log that is on disk."""
        self._store_timestamp_ms = 0
        """The store time of the last written record."""
        self.flushed_store_timestamp_ms = 0
        """The store time of the last record that is on disk; 0: none since the store was opened."""
        self._used_ends: dict[int, tuple[int, int]] = {}
        """Cached results of `used_end` before the log is open: the position and the result, by a file's start."""
        self._staged_end = 0
        """The end of the staged bytes; at most `end_offset` if nothing is staged."""
        self._easy_end = 0
        """Records that end before this offset, with space for a BLANK after them, need no `reserve`."""
        self._begin(self.starts[-1] + file_size if self.starts else 0)

    @classmethod
    def of(cls, settings: StoreSettings) -> Self:
        """Open the log that the settings name, with the writer that they choose.

        Errors as of the constructor. OSError: the address space is too small for the transient store pool.
        """
        file_size = settings.mapped_file_size_commit_log_bytes
        return cls(LogPaths.of(settings), file_size, _choose_writer(settings, file_size))

    @property
    def min_offset(self) -> int:
        """The physical offset at which the first file starts; 0 if there are no files."""
        return self.starts[0] if self.starts else 0

    def _begin(self, end_offset: int) -> None:
        """Set the log's end: everything before `end_offset` is in the files, and nothing follows."""
        self.end_offset = self.flushed_offset = end_offset
        self._staged_end = self._easy_end = 0
        self._writer.begin_at(end_offset)

    @property
    def committed_offset(self) -> int:
        """The end of the bytes that can be read from the files. Without a pool these are all written bytes."""
        return self._writer.committed_offset(self.end_offset)

    @property
    def has_pool(self) -> bool:
        """True if appends enter the files only when they are committed."""
        return self._writer.is_buffered

    def call_on_commit(self, callback: Callable[[int], None]) -> None:
        """Register `callback`, called before a commit returns with the end of the bytes that it wrote to the files."""
        self._writer.on_commit = callback

    def path(self, start: int) -> Path:
        """Return the path of the file that starts at physical offset `start`."""
        return self.paths.path(start)

    def open_for_append(self, end_offset: int) -> int:
        """Cut the log at `end_offset` and prepare for appends there. Returns the number of bytes cut.

        Later files are deleted. The rest of former records after the end is zeroed (RocketMQ leaves it). Otherwise an
        append over it could end where an old record starts, and the next recovery would mistake the old record for a
        new one.
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
            # Delete one by one: a power cut must not lose a file in the middle and keep a later one.
            disk.sync_directory(file.path.parent)
            self.paths.forget_file(self.starts.pop())
        self._begin(end_offset)
        self._allocator = Allocator(self.paths, self.file_size)
        self._writer.start(self.path)
        return used_end - end_offset

    def used_end(self, start: int, position: int) -> int:
        """Return the end of the last byte that is not zero in the file at `start`, from `position` on.

        Returns `position` if all are zero. For a log that is not open for appends yet. OSError.
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
        """Let an empty log begin at an offset. InvalidArgumentError unless the log is empty and a file may begin
        there.
        """
        if self.starts or physical_offset % self.file_size:
            raise InvalidArgumentError(
                f"the log in {self.paths} cannot begin at {physical_offset}: it has files, or files of "
                f"{self.file_size} bytes do not begin there"
            )
        self._begin(physical_offset)

    def plan_append(self, batches: Sequence[NDArray[np.int64]]) -> tuple[list[list[AppendSpan]], int]:
        """Plan the spans of batches appended to the log's end. Also returns the new end. Writes nothing.

        `batches`: for each batch, the bytes from its start to the end of each record. MessageIllegalError: a record is
        longer than a file.
        """
        return plan_append(batches, self.end_offset, self.file_size)

    def reserve(self, new_end: int, *, for_state: bool = False) -> None:
        """Make the files up to the one that holds the byte before `new_end`, so that writing there needs no more disk
        space.

        For messages, keep room after `new_end` for the broker's state, in this file or the next. `for_state`: the
        append holds only that state. Drops staged bytes, because an append is about to overwrite them.

        OSError: a file cannot be made; the log is unchanged, except for files that are still empty.
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
        """True if a record of `size` bytes may be written at the log's end without planning and reserving."""
        return self.end_offset + size + BLANK_LENGTH <= self._easy_end

    def goes_on_in_file(self, size: int) -> bool:
        """True if a record of `size` bytes goes to the log's end, and not to the start of the next file."""
        return self.end_offset % self.file_size + size + BLANK_LENGTH <= self.file_size

    def write_record(self, record: Bytes, queue_offset: int, store_timestamp_ms: int, store_host: bytes) -> bool:
        """Stamp and write one record at the log's end, in fewer steps than `write`.

        The record has no property CRC, and there is room for it (`has_room_for`, or `goes_on_in_file` and `reserve`).
        Returns False, and does nothing, if the record has to be written by `write`.
        """
        end_offset = self.end_offset
        if not self._writer.write_record(end_offset, record, queue_offset, store_timestamp_ms, store_host):
            return False
        self.end_offset = end_offset + len(record)
        self._store_timestamp_ms = store_timestamp_ms
        return True

    def has_buffer_for(self, size: int) -> bool:
        """True if an append of `size` bytes does not have to wait for a commit to free a buffer."""
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
        """Write records at an offset from `plan_append`, into files that `reserve` made, then move the log's end.

        `stamp` fills in the fields that only the store can set, in a copy; None: the records are stamped already.
        Unless `whole`, `stamp` neither reads nor writes the first 8 bytes. On return the records survive the end of
        this process, but not a power cut; with a pool they survive it once they are committed. After an OSError the
        log's end has not moved.
        """
        self._writer.write(self.end_offset, physical_offset, records, stamp, whole=whole)
        self.end_offset = physical_offset + len(records)
        self._store_timestamp_ms = store_timestamp_ms

    def write_through(self, physical_offset: int, records: memoryview, store_timestamp_ms: int) -> None:
        """Write stamped records as `write` does, into the files even if there is a pool."""
        self._writer.write_through(self.end_offset, physical_offset, records, None)
        self.end_offset = physical_offset + len(records)
        self._store_timestamp_ms = store_timestamp_ms

    @property
    def staged_end(self) -> int:
        """The end of the staged bytes; the log's end if nothing is staged."""
        return max(self._staged_end, self.end_offset)

    def stage(self, physical_offset: int, data: Bytes) -> None:
        """Write a part of something that is appended in parts to a file that `reserve` made, and flush it.

        The log's end stays until `take_staged` moves it after the last part. Recovery cuts off staged bytes. OSError:
        the disk failed.
        """
        start = physical_offset - physical_offset % self.file_size
        self._easy_end = 0  # the next append calls `reserve`, which drops the staged bytes
        self._staged_end = physical_offset + len(data)
        self._files[start].write(physical_offset - start, data)
        self._files[start].flush()

    def staged_bytes(self, physical_offset: int, end_offset: int) -> bytes:
        """Read the staged bytes in a range. OSError."""
        start = physical_offset - physical_offset % self.file_size
        with self.path(start).open("rb") as file:
            file.seek(physical_offset - start)
            return file.read(end_offset - physical_offset)

    def take_staged(self) -> None:
        """Move the log's end to the end of the staged bytes. OSError: the disk failed."""
        self._writer.commit(self.end_offset)
        # Skip before the log's end moves: otherwise a commit could write old buffer content there.
        self._writer.skip_to(self._staged_end)
        self.end_offset = self._staged_end

    def drop_staged(self) -> None:
        """Zero the staged bytes, if any. OSError: the disk failed."""
        if self._staged_end > self.end_offset:
            start = self.end_offset - self.end_offset % self.file_size
            self._files[start].zero(self.end_offset - start, self._staged_end - start)
        self._staged_end = 0

    def commit(self) -> int:
        """Bring everything written into the files, and return the end. Any thread may call it.

        OSError: the disk failed; every later commit raises it, too.
        """
        end_offset = self.end_offset
        self._writer.commit(end_offset)
        return end_offset

    def flush(self) -> int:
        """Wait until everything written so far is on disk, and return its end. Called by one thread at a time."""
        store_timestamp_ms = self._store_timestamp_ms  # Read before the end: never newer than what is flushed.
        target = self.commit()
        start = self.flushed_offset - self.flushed_offset % self.file_size
        while start < target:
            file = self._files[start]
            file.flush()
            if target >= start + self.file_size:
                # The writer does not return to this file.
                del self._files[start]
                file.close()
            start += self.file_size
        self.flushed_store_timestamp_ms = store_timestamp_ms
        self.flushed_offset = target
        return target

    def drop_files_before(self, physical_offset: int) -> list[Path]:
        """Let the log start at the first file that ends after `physical_offset`, and return the earlier files.

        The caller then deletes those files. Drops only files that are on disk, and never the last one. Called under the
        append lock.
        """
        limit = min(physical_offset, self.flushed_offset)
        kept = [start for start in self.starts[:-1] if start + self.file_size > limit] + self.starts[-1:]
        forgotten = self.starts[: len(self.starts) - len(kept)]
        self.starts = kept
        return [self.paths.forget_file(start) for start in forgotten]

    def close(self) -> None:
        """Drop staged bytes, stop preparing files and close the open files, without a flush. Idempotent."""
        try:
            self.drop_staged()
        except OSError as error:
            logger.warning("%s: bytes after the log's end stay until the next start: %s", self.paths, error)
        self._writer.close()
        if self._allocator is not None:
            self._allocator.close()
            self._allocator = None
        while self._files:
            self._files.popitem()[1].close()


def _choose_writer(settings: StoreSettings, file_size: int) -> LogWriter:
    """Choose the writer that the settings need. An option's module is imported only if the option is on."""
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
