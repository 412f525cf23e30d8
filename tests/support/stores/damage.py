"""Flips bits of records in the files of a store, as a failing disk does."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from raymq.records.format.layout import (
    BODY_SIZE_OFFSET,
    MAGIC_V1,
    PHYSICAL_OFFSET_OFFSET,
    QUEUE_OFFSET_OFFSET,
    header_size_at,
    read_header,
)
from tests.support.stores.stores import LOG_FILE_BYTES

FIELDS = ("size", "magic", "queue id", "queue offset", "physical offset", "body size", "body", "topic size", "topic")
"""Names of record fields in which a reader can detect a flipped bit."""


def flip(root: Path, physical_offset: int, field: str, *, file_size: int = LOG_FILE_BYTES) -> None:
    """Flip one bit in a field of the record at `physical_offset`. The store at `root` may be open or closed.

    A second call with equal arguments undoes the flip.
    """
    start = physical_offset - physical_offset % file_size
    with (root / "commitlog" / f"{start:020}").open("r+b", buffering=0) as file:
        data = file.read()
        position = _position(data, physical_offset - start, field)
        file.seek(position)
        file.write(bytes([data[position] ^ 0x01]))


_HEADER_POSITIONS: Final = {
    "size": 2,
    "magic": 5,
    "queue id": 15,
    "queue offset": QUEUE_OFFSET_OFFSET + 7,
    "physical offset": PHYSICAL_OFFSET_OFFSET + 7,
    "body size": BODY_SIZE_OFFSET + 2,
}
"""For each header field, the index of the byte in which a bit is flipped. The index counts from the start of a record
with IPv4 hosts."""


def _position(data: bytes, at: int, field: str) -> int:
    """Return the position, in a log file, of the byte in a record's field that is damaged by the test. The record
    starts at position `at` of the file."""
    if field in _HEADER_POSITIONS:
        return at + _HEADER_POSITIONS[field]
    body_at = at + header_size_at(data, at)
    header = read_header(data, at)
    body_end = body_at + header.body_size
    return {
        "body": (body_at + body_end) // 2,
        "topic size": body_end,
        "topic": body_end + (1 if header.magic == MAGIC_V1 else 2) + 2,
        "key": data.find(b"KEYS\x01", body_end) + len("KEYS\x01"),
    }[field]
