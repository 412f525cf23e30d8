"""Compares records with their consume-queue entries (units), and makes damaged records safe for readers.

A unit and its record must agree on the record's size, its position in the log, its queue id and its queue offset. If
they do not, the disk has changed the unit or the record. The topic has no fixed position in a record. Readers that
decode the record compare the topic later (raymq.records.format.places).
"""

from __future__ import annotations

import struct
from typing import Final

import numpy as np
from numpy.typing import NDArray

from raymq.records.format.layout import (
    BODY_SIZE_OFFSET,
    MAGIC_OFFSET,
    MAGIC_V1,
    MAGIC_V2,
    MIN_RECORD_SIZE,
    PHYSICAL_OFFSET_OFFSET,
    QUEUE_ID_OFFSET,
    QUEUE_OFFSET_OFFSET,
    SYS_FLAG_OFFSET,
    Buffer,
    windows,
)

_FIELDS_END: Final = PHYSICAL_OFFSET_OFFSET + 8
_PLACES: Final = np.dtype([("queue_id", ">i4"), ("flag", ">i4"), ("queue_offset", ">i8"), ("position", ">i8")])
"""numpy type of a part of a record's header, from QUEUE_ID_OFFSET on. The part contains the queue id, the queue offset
and the record's position in the log."""
_NO_BODY_SIZE: Final = (-1).to_bytes(4, signed=True)
_MAGICS: Final = tuple(magic.to_bytes(4, signed=True) for magic in (MAGIC_V1, MAGIC_V2))
_PLACE: Final = struct.Struct(">i16xqq")
"""Struct that reads the size, the queue offset and the physical offset from a record's header."""


def is_at(record: memoryview, position: int, queue_offset: int) -> bool:
    """True if a record's header contains the length of `record` as its size, and the given queue offset and physical
    offset (`position`). The queue id is not compared."""
    return len(record) >= MIN_RECORD_SIZE and _PLACE.unpack_from(record) == (len(record), queue_offset, position)


def agree(
    data: Buffer,
    starts: NDArray[np.int64],
    sizes: NDArray[np.int64],
    positions: NDArray[np.int64],
    offsets: NDArray[np.int64],
    queue_id: int,
) -> NDArray[np.bool_]:
    """Return a mask of the records that agree with their consume-queue entries. A record at `starts` of `data` agrees
    if its header has the size, physical offset, queue offset and queue id of its entry."""
    inside = starts + _FIELDS_END <= len(data)
    if not inside.all():
        found = np.zeros(len(starts), np.bool_)
        rows = np.flatnonzero(inside)
        if len(rows):
            found[rows] = agree(data, starts[rows], sizes[rows], positions[rows], offsets[rows], queue_id)
        return found
    places = windows(data, _PLACES.itemsize)[starts + QUEUE_ID_OFFSET].view(_PLACES)
    same: NDArray[np.bool_] = windows(data, 4)[starts].view(">i4") == sizes
    same &= (places["queue_id"] == queue_id) & (places["queue_offset"] == offsets) & (places["position"] == positions)
    return same


def with_places(record: bytearray, position: int, queue_offset: int, queue_id: int) -> bytearray:
    """Correct the header of a record that does not agree with its consume-queue entry. Readers then find the record's
    end, and its position in the log and the queue.

    If only the record's size or magic was damaged, the record is intact again. Otherwise the record is made unreadable,
    because its bytes may belong to another record.
    """
    if len(record) < MIN_RECORD_SIZE:
        return record
    record[:MAGIC_OFFSET] = len(record).to_bytes(4)
    if bytes(record[MAGIC_OFFSET : MAGIC_OFFSET + 4]) not in _MAGICS:
        record[MAGIC_OFFSET : MAGIC_OFFSET + 4] = _MAGICS[0]
    before = bytes(record[QUEUE_ID_OFFSET:_FIELDS_END])
    record[QUEUE_ID_OFFSET : QUEUE_ID_OFFSET + 4] = queue_id.to_bytes(4)
    record[QUEUE_OFFSET_OFFSET:PHYSICAL_OFFSET_OFFSET] = queue_offset.to_bytes(8)
    record[PHYSICAL_OFFSET_OFFSET:_FIELDS_END] = position.to_bytes(8)
    if record[QUEUE_ID_OFFSET:_FIELDS_END] != before:
        record[SYS_FLAG_OFFSET : SYS_FLAG_OFFSET + 4] = bytes(4)
        record[BODY_SIZE_OFFSET : BODY_SIZE_OFFSET + 4] = _NO_BODY_SIZE
    return record


def with_places_of(
    records: bytes,
    sizes: NDArray[np.int64],
    positions: NDArray[np.int64],
    offsets: NDArray[np.int64],
    queue_id: int,
) -> tuple[bytes, NDArray[np.int64]]:
    """Correct the headers of the records that do not agree with their consume-queue entries (`with_places`). Readers
    then find the records' ends. Returns all records back to back, and the indices of the corrected records."""
    ends = np.cumsum(sizes)
    starts = ends - sizes
    wrong = np.flatnonzero(~agree(records, starts, sizes, positions, offsets, queue_id))
    if not len(wrong):
        return records, wrong
    changed = bytearray(records)
    for row in wrong.tolist():
        span = slice(int(starts[row]), int(ends[row]))
        changed[span] = with_places(changed[span], int(positions[row]), int(offsets[row]), queue_id)
    return bytes(changed), wrong
