"""Writing appends to the log's files: here with `pwrite`, as each comes; the log's options are writers of their own.

A `CommitLog` has one writer, chosen when the store opens, and does not ask which:

    LogWriter                       pwrite into the file, unless an option asks for another
    MapWriter (map_writer.py)       stores into pages that a thread has made ahead of the writer (warm_up.py)
    PoolWriter (pool_writer.py)     copies into memory, and into the files at a commit (transient_store_pool.py)

The first 8 bytes of what one append writes to a span are written last. Until then the log ends there for every reader,
so a process killed in the middle of an append leaves all of a batch or nothing, not a record cut short.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, Final

from raymq.record.layout import encode_blank
from storage.files.mapped_file import MappedFile

SCRATCH_BYTES: Final = 512 << 10

Stamp = Callable[[memoryview], None]
"""Fills in, in the memory given, the fields of records that only the store knows."""


class LogWriter:
    """Writes to the files of one log. One thread writes (the store's append lock); any may commit."""

    is_buffered: ClassVar[bool] = False
    """True if appends are not in the files before they are committed."""

    def __init__(self, file_size: int) -> None:
        self.files: dict[int, MappedFile] = {}
        """The files open for writing, by their first physical offset; the log adds and removes them."""
        self.on_commit: Callable[[int], None] | None = None
        """Called with the end of what a commit brought to the files, before that commit returns."""
        self._file_size = file_size
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        """Memory for stamping, used again by each write."""

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

    def write(
        self, end_offset: int, physical_offset: int, records: memoryview, stamp: Stamp | None, *, whole: bool
    ) -> None:
        """Write records at `physical_offset`, behind a BLANK if the log's `end_offset` is in the file before.

        `stamp` is applied to a copy of them; None: they are stamped already. Unless `whole`, it neither reads nor
        writes the first 8 bytes. OSError: some of it may be written, but not the first 8 bytes.
        """
        if physical_offset != end_offset:
            self._end_file(end_offset, physical_offset)
        if stamp is not None:
            records = self._stamped(records, stamp)
        start = physical_offset - physical_offset % self._file_size
        self.files[start].write_whole(physical_offset - start, records)

    def write_through(self, end_offset: int, physical_offset: int, records: memoryview, stamp: Stamp | None) -> None:
        """Do as `write` does, and have them in the files on return, with all that was written before."""
        self.write(end_offset, physical_offset, records, stamp, whole=True)

    def commit(self, end_offset: int) -> None:
        """Have everything before `end_offset` in the files. OSError, from then on for ever, when the disk fails."""

    def close(self) -> None:
        """Release what `start` made. Idempotent."""

    def _end_file(self, end_offset: int, physical_offset: int) -> None:
        """Write the BLANK that ends a file at `end_offset`, as the records go to the next one."""
        left = self.files[physical_offset - physical_offset % self._file_size - self._file_size]
        left.write(end_offset - left.start, self._blank(end_offset, physical_offset))

    def _blank(self, end_offset: int, physical_offset: int) -> bytes:
        """The BLANK from `end_offset` to the start of the file that holds `physical_offset`."""
        return encode_blank(physical_offset - physical_offset % self._file_size - end_offset)

    def _stamped(self, records: memoryview, stamp: Stamp) -> memoryview:
        """A stamped copy of the records, valid until the next write."""
        size = len(records)
        copy = self._scratch[:size] if size <= SCRATCH_BYTES else memoryview(bytearray(size))
        copy[:] = records
        stamp(copy)
        return copy
