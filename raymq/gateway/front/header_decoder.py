"""HeaderDecoder decodes HPACK's header blocks (RFC 7541) with a small part of the work of hpack's own decoder.

The headers are most of the work of a small call: hpack's decoder copies the rest of the block at each header, and
writes a line for debugging at each number. The static table and the Huffman code are hpack's. Tests compare both
decoders on any blocks.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from hpack import HPACKDecodingError
from hpack.huffman_table import decode_huffman
from hpack.table import HeaderTable

HEADER_TABLE_BYTES: Final = 4096
"""Maximum size in bytes of the dynamic table."""
HEADER_EXTRA_BYTES: Final = 32
"""Number of bytes that HPACK counts for each header besides its name and value."""
_NUMBER_BYTES_MAX: Final = 5
_CACHED_BYTES_MAX: Final = 64
"""Size in bytes up to which the text of a Huffman code is kept for the next call: clients repeat most values."""

_STATIC: Final = HeaderTable.STATIC_TABLE
_STATIC_COUNT: Final = len(_STATIC)
_cached_text = lru_cache(maxsize=2048)(decode_huffman)


class HeaderDecoder:
    """Decodes the header blocks of one connection, in order. `list_bytes_max`: the maximum size of the headers of a
    block, as HPACK counts it."""

    def __init__(self, list_bytes_max: int) -> None:
        self.list_bytes = 0
        """Size in bytes of the headers in the last block, as HPACK counts it."""
        self._list_bytes_max = list_bytes_max
        self._dynamic: list[tuple[bytes, bytes]] = []
        """Headers to which later blocks refer, the newest last."""
        self._size, self._size_max = 0, HEADER_TABLE_BYTES

    def decode(self, block: bytes) -> list[tuple[bytes, bytes]]:
        """Return the names and values in a block. Raises HPACKDecodingError if it is malformed, or if the headers are
        too large: then no later block can be decoded."""
        try:
            return self._decode(block)
        except IndexError:
            raise HPACKDecodingError("the block ends inside a header, or names an unknown header") from None

    def _decode(self, block: bytes) -> list[tuple[bytes, bytes]]:
        fields: list[tuple[bytes, bytes]] = []
        position, end, total = 0, len(block), 0
        dynamic = self._dynamic
        while position < end:
            first = block[position]
            position += 1
            if first & 0x80:
                # most headers were in the call before, too
                index = first & 0x7F
                if index == 0x7F:
                    index, position = _number(block, position, index)
                if 0 < index <= _STATIC_COUNT:
                    field = _STATIC[index - 1]
                elif index <= _STATIC_COUNT + len(dynamic):
                    field = dynamic[_STATIC_COUNT - index]
                else:
                    raise IndexError(index)
            elif first & 0x60 == 0x20:
                if fields:
                    raise HPACKDecodingError("the size of the table changes after a header")
                size_max = first & 0x1F
                if size_max == 0x1F:
                    size_max, position = _number(block, position, size_max)
                self._resize(size_max)
                continue
            else:
                is_added = first & 0x40
                mask = 0x3F if is_added else 0x0F
                index = first & mask
                if index == mask:
                    index, position = _number(block, position, index)
                if index:
                    name = self._at(index)[0]
                else:
                    name, position = _text(block, position, end)
                value, position = _text(block, position, end)
                field = name, value
                if is_added:
                    self._add(field)
            total += len(field[0]) + len(field[1]) + HEADER_EXTRA_BYTES
            if total > self._list_bytes_max:
                raise HPACKDecodingError("the headers are too large")
            fields.append(field)
        self.list_bytes = total
        return fields

    def _at(self, index: int) -> tuple[bytes, bytes]:
        """Return the header at an index of both tables. Raises IndexError if there is no such header."""
        if index > _STATIC_COUNT:
            position = index - _STATIC_COUNT
            if position > len(self._dynamic):
                raise IndexError(index)
            return self._dynamic[-position]
        if not index:
            raise IndexError(index)
        return _STATIC[index - 1]

    def _add(self, field: tuple[bytes, bytes]) -> None:
        self._dynamic.append(field)
        self._size += len(field[0]) + len(field[1]) + HEADER_EXTRA_BYTES
        if self._size > self._size_max:
            self._shrink()

    def _resize(self, size_max: int) -> None:
        if size_max > HEADER_TABLE_BYTES:
            raise HPACKDecodingError("the table is larger than allowed")
        self._size_max = size_max
        self._shrink()

    def _shrink(self) -> None:
        count = 0
        while self._size > self._size_max:
            name, value = self._dynamic[count]
            self._size -= len(name) + len(value) + HEADER_EXTRA_BYTES
            count += 1
        del self._dynamic[:count]


def _number(block: bytes, position: int, number: int) -> tuple[int, int]:
    """Return a number that has more bytes, and the position after it. `number`: the value of its full first byte."""
    for shift in range(0, 7 * _NUMBER_BYTES_MAX, 7):
        part = block[position]
        position += 1
        number += (part & 0x7F) << shift
        if part < 0x80:
            return number, position
    raise HPACKDecodingError("a number is too long")


def _text(block: bytes, position: int, end: int) -> tuple[bytes, int]:
    """Return a text, and the position after it."""
    first = block[position]
    position += 1
    size = first & 0x7F
    if size == 0x7F:
        size, position = _number(block, position, size)
    stop = position + size
    if stop > end:
        raise IndexError(stop)
    text = block[position:stop]
    if first & 0x80:
        text = _cached_text(text) if size <= _CACHED_BYTES_MAX else decode_huffman(text)
    return text, stop
