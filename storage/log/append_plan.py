"""Where the records of an append go in a log of equal-sized files (spec/storage.md §1): pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raymq.errors import MessageIllegalError
from raymq.record.layout import BLANK_LENGTH


class AppendSpan(NamedTuple):
    """Records `first` to `last` (exclusive) of a batch go to `physical_offset`, back to back."""

    first: int
    last: int
    physical_offset: int


def plan_append(batches: Sequence[NDArray[np.int64]], end_offset: int, file_size: int) -> list[list[AppendSpan]]:
    """Where batches go whose records end at these bytes of them, if they are the next behind `end_offset`.

    A batch goes to one place, in the next file if the current one has no room (spec §1, classic batch). A batch longer
    than a file is split between records. MessageIllegalError if a single record is longer than a file.
    """
    cursor = end_offset
    placed = []
    for ends in batches:
        total = int(ends[-1]) if len(ends) else 0
        if 0 < total <= _room_at(cursor, file_size):
            placed.append([AppendSpan(0, len(ends), cursor)])
        else:
            placed.append(_place_elsewhere(ends, total, cursor, file_size))
        if placed[-1]:
            first, _, start = placed[-1][-1]
            cursor = start + total - (int(ends[first - 1]) if first else 0)
    return placed


def _room_at(cursor: int, file_size: int) -> int:
    return file_size - cursor % file_size - BLANK_LENGTH


def _place_elsewhere(ends: NDArray[np.int64], total: int, cursor: int, file_size: int) -> list[AppendSpan]:
    """The places of a batch of `total` bytes that does not fit into what is left of the file at `cursor`."""
    places = []
    first, count = 0, len(ends)
    whole = total + BLANK_LENGTH <= file_size
    while first < count:
        before = int(ends[first - 1]) if first else 0
        room = _room_at(cursor, file_size)
        last = count if total - before <= room else int(np.searchsorted(ends, before + room, "right"))
        if last == first or (whole and last < count):
            if room + BLANK_LENGTH == file_size:
                raise MessageIllegalError(
                    f"a record of {int(ends[first]) - before} bytes does not fit in a commit-log file of {file_size}"
                )
            cursor += room + BLANK_LENGTH
            continue
        places.append(AppendSpan(first, last, cursor))
        cursor += int(ends[last - 1]) - before
        first = last
    return places
