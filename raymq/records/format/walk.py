"""Finds the starts of records that follow one another, from the sizes in their headers.

A record's start is only known after the previous record's size was read, so a scan steps from header to header, in
Python. But most sizes are equal, or repeat: for example messages of one producer, with alternating tags. The scan
predicts repeating sizes from the sizes of the first records, and compares all predicted headers at once. Each header
confirms the next start, so a prediction whose headers all match is as reliable as single steps.
"""

from __future__ import annotations

import struct
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raymq.records.format.layout import BLANK_LENGTH, BLANK_MAGIC, MAGIC_V1, MAGIC_V2, MIN_RECORD_SIZE, Buffer, windows

_INTS: Final = struct.Struct(">ii")
_MAGICS: Final = (MAGIC_V1, MAGIC_V2)
_HEAD_BYTES: Final = 8
"""Number of bytes that a scan reads from the beginning of a header: the record's size and magic number, 4 bytes
each."""
_SAMPLE: Final = 32
"""Number of records that a scan reads one by one before it predicts the sizes of further records. If the prediction
fails early, the scan doubles this number for the next prediction."""
_SAMPLE_MAX: Final = 4096
_PERIOD_MAX: Final = 8
"""A log scan detects that the sizes of records repeat periodically. This is the maximum length of a period, in
records."""
_GUESS_MIN: Final = 128
_GUESS_MAX: Final = 16384


class Walked(NamedTuple):
    """The records that a scan found, and the end position of the scan."""

    starts: NDArray[np.int64]
    """The position of each record in the scanned bytes, ascending; shape (n,)."""
    end: int
    """The end of the last record that the scan found; the scan's first position if it found no record."""


def walk_records(data: Buffer, position: int = 0, limit: int | None = None, *, any_magic: bool = False) -> Walked:
    """Find the records that follow one another in `data` from `position` on and start before `limit` (None: the end of
    `data`).

    The scan ends earlier at a position without a record: too few bytes, a size that is below the minimum or reaches
    beyond the end of `data`, or an unknown magic number. The scan reads only sizes and magic numbers; with `any_magic`
    it ignores the magic numbers.
    """
    limit = len(data) if limit is None else min(limit, len(data))
    pieces: list[NDArray[np.int64]] = []
    sample = _SAMPLE
    while True:
        hops, position = _hop(data, position, limit, sample, any_magic=any_magic)
        pieces.append(np.array(hops, np.int64))
        if len(hops) < sample or position >= limit:
            break
        period = _period(hops, position)
        guessed = 0
        if period:
            for piece in _guess(data, hops[-period:], position, limit):
                pieces.append(piece.starts)
                position, guessed = piece.end, guessed + len(piece.starts)
        # The next prediction of record sizes begins after a sample of records that are read one by one. If the last
        # prediction was right for only few records, double the size of this sample (to at most _SAMPLE_MAX).
        sample = _SAMPLE if guessed >= _GUESS_MIN else min(sample * 2, _SAMPLE_MAX)
    return Walked(np.concatenate(pieces) if len(pieces) > 1 else pieces[0], position)


def is_blank(data: Buffer, position: int) -> bool:
    """True if the BLANK that ends a log file begins at `position`."""
    return position <= len(data) - BLANK_LENGTH and _INTS.unpack_from(data, position)[1] == BLANK_MAGIC


def _hop(data: Buffer, position: int, limit: int, count: int, *, any_magic: bool) -> tuple[list[int], int]:
    """Find up to `count` records from `position` on, one record at a time. Returns the starts of the records, and the
    end of the last record."""
    starts: list[int] = []
    end, unpack_from = len(data), _INTS.unpack_from
    while position < limit and position <= end - MIN_RECORD_SIZE and len(starts) < count:
        size, magic = unpack_from(data, position)
        if not MIN_RECORD_SIZE <= size <= end - position or not (any_magic or magic in _MAGICS):
            break
        starts.append(position)
        position += size
    return starts, position


def _period(hops: list[int], end: int) -> int:
    """Return the period with which the sizes of the last records repeat, as a number of records; 0 if the sizes do not
    repeat. `hops`: starts of consecutive records; the last record ends at `end`."""
    last = [*hops[-_SAMPLE:], end]
    sizes = [other - one for one, other in pairwise(last)]
    for period in range(1, _PERIOD_MAX + 1):
        if sizes[period:] == sizes[:-period]:
            return period
    return 0


def _guess(data: Buffer, model: list[int], position: int, limit: int) -> list[Walked]:
    """Predict that the records from `position` on repeat the sizes and magic numbers of the records at the positions
    `model`, and find these records. The last record of `model` ends at `position`.

    Returns the found records in several pieces.
    """
    heads = windows(data, _HEAD_BYTES)
    model_heads = heads[np.array(model)].view(np.int64)
    # Predict that the following records repeat the sizes of the records at `model`, as one period. `steps`: the start
    # of each record at `model`, relative to the first. `stride`: the length of the period in bytes.
    steps, stride = np.array(model) - model[0], position - model[0]
    pieces: list[Walked] = []
    count = _GUESS_MIN
    while position < limit:
        periods = min(count, (limit - position) // stride * len(model)) // len(model) + 1
        firsts = np.arange(periods + 1, dtype=np.int64) * stride + position
        starts = (firsts[:, None] + steps).ravel()
        # Keep the predicted record starts that are before the limit and whose record ends within the data. A record
        # ends at the predicted start of the next record.
        expected = periods * len(model)
        ends = starts[1 : expected + 1]
        fitting = min(int(np.searchsorted(starts[:expected], limit)), int(np.searchsorted(ends, len(data), "right")))
        same = (
            heads[starts[:fitting]].view(np.int64)
            == np.broadcast_to(model_heads, (periods, len(model))).ravel()[:fitting]
        )
        good = fitting if same.all() else int(np.argmin(same))
        if good:
            position = int(starts[good])
            pieces.append(Walked(starts[:good], position))
        if good < expected:
            break
        count = min(count * 8, _GUESS_MAX)
    return pieces
