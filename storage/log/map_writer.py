"""Writing appends into maps of the log's files, where their pages are in memory already (warm_up.py), else with pwrite.

The store uses this writer with ASYNC_FLUSH and warm_mapped_file_enable, and without a transient store pool.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from raymq.record.layout import BLANK_LENGTH
from storage.log.log_writer import LogWriter, Stamp
from storage.log.warm_up import WarmUp


class MapWriter(LogWriter):
    """Stores appends into warm pages. `warm_up` is None before `start` and after `close`."""

    warm_up: WarmUp | None = None

    def start(self, path_of: Callable[[int], Path]) -> None:
        self.warm_up = WarmUp(self._file_size, path_of)

    def write(
        self, end_offset: int, physical_offset: int, records: memoryview, stamp: Stamp | None, *, whole: bool
    ) -> None:
        assert self.warm_up is not None
        window = self.warm_up.window(physical_offset, len(records))
        if window is None:
            super().write(end_offset, physical_offset, records, stamp, whole=whole)
            return
        if physical_offset != end_offset:
            self._end_file(end_offset, physical_offset)
        if stamp is not None and whole:
            # A stamp that uses the first 8 bytes cannot work in the window, which must get them last.
            records, stamp = self._stamped(records, stamp), None
        window[BLANK_LENGTH:] = records[BLANK_LENGTH:]
        if stamp is not None:
            stamp(window)
        window[:BLANK_LENGTH] = records[:BLANK_LENGTH]

    def close(self) -> None:
        if self.warm_up is not None:
            self.warm_up.close()
            self.warm_up = None
