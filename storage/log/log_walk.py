"""Walking the log over whole records, also past damaged ones: where the walk goes on behind bytes that are no record.

Records are not aligned, so the start of the next one is known only from the size of the one before. If that record is
damaged, its size may be too. A record that follows is found by what it says of itself: its magic, its own physical
offset, and a body that matches its CRC. Nothing else in a log looks like that.
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
"""The bytes that are searched for a magic at a time."""
_MAGIC_BYTES: Final = 4
_MAGIC_PREFIX: Final = MAGIC_V1.to_bytes(_MAGIC_BYTES, signed=True)[:3]
"""The bytes that both magics of a record begin with."""
_BLANK_BYTES: Final = BLANK_MAGIC.to_bytes(_MAGIC_BYTES, signed=True)

logger = logging.getLogger(__name__)


class WalkedRecords(NamedTuple):
    """Records of one file, back to back: `data` begins at `physical_offset`, the records in it at `starts`.

    The walk goes on at `end_offset`: the end of the last record, the next intact record if damaged bytes follow, or the
    next file if this one ends there.
    """

    data: Bytes
    starts: Ints
    physical_offset: int
    end_offset: int


def walk_log(reader: LogReader, physical_offset: int, limit: int, max_bytes: int) -> WalkedRecords:
    """The records between `physical_offset`, where one starts, and `limit`, where one ends: about `max_bytes` of them.

    Only sizes and magics are looked at: everything before `limit` was checked when it was written or recovered. Where
    a record is damaged all the same, which is logged, the walk goes on at the next intact one. DataLossError if the
    file is gone.
    """
    file_size = reader.commit_log_file_size
    file_start = physical_offset - physical_offset % file_size
    data = reader.log_bytes(physical_offset, min(limit, file_start + file_size))
    starts, end = walk_records(data, 0, max_bytes)
    end_offset = physical_offset + end
    if end < min(max_bytes, len(data)):
        # At `limit`, if that is before the file's end: a hole may be the last thing in a replica's log.
        end_offset = min(limit, file_start + file_size)
        if not is_blank(data, end):
            file = reader.log_bytes(file_start, min(limit, file_start + file_size))
            behind = resume_behind(file, file_start, physical_offset + end - file_start)
            if behind is not None:
                end_offset = file_start + behind
            logger.error("no record at physical offset %d; going on at %d", physical_offset + end, end_offset)
    data = data[:end]
    return WalkedRecords(np.frombuffer(data, np.uint8), starts, physical_offset, end_offset)


def resume_behind(
    data: memoryview, file_start: int, position: int, limit: int | None = None, **checks: bool
) -> int | None:
    """The position behind a damaged record, which starts at `position` of a log file, where the log goes on: with an
    intact record, or with the BLANK that fills the file. None if neither follows in the file.

    `data` is the file, or its beginning; `file_start` its physical offset. Only records that start before `limit` are
    looked for; None: up to the end of `data`. `checks` are those of `check_record`.
    """
    limit = len(data) if limit is None else min(limit, len(data))
    named = position + int.from_bytes(data[position : position + _MAGIC_BYTES], signed=True)
    if not position + MIN_RECORD_SIZE <= named < limit or not _goes_on(data, file_start, named, checks):
        return next(_intact_from(data, file_start, position + 1, limit, checks), None)
    # The size leads to an intact record. It may be wrong all the same, and skip some: those lie back to back up to
    # there. A record that is part of a body does not.
    for found in _intact_from(data, file_start, position + 1, named, checks):
        if _lead_to(data, file_start, found, named, checks):
            return found
    return named


def is_intact(data: memoryview, file_start: int, position: int, **checks: bool) -> bool:
    """True if a record that passes `checks` starts at `position` of a log file, and says itself that it is there."""
    size, good = check_record(data, position, **checks)
    if not good or size <= 0:
        return False
    try:
        header = read_header(data, position)
    except RecordError:
        return False
    return header.physical_offset == file_start + position and header.queue_id >= 0 and header.queue_offset >= 0


def fills_file(data: memoryview, position: int) -> bool:
    """True if the BLANK at `position` of a whole file's `data` says rightly how much of the file is left."""
    return is_blank(data, position) and int.from_bytes(data[position : position + _MAGIC_BYTES]) == len(data) - position


def _goes_on(data: memoryview, file_start: int, position: int, checks: dict[str, bool]) -> bool:
    return fills_file(data, position) or is_intact(data, file_start, position, **checks)


def _lead_to(data: memoryview, file_start: int, position: int, target: int, checks: dict[str, bool]) -> bool:
    """True if intact records lie back to back from `position` up to `target`."""
    while position < target and is_intact(data, file_start, position, **checks):
        position += int.from_bytes(data[position : position + _MAGIC_BYTES])
    return position == target


def _intact_from(
    data: memoryview, file_start: int, position: int, limit: int, checks: dict[str, bool]
) -> Iterator[int]:
    """The positions in [`position`, `limit`) at which an intact record or the file's BLANK starts, ascending."""
    for found, is_mark in _magics_from(data, position + MAGIC_OFFSET, limit + MAGIC_OFFSET):
        start = found - MAGIC_OFFSET
        if fills_file(data, start) if is_mark else is_intact(data, file_start, start, **checks):
            yield start


def _magics_from(data: memoryview, position: int, limit: int) -> Iterator[tuple[int, bool]]:
    """The positions in [`position`, `limit`) of what may be a magic, ascending; True for that of a BLANK."""
    while position < limit:
        end = min(position + _SEARCH_BYTES, limit)
        # A magic may lie over the end of this piece: then it counts with this piece.
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
