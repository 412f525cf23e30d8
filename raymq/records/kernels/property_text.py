"""Builds the property texts of records from columns of tags, keys and properties, and computes the tags' codes.

A record's text equals the text that `raymq.records.format.encode` writes for a message. Each property is written as
name 0x01 value 0x02; TAGS and then KEYS come last. The value of KEYS is the keys separated by spaces. The caller must
have checked all values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from raymq.common.message import PROPERTY_KEYS, PROPERTY_TAGS
from raymq.records.format.hashing import java_hash
from raymq.records.kernels.byte_column import ByteColumn
from raymq.records.kernels.fields import Ints

_TAGS: Final = f"{PROPERTY_TAGS}\x01".encode()
_KEYS: Final = f"{PROPERTY_KEYS}\x01".encode()
_END: Final = b"\x02"


@dataclass(frozen=True, slots=True, eq=False)
class PropertyTexts:
    """A column with an optional text in each of n rows. An absent text is an empty string in `texts`."""

    texts: ByteColumn
    present: NDArray[np.bool_]
    """A mask of the n rows that is True if the row has a text, shape (n,)."""


@dataclass(frozen=True, slots=True, eq=False)
class ListColumn:
    """A column with a list or map in each of n rows. Row i has the entries from `starts[i]` up to `starts[i + 1]` of
    each column in `parts`. A list has one column; a map has two, names and values."""

    parts: tuple[ByteColumn, ...]
    starts: Ints
    """For each row, the index of its first entry in `parts`, followed by the total number of entries. The indices
    ascend from 0; shape (n + 1,). An entry is an element of the row's list or map."""


def property_texts(
    tags: PropertyTexts | None, keys: PropertyTexts | ListColumn | None, properties: ListColumn | None
) -> ByteColumn | None:
    """Return the property text of each row; None if no row has properties."""
    parts: list[ByteColumn] = []
    if properties is not None and len(properties.parts[0]):
        parts.append(_property_rows(properties))
    if tags is not None and tags.present.any():
        parts += _value_parts(_TAGS, tags)
    if isinstance(keys, ListColumn) and len(keys.parts[0]):
        parts.append(_key_rows(keys))
    elif isinstance(keys, PropertyTexts) and keys.present.any():
        parts += _value_parts(_KEYS, keys)
    return ByteColumn.joined(parts) if parts else None


def property_sizes(
    tags: PropertyTexts | None, keys: PropertyTexts | ListColumn | None, properties: ListColumn | None
) -> Ints | int:
    """Return, for each row, an upper bound of the length of the row's property text, in bytes. The bound exceeds the
    length by a few bytes at most, and is 0 if no row has properties."""
    sizes: Ints | int = 0
    for column, name in ((tags, _TAGS), (keys, _KEYS), (properties, b"")):
        if isinstance(column, PropertyTexts):
            sizes = sizes + column.texts.sizes + len(name) + 1
        elif column is not None:
            ends = sum(part.offsets[column.starts] - part.offsets[0] for part in column.parts) + 2 * column.starts
            sizes = sizes + (ends[1:] - ends[:-1]) + len(name)
    return sizes


def _value_parts(name: bytes, column: PropertyTexts) -> list[ByteColumn]:
    present = column.present
    return [ByteColumn.repeated(name, present), column.texts, ByteColumn.repeated(_END, present)]


def _property_rows(column: ListColumn) -> ByteColumn:
    names, values = column.parts
    everywhere = np.ones(len(names), np.bool_)
    pairs = [names, ByteColumn.repeated(b"\x01", everywhere), values, ByteColumn.repeated(_END, everywhere)]
    return _by_row(ByteColumn.joined(pairs), column.starts)


def _key_rows(column: ListColumn) -> ByteColumn:
    [keys] = column.parts
    # Write the KEYS property of each row: the property's name before the first key, a space before each further key,
    # and the end byte (0x02) after the last key.
    filled = column.starts[1:] > column.starts[:-1]
    first, last = np.zeros(len(keys), np.bool_), np.zeros(len(keys), np.bool_)
    first[column.starts[:-1][filled]] = True
    last[column.starts[1:][filled] - 1] = True
    parts = [
        ByteColumn.repeated(_KEYS, first),
        ByteColumn.repeated(b" ", ~first),
        keys,
        ByteColumn.repeated(_END, last),
    ]
    return _by_row(ByteColumn.joined(parts), column.starts)


def _by_row(entries: ByteColumn, starts: Ints) -> ByteColumn:
    """Join the byte strings of each row into one string. Row i has the strings of `entries` from `starts[i]` up to
    `starts[i + 1]`. They are adjacent in memory, so nothing is copied."""
    return ByteColumn(entries.data, entries.offsets[starts])


def java_hashes(texts: ByteColumn) -> NDArray[np.int64]:
    """Return Java's hash code of each text (raymq.records.format.hashing), shape (n,); 0 for an empty text."""
    first, last = int(texts.offsets[0]), int(texts.offsets[-1])
    hashes = np.zeros(len(texts), np.int64)
    units = texts.data[first:last]
    sizes = texts.sizes
    if not len(units):
        return hashes
    if units.max() > 127:  # Not ASCII: Java hashes UTF-16 code units, which here differ from the UTF-8 bytes.
        distinct = {text: java_hash(text.decode()) for text in set(texts.tolist())}
        return np.array([distinct[text] for text in texts.tolist()], np.int64)
    # Java's hash multiplies the last byte of a text by 1, the byte before it by 31, the next by 31**2, and so on,
    # modulo 2**32.
    powers = np.full(int(sizes.max()), 31, np.uint32)
    powers[0] = 1
    np.multiply.accumulate(powers, out=powers)
    ends = texts.offsets[1:] - first
    terms = powers[np.repeat(ends, sizes) - 1 - np.arange(len(units))] * units
    filled = sizes > 0
    starts = (ends - sizes)[filled]
    hashes[filled] = np.add.reduceat(terms, starts, dtype=np.uint32).view(np.int32)
    return hashes


def long_hashes(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return Java's hash code of each number, shape (n,): the hash of an Integer if the number fits in 32 bits, else
    the hash of a Long."""
    folded = (numbers ^ (numbers.view(np.uint64) >> np.uint64(32)).view(np.int64)).astype(np.int32)
    short = (numbers >= -(2**31)) & (numbers < 2**31)
    return np.where(short, numbers, folded.astype(np.int64))


def joined_texts(texts: Sequence[ByteColumn | None], rows: Sequence[int]) -> ByteColumn | None:
    """Concatenate columns of property texts. Column i has `rows[i]` rows. A column that is None has only rows without
    property texts. Returns None if all columns are None."""
    if all(column is None for column in texts):
        return None
    nothing = [ByteColumn.repeated(b"", np.zeros(count, np.bool_)) for count in rows]
    return ByteColumn.chained([column or empty for column, empty in zip(texts, nothing, strict=True)])
