"""Writing appends into pages of the log's files that a thread has made ahead of the writer (warm_up.py).

The store uses this writer with ASYNC_FLUSH and warm_mapped_file_enable, and without a transient store pool.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from storage.files.disk import Bytes
from storage.log.log_writer import LogWriter, Stamp
from storage.log.warm_up import WarmUp


class WarmWriter(LogWriter):
    """Tells a WarmUp how far it is. `warm_up` is None before `start` and after `close`."""

    warm_up: WarmUp | None = None

    def start(self, path_of: Callable[[int], Path]) -> None:
        self.warm_up = WarmUp(self._file_size, self.files)

    def write(
        self, end_offset: int, physical_offset: int, records: memoryview, stamp: Stamp | None, *, whole: bool
    ) -> None:
        assert self.warm_up is not None
        self.warm_up.note_writer_at(physical_offset)
        super().write(end_offset, physical_offset, records, stamp, whole=whole)

    def write_record(
        self,
        physical_offset: int,
        record: Bytes,
        size: int,
        queue_offset: int,
        store_timestamp_ms: int,
        store_host: bytes,
    ) -> bool:
        assert self.warm_up is not None
        self.warm_up.note_writer_at(physical_offset)
        return super().write_record(physical_offset, record, size, queue_offset, store_timestamp_ms, store_host)

    def close(self) -> None:
        if self.warm_up is not None:
            self.warm_up.close()
            self.warm_up = None
