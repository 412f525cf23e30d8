"""Writes appends into pages of the log's files that a thread has prefaulted (warm_up.py).

The store uses this writer with ASYNC_FLUSH and warm_mapped_file_enable, and without a transient store pool.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from storage.log.log_writer import LogWriter
from storage.log.warm_up import WarmUp


class WarmWriter(LogWriter):
    """Reports its position to a WarmUp, and prefaults only pages that the WarmUp has not prefaulted.

    `warm_up` is None before `start` and after `close`.
    """

    warm_up: WarmUp | None = None

    def start(self, path_of: Callable[[int], Path]) -> None:
        self.warm_up = WarmUp(self._file_size, self.files)

    def make_pages(self, end_offset: int, new_end: int) -> int:
        assert self.warm_up is not None
        # Report again at the end of the segment at the latest.
        warm_end, segment_end = self.warm_up.note_writer_at(new_end - 1)
        if new_end <= warm_end:
            return warm_end
        return min(super().make_pages(end_offset, new_end), max(segment_end, new_end))

    def close(self) -> None:
        if self.warm_up is not None:
            self.warm_up.close()
            self.warm_up = None
