"""Write appends to the log's files by stores into their memory maps. Some options of the log have their own writers.

A `CommitLog` has one writer, chosen when the store opens:

    LogWriter                       stores into the file's map
    WarmWriter (warm_up.py)         also has a thread that prefaults pages ahead of a fast writer (warm_up.py)
    PoolWriter (pool_writer.py)     copies into memory, and into the files at a commit (transient_store_pool.py)

A store into a map costs only the copy, plus a page fault at the first store to a page. `pwrite` costs a call each time,
and releases the interpreter to other threads. A store into a map cannot run out of space, because the blocks of a log
file are allocated beforehand. (If the disk cannot read a page, or another program truncates the file, the kernel sends
SIGBUS. SIGBUS ends the process as SIGKILL would.) A file that cannot be mapped for writing (disk.map_for_writing) is
written with `pwrite`.

Prefaulting hundreds of pages in one call is cheap; prefaulting pages one by one is expensive. With ASYNC_FLUSH the
writer prefaults PAGES_AHEAD_BYTES at a time (`make_pages`), and more for large appends, by writing zeros with `pwrite`.
With SYNC_FLUSH the writer does not prefault: after a store to one page, the next flush would write all pages that were
prefaulted with it. With SYNC_FLUSH, appends that fill whole pages are written with `pwrite`.

The first 8 bytes of what one append writes to a span are written last. Until then, every reader finds the log's end
there. So a process killed in the middle of an append leaves all of a batch or nothing, and no truncated record.
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
"""Factor for large appends: an append longer than half of PAGES_AHEAD_BYTES prefaults STEPS_OF_LARGE *
PAGES_AHEAD_BYTES bytes. With a smaller factor, almost every large append would prefault."""
STORE_MAX_BYTES: Final = 256 << 10
"""Maximum size in bytes of an append that is stored into the map of a log file. Longer appends are written with
`pwrite`, which also creates the pages."""
STORE_MAX_BYTES_WITHOUT_PAGES: Final = 8 << 10
"""Maximum size in bytes of an append that is stored into the map of a log file if pages are not prefaulted. With
prefaulted pages, STORE_MAX_BYTES applies."""
SCRATCH_MAX_BYTES: Final = 8 << 20
"""Maximum number of bytes of memory that a log writer keeps for copies of records. In the copies it sets offsets and
store time."""

_ZEROS: Final = memoryview(bytes(STEPS_OF_LARGE * PAGES_AHEAD_BYTES + STORE_MAX_BYTES))

Stamp = Callable[[memoryview], None]
"""A function that sets the record fields that only the store can set. It writes into the given memory, which contains
the records."""


class LogWriter:
    """Writes appends to the files of one log. One thread writes (under the store's append lock); any thread may
    commit."""

    is_buffered: ClassVar[bool] = False
    """True if this writer buffers appends, and writes them to the log files only at a commit."""

    def __init__(self, file_size: int, *, makes_pages: bool = False) -> None:
        """`makes_pages`: True to prefault pages ahead of the write position (see the module docstring)."""
        self.files: dict[int, MappedFile] = {}
        """The log files that are open for writing, by start offset. The log adds and removes files."""
        self.on_commit: Callable[[int], None] | None = None
        """Function that is called before a commit returns, with the physical offset up to which the log is in its
        files."""
        self._file_size = file_size
        self._makes_pages = makes_pages
        self._store_max_bytes = STORE_MAX_BYTES if makes_pages else STORE_MAX_BYTES_WITHOUT_PAGES
        self._pages_end = 0
        """The physical offset up to which the log's pages are prefaulted."""
        self._scratch = memoryview(b"")
        """Memory that is reused for copies of records. New memory would cost more time than the copying, because of its
        page faults."""

    def start(self, path_of: Callable[[int], Path]) -> None:
        """Prepare the writer for writing. `path_of` returns the path of the log file that starts at a given
        offset."""

    def begin_at(self, end_offset: int) -> None:
        """Set the log's end to `end_offset`: everything before it is in the log files, and nothing follows."""

    def committed_offset(self, end_offset: int) -> int:
        """Return the physical offset before which all bytes of the log are in the log files. `end_offset` is the log's
        end."""
        return end_offset

    def has_buffer_for(self, end_offset: int, size: int) -> bool:
        """Return True if `size` bytes can be written at `end_offset` without waiting for a commit to free a
        buffer."""
        return True

    def make_pages(self, end_offset: int, new_end: int) -> int:
        """Prefault pages of an existing log file up to at least `new_end`. Returns the end of the prefaulted range.

        Raises OSError if the disk failed or is full. Nothing has changed in this case.
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
            # Write zeros, so that the operating system creates these pages of the log file now. The file's content
            # stays the same, because the pages contained only zeros.
            self.files[file_start].write(first - file_start, _ZEROS[: last - first])
            self._pages_end = last
        return max(self._pages_end, new_end)

    def write(
        self, end_offset: int, physical_offset: int, records: memoryview, stamp: Stamp | None, *, whole: bool
    ) -> None:
        """Write records at `physical_offset`. If the log's `end_offset` is in the previous file, first write a BLANK
        (end-of-file marker) there.

        `stamp`: function that fills in the fields that only the store can set, in a copy of the records or in the file.
        It is None if the records already have these fields. `whole` is False if `stamp` neither reads nor writes the
        first 8 bytes. After an OSError some bytes may be written, but not the first 8.
        """
        if physical_offset != end_offset:
            self._end_file(end_offset, physical_offset)
        position = physical_offset % self._file_size
        file = self.files[physical_offset - position]
        mapped = file.mapped
        if len(records) > self._store_max_bytes:
            mapped = None
        if stamp is not None and (whole or mapped is None):
            # The append's first 8 bytes must be written to the file last. So if `stamp` needs these bytes, or the
            # records are not written through the file's map, stamp a copy of the records.
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
        """Write one record at the log's end, after the previous record in the same file, on a faster path than `write`.
        The queue offset, physical offset, store time and store host are set in the record.

        The record must have no property CRC. Returns False, and writes nothing, if the caller must use `write` instead.
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
        """Write records as `write` does. On return these records, and everything before them, are in the log
        files."""
        self.write(end_offset, physical_offset, records, stamp, whole=True)

    def skip_to(self, physical_offset: int) -> None:
        """Record that everything before `physical_offset` is in the log files, either by a commit or by a
        direct write."""

    def commit(self, end_offset: int) -> None:
        """Write everything before `end_offset` into the log files. Raises OSError if the disk failed; every later
        commit then raises this error too."""

    def close(self) -> None:
        """Release the resources that the method `start` acquired. Idempotent."""

    def _stamped(self, records: memoryview, stamp: Stamp) -> memoryview:
        """Return a copy of the records. The function `stamp` has set the fields in the copy that only the store can
        set. The copy is valid until the next call of this method."""
        size = len(records)
        if size <= SCRATCH_MAX_BYTES and size > len(self._scratch):
            self._scratch = memoryview(bytearray(size))
        copy = self._scratch[:size] if size <= SCRATCH_MAX_BYTES else memoryview(bytearray(size))
        copy[:] = records
        stamp(copy)
        return copy

    def _end_file(self, end_offset: int, physical_offset: int) -> None:
        """Write the BLANK (end-of-file marker) at `end_offset`, because the next records are written to the
        next file."""
        left = self.files[physical_offset - physical_offset % self._file_size - self._file_size]
        blank, position = self._blank(end_offset, physical_offset), end_offset - left.start
        if left.mapped is None:
            left.write(position, blank)
        else:
            left.mapped[position : position + BLANK_LENGTH] = blank

    def _blank(self, end_offset: int, physical_offset: int) -> bytes:
        """Build the BLANK (end-of-file marker) from `end_offset` to the start of the file that contains
        `physical_offset`."""
        return encode_blank(physical_offset - physical_offset % self._file_size - end_offset)
