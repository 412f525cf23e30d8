"""Planning an append: the spans of a log of equal-sized files that its records go to (spec/storage.md §1).

A change belongs here if it is about that arithmetic, which needs no files and keeps no state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raymq.common.errors import MessageIllegalError
from raymq.records.format.layout import BLANK_LENGTH


class AppendSpan(NamedTuple):
    """The bytes of the log from `physical_offset` on, which records `first` to `last` (exclusive) of a batch fill."""

    first: int
    last: int
    physical_offset: int


def plan_append(
    batches: Sequence[NDArray[np.int64]], end_offset: int, file_size: int
) -> tuple[list[list[AppendSpan]], int]:
    """The spans of each batch, if they are the next in a log that ends at `end_offset`; and where it ends then.

    `batches`: for each, the bytes of it at which its records end, ascending. A batch goes to one span, in the next file
    if the current one is too full (spec §1, classic batch). A batch longer than a file is split between records.
    MessageIllegalError if a single record is longer than a file.
    """
    cursor = end_offset
    plan = []
    for ends in batches:
        total = int(ends[-1]) if len(ends) else 0
        if 0 < total <= _space_at(cursor, file_size):
            plan.append([AppendSpan(0, len(ends), cursor)])
        else:
            plan.append(_spans_in_next_files(ends, total, cursor, file_size))
        if plan[-1]:
            # Behind the last span of this batch, which holds its records from `first` on.
            first, _, start = plan[-1][-1]
            cursor = start + total - (int(ends[first - 1]) if first else 0)
    return plan, cursor


def _space_at(cursor: int, file_size: int) -> int:
    """The bytes left for records in the file that holds `cursor`: a BLANK must fit behind them."""
    return file_size - cursor % file_size - BLANK_LENGTH


def _spans_in_next_files(ends: NDArray[np.int64], total: int, cursor: int, file_size: int) -> list[AppendSpan]:
    """The spans of a batch of `total` bytes that does not fit into what is left of the file at `cursor`."""
    spans = []
    first, count = 0, len(ends)
    whole = total + BLANK_LENGTH <= file_size
    while first < count:
        before = int(ends[first - 1]) if first else 0
        space = _space_at(cursor, file_size)
        # The first record that does not fit any more, or `count`.
        last = count if total - before <= space else int(np.searchsorted(ends, before + space, "right"))
        if last == first or (whole and last < count):
            # No record fits, or a batch that fits in one file would be split: go on in the next file.
            if space + BLANK_LENGTH == file_size:
                raise MessageIllegalError(
                    f"a record of {int(ends[first]) - before} bytes does not fit in a commit-log file of {file_size}"
                )
            cursor += space + BLANK_LENGTH
            continue
        spans.append(AppendSpan(first, last, cursor))
        cursor += int(ends[last - 1]) - before
        first = last
    return spans
