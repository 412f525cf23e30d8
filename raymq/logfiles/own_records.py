"""Compares records with the queue units that lead to them, and makes damaged ones safe to hand on.

A unit and its record must agree on the record's size, its position in the log and its offset in the queue. If they do
not, the disk has changed one of them.
"""

from __future__ import annotations

import struct
from typing import Final

import numpy as np
from numpy.typing import NDArray

from raymq.record.layout import (
    BODY_SIZE_OFFSET,
    MAGIC_OFFSET,
    MAGIC_V1,
    MAGIC_V2,
    MIN_RECORD_SIZE,
    PHYSICAL_OFFSET_OFFSET,
    QUEUE_OFFSET_OFFSET,
    SYS_FLAG_OFFSET,
    Buffer,
    windows,
)

_FIELDS_END: Final = PHYSICAL_OFFSET_OFFSET + 8
_NO_BODY_SIZE: Final = (-1).to_bytes(4, signed=True)
_MAGICS: Final = tuple(magic.to_bytes(4, signed=True) for magic in (MAGIC_V1, MAGIC_V2))


_PLACE: Final = struct.Struct(">i16xqq")
"""The size, the queue offset and the physical offset in a header."""


def is_at(record: memoryview, position: int, queue_offset: int) -> bool:
    """`agree` for one record, which has the size that its unit says."""
    return len(record) >= MIN_RECORD_SIZE and _PLACE.unpack_from(record) == (len(record), queue_offset, position)


def agree(
    data: Buffer,
    starts: NDArray[np.int64],
    sizes: NDArray[np.int64],
    positions: NDArray[np.int64],
    offsets: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """True for each record, at `starts` of `data`, whose header has the size, the physical offset and the queue offset
    that its unit says."""
    inside = starts + _FIELDS_END <= len(data)
    if not inside.all():
        found = np.zeros(len(starts), np.bool_)
        rows = np.flatnonzero(inside)
        if len(rows):
            found[rows] = agree(data, starts[rows], sizes[rows], positions[rows], offsets[rows])
        return found
    places = windows(data, 16)[starts + QUEUE_OFFSET_OFFSET].view(">i8").reshape(-1, 2)
    same: NDArray[np.bool_] = windows(data, 4)[starts].view(">i4") == sizes
    same &= (places[:, 0] == offsets) & (places[:, 1] == positions)
    return same


def with_places(record: bytearray, position: int, queue_offset: int) -> bytearray:
    """A record that does not agree with its unit, with a header that does, so that readers find its end and know where
    it is.

    If only its size or its magic was damaged, it is whole again. Else it is made unreadable: it may be another one.
    """
    if len(record) < MIN_RECORD_SIZE:
        return record
    place = queue_offset.to_bytes(8) + position.to_bytes(8)
    record[:MAGIC_OFFSET] = len(record).to_bytes(4)
    if bytes(record[MAGIC_OFFSET : MAGIC_OFFSET + 4]) not in _MAGICS:
        record[MAGIC_OFFSET : MAGIC_OFFSET + 4] = _MAGICS[0]
    if record[QUEUE_OFFSET_OFFSET:_FIELDS_END] != place:
        record[QUEUE_OFFSET_OFFSET:_FIELDS_END] = place
        record[SYS_FLAG_OFFSET : SYS_FLAG_OFFSET + 4] = bytes(4)
        record[BODY_SIZE_OFFSET : BODY_SIZE_OFFSET + 4] = _NO_BODY_SIZE
    return record


def with_places_of(
    records: bytes, sizes: NDArray[np.int64], positions: NDArray[np.int64], offsets: NDArray[np.int64]
) -> tuple[bytes, NDArray[np.int64]]:
    """Records back to back, of which those that do not agree with their units are changed so that readers find their
    ends (`with_places`); and the rows of these."""
    ends = np.cumsum(sizes)
    starts = ends - sizes
    wrong = np.flatnonzero(~agree(records, starts, sizes, positions, offsets))
    if not len(wrong):
        return records, wrong
    changed = bytearray(records)
    for row in wrong.tolist():
        span = slice(int(starts[row]), int(ends[row]))
        changed[span] = with_places(changed[span], int(positions[row]), int(offsets[row]))
    return bytes(changed), wrong
