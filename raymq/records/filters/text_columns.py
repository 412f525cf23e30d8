"""A column of one property's texts in many messages, with the comparisons of a filter expression for all rows at once.

The result of a comparison is False for a row without the property; `present` marks the rows with the property. numpy
parses ordinary texts. Unusual texts (numbers of many digits, with an exponent or with blanks) are parsed one by one by
the reference implementation.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from raymq.common.java_text import decode_utf8
from raymq.records.filters.plan import TextTest
from raymq.records.filters.values import INTEGER_MAX, IncomparableError, ValueKind, read_number
from raymq.records.format.layout import windows
from raymq.records.kernels.property_columns import ValueColumn

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]
Numbers = tuple[NDArray[Any], Mask]
"""A text column read as numbers: for each row the number (a 64-bit integer or a double), and a mask of the rows whose
text is a number."""

_WHOLE_MAX: Final = 18
"""Maximum length of an integer's text, including a sign, for which every integer fits into 64 bits."""
_DOUBLE_MAX: Final = 15
"""Maximum length of a decimal number's text for the fast conversion. Up to this length, the digits and the power of ten
are exact doubles, so dividing them gives the correctly rounded number."""
_POWERS: Final = 10.0 ** np.arange(_DOUBLE_MAX + 1)
_SHIFTED_MAX: Final = 256
"""Maximum length, in bytes, of texts that are searched in all rows at once, one position after another. Longer texts
are searched row by row."""
_ZERO, _PLUS, _MINUS, _POINT = b"0+-."


class TextColumn:
    """The texts of one property in n messages, one row per message."""

    def __init__(self, values: ValueColumn) -> None:
        self._values = values
        self._sizes = values.sizes
        self.present: Mask = values.present
        self._numbers: dict[ValueKind, Numbers] = {}

    def equals(self, text: str) -> Mask:
        """Return a mask that is True for rows whose text equals `text`."""
        return self._at(np.flatnonzero(self._sizes == len(data := text.encode())), 0, data)

    def is_one_of(self, texts: Iterable[str]) -> Mask:
        """Return a mask that is True for rows whose text equals one of `texts`."""
        result = np.zeros(len(self._sizes), np.bool_)
        wanted = sorted({text.encode() for text in texts if text}, key=len)
        for size, group in groupby(wanted, len):
            rows = np.flatnonzero(self._sizes == size)
            # numpy ignores zero bytes at the end of byte strings. The comparison is still exact, because the strings in
            # `found` and `group` all have `size` bytes.
            found = windows(self._values.data, size)[self._values.starts[rows]].view(f"S{size}")
            result[rows] = np.isin(found, np.array(list(group), f"S{size}"))
        return result

    def is_true(self) -> Mask:
        """Return a mask that is True for rows whose text is "true" in upper, lower or mixed case."""
        rows = np.flatnonzero(self._sizes == 4)
        # Set bit 0x20 of each byte, which converts ASCII letters to lower case. The comparison with "true" stays exact:
        # of all bytes, only T and t become t, and likewise for r, u and e.
        texts = self._values.table(rows, 4) | 0x20
        result = np.zeros(len(self._sizes), np.bool_)
        result[rows] = (texts == np.frombuffer(b"true", np.uint8)).all(axis=1)
        return result

    def finds(self, test: TextTest, text: str) -> Mask:
        """Return a mask that is True for rows whose text contains, starts with or ends with `text`, which is
        not empty."""
        data = text.encode()
        rows = np.flatnonzero(self._sizes >= len(data))
        if test is TextTest.STARTSWITH:
            return self._at(rows, 0, data)
        if test is TextTest.ENDSWITH:
            return self._at(rows, self._sizes[rows] - len(data), data)
        result = np.zeros(len(self._sizes), np.bool_)
        long = self._sizes[rows] > _SHIFTED_MAX
        for row in rows[long].tolist():
            result[row] = data in self._values.value(row)
        rows = rows[~long]
        for shift in range(int(self._sizes[rows].max(initial=0)) - len(data) + 1):
            rows = rows[self._sizes[rows] >= shift + len(data)]
            result |= self._at(rows, shift, data)
        return result

    def is_same(self, other: TextColumn) -> Mask:
        """Return a mask that is True for rows with equal texts in both columns."""
        result = np.zeros(len(self._sizes), np.bool_)
        same_size = np.flatnonzero((self._sizes == other._sizes) & self.present)
        for size in np.unique(self._sizes[same_size]).tolist():
            rows = same_size[self._sizes[same_size] == size]
            mine, others = (windows(values.data, size)[values.starts[rows]] for values in (self._values, other._values))
            result[rows] = mine == others
        return result

    def numbers(self, kind: ValueKind) -> Numbers:
        """Parse this column's texts as numbers of type `kind`. The result is cached."""
        if kind not in self._numbers:
            self._numbers[kind] = self._doubles() if kind is ValueKind.DOUBLE else self._wholes(kind)
        return self._numbers[kind]

    def _at(self, rows: Ints, skip: Ints | int, data: bytes) -> Mask:
        """Return a mask over all rows of the text column. It is True for each row in `rows` whose text contains the
        bytes `data` at byte position `skip`. The texts of `rows` must have at least skip + len(data) bytes."""
        result = np.zeros(len(self._sizes), np.bool_)
        if len(rows) and data:
            result[rows] = windows(self._values.data, len(data))[self._values.starts[rows] + skip] == np.void(data)
        return result

    def _wholes(self, kind: ValueKind) -> Numbers:
        numbers, readable = np.zeros(len(self._sizes), np.int64), np.zeros(len(self._sizes), np.bool_)
        rows = np.flatnonzero(self.present & (self._sizes <= _WHOLE_MAX))
        numbers[rows], readable[rows], _ = self._digits(rows, point=False)
        self._read_singly(np.flatnonzero(self._sizes > _WHOLE_MAX), kind, numbers, readable)
        if kind is ValueKind.INTEGER:
            readable &= (numbers >= -INTEGER_MAX - 1) & (numbers <= INTEGER_MAX)
        return numbers, readable

    def _doubles(self) -> Numbers:
        numbers, readable = np.zeros(len(self._sizes), np.float64), np.zeros(len(self._sizes), np.bool_)
        rows = np.flatnonzero(self.present & (self._sizes <= _DOUBLE_MAX))
        digits, plain, decimals = self._digits(rows, point=True)
        numbers[rows] = digits / _POWERS[decimals]
        readable[rows] = plain
        minus = rows[plain & (self._values.table(rows, 1)[:, 0] == _MINUS)]
        numbers[minus] = -np.abs(numbers[minus])  # the negative sign also makes -0.0 from the text "-0", as Java does
        self._read_singly(np.flatnonzero(self.present & ~readable), ValueKind.DOUBLE, numbers, readable)
        return numbers, readable

    def _digits(self, rows: Ints, *, point: bool) -> tuple[Ints, Mask, Ints]:
        """Parse decimal numbers in the texts of `rows`. Returns the digits of each number as an integer (without the
        point), and a mask of texts that are decimal numbers. Also returns the number of digits after the point of each
        number."""
        sizes = self._sizes[rows]
        table = np.ascontiguousarray(self._values.table(rows, int(sizes.max(initial=1))).T)
        minus = table[0] == _MINUS
        signed = minus | (table[0] == _PLUS)
        numbers, count, decimals = (np.zeros(len(rows), np.int64) for _ in range(3))
        pointed, good = np.zeros(len(rows), np.bool_), np.ones(len(rows), np.bool_)
        for column, characters in enumerate(table):
            inside = sizes > column
            digits = characters - np.uint8(_ZERO)
            is_digit = inside & (digits <= 9)
            numbers = np.where(is_digit, numbers * 10 + digits, numbers)
            count += is_digit
            legal = is_digit | ~inside
            if column == 0:
                legal |= signed
            if point:
                decimals += is_digit & pointed
                is_point = inside & (characters == _POINT)
                legal |= is_point & ~pointed
                pointed |= is_point
            good &= legal
        return np.where(minus, -numbers, numbers), good & (count > 0), decimals

    def _read_singly(self, rows: Ints, kind: ValueKind, numbers: NDArray[Any], readable: Mask) -> None:
        """Parse numbers that the fast path cannot parse, one text at a time. `rows`: the rows with these texts. Stores
        the results in `numbers` and `readable`. A text that occurs in several rows is parsed once."""
        known: dict[bytes, int | float | None] = {}
        for row in rows.tolist():
            data = self._values.value(row)
            if data not in known:
                try:
                    known[data] = read_number(decode_utf8(data), kind)
                except IncomparableError:
                    known[data] = None
            number = known[data]
            readable[row] = number is not None
            if number is not None:
                numbers[row] = number
