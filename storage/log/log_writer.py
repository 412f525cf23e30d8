"""Writes appends to the log's files: here at once into their maps; each option of the log is a writer of its own.

A `CommitLog` has one writer, chosen when the store opens:

    LogWriter                       stores into the file's map
    WarmWriter (warm_up.py)         also has a thread that prefaults pages ahead of a fast writer (warm_up.py)
    PoolWriter (pool_writer.py)     copies into memory, and into the files at a commit (transient_store_pool.py)

A store into a map costs only the copy, plus a page fault at the first store to a page. `pwrite` costs a call each time,
and releases the interpreter to other threads. A store into a map cannot run out of space, because the blocks of a log
file are allocated beforehand. (If the disk cannot read a page, or another program truncates the file, the process gets
SIGBUS, which ends it as SIGKILL would.) A file that cannot be mapped for writing (disk.map_for_writing) is written with
`pwrite`.

Pages are cheap to prefault by the hundred and expensive one by one. With ASYNC_FLUSH the writer prefaults
PAGES_AHEAD_BYTES at a time (`make_pages`), and more for large appends, by writing zeros with `pwrite`. With SYNC_FLUSH
it does not: after a store to one page the next flush would write all pages prefaulted with it. With SYNC_FLUSH, appends
that fill whole pages are written with `pwrite`.

The first 8 bytes of what one append writes to a span are written last. Until then the log ends there for every reader.
So a process killed in the middle of an append leaves all of a batch or nothing, and no truncated record.
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
"""The multiple of PAGES_AHEAD_BYTES for an append that fills half of them itself; else each such append would
prefault.
"""
STORE_MAX_BYTES: Final = 256 << 10
"""Longer appends are written with `pwrite`, which makes the pages during the write."""
STORE_MAX_BYTES_WITHOUT_PAGES: Final = 8 << 10
"""The limit instead of STORE_MAX_BYTES if no pages are prefaulted."""
SCRATCH_MAX_BYTES: Final = 8 << 20
"""The most memory that is kept for stamped copies."""

_ZEROS: Final = memoryview(bytes(STEPS_OF_LARGE * PAGES_AHEAD_BYTES + STORE_MAX_BYTES))

Stamp = Callable[[memoryview], None]
"""Fills in, in the given memory, the fields of records that only the store can set."""


class LogWriter:
    """Writes to the files of one log. One thread writes (under the store's append lock); any thread may commit."""

    is_buffered: ClassVar[bool] = False
    """True if appends enter the files only when they are committed."""

    def __init__(self, file_size: int, *, makes_pages: bool = False) -> None:
        """`makes_pages`: prefault pages ahead of the writer (module docstring)."""
        self.files: dict[int, MappedFile] = {}
        """The files open for writing, by their first physical offset. The log adds and removes files."""
        self.on_commit: Callable[[int], None] | None = None
        """Called before a commit returns, with the end of the bytes that it wrote to the files."""
        self._file_size = file_size
        self._makes_pages = makes_pages
        self._store_max_bytes = STORE_MAX_BYTES if makes_pages else STORE_MAX_BYTES_WITHOUT_PAGES
        self._pages_end = 0
        """The end of the prefaulted pages."""
        self._scratch = memoryview(b"")
        """Reused memory for stamped copies: new memory costs more than the copy, because of its page faults."""

    def start(self, path_of: Callable[[int], Path]) -> None:
        """Prepare for writing. `path_of` returns the path of the file that starts at an offset."""

    def begin_at(self, end_offset: int) -> None:
        """Note that everything before `end_offset` is in the files, and that nothing follows."""

    def committed_offset(self, end_offset: int) -> int:
        """Return the end of the bytes in the files, for a log that is written up to `end_offset`."""
        return end_offset

    def has_buffer_for(self, end_offset: int, size: int) -> bool:
        """True if `size` bytes after `end_offset` can be written without waiting for a commit."""
        return True

    def make_pages(self, end_offset: int, new_end: int) -> int:
        """Prefault pages up to at least `new_end` in an existing file. Returns the end of the prefaulted range.

        OSError: the disk failed, or is full; nothing has changed.
        """
        file_start = (new_end - 1) // self._file_size * self._file_size
        file_end = file_start + self._file_size
        if not self._makes_pages or self.files[file_start].mapped is None:
            return file_end
        first = max(end_offset, self._pages_end, file_start)
        if new_end > first and new_end - first <= STORE_MAX_BYTES:
            is_large = 2 * (new_end - end_offset) >= PAGES_AHEAD_BYTES
            step = STEPS_OF_LARGE * PAGES_AHEAD_BYTES if is_large else PAGES_AHEAD_BYTES
            last = min(new_end - new_end % -step, file_end)
            # These bytes are all zero already.
            self.files[file_start].write(first - file_start, _ZEROS[: last - first])
            self._pages_end = last
        return max(self._pages_end, new_end)

    def write(
        self, end_offset: int, physical_offset: int, records: memoryview, stamp: Stamp | None, *, whole: bool
    ) -> None:
        """Write records at `physical_offset`, after a BLANK if the log's `end_offset` is in the previous file.

        `stamp` is applied to a copy of the records, or in the file; None: they are stamped already. Unless `whole`,
        `stamp` neither reads nor writes the first 8 bytes. OSError: some bytes may be written, but not the first 8.
        """
        if physical_offset != end_offset:
            self._end_file(end_offset, physical_offset)
        position = physical_offset % self._file_size
        file = self.files[physical_offset - position]
        mapped = file.mapped
        if len(records) > self._store_max_bytes:
            mapped = None
        if stamp is not None and (whole or mapped is None):
            # In the file `stamp` could not use the first 8 bytes, which come last. So stamp a copy.
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
        """Stamp and write one record after others in its file, in fewer steps than `write`.

        The record has no property CRC. Returns False, and writes nothing, if the record has to be written by `write`.
        """
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
        """Write as `write` does; on return these bytes, and all earlier ones, are in the files."""
        self.write(end_offset, physical_offset, records, stamp, whole=True)

    def skip_to(self, physical_offset: int) -> None:
        """Note that everything before an offset is in the files, whether it was committed or written there."""

    def commit(self, end_offset: int) -> None:
        """Bring everything before `end_offset` into the files. OSError: the disk failed; later commits raise it,
        too.
        """

    def close(self) -> None:
        """Release the resources of `start`. Idempotent."""

    def _stamped(self, records: memoryview, stamp: Stamp) -> memoryview:
        """Return a stamped copy of the records, valid until the next copy is made."""
        size = len(records)
        if size <= SCRATCH_MAX_BYTES and size > len(self._scratch):
            self._scratch = memoryview(bytearray(size))
        copy = self._scratch[:size] if size <= SCRATCH_MAX_BYTES else memoryview(bytearray(size))
        copy[:] = records
        stamp(copy)
        return copy

    def _end_file(self, end_offset: int, physical_offset: int) -> None:
        """Write the BLANK that ends a file at `end_offset`, because the records go to the next file."""
        left = self.files[physical_offset - physical_offset % self._file_size - self._file_size]
        blank, position = self._blank(end_offset, physical_offset), end_offset - left.start
        if left.mapped is None:
            left.write(position, blank)
        else:
            left.mapped[position : position + BLANK_LENGTH] = blank

    def _blank(self, end_offset: int, physical_offset: int) -> bytes:
        """Build the BLANK from `end_offset` to the start of the file that holds `physical_offset`."""
        return encode_blank(physical_offset - physical_offset % self._file_size - end_offset)
