"""The holes of a log. A hole is a range of damaged bytes that is followed by intact records. Recovery keeps holes and
lists them in a file.

On disk
    holes       1a2b3c4d                            the CRC-32 of the rest
                [[offset, size, reason], …]         ascending; no two touch in one file
    holes.bak   the same (storage/files/two_copies.py)

Both files are missing while the log has no hole. Recovery finds the holes of the part of the log that it scans, and
takes earlier holes from this file. A hole is removed from the table when intact bytes replace it, or when retention
deletes its log file. If a master has a hole that no replica can repair, its slaves copy the damaged bytes and record
the same hole (chunk_appender.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

from raymq.common.errors import StoreCorruptError
from raymq.common.protocol.store import Hole
from raymq.records.format.check import check_record
from raymq.records.format.crc import body_crc, seal_holds
from raymq.records.format.layout import (
    BLANK_LENGTH,
    MAGIC_V1,
    MAGIC_V2,
    MIN_RECORD_SIZE,
    RecordError,
    encode_blank,
    find_sections,
    read_header,
)
from storage.files.damage import DamageNotes
from storage.files.two_copies import CHECKSUM_LINE, TwoCopies

HOLES_FILE: Final = "holes"
PLACE_REASON: Final = "the place of a record in its queue is damaged"
"""The beginning of the reason that is stored for a special kind of hole (damaged range). Its record passes all checks,
but does not match its place in its queue (storage/recovery/misfits.py)."""


class HoleTable:
    """The holes (damaged ranges) of one store's log. Only one thread at a time may change the table; any thread can
    read `holes` without a lock."""

    def __init__(self, root: Path, damage: DamageNotes) -> None:
        """Read the file `holes`, if it exists. If the file is damaged, that is recorded in `damage`. Raises OSError if
        the disk failed."""
        self._copies = TwoCopies(root / HOLES_FILE, CHECKSUM_LINE, damage)
        self.holes: tuple[Hole, ...] = ()
        """All holes (damaged ranges) of the log, ascending by physical offset."""
        self.mended_bytes = self.mended_holes = 0
        """Two counters since the store was opened: the damaged bytes of the log that intact bytes replaced, and the
        holes (damaged ranges) that were removed because they are completely repaired."""
        self.found_holes = self.found_bytes = 0
        """Two counters since the store was opened: the holes (damaged ranges) that were found while the store runs, and
        their bytes. Holes that recovery has found are not included."""
        try:
            text = self._copies.read() or b"[]"
            self.holes = tuple(Hole(int(offset), int(size), str(reason)) for offset, size, reason in json.loads(text))
        except (StoreCorruptError, TypeError, ValueError) as error:
            damage.note(f"damaged ranges of the log that the file listed are found again when they are read: {error}")

    def replace(self, holes: Iterable[Hole], file_size: int) -> None:
        """Replace all holes (damaged ranges) in the table by `holes`. Holes that touch within one log file of
        `file_size` bytes are joined.

        On return the new holes are on disk. After an OSError the table is unchanged.
        """
        merged: list[Hole] = []
        for hole in sorted(holes, key=lambda one: one.offset):
            last = merged[-1] if merged else None
            if last is not None and last.end_offset == hole.offset and hole.offset % file_size:
                merged[-1] = Hole(last.offset, last.size + hole.size, last.reason)
            else:
                merged.append(hole)
        if tuple(merged) == self.holes and self._copies.path.exists() == bool(merged):
            return
        if merged:
            self._copies.write(json.dumps([[hole.offset, hole.size, hole.reason] for hole in merged]).encode())
        else:
            self._copies.remove()
        self.holes = tuple(merged)

    def add(self, holes: Sequence[Hole], file_size: int) -> None:
        """Add holes (damaged ranges) that were found while the store runs. They overlap no hole in the table.

        On return they are on disk. After an OSError the table is unchanged.
        """
        self.replace([*self.holes, *holes], file_size)
        self.found_holes += len(holes)
        self.found_bytes += sum(hole.size for hole in holes)

    def from_offset(self, physical_offset: int) -> tuple[Hole, ...]:
        """Return the holes (damaged ranges) that end after `physical_offset`, the start of the log."""
        return tuple(hole for hole in self.holes if hole.end_offset > physical_offset)


def share_among_holes(holes: Sequence[Hole], count: int) -> list[tuple[Hole, list[tuple[int, int]]]]:
    """Distribute `count` missing records of a queue over holes (damaged ranges of the log), in order. Returns, for each
    hole, the places of its records.

    A place is a physical offset and a size. The number of records in a hole is unknown: each hole gets one record, and
    the largest hole gets all remaining records. Returns an empty list if there is no hole, or if the largest hole is
    too small for its records.
    """
    holes = holes[:count]
    if not holes:
        return []
    room = [1] * len(holes)
    largest = max(range(len(holes)), key=lambda index: holes[index].size)
    room[largest] += count - len(holes)
    if room[largest] > 1 and room[largest] > holes[largest].size // MIN_RECORD_SIZE:
        return []
    shared = []
    for hole, records in zip(holes, room, strict=True):
        step = hole.size // records
        # The queue entry (unit) gets a size that is too small for a record. So the entry never leads to a message, even
        # if an intact record happens to be at the position to which it points.
        size = min(step, MIN_RECORD_SIZE)
        shared.append((hole, [(hole.offset + step * record, size) for record in range(records)]))
    return shared


def damaged_records(data: memoryview, start: int, position: int, end: int) -> list[Hole]:
    """Return the damaged records from `position` up to `end` of a log file as holes (damaged ranges of the log).

    `data` is the file, and `start` its physical offset. There is one hole per record if the records' sizes add up to
    the range, otherwise one hole for the whole range.
    """
    edges = [position]
    while edges[-1] < end:
        size = int.from_bytes(data[edges[-1] : edges[-1] + 4], signed=True)
        if not MIN_RECORD_SIZE <= size <= end - edges[-1]:
            edges = [position, end]
            break
        edges.append(edges[-1] + size)
    return [Hole(start + at, to - at, reason_of(data[at:to], start + at)) for at, to in pairwise(edges)]


def lost_blank(data: memoryview, position: int) -> bytes:
    """Return the 8 bytes of the BLANK (end-of-file marker) that a log file `data` had at `position`, if only one of its
    two fields is damaged. Otherwise return empty bytes.

    The content of a BLANK follows from the file's size. All bytes after a BLANK in its file are zero, which
    distinguishes the BLANK from a damaged record.
    """
    found, blank = bytes(data[position : position + BLANK_LENGTH]), encode_blank(len(data) - position)
    half = BLANK_LENGTH // 2
    is_half = (found[:half] == blank[:half]) != (found[half:] == blank[half:])
    return blank if is_half and not any(data[position + BLANK_LENGTH :]) else b""


def reason_of(record: memoryview, physical_offset: int) -> str:
    """Describe the damage of the bytes that should be the record at `physical_offset`."""
    if not any(record):
        return f"{len(record)} bytes that should be a record are zero"
    try:
        header = read_header(record)
    except RecordError:
        return f"{len(record)} bytes are no record"
    if header.magic not in (MAGIC_V1, MAGIC_V2):
        return f"the magic of a record is {header.magic & 0xFFFFFFFF:#x}"
    if header.physical_offset != physical_offset:
        return f"a record at {physical_offset} says that it is at {header.physical_offset}"
    if header.total_size != len(record):
        return f"the size of a record is {header.total_size}, but the next one follows after {len(record)} bytes"
    if check_record(record, check_crc=False).ok:
        if is_changed_beside_body(record):
            return "the header or the properties of a record do not match its property CRC"
        return "the body of a record does not match its checksum"
    return "the lengths in a record do not add up to its size"


def is_changed_beside_body(record: memoryview) -> bool:
    """True if a record is damaged only outside of its body: its fields are consistent, but its property CRC does not
    match."""
    if seal_holds(record):
        return False
    header = read_header(record)
    body_at, body_end, *_ = find_sections(record, 0, header)
    return body_at == body_end or body_crc(record[body_at:body_end]) == header.body_crc
