"""The body columns of a batch: the readable bodies, their Arrow column, and rows for damaged records.

An uncompressed body is not copied. Compressed bodies are decompressed in the order of their rows until the decompressed
bytes reach the caller's limit. A body is null in the column if its CRC is wrong, or if it cannot be decompressed within
the maximum body size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raymq.records.format import layout
from raymq.records.format.compression import decompress
from raymq.records.format.crc import body_crcs
from raymq.records.format.decode import CRC_WRONG
from raymq.records.format.layout import RecordError, windows
from raymq.records.format.places import RecordPlaces
from raymq.records.kernels.byte_column import int_array, text_array, text_scalar
from raymq.records.kernels.fields import Bytes, Ints
from raymq.records.kernels.templates import INLINE_MAX

BodyType = Literal["binary", "large_binary", "binary_view"]
"""The Arrow types of a body column. With "binary_view" the column refers to the decoded buffer; with the other types it
is a copy."""
BODY_TYPES: Final = {"binary": pa.binary(), "large_binary": pa.large_binary(), "binary_view": pa.binary_view()}
_OWN_BUFFER_BYTES: Final = 1 << 30
"""Approximate maximum size, in bytes, of one buffer of decompressed bodies. Positions in a buffer of an Arrow view have
32 bits."""


@dataclass(slots=True)
class Bodies:
    """The bodies of the first `rows` records of a batch."""

    rows: int
    errors: dict[int, str]
    """The reason why each unreadable body is unreadable, by row. If bodies are not decompressed, only wrong CRCs are
    detected."""
    _data: Bytes
    _at: Ints
    _size: Ints
    _compressed: Ints
    """The indices of the records whose body is compressed and readable, ascending."""
    _sizes_of: list[int]
    """The decompressed size, in bytes, of each readable compressed body, in the order of the rows in
    `_compressed`."""
    _plain: list[bytes]
    """The decompressed bytes of each compressed body that could be read, in the order of the rows in `_compressed`.
    Empty if the caller does not need the decompressed bodies."""

    def makers(self, body_type: BodyType) -> dict[str, Callable[[], pa.Array]]:
        """Return, by column name, functions that create the columns that are computed from the message bodies."""
        return {"body": lambda: self._column(body_type), "body_size": self._sizes, "error": self._reasons}

    @property
    def _absent(self) -> NDArray[np.bool_] | None:
        """Return a mask of the rows with unreadable bodies; None if all bodies are readable."""
        if not self.errors:
            return None
        absent = np.zeros(self.rows, np.bool_)
        absent[list(self.errors)] = True
        return absent

    def _reasons(self) -> pa.Array:
        if not self.errors:
            return pa.nulls(self.rows, pa.string())
        return text_array([self.errors.get(row) for row in range(self.rows)])

    def _sizes(self) -> pa.Array:
        """Return the length of each body in bytes. The length of a compressed body is its decompressed length."""
        sizes = np.array(self._size, dtype=np.int32)
        sizes[self._compressed] = self._sizes_of
        return int_array(sizes, self._absent)

    def _column(self, body_type: BodyType) -> pa.Array:
        """Return the body column. With type "binary_view", the values refer to the bytes from which they were read, and
        decompressed bodies have separate buffers. With other types, the column is one copy."""
        data, body_at, body_size = self._data, self._at, self._size
        absent, validity = self._absent, None
        if absent is not None:
            body_size = np.where(absent, 0, body_size)
            validity = pa.py_buffer(np.packbits(~absent, bitorder="little"))
        views = views_of(data, body_at, body_size)
        # Arrow's views refer to one buffer that contains the bodies. This buffer is only the part of `data` from the
        # first body to the last body. Pickling a table copies whole buffers, and `data` may be a large mapped file.
        first, end = (int(body_at.min()), int((body_at + body_size).max())) if len(views) else (0, 0)
        views[body_size > INLINE_MAX, 3] -= first
        buffers = [validity, pa.py_buffer(views), pa.py_buffer(data[first:end])]
        compressed, plain = self._compressed, self._plain
        if len(compressed):
            sizes = np.array(self._sizes_of, np.int64)
            # Positions in an Arrow buffer have 32 bits, so the bodies may need several buffers.
            groups = (np.cumsum(sizes) // _OWN_BUFFER_BYTES).tolist()
            done = 0
            for _, group in groupby(groups):
                count = len(list(group))
                bodies = plain[done : done + count]
                own = np.frombuffer(b"".join([*bodies, bytes(INLINE_MAX)]), np.uint8)
                starts = np.cumsum(sizes[done : done + count]) - sizes[done : done + count]
                rows = compressed[done : done + count]
                views[rows] = views_of(own, starts, sizes[done : done + count])
                # The buffer numbers in Arrow views begin with 0 at the array's third buffer. The first two buffers are
                # the validity and the views themselves.
                views[rows[sizes[done : done + count] > INLINE_MAX], 2] = len(buffers) - 2
                buffers.append(pa.py_buffer(own))
                done += count
        column = pa.Array.from_buffers(pa.binary_view(), len(views), buffers)
        return column if body_type == "binary_view" else column.cast(BODY_TYPES[body_type])


def read_bodies(
    data: Bytes,
    at: Ints,
    size: Ints,
    sys_flag: Ints,
    crc: NDArray[Any] | None,
    max_bytes: int | None,
    *,
    decompresses: bool,
    keeps: bool,
) -> Bodies:
    """Return the bodies at positions `at` of `data`, of `size` bytes each; all arrays have shape (n,).

    `crc`: the expected CRC of each body; None skips the comparison. If `decompresses` is False, compressed bodies stay
    compressed. If `keeps` is False, compressed bodies are decompressed only to check them. The result has all n rows.
    If the decompressed bodies would exceed `max_bytes`, it has fewer rows, but at least one.
    """
    errors: dict[int, str] = {}
    if crc is not None:
        holds = (body_crcs(data.data, at, at + size) == crc) | (size == 0)
        if not holds.all():
            errors = dict.fromkeys(np.flatnonzero(~holds).tolist(), CRC_WRONG)
    compressed = np.flatnonzero(sys_flag & layout.SYS_FLAG_COMPRESSED) if decompresses else np.zeros(0, np.int64)
    if not len(compressed):
        return Bodies(len(at), errors, data, at, size, compressed, [], [])
    rows, sizes = list[int](), list[int]()
    plain: list[bytes] = []
    end, left = len(at), max_bytes
    for row in compressed.tolist():
        if row in errors:
            continue
        try:
            body = decompress(data[at[row] : at[row] + size[row]].tobytes(), int(sys_flag[row]))
        except RecordError as error:
            errors[row] = error.reason
            continue
        if left is not None and keeps:
            left -= len(body)
            if left < 0 and row:
                end = row
                break
        rows.append(row)
        sizes.append(len(body))
        if keeps:
            plain.append(body)
    if end < len(at):
        errors = {row: reason for row, reason in errors.items() if row < end}
    return Bodies(end, errors, data, at[:end], size[:end], np.array(rows, np.int64), sizes, plain)


def views_of(data: Bytes, at: Ints, size: Ints) -> NDArray[np.int32]:
    """Return Arrow's 16-byte views of the values at positions `at`. A view begins with the value's size. If the value
    is short, it follows in the view itself. Otherwise its first four bytes, the buffer's number (0) and the position in
    the buffer follow."""
    views = np.zeros((len(at), 4), dtype=np.int32)
    views[:, 0] = size
    if not len(at):
        return views
    # The Arrow view of a long value is the value's size, its first four bytes, its buffer's number (0) and its position
    # in the buffer.
    long = size > INLINE_MAX
    if long.all():
        views[:, 1] = windows(data, 4)[at].view(np.int32)
        views[:, 3] = at
        return views
    if long.any():
        views[long, 1] = windows(data, 4)[at[long]].view(np.int32)
        views[long, 3] = at[long]
    # An Arrow view holds a short value (at most 12 bytes) itself; for a longer value it points to a buffer. Fill in the
    # short values.
    short = np.flatnonzero(~long)
    views[short, 1:] = _inline(data, at[short], size[short])
    return views


def _inline(data: Bytes, at: Ints, size: Ints) -> NDArray[np.int32]:
    """Return the bytes of short values (at most 12 bytes each), padded with zeros. If the 12-byte window of a value
    would reach beyond the end of `data`, the window starts earlier and its content is shifted back."""
    safe = np.minimum(at, len(data) - INLINE_MAX)
    values = windows(data, INLINE_MAX)[safe].view(np.uint8).reshape(-1, INLINE_MAX)
    for row in np.flatnonzero(safe != at):
        values[row] = np.roll(values[row], safe[row] - at[row])
    values *= np.arange(INLINE_MAX) < size[:, None]
    return values.view(np.int32)


def slices_of(data: Bytes, at: Ints, size: Ints) -> pa.Array:
    """Return the values at positions `at`, of `size` bytes each, as a binary_view array over `data`."""
    views = views_of(data, at, size)
    return pa.Array.from_buffers(pa.binary_view(), len(at), [None, pa.py_buffer(views), pa.py_buffer(data)])


def spread(
    batch: pa.RecordBatch, rows: Ints, count: int, damaged: dict[int, str], places: RecordPlaces
) -> pa.RecordBatch:
    """Insert rows for damaged records into `batch`. The result has `count` rows. Row i of `batch` becomes row `rows[i]`
    of the result. All other rows of the result stand for damaged records, with the reasons in `damaged`. Such a row has
    only the queue and the offsets, from `places`; its other columns are null."""
    indices, absent = np.zeros(count, np.int64), np.ones(count, np.bool_)
    indices[rows], absent[rows] = np.arange(len(rows)), False
    chosen = int_array(indices, absent)
    lost = np.flatnonzero(absent)
    columns: list[pa.Array] = []
    for field in batch.schema:
        column = batch.column(field.name)
        if field.name == "error":
            texts = dict(zip(rows.tolist(), column.to_pylist(), strict=True))
            columns.append(text_array([damaged.get(row) or texts.get(row) for row in range(count)]))
        elif field.name == "broker_name":
            columns.append(pa.repeat(text_scalar(places.queue.broker_name), count))
        elif pa.types.is_binary_view(field.type):
            columns.append(_spread_views(column, rows, absent))
        else:
            made = column.take(chosen) if len(column) else pa.nulls(count, field.type)
            columns.append(_with_places(field.name, made, lost, places))
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)


def _with_places(name: str, column: pa.Array, rows: Ints, places: RecordPlaces) -> pa.Array:
    """Return the column `name` with corrected values in the rows of unreadable records (`rows`). A corrected value is
    the topic, queue or offset that the record should have. A row keeps its value if the expected value is unknown."""
    queue = places.queue
    known: dict[int, Any] = {}
    if name == "topic" and queue.topic:
        known = dict.fromkeys(rows.tolist(), queue.topic)
    elif name == "queue_id" and queue.queue_id >= 0:
        known = dict.fromkeys(rows.tolist(), queue.queue_id)
    elif name == "queue_offset" and places.offsets is not None:
        known = dict(zip(rows.tolist(), places.offsets[rows].tolist(), strict=True))
    if not known:
        return column
    values = column.to_pylist()
    for row, value in known.items():
        values[row] = value
    if name == "topic":
        return text_array(values)
    kind = np.int64 if name == "queue_offset" else np.int32
    return int_array(np.array(values, kind))


def _spread_views(column: pa.Array, rows: Ints, absent: NDArray[np.bool_]) -> pa.Array:
    """Return a binary_view column with additional null rows: a row is null if `absent` is True for it. `rows`: the new
    row numbers of the old rows. Arrow's `take` does not support view types."""
    validity, lines, *data = column.buffers()
    views = np.zeros((len(absent), 4), np.int32)
    views[rows] = np.frombuffer(lines, np.int32).reshape(-1, 4)[column.offset :][: len(column)]
    if validity is not None:
        absent = absent.copy()
        bits = np.unpackbits(np.frombuffer(validity, np.uint8), bitorder="little")[column.offset :][: len(column)]
        absent[rows] = bits == 0
    bits = pa.py_buffer(np.packbits(~absent, bitorder="little"))
    return pa.Array.from_buffers(pa.binary_view(), len(absent), [bits, pa.py_buffer(views), *data])
