"""The properties of many records, read by the shapes that most of them share.

Records of one producer mostly have the same properties, with values of the same few lengths: their texts have one
*shape*. A shape is parsed once; then a property's values are a few columns of a table of bytes, one row per record, and
most columns hold the same byte in every row.
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
"""The number of shapes that are always accepted; more are accepted only if this number of records shares each shape."""
_TEXT_MAX: Final = 2048
"""The longest text, in bytes, for a table."""


@dataclass(frozen=True, slots=True)
class Values:
    """The values of one property in m records, all of one length."""

    rows: Ints
    """The records' indices, ascending; shape (m,)."""
    table: Bytes
    """The values' bytes, shape (m, length): a view."""
    varies: NDArray[np.bool_]
    """True for columns whose bytes differ, shape (length,)."""

    def first(self) -> bytes:
        """The value of the first record."""
        return bytes(self.table[0])

    def part(self, start: int, end: int) -> Values:
        """Return the columns from `start` up to `end` of each value."""
        return Values(self.rows, self.table[:, start:end], self.varies[start:end])

    def distinct(self) -> tuple[list[bytes], Ints]:
        """Return the different values, and for each record the index of its value. Fast if neighbours are mostly
        equal."""
        if not self.varies.any():
            return [self.first()], np.zeros(len(self.table), np.int64)
        columns = self.table[:, self.varies]
        firsts = np.concatenate(([0], np.flatnonzero((columns[1:] != columns[:-1]).any(axis=1)) + 1))
        found = [self.table[row].tobytes() for row in firsts.tolist()]
        code_of = {value: code for code, value in enumerate(dict.fromkeys(found))}
        codes = np.array([code_of[value] for value in found], np.int64)
        return list(code_of), np.repeat(codes, np.diff(firsts, append=len(self.table)))

    def numbers(self) -> Ints | None:
        """Return the values as decimal numbers; None if one has other characters than digits, or more than 18 of
        them."""
        first = self.first()
        if not first.isdigit() or len(first) > _DIGITS_MAX:
            return None
        # The first record's number, and the difference that another digit makes.
        numbers = np.full(len(self.table), int(first), np.int64)
        for column in np.flatnonzero(self.varies).tolist():
            digits = self.table[:, column]
            if (digits - _ZERO > 9).any():
                return None
            numbers += (digits.astype(np.int64) - first[column]) * 10 ** (len(first) - 1 - column)
        return numbers

    def java_hashes(self) -> NDArray[np.uint32] | None:
        """Return `java_hash` of each value, modulo 2**32; None if one is not ASCII, because its units then differ from
        its bytes."""
        first = self.first()
        if not first.isascii():
            return None
        # The first record's hash, and the difference that another byte makes.
        hashes = np.full(len(self.table), java_hash(first.decode()) & 0xFFFFFFFF, np.uint32)
        for column in np.flatnonzero(self.varies).tolist():
            units = self.table[:, column]
            if units.max() >= _ASCII_END:
                return None
            power = np.uint32(pow(31, len(first) - 1 - column, 1 << 32))
            hashes += (units.astype(np.uint32) - np.uint32(first[column])) * power
        return hashes

    def tags_codes(self) -> Ints:
        """Return the code of each value as a record's tags (`tags_code`)."""
        hashes = self.java_hashes()
        if hashes is not None:
            return hashes.view(np.int32).astype(np.int64)
        different, numbers = self.distinct()
        return np.array([tags_code(decode_utf8(tags)) for tags in different], np.int64)[numbers]


@dataclass(frozen=True, slots=True)
class PropertyShape:
    """m records whose property texts only differ in values of equal lengths."""

    rows: Ints
    texts: Bytes
    """The texts, shape (m, length of each)."""
    values: dict[bytes, tuple[int, int]]
    """The columns of each property's value in `texts`, as start and end, by the property's name."""
    varies: NDArray[np.bool_]
    """True for columns whose bytes differ, shape (length of each,)."""

    def get(self, name: bytes) -> Values | None:
        """Return the values of the property `name`; None if these records do not have it."""
        span = self.values.get(name)
        if span is None:
            return None
        return Values(self.rows, self.texts[:, slice(*span)], self.varies[slice(*span)])


def find_property_shapes(data: Bytes, at: Ints, sizes: Ints) -> list[PropertyShape] | None:
    """Return the shapes of the property texts of `sizes` bytes at `at`. Each record belongs to one shape.

    A property without a value counts as absent. Returns None if too few records share a shape, a text is very long, or
    a record repeats a property: the caller then handles each record separately.
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
    """`find_property_shapes` of texts of one length, given as a table of shape (n, length)."""
    found = list(islice(_shapes_of(texts, np.arange(len(texts))), _shapes_max(len(texts)) + 1))
    shapes = [shape for shape in found if shape is not None]
    return shapes if len(shapes) == len(found) <= _shapes_max(len(texts)) else None


def _shapes_max(count: int) -> int:
    return max(_SHAPES_MIN, count // _ROWS_PER_SHAPE)


def _shapes_of(texts: Bytes, rows: Ints) -> Iterator[PropertyShape | None]:
    """Yield the shapes of the texts of `rows`, all of one length. Yields None last if a property is repeated."""
    size = texts.shape[1]
    if not size:
        yield PropertyShape(rows, texts, {}, np.zeros(0, bool))
        return
    # The first remaining text defines a shape; texts of other shapes remain for the next turn.
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
    """Return the span of each property's value, by name; None if a name is repeated."""
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
