"""Reads the properties of many records at once, by the layouts ("shapes") that most records share.

Most records of one producer have the same properties, with values of the same few lengths. Property texts that differ
only in such values have one *shape*. A shape is parsed once. After that, a property's values are a few columns of a
table of bytes, one row per record. Most columns have the same byte in every row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np
from numpy.typing import NDArray

from raymq.common.java_text import decode_utf8
from raymq.records.format.hashing import java_hash, tags_code
from raymq.records.format.layout import windows
from raymq.records.kernels.fields import Bytes, Ints

_SEPARATOR: Final = 0x02
_ZERO: Final = np.uint8(ord("0"))
_ASCII_END: Final = 0x80
_DIGITS_MAX: Final = 18
_ROWS_PER_SHAPE: Final = 64
_SHAPES_MIN: Final = 8
"""Number of shapes (common layouts of property texts) that a batch may always have. More shapes are allowed only if
there are on average at least _ROWS_PER_SHAPE records per shape."""
_TEXT_MAX: Final = 2048
"""Maximum length in bytes of a record's property text for which shapes (common layouts) are used."""


@dataclass(frozen=True, slots=True)
class Values:
    """The values of one property in m records. All m values have the same length."""

    rows: Ints
    """The indices of the records whose property values are in `table`, ascending; shape (m,)."""
    table: Bytes
    """The bytes of the property's value in each of the m records, shape (m, length of a value). This is a view without
    a copy."""
    varies: NDArray[np.bool_]
    """Mask of the byte positions at which the property's values in the m records differ, shape (length of a
    value,)."""

    def first(self) -> bytes:
        """Return the property's value in the first of the m records."""
        return bytes(self.table[0])

    def part(self, start: int, end: int) -> Values:
        """Return a part of each record's property value: bytes `start` up to, but not including, `end`."""
        return Values(self.rows, self.table[:, start:end], self.varies[start:end])

    def distinct(self) -> tuple[list[bytes], Ints]:
        """Return the distinct values of the property, and for each record the index of its value. The call is fast if
        most adjacent records have equal values."""
        if not self.varies.any():
            return [self.first()], np.zeros(len(self.table), np.int64)
        columns = self.table[:, self.varies]
        firsts = np.concatenate(([0], np.flatnonzero((columns[1:] != columns[:-1]).any(axis=1)) + 1))
        found = [self.table[row].tobytes() for row in firsts.tolist()]
        code_of = {value: code for code, value in enumerate(dict.fromkeys(found))}
        codes = np.array([code_of[value] for value in found], np.int64)
        return list(code_of), np.repeat(codes, np.diff(firsts, append=len(self.table)))

    def numbers(self) -> Ints | None:
        """Parse the property's values as decimal numbers. Returns None if a value contains a character that is not a
        digit, or if the values have more than 18 digits."""
        first = self.first()
        if not first.isdigit() or len(first) > _DIGITS_MAX:
            return None
        # Set all rows to the first record's number, then correct each digit column in which the values differ. The
        # correction is the row's digit minus the first record's digit, times the digit's place value.
        numbers = np.full(len(self.table), int(first), np.int64)
        for column in np.flatnonzero(self.varies).tolist():
            digits = self.table[:, column]
            if (digits - _ZERO > 9).any():
                return None
            numbers += (digits.astype(np.int64) - first[column]) * 10 ** (len(first) - 1 - column)
        return numbers

    def java_hashes(self) -> NDArray[np.uint32] | None:
        """Return Java's string hash of each property value, modulo 2**32. Returns None if a value is not ASCII, because
        Java hashes UTF-16 code units, which then differ from the bytes."""
        first = self.first()
        if not first.isascii():
            return None
        # Start with the hash of the first record's value in all rows. In each byte column in which values differ, add
        # the difference that a row's own byte makes to its hash.
        hashes = np.full(len(self.table), java_hash(first.decode()) & 0xFFFFFFFF, np.uint32)
        for column in np.flatnonzero(self.varies).tolist():
            units = self.table[:, column]
            if units.max() >= _ASCII_END:
                return None
            power = np.uint32(pow(31, len(first) - 1 - column, 1 << 32))
            hashes += (units.astype(np.uint32) - np.uint32(first[column])) * power
        return hashes

    def tags_codes(self) -> Ints:
        """Return the tag code of each record's value of this property, as the function `tags_code` computes it."""
        hashes = self.java_hashes()
        if hashes is not None:
            return hashes.view(np.int32).astype(np.int64)
        different, numbers = self.distinct()
        return np.array([tags_code(decode_utf8(tags)) for tags in different], np.int64)[numbers]


@dataclass(frozen=True, slots=True)
class PropertyShape:
    """A group of m records whose property texts differ only in the values of the properties. All values of one property
    have the same length."""

    rows: Ints
    texts: Bytes
    """The property texts of all records in the group as a table of bytes, with one row per record. Shape (number of
    records, length of one text)."""
    values: dict[bytes, tuple[int, int]]
    """The start and end column of each property's value in `texts`, by the property's name."""
    varies: NDArray[np.bool_]
    """Mask of the byte columns of `texts` that are not equal in all m records, shape (length of one text,)."""

    def get(self, name: bytes) -> Values | None:
        """Return the values of the property `name` in this group of records, whose property texts have one layout
        (shape). Returns None if these records do not have the property."""
        span = self.values.get(name)
        if span is None:
            return None
        return Values(self.rows, self.texts[:, slice(*span)], self.varies[slice(*span)])


def find_property_shapes(data: Bytes, at: Ints, sizes: Ints) -> list[PropertyShape] | None:
    """Group records by the shapes of their property texts. Texts of one shape have the same properties, with values of
    the same lengths. `at` and `sizes` are the positions and lengths, in bytes, of the texts. Each record belongs to one
    shape.

    A property without a value counts as absent. Returns None if too few records share a shape, a text is too long, or a
    record repeats a property. The caller must then handle each record separately.
    """
    shapes: list[PropertyShape] = []
    shapes_max = _shapes_max(len(at))
    counts = np.bincount(np.minimum(sizes, _TEXT_MAX + 1))
    for size in np.flatnonzero(counts).tolist():
        if size > _TEXT_MAX:
            return None
        rows = np.arange(len(at)) if counts[size] == len(at) else np.flatnonzero(sizes == size)
        texts = np.empty((len(rows), 0), np.uint8)
        if size:
            texts = windows(data, size)[at[rows]].view(np.uint8).reshape(-1, size)
        for shape in _shapes_of(texts, rows):
            if shape is None or len(shapes) == shapes_max:
                return None
            shapes.append(shape)
    return shapes


def shapes_of_table(texts: Bytes) -> list[PropertyShape] | None:
    """Apply `find_property_shapes` to property texts of equal length, given as a table of shape (n, length)."""
    found = list(islice(_shapes_of(texts, np.arange(len(texts))), _shapes_max(len(texts)) + 1))
    shapes = [shape for shape in found if shape is not None]
    return shapes if len(shapes) == len(found) <= _shapes_max(len(texts)) else None


def _shapes_max(count: int) -> int:
    return max(_SHAPES_MIN, count // _ROWS_PER_SHAPE)


def _shapes_of(texts: Bytes, rows: Ints) -> Iterator[PropertyShape | None]:
    """Group the property texts of the records `rows` by their layout, and yield a PropertyShape for each group. All
    texts have the same length. If a text contains a property twice, yields None and ends."""
    size = texts.shape[1]
    if not size:
        yield PropertyShape(rows, texts, {}, np.zeros(0, bool))
        return
    # Each pass yields one shape, that of the first remaining property text, with all texts of this shape. Texts of
    # other shapes remain for the next pass.
    while len(rows):
        values = _parse(texts[0].tobytes())
        if values is None:
            yield None
            return
        differs = texts != texts[0]
        varies = differs.any(axis=0)
        fixed = np.ones(size, bool)
        for start, end in values.values():
            fixed[start:end] = False
        columns = np.flatnonzero(varies)
        if not fixed[columns].any() and not (texts[:, columns] == _SEPARATOR).any():
            yield PropertyShape(rows, texts, values, varies)
            return
        fits = ~((differs & fixed) | ((texts == _SEPARATOR) & ~fixed)).any(axis=1)
        some = texts[fits]
        yield PropertyShape(rows[fits], some, values, (some != some[0]).any(axis=0))
        rows, texts = rows[~fits], texts[~fits]


def _parse(text: bytes) -> dict[bytes, tuple[int, int]] | None:
    """Return the start and end of each property's value in a property text, by the property's name. Returns None if a
    name is repeated."""
    values: dict[bytes, tuple[int, int]] = {}
    at = 0
    for piece in text.split(b"\x02"):
        name, _, value = piece.partition(b"\x01")
        if value:
            if name in values:
                return None
            values[name] = at + len(name) + 1, at + len(piece)
        at += len(piece) + 1
    return values
