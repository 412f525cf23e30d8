"""Write appends to a transient store pool: into its memory at once, and into the log's files at a commit.

The store uses this writer with transient_store_pool_enable. An append longer than a buffer of the pool is written
directly to the files, and so are records of another replica. Before such a direct write, everything in the pool is
committed.
"""

from __future__ import annotations

from typing import ClassVar

from raymq.records.format.layout import BLANK_LENGTH
from storage.files.disk import Bytes
from storage.log.log_writer import LogWriter, Stamp
from storage.log.transient_store_pool import TransientStorePool


class PoolWriter(LogWriter):
    """Writes the appends of one log to its transient store pool `pool`."""

    is_buffered: ClassVar[bool] = True

    def __init__(self, file_size: int, pool: TransientStorePool) -> None:
        super().__init__(file_size)
        self.pool = pool

    def begin_at(self, end_offset: int) -> None:
        self.pool.begin_at(end_offset)

    def committed_offset(self, end_offset: int) -> int:
        return self.pool.committed_offset

    def has_buffer_for(self, end_offset: int, size: int) -> bool:
        return self.pool.has_buffer_for(end_offset, size + BLANK_LENGTH)

    def write(
        self, end_offset: int, physical_offset: int, records: memoryview, stamp: Stamp | None, *, whole: bool
    ) -> None:
        if len(records) > self.pool.buffer_bytes:
            self.write_through(end_offset, physical_offset, records, stamp)
            return
        if physical_offset != end_offset:
            self._window(end_offset, end_offset, BLANK_LENGTH)[:] = self._blank(end_offset, physical_offset)
        window = self._window(end_offset, physical_offset, len(records))
        window[:] = records
        if stamp is not None:
            stamp(window)

    def make_pages(self, end_offset: int, new_end: int) -> int:
        """Return the end of the log file that contains `new_end`. This writer does not prefault pages: each commit
        writes such a long range that prefaulting gains nothing."""
        return (new_end - 1) // self._file_size * self._file_size + self._file_size

    def write_record(
        self, physical_offset: int, record: Bytes, queue_offset: int, store_timestamp_ms: int, store_host: bytes
    ) -> bool:
        """Return False, so that the caller uses `write`: the transient store pool has no faster path for a single
        record."""
        return False

    def write_through(self, end_offset: int, physical_offset: int, records: memoryview, stamp: Stamp | None) -> None:
        self.commit(end_offset)
        super().write(end_offset, physical_offset, records, stamp, whole=True)
        # The records were just written directly to the file, not to a buffer of the pool. Skip them in the buffers
        # before the log's end moves. Otherwise a commit could write the buffers' old content over the records.
        self.skip_to(physical_offset + len(records))

    def skip_to(self, physical_offset: int) -> None:
        self.pool.skip_to(physical_offset)

    def commit(self, end_offset: int) -> None:
        self.pool.commit(end_offset, self.files)
        if self.on_commit is not None:
            self.on_commit(end_offset)

    def _window(self, end_offset: int, physical_offset: int, size: int) -> memoryview:
        """Return the buffer memory of the pool for `size` bytes of the log at `physical_offset`. If no buffer is free,
        commit first."""
        window = self.pool.window(physical_offset, size)
        if window is None:
            self.commit(end_offset)
            window = self.pool.window(physical_offset, size)
            assert window is not None
        return window
