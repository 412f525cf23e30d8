"""Mapping the log's next pages, and having them in memory, before the writer gets there (map_writer.py).

A page that is written for the first time costs an allocation, several times what copying 4 KiB into it costs, and
`pwrite` pays it while the append lock is held. Here a thread pays it: it maps the log ahead of the writer, a segment at
a time, and has the kernel make the pages (MADV_POPULATE_WRITE). The writer then stores into the map, which costs the
copy alone, and no call that gives the interpreter away to other threads.

Only a writer that is fast gets this, because the pages are dirty from then on, as zeros: a flush that comes before the
writer writes them to the disk once for nothing. So nothing is warm before the writer crossed two segments within
FAST_S, and never more than 64 MiB. For SYNC_FLUSH it would not pay: each append flushes. Bytes without a warm page are
written with `pwrite`. A store into a map cannot fail for want of space: the blocks of a log file are allocated before
it is used, so a page of it needs nothing more from the disk. (A disk that dies all the same is SIGBUS here, which ends
the process as SIGKILL would.)
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from storage.files import disk

logger = logging.getLogger(__name__)

SEGMENT_BYTES: Final = 4 << 20
SEGMENTS_AHEAD_MAX: Final = 16
FAST_S: Final = 0.25
WARM_UP_STOP_TIMEOUT_S: Final = 30.0


class WarmUp:
    """Warm segments of a log whose files have `file_size` bytes, for which `fits` holds. `path_of` gives the path of
    the file that starts at an offset."""

    def __init__(self, file_size: int, path_of: Callable[[int], Path]) -> None:
        self._file_size, self._path_of = file_size, path_of
        self._segments: dict[int, mmap.mmap] = {}
        """The warm segments by number, counted from the log's offset 0."""
        self._segment = -1
        """The segment that the writer is in."""
        self._crossed_s = 0.0
        """The time at which it was seen to have come there."""
        self._lead = 0
        """The number of segments ahead of the writer that are to be warm."""
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="raymq-warm-up", daemon=True)
        self._thread.start()

    @staticmethod
    def fits(file_size: int) -> bool:
        """True if files of this size consist of whole segments."""
        return file_size % SEGMENT_BYTES == 0

    def window(self, physical_offset: int, size: int) -> memoryview | None:
        """The memory of these bytes of the log, to be written; None unless all of them are warm. Called by the thread
        that appends."""
        segment, position = divmod(physical_offset, SEGMENT_BYTES)
        if segment != self._segment:
            self._segment = segment
            self._wake.set()
        mapped = self._segments.get(segment)
        if mapped is None or position + size > SEGMENT_BYTES:
            return None
        return memoryview(mapped)[position : position + size]

    def close(self) -> None:
        """Stop the thread and unmap everything. Idempotent."""
        self._stopping = True
        self._wake.set()
        self._thread.join(WARM_UP_STOP_TIMEOUT_S)
        self._segments.clear()

    def _run(self) -> None:
        try:
            while True:
                self._wake.wait()
                self._wake.clear()
                if self._stopping:
                    return
                self._follow_writer(time.monotonic())
        except OSError as error:
            # No page is warmed from here on; the appends go on without.
            logger.warning("cannot warm up the log: %s", error)

    def _follow_writer(self, now_s: float) -> None:
        """Drop the segments behind the writer, which has come to another, and warm as many ahead of it as its speed
        asks for."""
        for passed in [number for number in self._segments if number < self._segment]:
            # Unmapped here, not by the writer, who may still hold a part of it.
            del self._segments[passed]
        is_fast = now_s - self._crossed_s < FAST_S
        self._crossed_s = now_s
        self._lead = min(max(2 * self._lead, 2), SEGMENTS_AHEAD_MAX) if is_fast else 0
        for number in range(self._segment + 1, self._segment + 1 + self._lead):
            if self._stopping or not (number in self._segments or number <= self._segment or self._warm(number)):
                return

    def _warm(self, number: int) -> bool:
        """Warm a segment; False if its file is not there yet."""
        position = number * SEGMENT_BYTES % self._file_size
        try:
            descriptor = disk.open_file(self._path_of(number * SEGMENT_BYTES - position), os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            mapped = mmap.mmap(descriptor, SEGMENT_BYTES, offset=position)
        finally:
            os.close(descriptor)
        disk.make_pages(mapped)
        self._segments[number] = mapped
        return True
