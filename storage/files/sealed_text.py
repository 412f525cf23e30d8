"""Seals small texts with a checksum that other programs do not see.

RocketMQ reads the same JSON files, and may write them. So the checksum is white space after the text: a line feed, one
character for each bit of the CRC-32 (a space for 0, a tab for 1), a line feed. A text without a checksum was written by
RocketMQ or by hand, and is accepted unchecked. To edit a sealed text by hand, delete the white space.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from raymq.records.format.crc import crc32

_BITS: Final = 32
_SEAL_BYTES: Final = _BITS + 2
_ZERO, _ONE, _LINE_FEED = b" \t\n"
REPAIRED_MAX_BYTES: Final = 8192
"""In a text up to this length a single wrong bit is located and corrected."""


class Unsealed(NamedTuple):
    """A text that was read, and the damage found in it.

    `text` is None if the text changed since it was sealed and cannot be corrected. `damage` describes what was wrong;
    it is empty if nothing was.
    """

    text: bytes | None
    damage: str


def seal(text: bytes) -> bytes:
    """Return the text followed by its checksum."""
    crc = crc32(text)
    bits = bytes(_ONE if crc >> bit & 1 else _ZERO for bit in range(_BITS))
    return b"".join((text, b"\n", bits, b"\n"))


def unseal(data: bytes) -> Unsealed:
    """Return the text in `data`, checked if it has a checksum."""
    text, tail = data[:-_SEAL_BYTES], data[-_SEAL_BYTES:]
    wrong = sum(byte not in (_ZERO, _ONE) for byte in tail[1:-1]) + (tail[:1] != b"\n") + (tail[-1:] != b"\n")
    if len(data) < _SEAL_BYTES or wrong > 1:
        return Unsealed(data, "")
    if _agrees(crc32(text), tail):
        return Unsealed(text, "a bit of its checksum was wrong" if wrong else "")
    if not wrong and len(text) <= REPAIRED_MAX_BYTES:
        changed = bytearray(text)
        for at in range(len(changed)):
            for bit in range(8):
                changed[at] ^= 1 << bit
                if _agrees(crc32(changed), tail):
                    return Unsealed(bytes(changed), f"a bit of byte {at} was wrong, and is corrected")
                changed[at] ^= 1 << bit
    return Unsealed(None, "it does not match its checksum")


def _agrees(crc: int, tail: bytes) -> bool:
    """True if all readable bits of a checksum equal those of `crc`."""
    return all(
        byte not in (_ZERO, _ONE) or (byte == _ONE) == bool(crc >> bit & 1) for bit, byte in enumerate(tail[1:-1])
    )
