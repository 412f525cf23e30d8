"""Plan an append: compute the ranges of the log (spans) to which its records are written (spec/storage.md §1). The log
is a sequence of equal-sized files.

Only this arithmetic belongs in this module. It needs no files and keeps no state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raymq.common.errors import MessageIllegalError
from raymq.records.format.layout import BLANK_LENGTH


class AppendSpan(NamedTuple):
    """A span: a range of the log that starts at `physical_offset` and contains the records `first` to `last`
    (exclusive) of a batch."""

    first: int
    last: int
    physical_offset: int


def plan_append(
    batches: Sequence[NDArray[np.int64]], end_offset: int, file_size: int
) -> tuple[list[list[AppendSpan]], int]:
    """Plan the log ranges (spans) of consecutive batches in a log that ends at `end_offset`. Also returns the new end
    of the log.

    `batches`: for each batch, the end of each record in bytes from the batch's start, ascending. A batch gets one span.
    If the current file is too full, the span is in the next file (spec §1, classic batch). A batch longer than a file
    is split between records. Raises MessageIllegalError if a single record is longer than a file.
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
            # The log's new end is the end of this batch's last span (range of the log). `first`: index of the first
            # record in this span. `start`: the physical offset of this span.
            first, _, start = plan[-1][-1]
            cursor = start + total - (int(ends[first - 1]) if first else 0)
    return plan, cursor


def _space_at(cursor: int, file_size: int) -> int:
    """Return the number of bytes from offset `cursor` to the end of its log file that are free for records. A BLANK
    (end-of-file marker) must fit after the records."""
    return file_size - cursor % file_size - BLANK_LENGTH


def _spans_in_next_files(ends: NDArray[np.int64], total: int, cursor: int, file_size: int) -> list[AppendSpan]:
    """Plan the log ranges (spans) of a batch of `total` bytes that does not fit into the rest of the current file. The
    log ends at offset `cursor`."""
    spans = []
    first, count = 0, len(ends)
    whole = total + BLANK_LENGTH <= file_size
    while first < count:
        before = int(ends[first - 1]) if first else 0
        space = _space_at(cursor, file_size)
        # `last`: the index of the first record of the batch that does not fit into the current log file; `count` if all
        # records fit.
        last = count if total - before <= space else int(np.searchsorted(ends, before + space, "right"))
        if last == first or (whole and last < count):
            # Continue in the next file: no record fits into this file, or the batch would be split although it fits
            # into one file.
            if space + BLANK_LENGTH == file_size:
                raise MessageIllegalError(
                    f"a record of {int(ends[first]) - before} bytes does not fit in a commit-log file of "
                    f"{file_size} bytes; raise mapped_file_size_commit_log_bytes, or send smaller messages"
                )
            cursor += space + BLANK_LENGTH
            continue
        spans.append(AppendSpan(first, last, cursor))
        cursor += int(ends[last - 1]) - before
        first = last
    return spans
