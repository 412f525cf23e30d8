"""Writing appends to the log's files: here into their maps, as each comes; the log's options are writers of their own.

A `CommitLog` has one writer, chosen when the store opens, and does not ask which:

    LogWriter                       stores into the file's map
    WarmWriter (warm_writer.py)     does so, and has a thread make the pages ahead of a fast writer (warm_up.py)
    PoolWriter (pool_writer.py)     copies into memory, and into the files at a commit (transient_store_pool.py)

A store into a map costs the copy alone, and a page where it is the first; `pwrite` costs a call each time, and gives
the interpreter away to other threads. It cannot fail for want of space: the blocks of a log file are allocated before
it is used. (A disk that dies when it has to read a page, or somebody who cuts the file short, is SIGBUS here, which
ends the process as SIGKILL would.) A file that cannot be mapped for writing (disk.map_for_writing) is written with
`pwrite`.

Pages are cheap to make by the hundred and dear one by one. With ASYNC_FLUSH the writer makes PAGES_AHEAD_BYTES at a
time ahead of itself (`make_pages`), and more for large appends, by writing zeros with `pwrite`. With SYNC_FLUSH it does
not: a store to one of them would have the next flush write all that were made together. Appends that fill whole pages
go by `pwrite` there.

The first 8 bytes of what one append writes to a span are written last. Until then the log ends there for every reader,
so a process killed in the middle of an append leaves all of a batch or nothing, not a record cut short.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, Final

from raymq.records.format.layout import BLANK_LENGTH, encode_blank
from raymq.records.kernels.stamp import stamp_at
from storage.files.disk import Bytes
from storage.files.mapped_file import MappedFile

PAGES_AHEAD_BYTES: Final = 128 << 10
STEPS_OF_LARGE: Final = 4
"""So many times PAGES_AHEAD_BYTES for an append that fills half of them itself: else each such append would make some.
"""
STORE_MAX_BYTES: Final = 256 << 10
"""Longer appends are written with `pwrite`: it makes the pages as it goes."""
STORE_MAX_BYTES_WITHOUT_PAGES: Final = 8 << 10
"""The same where no pages are made ahead."""
SCRATCH_MAX_BYTES: Final = 8 << 20
"""The memory for stamped copies that is kept."""

_ZEROS: Final = memoryview(bytes(STEPS_OF_LARGE * PAGES_AHEAD_BYTES + STORE_MAX_BYTES))

Stamp = Callable[[memoryview], None]
"""Fills in, in the memory given, the fields of records that only the store knows."""


class LogWriter:
    """Writes to the files of one log. One thread writes (the store's append lock); any may commit."""

    is_buffered: ClassVar[bool] = False
    """True if appends are not in the files before they are committed."""

    def __init__(self, file_size: int, *, makes_pages: bool = False) -> None:
        """`makes_pages`: see above."""
        self.files: dict[int, MappedFile] = {}
        """The files open for writing, by their first physical offset; the log adds and removes them."""
        self.on_commit: Callable[[int], None] | None = None
        """Called with the end of what a commit brought to the files, before that commit returns."""
        self._file_size = file_size
        self._makes_pages = makes_pages
        self._store_max_bytes = STORE_MAX_BYTES if makes_pages else STORE_MAX_BYTES_WITHOUT_PAGES
        self._pages_end = 0
        """The end of the pages made ahead."""
        self._scratch = memoryview(b"")
        """Memory for stamped copies, kept: new memory costs more than the copy, a page at a time."""

    def start(self, path_of: Callable[[int], Path]) -> None:
        """Get ready to write. `path_of` gives the path of the file that starts at an offset."""

    def begin_at(self, end_offset: int) -> None:
        """Take note that all before `end_offset` is in the files, and nothing behind it."""

    def committed_offset(self, end_offset: int) -> int:
        """The end of what is in the files, of a log that is written up to `end_offset`."""
        return end_offset

    def has_buffer_for(self, end_offset: int, size: int) -> bool:
        """True if `size` bytes behind `end_offset` can be written without waiting for a commit."""
        return True

    def make_pages(self, end_offset: int, new_end: int) -> int:
        """Get ready to write from the log's end up to `new_end`, in a file that is there; returns the offset, there or
        behind it, up to which that holds. OSError: the disk failed, or is full; nothing is changed."""
        file_start = (new_end - 1) // self._file_size * self._file_size
        file_end = file_start + self._file_size
        if not self._makes_pages or self.files[file_start].mapped is None:
            return file_end
        first = max(end_offset, self._pages_end, file_start)
        if new_end > first and new_end - first <= STORE_MAX_BYTES:
            is_large = 2 * (new_end - end_offset) >= PAGES_AHEAD_BYTES
            step = STEPS_OF_LARGE * PAGES_AHEAD_BYTES if is_large else PAGES_AHEAD_BYTES
            last = min(new_end - new_end % -step, file_end)
            # All is zero there already.
            self.files[file_start].write(first - file_start, _ZEROS[: last - first])
            self._pages_end = last
        return max(self._pages_end, new_end)

    def write(
        self, end_offset: int, physical_offset: int, records: memoryview, stamp: Stamp | None, *, whole: bool
    ) -> None:
        """Write records at `physical_offset`, behind a BLANK if the log's `end_offset` is in the file before.

        `stamp` is applied to a copy of them, or in the file; None: they are stamped already. Unless `whole`, it neither
        reads nor writes the first 8 bytes. OSError: some of it may be written, but not the first 8 bytes.
        """
        if physical_offset != end_offset:
            self._end_file(end_offset, physical_offset)
        position = physical_offset % self._file_size
        file = self.files[physical_offset - position]
        mapped = file.mapped
        if len(records) > self._store_max_bytes:
            mapped = None
        if stamp is not None and (whole or mapped is None):
            # In the file, `stamp` cannot have the first 8 bytes: they come last.
            records, stamp = self._stamped(records, stamp), None
        if mapped is None:
            file.write_whole(position, records)
            return
        end = position + len(records)
        mapped[position + BLANK_LENGTH : end] = records[BLANK_LENGTH:]
        if stamp is not None:
            stamp(memoryview(mapped)[position:end])
        mapped[position : position + BLANK_LENGTH] = records[:BLANK_LENGTH]

    def write_record(
        self, physical_offset: int, record: Bytes, queue_offset: int, store_timestamp_ms: int, store_host: bytes
    ) -> bool:
        """`write` for one record without a property CRC, behind others in its file: stamped here, in fewer steps.
        False, and nothing is written, if it has to go by `write`."""
        size, position = len(record), physical_offset % self._file_size
        mapped = self.files[physical_offset - position].mapped
        if mapped is None or size > self._store_max_bytes:
            return False
        body = position + BLANK_LENGTH
        mapped[body : position + size] = record[BLANK_LENGTH:]
        stamp_at(mapped, position, queue_offset, physical_offset, store_timestamp_ms, store_host)
        mapped[position:body] = record[:BLANK_LENGTH]
        return True

    def write_through(self, end_offset: int, physical_offset: int, records: memoryview, stamp: Stamp | None) -> None:
        """Do as `write` does, and have them in the files on return, with all that was written before."""
        self.write(end_offset, physical_offset, records, stamp, whole=True)

    def skip_to(self, physical_offset: int) -> None:
        """Take note that everything before an offset is in the files: it was committed, or written there."""

    def commit(self, end_offset: int) -> None:
        """Have everything before `end_offset` in the files. OSError, from then on for ever, when the disk fails."""

    def close(self) -> None:
        """Release what `start` made. Idempotent."""

    def _stamped(self, records: memoryview, stamp: Stamp) -> memoryview:
        """A stamped copy of the records, valid until the next one is made."""
        size = len(records)
        if size <= SCRATCH_MAX_BYTES and size > len(self._scratch):
            self._scratch = memoryview(bytearray(size))
        copy = self._scratch[:size] if size <= SCRATCH_MAX_BYTES else memoryview(bytearray(size))
        copy[:] = records
        stamp(copy)
        return copy

    def _end_file(self, end_offset: int, physical_offset: int) -> None:
        """Write the BLANK that ends a file at `end_offset`, as the records go to the next one."""
        left = self.files[physical_offset - physical_offset % self._file_size - self._file_size]
        blank, position = self._blank(end_offset, physical_offset), end_offset - left.start
        if left.mapped is None:
            left.write(position, blank)
        else:
            left.mapped[position : position + BLANK_LENGTH] = blank

    def _blank(self, end_offset: int, physical_offset: int) -> bytes:
        """The BLANK from `end_offset` to the start of the file that holds `physical_offset`."""
        return encode_blank(physical_offset - physical_offset % self._file_size - end_offset)
