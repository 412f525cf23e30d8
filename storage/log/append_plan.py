"""Planning an append: the spans of a log of equal-sized files that its records go to (spec/storage.md §1).

Only this arithmetic belongs here. It needs no files and keeps no state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raymq.common.errors import MessageIllegalError
from raymq.records.format.layout import BLANK_LENGTH


class AppendSpan(NamedTuple):
    """A range of the log, from `physical_offset` on, for the records `first` to `last` (exclusive) of a batch."""

    first: int
    last: int
    physical_offset: int


def plan_append(
    batches: Sequence[NDArray[np.int64]], end_offset: int, file_size: int
) -> tuple[list[list[AppendSpan]], int]:
    """Plan the spans of batches that follow each other in a log that ends at `end_offset`. Also returns the new end.

    `batches`: for each batch, the bytes from its start to the end of each record, ascending. A batch goes to one span,
    in the next file if the current one is too full (spec §1, classic batch). A batch longer than a file is split
    between records. MessageIllegalError: a single record is longer than a file.
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
            # The new end is after this batch's last span, which holds its records from `first` on.
            first, _, start = plan[-1][-1]
            cursor = start + total - (int(ends[first - 1]) if first else 0)
    return plan, cursor


def _space_at(cursor: int, file_size: int) -> int:
    """Return the bytes left for records in the file that holds `cursor`. A BLANK must fit after the records."""
    return file_size - cursor % file_size - BLANK_LENGTH


def _spans_in_next_files(ends: NDArray[np.int64], total: int, cursor: int, file_size: int) -> list[AppendSpan]:
    """Plan the spans of a batch of `total` bytes that does not fit into the rest of the file at `cursor`."""
    spans = []
    first, count = 0, len(ends)
    whole = total + BLANK_LENGTH <= file_size
    while first < count:
        before = int(ends[first - 1]) if first else 0
        space = _space_at(cursor, file_size)
        # The first record that does not fit, or `count`.
        last = count if total - before <= space else int(np.searchsorted(ends, before + space, "right"))
        if last == first or (whole and last < count):
            # No record fits, or a batch that fits in one file would be split: continue in the next file.
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
