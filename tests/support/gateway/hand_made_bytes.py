"""Makes the bytes of a request from field numbers, without the gateway's own messages.

So the gateway's table of fields is not compared with itself.
"""

from __future__ import annotations

Value = int | str | bytes
"""A number, a text, or bytes: a body, or the fields of a message inside a message."""


def fields(*pairs: tuple[int, Value]) -> bytes:
    """Return the bytes of a message of protobuf with these fields, each a number and a value, in this order."""
    return b"".join(_field(number, value) for number, value in pairs)


def _field(number: int, value: Value) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    data = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    """Return a number in groups of 7 bits, the lowest group first. Each byte but the last has its highest bit set."""
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    data.append(value)
    return bytes(data)
