"""Computes the total size of the records in an offset range of a queue, from the sizes in the consume-queue entries.

The size of a short range is exact. The size of a long range is estimated from samples, so that the call takes about a
millisecond for any range.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from raymq.records.logfiles.log_reader import PRE_BLANK_SIZE, LogReader

SPAN_PARTS: Final = 32
"""Number of equal parts into which an offset range of a queue is divided. The size of each part is computed
separately."""
_WINDOWS: Final = 8
_WINDOW_UNITS: Final = 128
"""Number of adjacent consume-queue entries in one sample of message sizes. Adjacent entries usually share a memory
page. The size of a long part of the offset range is estimated from _WINDOWS such samples."""
_UNKNOWN_SIZE: Final = 1024
"""Assumed size, in bytes, of a message in a queue without plain consume-queue entries (ext_units.py)."""


def span_bytes(reader: LogReader, topic: str, queue_id: int, start: int, end: int) -> list[int]:
    """Return the size in bytes of the records in an offset range, separately for each of SPAN_PARTS equal parts of the
    range, in order. The range extends from `start` up to `end`. A range with fewer offsets has fewer parts. A missing
    consume-queue entry is assumed to have the average size of the existing entries in its part."""
    parts = max(1, min(SPAN_PARTS, end - start))
    edges = [start + (end - start) * index // parts for index in range(parts + 1)]
    return [_part_bytes(reader, topic, queue_id, edges[part], edges[part + 1]) for part in range(parts)]


def _part_bytes(reader: LogReader, topic: str, queue_id: int, start: int, end: int) -> int:
    count = end - start
    if count <= _WINDOWS * _WINDOW_UNITS:
        windows = [(start, count)]
    else:
        starts = np.linspace(start, end - _WINDOW_UNITS, _WINDOWS).astype(np.int64).tolist()
        windows = [(first, _WINDOW_UNITS) for first in starts]
    sizes = [_sizes(reader, topic, queue_id, first, wanted) for first, wanted in windows]
    seen = sum(map(len, sizes))
    if not seen:
        return count * _UNKNOWN_SIZE
    return sum(int(some[some != PRE_BLANK_SIZE].sum(dtype=np.int64)) for some in sizes) * count // seen


def _sizes(reader: LogReader, topic: str, queue_id: int, first: int, count: int) -> NDArray[np.int32]:
    """Return the record sizes from at most `count` entries of a consume queue, from queue offset `first` on. Reads
    several files if necessary."""
    found: list[NDArray[np.int32]] = []
    while count > 0:
        units = reader.units(topic, queue_id, first, count)
        if not len(units):
            break
        found.append(units["size"].astype(np.int32))
        first, count = first + len(units), count - len(units)
    return np.concatenate(found) if found else np.zeros(0, np.int32)
