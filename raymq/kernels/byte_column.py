"""Byte strings of many rows as one buffer and offsets, and Arrow arrays made of them without a copy.

Arrow's own ways from Python values to arrays (`pa.array`, `pa.scalar`) import pandas where it is installed, which takes
longer than a program's first second; the functions here do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raymq.errors import InvalidArgumentError

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]

_INT32_MAX: Final = 2**31 - 1


@dataclass(frozen=True, slots=True, eq=False)
class ByteColumn:
    """n byte strings: string i is `data[offsets[i]:offsets[i + 1]]`, and they lie back to back."""

    data: Bytes
    offsets: Ints
    """Positions in `data`, ascending, shape (n + 1,)."""
    values: Sequence[bytes] | None = None
    """The same strings as objects, where the column was made of those."""

    @classmethod
    def of(cls, values: pa.Array | Sequence[bytes] | ByteColumn) -> ByteColumn:
        """The strings of an Arrow column of bytes or text, or of a list, without nulls.

        Arrow's buffers are used as they are, but for views, which are copied together. InvalidArgumentError for another
        type, and for a column with nulls.
        """
        if isinstance(values, ByteColumn):
            return values
        if not isinstance(values, pa.Array):
            data = np.frombuffer(b"".join(values), np.uint8)
            return cls(data, _bounds(np.fromiter(map(len, values), np.int64, len(values))), values)
        if values.null_count:
            raise InvalidArgumentError(f"a column of bytes has {values.null_count} nulls, which are no byte strings")
        kind = values.type
        if pa.types.is_binary_view(kind) or pa.types.is_string_view(kind):
            values = values.cast(pa.large_binary())
            kind = values.type
        if pa.types.is_large_binary(kind) or pa.types.is_large_string(kind):
            width: type[np.signedinteger[Any]] = np.int64
        elif pa.types.is_binary(kind) or pa.types.is_string(kind):
            width = np.int32
        else:
            raise InvalidArgumentError(f"a column of {kind} holds no byte strings: make it binary or string")
        _, offsets, data = values.buffers()
        if not len(values):
            return cls(np.zeros(0, np.uint8), np.zeros(1, np.int64))
        positions = np.frombuffer(offsets, width)[values.offset : values.offset + len(values) + 1].astype(np.int64)
        return cls(np.zeros(0, np.uint8) if data is None else np.frombuffer(data, np.uint8), positions)

    @classmethod
    def of_matrix(cls, matrix: Bytes) -> ByteColumn:
        """The rows of a contiguous matrix of bytes, which is used as it is."""
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

    def tolist(self) -> Sequence[bytes]:
        """The strings as objects."""
        if self.values is not None:
            return self.values
        bounds = self.offsets.tolist()
        data = self.data[bounds[0] : bounds[-1]].tobytes()
        return [data[start - bounds[0] : end - bounds[0]] for start, end in pairwise(bounds)]

    def array(self) -> pa.Array:
        """The column as an Arrow binary array over the same bytes. InvalidArgumentError for 2 GiB or more."""
        first, last = int(self.offsets[0]), int(self.offsets[-1])
        if last - first > _INT32_MAX:
            raise InvalidArgumentError(f"{last - first} bytes are too many for one batch: send fewer rows at a time")
        offsets = (self.offsets - first).astype(np.int32)
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(self.data[first:last])]
        return pa.Array.from_buffers(pa.binary(), len(self), buffers)


def _bounds(sizes: Ints) -> Ints:
    bounds = np.zeros(len(sizes) + 1, np.int64)
    sizes.cumsum(out=bounds[1:])
    return bounds


def _zeros(rows: int) -> Ints:
    return np.zeros(rows + 1, np.int64)
