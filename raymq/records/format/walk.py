"""The walk over records that lie back to back: where each one starts, by the sizes in their headers.

A record's start is known only once the one before it was read, so a walk hops from header to header, in Python. But
sizes are mostly alike, or repeat: messages of one producer, tags in turns. Such a run is guessed from the sizes of its
first records, and the headers where records would start are compared all at once. Each of them names the next one's
start, so that a guess whose headers are all as expected is as good as the hops.
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
"""A header begins with its record's size and magic, 4 bytes each."""
_SAMPLE: Final = 32
"""So many records are hopped over before their sizes are looked at; a multiple where that told nothing."""
_SAMPLE_MAX: Final = 4096
_PERIOD_MAX: Final = 8
"""Sizes that repeat after so many records are found out."""
_GUESS_MIN: Final = 128
_GUESS_MAX: Final = 16384


class Walked(NamedTuple):
    """The records that a walk found."""

    starts: NDArray[np.int64]
    """The position of each record, ascending; shape (n,)."""
    end: int
    """The end of the last record; the position where the walk began, if there is none."""


def walk_records(data: Buffer, position: int = 0, limit: int | None = None, *, any_magic: bool = False) -> Walked:
    """The records that lie back to back in `data` from `position` on and start before `limit` (None: the end).

    The walk ends sooner at a position that holds no record: too few bytes, a size below a record's least or beyond the
    end of `data`, a magic of something else. Nothing but sizes and magics is looked at, with `any_magic` only sizes.
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
        # Where guessing does not pay, it is tried less and less often.
        sample = _SAMPLE if guessed >= _GUESS_MIN else min(sample * 2, _SAMPLE_MAX)
    return Walked(np.concatenate(pieces) if len(pieces) > 1 else pieces[0], position)


def is_blank(data: Buffer, position: int) -> bool:
    """True if the BLANK that ends a log file begins at `position`."""
    return position <= len(data) - BLANK_LENGTH and _INTS.unpack_from(data, position)[1] == BLANK_MAGIC


def _hop(data: Buffer, position: int, limit: int, count: int, *, any_magic: bool) -> tuple[list[int], int]:
    """The starts of up to `count` records from `position` on, and the end of the last: the walk one by one."""
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
    """The number of records after which the sizes of the last ones repeat; 0 if they do not. The last ends at `end`."""
    last = [*hops[-_SAMPLE:], end]
    sizes = [other - one for one, other in pairwise(last)]
    for period in range(1, _PERIOD_MAX + 1):
        if sizes[period:] == sizes[:-period]:
            return period
    return 0


def _guess(data: Buffer, model: list[int], position: int, limit: int) -> list[Walked]:
    """The records from `position` on whose sizes repeat those of the records at `model`, the last of which ends there.

    Returns them in pieces. None of their sizes and magics is other than its model's.
    """
    heads = windows(data, _HEAD_BYTES)
    model_heads = heads[np.array(model)].view(np.int64)
    # Where the records of a period start, counted from its first one's start, and the period's length in bytes.
    steps, stride = np.array(model) - model[0], position - model[0]
    pieces: list[Walked] = []
    count = _GUESS_MIN
    while position < limit:
        periods = min(count, (limit - position) // stride * len(model)) // len(model) + 1
        firsts = np.arange(periods + 1, dtype=np.int64) * stride + position
        starts = (firsts[:, None] + steps).ravel()
        # Only records that start before the limit and end in the data; the end of each is the start of the next one.
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
