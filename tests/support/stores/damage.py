"""Damages the files of a store as a failing disk does: bits of records in the log, and small files beside the log."""

from __future__ import annotations

import random
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
from storage.files.config_files import SealedText
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


FAULTS: Final = ("flipped bit", "cut short", "empty", "missing", "older version")
_LARGE: Final = ("commitlog", "consumequeue", "index", "lost+cut")


def small_files(root: Path) -> list[str]:
    """Return the names of a store's files, relative to its directory, without the files of log, queues and index."""
    names = (path.relative_to(root) for path in sorted(root.rglob("*")) if path.is_file())
    return [str(name) for name in names if name.parts[0] not in _LARGE]


def harm(path: Path, fault: str, older: Path, rng: random.Random) -> bytes:
    """Damage the file at `path`. Returns its content afterwards. The result is empty for a missing file, and for a file
    that lost only white space at its end: that file is whole.

    `older`: the file in an older copy of the store. If this copy has no such file, an older version is a missing file.
    """
    data = path.read_bytes()
    if fault == "flipped bit":
        changed = bytearray(data)
        # Most of a checkpoint or a confirm file is unused.
        changed[rng.randrange(len(data.rstrip(b"\0")) or 1)] ^= 1 << rng.randrange(8)
        data = bytes(changed)
    elif fault == "cut short":
        whole = data.rstrip()
        data = data[: rng.randrange(1, max(len(data), 2))]
        if data.rstrip() == whole:
            path.write_bytes(data)
            return b""
    elif fault == "empty":
        data = b""
    elif fault == "older version" and older.exists():
        data = older.read_bytes()
    else:
        path.unlink()
        return b""
    path.write_bytes(data)
    return data


def damaged_bytes_are_kept(path: Path, fault: str, damaged: bytes) -> bool:
    """True if the bytes of a damaged file are still in the store's directory, under the file's name or beside it. An
    intact older version, and a file without bytes, need not be kept. Nor must a text that lost only white space."""
    if not damaged or fault == "older version" or _is_whole_text(damaged):
        return True
    kept = [path, *path.parent.glob(f"{path.name}.damaged-*")]
    return any(file.exists() and file.read_bytes() == damaged for file in kept)


def _is_whole_text(data: bytes) -> bool:
    try:
        SealedText(is_json=True).decode(data)
    except ValueError:
        return False
    return True
