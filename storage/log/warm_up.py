"""Prefault the log's next pages in a background thread, ahead of the writer.

The first write to a page costs an allocation, several times the cost of copying 4 KiB into the page. Without this
module the writer pays this cost while it holds the append lock. Instead a background thread makes the kernel prefault
the pages of the log's map ahead of the writer (MADV_POPULATE_WRITE), one segment at a time. A store into a prefaulted
page then costs only the copy.

Pages are prefaulted only for a fast writer, because prefaulted pages are dirty. If a flush runs before the writer
reaches them, it writes their zeros to the disk for nothing. So nothing is prefaulted until the writer has crossed two
segments within FAST_S, and never more than 64 MiB. With SYNC_FLUSH prefaulting gains nothing, because each append
flushes. The start of a file is never prefaulted, nor is a file without a map.

The store uses WarmWriter with ASYNC_FLUSH and warm_mapped_file_enable, and without a transient store pool.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from storage.files import disk
from storage.files.mapped_file import MappedFile
from storage.log.log_writer import LogWriter

logger = logging.getLogger(__name__)

SEGMENT_BYTES: Final = 4 << 20
SEGMENTS_AHEAD_MAX: Final = 16
FAST_S: Final = 0.25
WARM_UP_STOP_TIMEOUT_S: Final = 30.0


class WarmUp:
    """The segments of a log that are already prefaulted ("warm"). `file_size`: the size of each log file; the function
    `fits` must return True for this size.

    `files`: the log files that are open for writing, by start offset.
    """

    def __init__(self, file_size: int, files: Mapping[int, MappedFile]) -> None:
        self._file_size, self._files = file_size, files
        self.segments: set[int] = set()
        """The numbers of the prefaulted (warm) segments that the writer has not yet passed. Segments are counted from
        the log's offset 0."""
        self._segment = -1
        """The number of the log segment to which the writer is writing; -1 before the first write."""
        self._crossed_s = 0.0
        """The time (time.monotonic) at which the writer was first observed in its current log segment."""
        self._lead = 0
        """The number of log segments ahead of the writer that should be prefaulted."""
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="raymq-warm-up", daemon=True)
        self._thread.start()

    @staticmethod
    def fits(file_size: int) -> bool:
        """Return True if log files of `file_size` bytes consist of whole segments, the units of prefaulting."""
        return file_size % SEGMENT_BYTES == 0

    def note_writer_at(self, physical_offset: int) -> tuple[int, int]:
        """Record the physical offset at which the log's writer writes now. Called by the thread that appends.

        Returns two offsets about the log segment that contains this offset. The first is the segment's end if the
        segment is prefaulted (warm), else 0. The second is the segment's end in any case.
        """
        segment = physical_offset // SEGMENT_BYTES
        if segment != self._segment:
            self._segment = segment
            self._wake.set()
        segment_end = (segment + 1) * SEGMENT_BYTES
        return (segment_end if segment in self.segments else 0), segment_end

    def close(self) -> None:
        """Stop the prefault thread. Idempotent."""
        self._stopping = True
        self._wake.set()
        self._thread.join(WARM_UP_STOP_TIMEOUT_S)
        self.segments.clear()

    def _run(self) -> None:
        try:
            while True:
                self._wake.wait()
                self._wake.clear()
                if self._stopping:
                    return
                self._follow_writer(time.monotonic())
        except OSError as error:
            # This error ends the warm-up thread, so log pages are no longer prefaulted. The only effect is that appends
            # become slower.
            logger.warning("cannot warm up the log; appends continue without it: %s", error)

    def _follow_writer(self, now_s: float) -> None:
        """Forget the prefaulted log segments that the writer has passed. Prefault as many segments ahead of the writer
        as the writer's speed requires."""
        self.segments -= {number for number in self.segments if number < self._segment}
        is_fast = now_s - self._crossed_s < FAST_S
        self._crossed_s = now_s
        self._lead = min(max(2 * self._lead, 2), SEGMENTS_AHEAD_MAX) if is_fast else 0
        for number in range(self._segment + 1, self._segment + 1 + self._lead):
            if self._stopping or not (number in self.segments or number <= self._segment or self._warm(number)):
                return

    def _warm(self, number: int) -> bool:
        """Prefault the log segment with the number `number`. Returns False if the segment's log file does not exist
        yet, or has no map."""
        position = number * SEGMENT_BYTES % self._file_size
        file = self._files.get(number * SEGMENT_BYTES - position)
        mapped = None if file is None else file.mapped
        if mapped is None:
            return False
        disk.make_pages(mapped, position, SEGMENT_BYTES)
        self.segments.add(number)
        return True


class WarmWriter(LogWriter):
    """A LogWriter that reports its position to a WarmUp, which prefaults pages in a background thread. The writer
    itself prefaults only pages that the WarmUp has not prefaulted.

    `warm_up` is None before `start` and after `close`.
    """

    warm_up: WarmUp | None = None

    def start(self, path_of: Callable[[int], Path]) -> None:
        self.warm_up = WarmUp(self._file_size, self.files)

    def make_pages(self, end_offset: int, new_end: int) -> int:
        assert self.warm_up is not None
        # Report the writer's position to the WarmUp. The range that this method returns must not extend beyond the
        # current segment, unless the append itself is longer. Then the writer calls this method again in the next
        # segment.
        warm_end, segment_end = self.warm_up.note_writer_at(new_end - 1)
        if new_end <= warm_end:
            return warm_end
        return min(super().make_pages(end_offset, new_end), max(segment_end, new_end))

    def close(self) -> None:
        if self.warm_up is not None:
            self.warm_up.close()
            self.warm_up = None
