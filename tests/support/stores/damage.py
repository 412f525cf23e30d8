"""Flips bits of records in the files of a store, as a failing disk does."""

from __future__ import annotations

from pathlib import Path

from raymq.record.layout import (
    BODY_SIZE_OFFSET,
    PHYSICAL_OFFSET_OFFSET,
    QUEUE_OFFSET_OFFSET,
    find_sections,
    read_header,
)
from tests.support.stores.stores import LOG_FILE_BYTES

FIELDS = ("size", "magic", "queue id", "queue offset", "physical offset", "body size", "body", "topic size", "topic")
"""Parts of a record that a reader can find to be damaged."""


def flip(root: Path, physical_offset: int, field: str, *, file_size: int = LOG_FILE_BYTES) -> None:
    """Flip one bit of a field of the record at `physical_offset` of the store at `root`, open or closed."""
    start = physical_offset - physical_offset % file_size
    with (root / "commitlog" / f"{start:020}").open("r+b", buffering=0) as file:
        data = file.read()
        at = physical_offset - start
        body_at, body_end, topic_at, properties_at, _ = find_sections(data, at, read_header(data, at))
        position = {
            "size": at + 2,
            "magic": at + 5,
            "queue id": at + 15,
            "queue offset": at + QUEUE_OFFSET_OFFSET + 7,
            "physical offset": at + PHYSICAL_OFFSET_OFFSET + 7,
            "body size": at + BODY_SIZE_OFFSET + 2,
            "body": (body_at + body_end) // 2,
            "topic size": body_end,
            "topic": topic_at + 2,
            "key": data.find(b"KEYS\x01", properties_at) + len("KEYS\x01"),
        }[field]
        file.seek(position)
        file.write(bytes([data[position] ^ 0x01]))
