"""Finds the values of a few properties of many records by name, for all records at once.

    name 0x01 value 0x02 name 0x01 value 0x02 …     the property text that ends a record

The texts of a block of records are copied side by side into a table, without the bodies. In the table, every 0x01 after
a wanted name begins a value, and the next 0x02 ends the value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from raymq.records.format.layout import windows
from raymq.records.kernels.fields import Bytes, Ints

_BLOCK_BYTES: Final = 1 << 18
"""Approximate size, in bytes, of the block of property texts that is searched at a time. A block of this size fits in
the processor's cache."""
_ABSENT: Final = -1


@dataclass(frozen=True, slots=True, eq=False)
class ValueColumn:
    """The values of one property in n records, as positions and sizes in a buffer."""

    data: Bytes
    starts: Ints
    """The position in `data` of the property's value in each record, shape (n,)."""
    sizes: Ints
    """The length in bytes of each record's value of the property, shape (n,); -1 if the record does not have the
    property."""

    @property
    def present(self) -> NDArray[np.bool_]:
        """A mask of the n records that is True if the record has this property, shape (n,)."""
        return self.sizes >= 0

    def table(self, rows: Ints, width: int, skip: Ints | int = 0) -> Bytes:
        """Return `width` bytes of the property's value in each record of `rows`, shape (m, width). The bytes start at
        byte `skip` of the value. Bytes after the value's end are arbitrary."""
        return _table(self.data, self.starts[rows] + skip, width)

    def value(self, row: int) -> bytes:
        """Return the property's value in the record at index `row`. The record must have the property."""
        return self.data[self.starts[row] : self.starts[row] + self.sizes[row]].tobytes()


def find_properties(data: Bytes, at: Ints, sizes: Ints, names: Sequence[bytes]) -> list[ValueColumn]:
    """Return, for each property in `names`, a column with the property's value in each record. `at` and `sizes` are the
    positions and lengths, in bytes, of the records' property texts.

    A property without a value counts as absent. If a record repeats a property, the last value counts.
    """
    found = [(np.zeros(len(at), np.int64), np.full(len(at), _ABSENT, np.int64)) for _ in names]
    for rows in _blocks(sizes):
        block_at, block_sizes = at[rows], sizes[rows]
        width = int(block_sizes.max(initial=0)) + 2
        texts = _texts(data, block_at, block_sizes, width).reshape(-1)
        begins, ends = np.flatnonzero(texts == 1), np.flatnonzero(texts == 2)
        for name, (starts, lengths) in zip(names, found, strict=True):
            here = _behind(texts, begins, b"\x02" + name)
            row, column = np.divmod(here, width)
            # Ignore matches of the property's name that lie outside a record's property text. In a row, the bytes after
            # the text are arbitrary, and column 0 is the 0x02 that `_texts` puts before the text.
            inside = (column <= block_sizes[row]) & (column > len(name))
            here, row, column = here[inside], row[inside], column[inside]
            length = ends[np.searchsorted(ends, here)] - here - 1
            filled = length > 0
            of = rows.start + row[filled] if isinstance(rows, slice) else rows[row[filled]]
            starts[of] = block_at[row[filled]] + column[filled]
            lengths[of] = length[filled]
    return [ValueColumn(data, starts, lengths) for starts, lengths in found]


def _blocks(sizes: Ints) -> Iterator[slice | Ints]:
    """Yield the indices of the property texts in blocks of about equal size in bytes. If the lengths differ widely,
    long and short texts are in different blocks, so that a block's table has little unused space."""
    longest = int(sizes.max(initial=0))
    if len(sizes) * longest <= 2 * int(sizes.sum()) + _BLOCK_BYTES:
        rows = max(_BLOCK_BYTES // (longest + 2), 1)
        for first in range(0, len(sizes), rows):
            yield slice(first, min(first + rows, len(sizes)))
        return
    # group the texts by the bit length of their sizes, so that sizes in a group differ by less than a factor of 2
    classes = np.frexp(sizes)[1]
    for one in np.unique(classes).tolist():
        members = np.flatnonzero(classes == one)
        rows = max(_BLOCK_BYTES >> one, 1)
        for first in range(0, len(members), rows):
            yield members[first : first + rows]


def _texts(data: Bytes, at: Ints, sizes: Ints, width: int) -> Bytes:
    """Return the property texts as rows of a table with `width` columns. A row is 0x02, the text, 0x02, and then
    arbitrary bytes."""
    # The property text's length field lies directly before the text. Let each row of the table begin at this field's
    # last byte. This makes room for a 0x02 before the first property.
    table = _table(data, at - 1, width)
    table[:, 0] = 2
    table[np.arange(len(at)), sizes + 1] = 2
    return table


def _table(data: Bytes, starts: Ints, width: int) -> Bytes:
    """Return a table with one row per position in `starts`: a copy of the `width` bytes of `data` from this position
    on. Bytes beyond the end of `data` are zero."""
    within = starts + width <= len(data)
    if within.all():
        gathered: Bytes = windows(data, width)[starts].view(np.uint8).reshape(-1, width)
        return gathered
    table = np.zeros((len(starts), width), np.uint8)
    if within.any():
        table[within] = windows(data, width)[starts[within]].view(np.uint8).reshape(-1, width)
    # A row takes `width` bytes from its start in `data`. Copy the few rows that would extend beyond the end of `data`
    # one by one.
    for row in np.flatnonzero(~within).tolist():
        part = data[starts[row] : starts[row] + width]
        table[row, : len(part)] = part
    return table


def _behind(texts: Bytes, begins: Ints, before: bytes) -> Ints:
    """Return the positions in `begins` that directly follow an occurrence of the bytes `before` in `texts`."""
    begins = begins[np.searchsorted(begins, len(before)) :]
    for distance, byte in enumerate(reversed(before), 1):
        begins = begins[texts[begins - distance] == byte]
    return begins
