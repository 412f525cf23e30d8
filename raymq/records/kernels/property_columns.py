"""The values of a few properties of many records, found by name for all records at once.

    name 0x01 value 0x02 name 0x01 value 0x02 …     the property text that ends a record

The texts of some records at a time are copied side by side into a table, without the bodies between them. There every
0x01 behind the wanted name begins a value, which the next 0x02 ends.
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
"""Bytes of texts that are looked through at a time: they stay in the processor's cache."""
_ABSENT: Final = -1


@dataclass(frozen=True, slots=True, eq=False)
class ValueColumn:
    """The values of one property in n records, as spans of a buffer."""

    data: Bytes
    starts: Ints
    """The position of each value in `data`, shape (n,)."""
    sizes: Ints
    """The length of each value in bytes, -1 where a record has none, shape (n,)."""

    @property
    def present(self) -> NDArray[np.bool_]:
        """True where a record has the property."""
        return self.sizes >= 0

    def table(self, rows: Ints, width: int, skip: Ints | int = 0) -> Bytes:
        """`width` bytes of each value of `rows`, from byte `skip` on, shape (m, width): foreign ones behind its end."""
        return _table(self.data, self.starts[rows] + skip, width)

    def value(self, row: int) -> bytes:
        """The value of one record, which has it."""
        return self.data[self.starts[row] : self.starts[row] + self.sizes[row]].tobytes()


def find_properties(data: Bytes, at: Ints, sizes: Ints, names: Sequence[bytes]) -> list[ValueColumn]:
    """The values of the properties `names` in the property texts of `sizes` bytes at `at`, a column for each name.

    A property without a value counts as none, and of one that is there twice the last counts, as everywhere.
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
            # Behind a text there are foreign bytes, and before its first name the mark of `_texts`.
            inside = (column <= block_sizes[row]) & (column > len(name))
            here, row, column = here[inside], row[inside], column[inside]
            length = ends[np.searchsorted(ends, here)] - here - 1
            filled = length > 0
            of = rows.start + row[filled] if isinstance(rows, slice) else rows[row[filled]]
            starts[of] = block_at[row[filled]] + column[filled]
            lengths[of] = length[filled]
    return [ValueColumn(data, starts, lengths) for starts, lengths in found]


def _blocks(sizes: Ints) -> Iterator[slice | Ints]:
    """The rows in blocks of about the same size in bytes; long texts are not in one block with short ones."""
    longest = int(sizes.max(initial=0))
    if len(sizes) * longest <= 2 * int(sizes.sum()) + _BLOCK_BYTES:
        rows = max(_BLOCK_BYTES // (longest + 2), 1)
        for first in range(0, len(sizes), rows):
            yield slice(first, min(first + rows, len(sizes)))
        return
    classes = np.frexp(sizes)[1]  # the number of bits of each size
    for one in np.unique(classes).tolist():
        members = np.flatnonzero(classes == one)
        rows = max(_BLOCK_BYTES >> one, 1)
        for first in range(0, len(members), rows):
            yield members[first : first + rows]


def _texts(data: Bytes, at: Ints, sizes: Ints, width: int) -> Bytes:
    """The texts in a table of `width` columns, each between two 0x02, and foreign bytes behind that."""
    table = _table(data, at - 1, width)  # the length field lies before a text
    table[:, 0] = 2
    table[np.arange(len(at)), sizes + 1] = 2
    return table


def _table(data: Bytes, starts: Ints, width: int) -> Bytes:
    """A copy of the `width` bytes from each of `starts` on, zero behind the end of `data`."""
    within = starts + width <= len(data)
    if within.all():
        gathered: Bytes = windows(data, width)[starts].view(np.uint8).reshape(-1, width)
        return gathered
    table = np.zeros((len(starts), width), np.uint8)
    if within.any():
        table[within] = windows(data, width)[starts[within]].view(np.uint8).reshape(-1, width)
    for row in np.flatnonzero(~within).tolist():  # the last ones of the buffer
        part = data[starts[row] : starts[row] + width]
        table[row, : len(part)] = part
    return table


def _behind(texts: Bytes, begins: Ints, before: bytes) -> Ints:
    """Those of the positions `begins` before which `texts` has the bytes `before`."""
    begins = begins[np.searchsorted(begins, len(before)) :]
    for distance, byte in enumerate(reversed(before), 1):
        begins = begins[texts[begins - distance] == byte]
    return begins
