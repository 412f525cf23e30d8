"""Checks a record at one position of a file or a buffer before the record is trusted.

`check_record` is the record parser of spec/storage.md §5; it never raises, whatever the buffer contains.
raymq.records.kernels.check checks whole batches from producers.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raymq.records.format.crc import PROPERTY_CRC_LENGTH, body_crc, property_crc, seal_holds
from raymq.records.format.layout import (
    BLANK_LENGTH,
    BLANK_MAGIC,
    BODY_OFFSET,
    INT,
    INTS,
    MAGIC_V1,
    MAGIC_V2,
    MIN_RECORD_SIZE,
    SHORT,
    SYS_FLAG_HOSTS_MASK,
    TOPIC_SIZE_MAX,
    Buffer,
    RecordError,
    header_size,
)
from raymq.records.format.walk import walk_records

_CHECKED: Final = struct.Struct(">iii24xi44xi")
"""Struct of the header fields that are checked: total_size, magic, body_crc, sys_flag and, with IPv4 hosts,
body_size."""


class RecordCheck(NamedTuple):
    """Result of parsing a record at a position: its `size` in bytes, and `ok` (True if it is intact).

    The four possible results: (the record's size, True) for an intact record, (0, True) for a BLANK (end-of-file
    marker), (-1, False) if no record exists at the position, and (size, False) for a record whose length fields
    disagree with its size.
    """

    size: int
    ok: bool

    @property
    def is_blank(self) -> bool:
        """True if the checked position has a BLANK, the marker that ends a log file."""
        return self.ok and self.size == 0


_BLANK_CHECK: Final = RecordCheck(0, True)


_NO_RECORD: Final = RecordCheck(-1, False)


def check_record(
    buffer: Buffer, position: int = 0, *, check_crc: bool = True, check_property_crc: bool = False
) -> RecordCheck:
    """Parse the record at `position` of `buffer`, whose end is the end of the file (spec/storage.md §5).

    `check_crc`: compare the body's CRC, and the property CRC if the record has one. `check_property_crc`: compare only
    the property CRC; a record without a property CRC fails. Never raises, whatever the buffer contains. If a field
    would lie outside the buffer, the result is that no record is at `position`.
    """
    limit = len(buffer)
    if not 0 <= position <= limit - MIN_RECORD_SIZE:
        return _check_tail(buffer, position)
    total, magic, crc, sys_flag, body_size = _CHECKED.unpack_from(buffer, position)
    if total > limit - position:
        return _NO_RECORD
    if magic == MAGIC_V1:
        topic_width = 1
    elif magic == MAGIC_V2:
        topic_width = 2
    else:
        return _BLANK_CHECK if magic == BLANK_MAGIC else _NO_RECORD
    body = position + BODY_OFFSET
    if sys_flag & SYS_FLAG_HOSTS_MASK:
        body = position + header_size(sys_flag)
        if body > limit:
            return _NO_RECORD
        (body_size,) = INT.unpack_from(buffer, body - 4)
    topic = body + body_size
    if body_size < 0 or topic + topic_width > limit:
        return _NO_RECORD
    if check_crc and body_size and body_crc(buffer[body:topic]) != crc:
        return _NO_RECORD
    topic_size = buffer[topic] if topic_width == 1 else SHORT.unpack_from(buffer, topic)[0]
    properties = topic + topic_width + topic_size
    if not 0 <= topic_size <= TOPIC_SIZE_MAX[topic_width] or properties + 2 > limit:
        return _NO_RECORD
    (properties_size,) = SHORT.unpack_from(buffer, properties)
    end = properties + 2 + properties_size
    if properties_size < 0 or end > limit:
        return _NO_RECORD
    if end - position != total:
        return RecordCheck(total, False)
    if check_property_crc and not _property_crc_holds(buffer[position:end], properties_size):
        return _NO_RECORD
    if check_crc and not seal_holds(buffer[position:end]):
        return _NO_RECORD
    return RecordCheck(total, True)


def _check_tail(buffer: Buffer, position: int) -> RecordCheck:
    """Check a position after which the buffer is too short for a record. If a BLANK (end-of-file marker) is at this
    position, returns a result that describes the BLANK. Otherwise the result states that there is no record."""
    remaining = len(buffer) - position
    if position < 0 or remaining < BLANK_LENGTH:
        return _NO_RECORD
    total, magic = INTS.unpack_from(buffer, position)
    return _BLANK_CHECK if magic == BLANK_MAGIC and total <= remaining else _NO_RECORD


def _property_crc_holds(record: Buffer, properties_size: int) -> bool:
    return properties_size >= PROPERTY_CRC_LENGTH and record[-PROPERTY_CRC_LENGTH:] == property_crc(record)


def record_starts(buffer: Buffer) -> NDArray[np.int64]:
    """Return the positions of the records that fill `buffer` one after another. Reads only the records' size fields.
    Raises RecordError if the last record does not end exactly at the buffer's end."""
    starts, position = walk_records(buffer, any_magic=True)
    limit = len(buffer)
    if position <= limit - MIN_RECORD_SIZE:
        (size,) = INT.unpack_from(buffer, position)
        if size < MIN_RECORD_SIZE:
            raise RecordError(f"the record at byte {position} has an impossible size of {size} bytes")
        position += size
    if position != limit:
        raise RecordError(f"the last record ends at byte {position}, not at the end of the {limit} bytes")
    return starts


def find_starts(buffer: Buffer) -> NDArray[np.int64]:
    """Return the positions of the records that fill `buffer`, even if records are damaged. The first position is 0.

    Returns the result of `record_starts` if the size fields add up to the buffer's length. If not, a record is damaged.
    The search then continues at the next record whose length fields are consistent. So several adjacent damaged records
    are returned as one record.
    """
    try:
        return record_starts(buffer)
    except RecordError:
        data = bytes(buffer)
    starts, position = [], 0
    while position < len(data):
        starts.append(position)
        position = _end_of(data, position) or _next_start(data, position)
    return np.array(starts, np.int64)


def _end_of(data: bytes, position: int) -> int:
    """Return the end of the record at `position`. Returns 0 if no record begins there, or if the record's length fields
    contradict each other."""
    size, good = check_record(data, position, check_crc=False)
    return position + size if good and size > 0 else 0


def _next_start(data: bytes, position: int) -> int:
    """Return the start of the record after the damaged record at `position`.

    The start is the end of the damaged record according to its size field, if a record or the end of the data follows
    there. Otherwise the start is the next position with an intact record, or the end of the data.
    """
    if position + MIN_RECORD_SIZE <= len(data):
        size: int = INT.unpack_from(data, position)[0]
        if size >= MIN_RECORD_SIZE and (position + size == len(data) or _end_of(data, position + size)):
            return position + size
    found = [len(data)]
    for magic in (MAGIC_V1, MAGIC_V2):
        at = data.find(INT.pack(magic), position + 5)
        while 0 <= at < found[-1] + 4:
            if _end_of(data, at - 4):
                found.append(min(found[-1], at - 4))
                break
            at = data.find(INT.pack(magic), at + 1)
    return found[-1]
