"""Every message of this store, in one append-only log of equal-sized files (spec/storage.md §1).

On disk
    commitlog/00000000000000000000      named after the physical offset of its first byte
    commitlog/00000000001073741824

    | record | record | ... | BLANK: remaining 4, magic 4 | unused |

A record never crosses a file end; 8 bytes always remain for the BLANK that says that the log goes on in the next file.

The first 8 bytes of what one append writes to a place are written last. Until then the log ends there for every
reader, so a process killed in the middle of an append leaves all of a batch or nothing, not a record cut short.

With a transient store pool appends are written to its memory, and to the files by `commit`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from raymq.errors import InvalidArgumentError
from raymq.record.layout import BLANK_LENGTH, encode_blank
from storage.files import disk
from storage.files.mapped_file import MappedFile
from storage.log.allocator import Allocator
from storage.log.append_plan import AppendSpan, plan_append
from storage.log.log_paths import LogPaths
from storage.log.transient_store_pool import TransientStorePool
from storage.log.warm_up import WarmUp

SCRATCH_BYTES: Final = 512 << 10
PREPARE_BYTES: Final = 64 << 20
"""The next file is made once so little is left of the current one, or once half of it is written."""


class CommitLog:
    """The log at `paths`. One thread appends (the caller's lock), one flushes; positions are plain reads.

    `end_offset` is the end of what is written, `committed_offset` of what can be read from the files (the same without
    a pool), `flushed_offset` of what is on disk, and `flushed_store_timestamp_ms` the store time of its last record (0:
    none since the store was opened). `min_offset` is where the first file starts.
    `open_for_append` must be called, with the end that recovery found, before anything is written. With a pool
    `on_commit` is called with the end of what is committed, before `commit` returns.
    """

    def __init__(
        self, paths: LogPaths, file_size: int, *, warm_up: bool = False, pool: TransientStorePool | None = None
    ) -> None:
        """Find the files. StoreCorruptError when they do not form a log (spec §5, load). With `warm_up` a fast writer
        finds the next pages in memory (warm_up.py); what is appended through a `pool` needs none."""
        self.paths = paths
        self.file_size = file_size
        self.starts = paths.find()
        self._open_files: dict[int, MappedFile] = {}
        self._allocator: Allocator | None = None
        self._may_warm_up = warm_up and WarmUp.fits(file_size)
        self._warm_up: WarmUp | None = None
        self._pool = pool
        self.on_commit: Callable[[int], None] | None = None
        self._begin(self.starts[-1] + file_size if self.starts else 0)
        self._stamping = memoryview(bytearray(SCRATCH_BYTES))
        self._store_timestamp_ms = self.flushed_store_timestamp_ms = 0

    @property
    def min_offset(self) -> int:
        return self.starts[0] if self.starts else 0

    def _begin(self, end_offset: int) -> None:
        """All before `end_offset` is in the files, and nothing is behind it."""
        self.end_offset = self.flushed_offset = end_offset
        if self._pool is not None:
            self._pool.begin_at(end_offset)

    @property
    def committed_offset(self) -> int:
        return self.end_offset if self._pool is None else self._pool.committed_offset

    @property
    def has_pool(self) -> bool:
        """Whether appends are not in the files before they are committed."""
        return self._pool is not None

    def path(self, start: int) -> Path:
        """The path of the file that starts at physical offset `start`."""
        return self.paths.path(start)

    def open_for_append(self, end_offset: int) -> int:
        """Cut the log at `end_offset` and get ready to append there. Returns how many bytes were cut.

        Files beyond are deleted. What is left of former records behind the end is zeroed (RocketMQ leaves it): an
        append over it could end where an old record starts, and the next recovery would take that for a new one.
        """
        used_end = end_offset
        while self.starts and self.starts[-1] + self.file_size > end_offset:
            start = self.starts[-1]
            file = MappedFile(self.path(start), start, self.file_size)
            within = max(end_offset - start, 0)
            used = file.used_end(within)
            if used > within:
                used_end = max(used_end, start + used)
            if start <= end_offset:
                file.zero(within, used)
                self._open_files[start] = file
                break
            file.close()
            disk.unlink(file.path)
            # One by one: a power cut must not lose a file in the middle and keep the one behind it.
            disk.sync_directory(file.path.parent)
            self.paths.forget(self.starts.pop())
        self._begin(end_offset)
        self._allocator = Allocator(self.paths, self.file_size)
        if self._may_warm_up:
            self._warm_up = WarmUp(self.file_size, self.path)
        return used_end - end_offset

    def begin_at(self, physical_offset: int) -> None:
        """Let an empty log begin at an offset. InvalidArgumentError unless it is empty and a file may begin there."""
        if self.starts or physical_offset % self.file_size:
            raise InvalidArgumentError(
                f"the log in {self.paths} cannot begin at {physical_offset}: it has files, or files of "
                f"{self.file_size} bytes do not begin there"
            )
        self._begin(physical_offset)

    def place(self, batches: Sequence[NDArray[np.int64]]) -> list[list[AppendSpan]]:
        """Where batches go, if they are the next to be written (`plan_append`); writes nothing."""
        return plan_append(batches, self.end_offset, self.file_size)

    def reserve(self, last_offset: int) -> None:
        """Make the files up to the one that holds `last_offset`, so that writing needs no more space on the disk.

        OSError if that fails; the log is as before then, but for files that are still empty.
        """
        assert self._allocator is not None
        last = last_offset - last_offset % self.file_size
        while not self.starts or self.starts[-1] < last:
            start = (
                self.starts[-1] + self.file_size if self.starts else self.end_offset - self.end_offset % self.file_size
            )
            file = self._allocator.take(start)
            self._open_files[start] = file
            self.starts.append(start)
        left = last + self.file_size - last_offset
        if left <= max(self.file_size // 2, PREPARE_BYTES):
            self._allocator.prepare(last + self.file_size)

    def has_buffer_for(self, size: int) -> bool:
        """Whether an append of so many bytes need not wait for a commit, for want of a buffer."""
        return self._pool is None or self._pool.has_buffer_for(self.end_offset, size + BLANK_LENGTH)

    def write(
        self,
        physical_offset: int,
        records: memoryview,
        store_timestamp_ms: int,
        stamp: Callable[[memoryview], None] | None = None,
        *,
        whole: bool = True,
        through: bool = False,
    ) -> None:
        """Write records at a place that `place` gave and `reserve` made, then move the end.

        `stamp` fills in a copy of them what only the store knows; None: they are stamped already. Unless `whole`, it
        neither reads nor writes the first 8 bytes. On return they outlive this process, not a power cut; with a pool
        they do so once they are committed, which `through` has done at once. After an OSError the log's end has not
        moved.
        """
        pool, end_offset = self._pool, physical_offset + len(records)
        if pool is None:
            self._write_to_file(physical_offset, records, stamp, whole=whole)
        elif through or len(records) > pool.buffer_bytes:
            self.commit()
            self._write_to_file(physical_offset, records, stamp, whole=whole)
            # Before the end moves: nobody may commit there what the buffers hold from another time.
            pool.skip_to(end_offset)
        else:
            self._write_to_pool(pool, physical_offset, records, stamp)
        self.end_offset = end_offset
        self._store_timestamp_ms = store_timestamp_ms

    def _write_to_pool(
        self,
        pool: TransientStorePool,
        physical_offset: int,
        records: memoryview,
        stamp: Callable[[memoryview], None] | None,
    ) -> None:
        if physical_offset != self.end_offset:
            self._window(pool, self.end_offset, BLANK_LENGTH)[:] = self._blank_before(physical_offset)
        window = self._window(pool, physical_offset, len(records))
        window[:] = records
        if stamp is not None:
            stamp(window)

    def _window(self, pool: TransientStorePool, physical_offset: int, size: int) -> memoryview:
        window = pool.window(physical_offset, size)
        if window is None:
            self.commit()
            window = pool.window(physical_offset, size)
            assert window is not None
        return window

    def _blank_before(self, physical_offset: int) -> bytes:
        return encode_blank(physical_offset - physical_offset % self.file_size - self.end_offset)

    def _write_to_file(
        self, physical_offset: int, records: memoryview, stamp: Callable[[memoryview], None] | None, *, whole: bool
    ) -> None:
        start = physical_offset - physical_offset % self.file_size
        if physical_offset != self.end_offset:
            left = self._open_files[start - self.file_size]
            left.write(self.end_offset - left.start, self._blank_before(physical_offset))
        window = None if self._warm_up is None else self._warm_up.window(physical_offset, len(records))
        if stamp is not None and (whole or window is None):
            target = self._scratch_of(len(records))
            target[:] = records
            stamp(target)
            records, stamp = target, None
        if window is not None:
            window[BLANK_LENGTH:] = records[BLANK_LENGTH:]
            if stamp is not None:
                stamp(window)
            window[:BLANK_LENGTH] = records[:BLANK_LENGTH]
        else:
            self._open_files[start].write_whole(physical_offset - start, records)

    def _scratch_of(self, size: int) -> memoryview:
        """So many bytes of memory, which is used again by the next write unless it is much."""
        if size > SCRATCH_BYTES:
            return memoryview(bytearray(size))
        return self._stamping[:size]

    def commit(self) -> int:
        """Have all that is written now in the files; returns its end. Any thread may. OSError, from then on for ever,
        when the disk fails."""
        end_offset = self.end_offset
        if self._pool is not None:
            self._pool.commit(end_offset, self._open_files)
            if self.on_commit is not None:
                self.on_commit(end_offset)
        return end_offset

    def flush(self) -> int:
        """Wait until all that is written now is on disk; returns its end. Called by one thread at a time."""
        store_timestamp_ms = self._store_timestamp_ms  # Read before the end: never newer than what is flushed.
        target = self.commit()
        start = self.flushed_offset - self.flushed_offset % self.file_size
        while start < target:
            file = self._open_files[start]
            file.flush()
            if target >= start + self.file_size:
                # The writer has left this file for good.
                del self._open_files[start]
                file.close()
            start += self.file_size
        self.flushed_store_timestamp_ms = store_timestamp_ms
        self.flushed_offset = target
        return target

    def forget_before(self, physical_offset: int) -> list[Path]:
        """Let the log start at the first file that ends behind `physical_offset`; returns the files before it, which
        are now the caller's to delete. Only what is on disk, and never the last. Called under the append lock."""
        limit = min(physical_offset, self.flushed_offset)
        kept = [start for start in self.starts[:-1] if start + self.file_size > limit] + self.starts[-1:]
        forgotten = self.starts[: len(self.starts) - len(kept)]
        self.starts = kept
        return [self.paths.forget(start) for start in forgotten]

    def close(self) -> None:
        """Stop preparing files and close those that are open. Nothing is flushed. Idempotent."""
        if self._warm_up is not None:
            self._warm_up.close()
            self._warm_up = None
        if self._allocator is not None:
            self._allocator.close()
            self._allocator = None
        while self._open_files:
            self._open_files.popitem()[1].close()
