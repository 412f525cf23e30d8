"""Scan the log record by record, and continue after damaged records.

Records are not aligned, so only the size of the current record shows where the next record starts. If the current
record is damaged, its size may be damaged too. Then a later record is found by its content: its magic, its own physical
offset, and a body that matches its CRC. Nothing else in a log has this content.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from raymq.records.format.check import check_record
from raymq.records.format.layout import (
    BLANK_LENGTH,
    BLANK_MAGIC,
    MAGIC_OFFSET,
    MAGIC_V1,
    MIN_RECORD_SIZE,
    RecordError,
    read_header,
)
from raymq.records.format.walk import is_blank, walk_records
from raymq.records.kernels.fields import Bytes, Ints
from raymq.records.logfiles.log_reader import LogReader

_SEARCH_BYTES: Final = 1 << 20
"""Number of bytes that are searched for a record's magic in one step."""
_MAGIC_BYTES: Final = 4
_MAGIC_PREFIX: Final = MAGIC_V1.to_bytes(_MAGIC_BYTES, signed=True)[:3]
"""The first bytes of a record's magic. Both versions of the magic begin with them."""
_BLANK_BYTES: Final = BLANK_MAGIC.to_bytes(_MAGIC_BYTES, signed=True)

logger = logging.getLogger(__name__)


class WalkedRecords(NamedTuple):
    """Records of one log file, back to back. `data` begins at `physical_offset`; `starts` are the positions of the
    records in `data`.

    The scan continues at `end_offset`. This is the end of the last record, or the next intact record if damaged bytes
    follow. If the log file ends after the records, `end_offset` is the start of the next file.
    """

    data: Bytes
    starts: Ints
    physical_offset: int
    end_offset: int


def walk_log(reader: LogReader, physical_offset: int, limit: int, max_bytes: int) -> WalkedRecords:
    """Read about `max_bytes` of log records between `physical_offset` and `limit`. A record must start at
    `physical_offset`, and a record must end at `limit`.

    Only sizes and magics are checked, because everything before `limit` was checked when it was written or recovered.
    If a record is damaged nevertheless, the damage is logged, and the scan continues at the next intact record. Raises
    DataLossError if the file was deleted.
    """
    file_size = reader.commit_log_file_size
    file_start = physical_offset - physical_offset % file_size
    data = reader.log_bytes(physical_offset, min(limit, file_start + file_size))
    starts, end = walk_records(data, 0, max_bytes)
    end_offset = physical_offset + end
    if end < min(max_bytes, len(data)):
        # The bytes after the last record that this scan found are no record. Continue at the next log file. If the log
        # ends within this file, stop at `limit`: a damaged range (hole) may be the last part of a replica's log.
        end_offset = min(limit, file_start + file_size)
        if not is_blank(data, end):
            file = reader.log_bytes(file_start, min(limit, file_start + file_size))
            behind = resume_behind(file, file_start, physical_offset + end - file_start)
            if behind is not None:
                end_offset = file_start + behind
            logger.error("no intact record at physical offset %d; continuing at %d", physical_offset + end, end_offset)
    data = data[:end]
    return WalkedRecords(np.frombuffer(data, np.uint8), starts, physical_offset, end_offset)


def resume_behind(
    data: memoryview, file_start: int, position: int, limit: int | None = None, **checks: bool
) -> int | None:
    """Return the position at which the log continues after a damaged record: at an intact record, or at the file's
    BLANK (end-of-file marker).

    Returns None if neither follows the damaged record. The damaged record starts at `position`. `data` is the file or
    its beginning, and `file_start` the physical offset of the file. Only records that start before `limit` are
    searched; None: up to the end of `data`. `checks` are the options of `check_record`.
    """
    limit = len(data) if limit is None else min(limit, len(data))
    named = position + int.from_bytes(data[position : position + _MAGIC_BYTES], signed=True)
    is_named = position + MIN_RECORD_SIZE <= named < limit
    if not is_named or not (fills_file(data, named) or is_intact(data, file_start, named, **checks)):
        return next(_intact_from(data, file_start, position + 1, limit, checks), None)
    # The size field of the damaged record leads to an intact record at `named`. But if the size is damaged too, intact
    # records may lie before `named`. So search for an intact record from which intact records follow one another up to
    # `named`, and return the first such record. An intact record inside a message body does not meet this condition.
    for found in _intact_from(data, file_start, position + 1, named, checks):
        if _lead_to(data, file_start, found, named, checks):
            return found
    return named


def is_intact(data: memoryview, file_start: int, position: int, **checks: bool) -> bool:
    """Return True if the record at `position` of a log file passes `checks` and contains its own physical
    offset."""
    size, good = check_record(data, position, **checks)
    if not good or size <= 0:
        return False
    try:
        header = read_header(data, position)
    except RecordError:
        return False
    return header.physical_offset == file_start + position and header.queue_id >= 0 and header.queue_offset >= 0


def fills_file(data: memoryview, position: int) -> bool:
    """Return True if the BLANK (end-of-file marker) at `position` of a whole file's `data` states the correct number of
    remaining bytes."""
    return is_blank(data, position) and int.from_bytes(data[position : position + _MAGIC_BYTES]) == len(data) - position


def _lead_to(data: memoryview, file_start: int, position: int, target: int, checks: dict[str, bool]) -> bool:
    """Return True if intact records are back to back from `position` up to `target`."""
    while position < target and is_intact(data, file_start, position, **checks):
        position += int.from_bytes(data[position : position + _MAGIC_BYTES])
    return position == target


def _intact_from(
    data: memoryview, file_start: int, position: int, limit: int, checks: dict[str, bool]
) -> Iterator[int]:
    """Yield the positions in [`position`, `limit`) at which an intact record or the file's BLANK (end-of-file marker)
    starts, ascending."""
    for found, is_mark in _magics_from(data, position + MAGIC_OFFSET, limit + MAGIC_OFFSET):
        start = found - MAGIC_OFFSET
        if fills_file(data, start) if is_mark else is_intact(data, file_start, start, **checks):
            yield start


def _magics_from(data: memoryview, position: int, limit: int) -> Iterator[tuple[int, bool]]:
    """Yield the positions in [`position`, `limit`) at which a record's magic may begin, ascending. Each position comes
    with a bool: True if the magic is that of a BLANK (end-of-file marker)."""
    while position < limit:
        end = min(position + _SEARCH_BYTES, limit)
        # Also read a few bytes after `end`. They complete a record's magic number that begins before `end` and ends
        # after it.
        piece = bytes(data[position : end + BLANK_LENGTH])
        found = [(at, False) for at in _all_in(piece, _MAGIC_PREFIX)] + [
            (at, True) for at in _all_in(piece, _BLANK_BYTES)
        ]
        yield from ((position + at, is_mark) for at, is_mark in sorted(found) if position + at < end)
        position = end


def _all_in(piece: bytes, wanted: bytes) -> Iterator[int]:
    at = piece.find(wanted)
    while at >= 0:
        yield at
        at = piece.find(wanted, at + 1)
