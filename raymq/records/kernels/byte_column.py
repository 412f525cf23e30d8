"""Byte strings of many rows, stored as one buffer and the strings' offsets, and Arrow arrays over the same memory.

Arrow's own conversions from Python values (`pa.array`, `pa.scalar`) import pandas if it is installed, and this import
alone can take more than a second. The functions of this module do not import pandas. They import `pyarrow.compute` when
they need it, because most processes do not need it, and the import takes 0.06 s of processor time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raymq.common.errors import InvalidArgumentError
from raymq.records.kernels.fields import Bytes, Ints

_INT32_MAX: Final = 2**31 - 1
_NO_BYTES: Final = pa.Array.from_buffers(pa.binary(), 1, [None, pa.py_buffer(np.zeros(2, np.int32)), pa.py_buffer(b"")])
"""An Arrow array with one row, an empty byte string."""


@dataclass(frozen=True, slots=True, eq=False)
class ByteColumn:
    """A column of n byte strings, stored one after another: string i is `data[offsets[i]:offsets[i + 1]]`."""

    data: Bytes
    offsets: Ints
    """The start of each string in `data`, in ascending order; the last item is the end of the last string. Shape (n +
    1,)."""
    values: Sequence[bytes] | None = None
    """The column's byte strings as Python objects if the column was created from such objects; otherwise None."""

    @classmethod
    def of(cls, values: pa.Array | Sequence[bytes] | ByteColumn) -> ByteColumn:
        """Create a column from a list, or from an Arrow column of bytes or text. There must be no nulls.

        Arrow's buffers are used without a copy, except buffers of view types, which are copied into one buffer. Raises
        InvalidArgumentError if `values` has another type or contains nulls.
        """
        if isinstance(values, ByteColumn):
            return values
        if not isinstance(values, pa.Array):
            column = cls.of_buffers(values)
            return cls(column.data, column.offsets, values)
        if values.null_count:
            raise InvalidArgumentError(
                f"a column of byte strings has {values.null_count} nulls: fill or drop the null rows"
            )
        values = _without_views(values)
        kind = values.type
        if pa.types.is_large_binary(kind) or pa.types.is_large_string(kind):
            width: type[np.signedinteger[Any]] = np.int64
        elif pa.types.is_binary(kind) or pa.types.is_string(kind):
            width = np.int32
        else:
            raise InvalidArgumentError(
                f"a column of type {kind} does not contain byte strings: cast it to binary or string"
            )
        _, offsets, data = values.buffers()
        if not len(values):
            return cls(np.zeros(0, np.uint8), np.zeros(1, np.int64))
        positions = np.frombuffer(offsets, width)[values.offset : values.offset + len(values) + 1].astype(np.int64)
        return cls(np.zeros(0, np.uint8) if data is None else np.frombuffer(data, np.uint8), positions)

    @classmethod
    def of_buffers(cls, values: Sequence[bytes | memoryview]) -> ByteColumn:
        """Create a column from a list of byte strings, which are copied into one buffer."""
        data = np.frombuffer(b"".join(values), np.uint8)
        return cls(data, _bounds(np.fromiter(map(len, values), np.int64, len(values))))

    @classmethod
    def of_nullable(cls, values: pa.Array) -> tuple[ByteColumn, NDArray[np.bool_]]:
        """Return the strings of an Arrow column (a null becomes an empty string), and a mask, shape (n,), that is False
        for nulls."""
        present = np.ones(len(values), np.bool_)
        if values.null_count:
            import pyarrow.compute as pc

            present = mask_of(values.is_valid())
            values = _without_views(values)
            values = pc.fill_null(values, _NO_BYTES.cast(values.type)[0])
        return cls.of(values), present

    @classmethod
    def repeated(cls, text: bytes, where: NDArray[np.bool_]) -> ByteColumn:
        """Return a column with `text` in the rows where the mask `where` is True, and empty strings in the
        other rows."""
        sizes = where * np.int64(len(text))
        return cls(np.frombuffer(text * int(np.count_nonzero(where)), np.uint8), _bounds(sizes))

    @classmethod
    def joined(cls, columns: Sequence[ByteColumn]) -> ByteColumn:
        """Concatenate the strings of several columns row by row. Raises InvalidArgumentError if the result has 2 GiB or
        more."""
        if len(columns) == 1:
            return columns[0]
        total = sum(int(column.offsets[-1] - column.offsets[0]) for column in columns)
        if total > _INT32_MAX:
            raise InvalidArgumentError(f"{total} bytes are too many for one batch: send fewer rows at a time")
        import pyarrow.compute as pc

        rows = pc.binary_join_element_wise(*[column.array() for column in columns], _NO_BYTES[0])
        _, offsets, data = rows.buffers()
        positions = np.frombuffer(offsets, np.int32)[: len(rows) + 1].astype(np.int64)
        return cls(np.frombuffer(data, np.uint8)[:total], positions)

    @classmethod
    def chained(cls, columns: Sequence[ByteColumn]) -> ByteColumn:
        """Return a column with the rows of the first column, followed by the rows of the next column, and so
        on."""
        if len(columns) == 1:
            return columns[0]
        sizes = np.concatenate([column.sizes for column in columns])
        bounds = _bounds(sizes)
        # Allocate the result with Arrow's allocator. It reuses memory, and so avoids page faults of new memory.
        buffer = pa.allocate_buffer(int(bounds[-1]))
        data, at = np.frombuffer(buffer, np.uint8), 0
        for column in columns:
            part = column.data[column.offsets[0] : column.offsets[-1]]
            data[at : at + len(part)] = part
            at += len(part)
        return cls(data, bounds)

    @classmethod
    def of_matrix(cls, matrix: Bytes) -> ByteColumn:
        """Create a column from a contiguous matrix of bytes, one string per row, without a copy."""
        rows, width = matrix.shape
        return cls(
            matrix.reshape(-1), np.arange(0, (rows + 1) * width, width, dtype=np.int64) if width else _zeros(rows)
        )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def sizes(self) -> Ints:
        """The length of each string in bytes, shape (n,)."""
        return self.offsets[1:] - self.offsets[:-1]

    def slice(self, first: int, end: int) -> ByteColumn:
        """Return a column with the strings from row `first` up to `end`, without a copy."""
        return ByteColumn(self.data, self.offsets[first : end + 1], self.values[first:end] if self.values else None)

    def take(self, rows: Ints) -> ByteColumn:
        """Return a new column with copies of the strings at the row numbers `rows`, in that order."""
        return ByteColumn.of(self.array().take(int_array(rows)))

    def tolist(self) -> Sequence[bytes]:
        """Return the strings of the column as Python objects."""
        if self.values is not None:
            return self.values
        bounds = self.offsets.tolist()
        data = self.data[bounds[0] : bounds[-1]].tobytes()
        return [data[start - bounds[0] : end - bounds[0]] for start, end in pairwise(bounds)]

    def views(self) -> Sequence[bytes | memoryview]:
        """Return the strings of the column without a copy: the existing Python objects if the column has them,
        otherwise views of its memory."""
        if self.values is not None:
            return self.values
        data = self.data.data
        return [data[start:end] for start, end in pairwise(self.offsets.tolist())]

    def array(self) -> pa.Array:
        """Return the column as an Arrow binary array over the same bytes. Raises InvalidArgumentError if the column has
        2 GiB or more."""
        first, last = int(self.offsets[0]), int(self.offsets[-1])
        if last - first > _INT32_MAX:
            raise InvalidArgumentError(f"{last - first} bytes are too many for one batch: send fewer rows at a time")
        offsets = (self.offsets - first).astype(np.int32)
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(self.data[first:last])]
        return pa.Array.from_buffers(pa.binary(), len(self), buffers)


def sizes_of(values: pa.Array) -> Ints:
    """Return the length in bytes of each string of an Arrow column, shape (n,), without reading the strings. The length
    of a null is 0."""
    if not _is_view(values.type):
        return ByteColumn.of_nullable(values)[0].sizes
    views = np.frombuffer(values.buffers()[1], np.int32).reshape(-1, 4)[values.offset :][: len(values)]
    sizes = views[:, 0].astype(np.int64)  # the first 4 bytes of an Arrow view are the string's length
    return sizes * mask_of(values.is_valid()) if values.null_count else sizes


def _is_view(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary_view(kind) or pa.types.is_string_view(kind))


def _without_views(values: pa.Array) -> pa.Array:
    """Return an Arrow column itself, or a copy as large_binary if its type is a view type."""
    return values.cast(pa.large_binary()) if _is_view(values.type) else values


def int_array(numbers: NDArray[np.signedinteger[Any]], absent: NDArray[np.bool_] | None = None) -> pa.Array:
    """Return integers of 32 or 64 bits as an Arrow array over the same memory. A value is null if `absent` is True for
    it."""
    numbers = np.ascontiguousarray(numbers)
    kind = pa.int64() if numbers.dtype.itemsize == 8 else pa.int32()
    return pa.Array.from_buffers(kind, len(numbers), [_validity(absent), pa.py_buffer(numbers)])


def text_array(texts: Sequence[str | None]) -> pa.Array:
    """Convert texts into an Arrow string array; None becomes null."""
    column = ByteColumn.of([b"" if text is None else text.encode() for text in texts])
    absent = np.fromiter((text is None for text in texts), np.bool_, len(texts))
    _, offsets, data = column.array().buffers()
    return pa.Array.from_buffers(pa.string(), len(texts), [_validity(absent), offsets, data])


@lru_cache(maxsize=256)
def text_scalar(text: str) -> pa.Scalar:
    """Convert a text into an Arrow scalar."""
    return text_array([text])[0]


def numbers_of(column: pa.Array, kind: type[np.signedinteger[Any]]) -> NDArray[Any]:
    """Return the values of an Arrow column of integers of type `kind`, without a copy. The result is an array of shape
    (n,). The column must not contain nulls."""
    return np.frombuffer(column.buffers()[1], kind)[column.offset : column.offset + len(column)]


def _validity(absent: NDArray[np.bool_] | None) -> pa.Buffer | None:
    if absent is None or not absent.any():
        return None
    return pa.py_buffer(np.packbits(~absent, bitorder="little"))


def mask_of(column: pa.BooleanArray) -> NDArray[np.bool_]:
    """Return an Arrow column of booleans as a mask, shape (n,). The column must not contain nulls."""
    bits = np.frombuffer(column.buffers()[1], np.uint8)
    return np.unpackbits(bits, count=column.offset + len(column), bitorder="little")[column.offset :].view(np.bool_)


def _bounds(sizes: Ints) -> Ints:
    bounds = np.zeros(len(sizes) + 1, np.int64)
    sizes.cumsum(out=bounds[1:])
    return bounds


def _zeros(rows: int) -> Ints:
    return np.zeros(rows + 1, np.int64)
