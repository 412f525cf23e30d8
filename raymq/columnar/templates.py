"""What stands behind the bodies of many records, found by what they have in common.

The messages of a topic mostly look alike: behind the body the same topic and the same property names, values of the
same few lengths. Records whose bytes there are the same but for the values have one *shape*. It is parsed once; then
each value is at the same place in all of its records, and a column of values is copied as a column of a table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raymq.columnar.fields import Bytes, Ints
from raymq.record import layout
from raymq.record.layout import windows

HEAD: Final = np.dtype(
    [
        *layout.HEAD_FIELDS,
        ("born_timestamp", ">i8"),
        ("born_host", "V8"),
        ("store_timestamp", ">i8"),
        ("store_host", "V8"),
        ("rest", "V12"),
        ("body_size", ">i4"),
    ]
)
"""A record up to its body, with IPv4 hosts."""

_FIELDS: Final = (
    ("total_size", np.int32),
    ("magic", np.int32),
    ("queue_id", np.int32),
    ("queue_offset", np.int64),
    ("sys_flag", np.int64),
    ("born_timestamp", np.int64),
    ("store_timestamp", np.int64),
    ("body_size", np.int64),
)

_ROWS_PER_SHAPE: Final = 64
"""With more shapes than one for so many records, it is quicker to look at each record."""
_TAIL_MAX: Final = 4096
_SCRATCH_BYTES: Final = 100_000
"""How much is taken apart at a time. The allocator gives this much again and again; more of it would be returned, and
its pages faulted in anew each time."""
_INLINE: Final = 12
"""An Arrow view holds values up to this length itself."""


@dataclass(frozen=True, slots=True)
class _RecordTemplate:
    """Records at `rows` that look alike: `tails` is what stands behind their bodies, a line for each; a property's
    value is in columns `values[name]` of it, from and to."""

    rows: Ints
    tails: Bytes
    topic: str
    values: dict[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class RecordTails:
    """The topics and properties of many records; `head` has their other fields, `body_at` is where bodies are."""

    head: dict[str, NDArray[Any]]
    body_at: Ints
    _templates: list[_RecordTemplate]

    def topics(self) -> pa.Array:
        """The topic of each record."""
        names = [shape.topic for shape in self._templates]
        if len(set(names)) <= 1:
            return pa.repeat(pa.scalar(names[0], pa.string()), len(self.body_at))
        codes = np.zeros(len(self.body_at), np.int32)
        for code, shape in enumerate(self._templates):
            codes[shape.rows] = code
        return pa.array(names, pa.string()).take(pa.array(codes))

    def column(self, name: str) -> pa.Array:
        """The value of property `name` in each record, null where it has none. ArrowInvalid for one that is no text."""
        found = [(shape.rows, shape, *shape.values[name]) for shape in self._templates if name in shape.values]
        if not found:
            return pa.nulls(len(self.body_at), pa.string())
        return _strings(len(self.body_at), found, nulls=True)

    def pairs(self, wanted: Callable[[str], bool]) -> pa.MapArray:
        """Each record's properties whose names are `wanted`. ArrowInvalid for one that is no text."""
        chosen = [[name for name in shape.values if wanted(name)] for shape in self._templates]
        counts = np.zeros(len(self.body_at), np.int32)
        for shape, names in zip(self._templates, chosen, strict=True):
            counts[shape.rows] = len(names)
        offsets = np.concatenate((np.zeros(1, np.int32), np.cumsum(counts, dtype=np.int32)))
        known = list(dict.fromkeys(name for names in chosen for name in names))
        codes = np.zeros(int(offsets[-1]), np.int32)
        found = []
        for shape, names in zip(self._templates, chosen, strict=True):
            for number, name in enumerate(names):
                entries = offsets[shape.rows].astype(np.int64) + number
                codes[entries] = known.index(name)
                found.append((entries, shape, *shape.values[name]))
        keys = pa.array(known, pa.string()).take(pa.array(codes))
        return pa.MapArray.from_arrays(pa.array(offsets), keys, _strings(len(codes), found, nulls=False))


def find_tails(data: Bytes, starts: Ints) -> RecordTails | None:
    """The tails of the records at `starts`, checked as `raymq.columnar.fields.find_fields` does.

    None if one is damaged, has IPv6 hosts, a long topic or odd properties, or if too few look alike: then each has to
    be looked at.
    """
    if not len(starts) or starts.min() < 0 or starts.max() > len(data) - HEAD.itemsize:
        return None
    head = _heads(data, starts)
    body_size, body_at = head["body_size"], starts + HEAD.itemsize
    tail_at, ends = body_at + body_size, starts + head["total_size"]
    plain = (head["magic"] == layout.MAGIC_V1) & (head["sys_flag"] & layout.SYS_FLAG_HOSTS_MASK == 0)
    if not (plain & (body_size >= 0) & (tail_at + 3 <= ends) & (ends <= len(data))).all():
        return None
    shapes: list[_RecordTemplate] = []
    for shape in _templates(data, tail_at, ends - tail_at):
        if shape is None or len(shapes) > len(starts) // _ROWS_PER_SHAPE:
            return None
        shapes.append(shape)
    return RecordTails(head, body_at, shapes)


def _heads(data: Bytes, starts: Ints) -> dict[str, NDArray[Any]]:
    """The fields of the records' heads that columns are made of, each as an array."""
    columns = {name: np.empty(len(starts), dtype) for name, dtype in _FIELDS}
    step = _SCRATCH_BYTES // HEAD.itemsize
    for at in range(0, len(starts), step):
        some = _gather(data, starts[at : at + step], HEAD.itemsize).view(HEAD)[:, 0]
        for name, column in columns.items():
            column[at : at + step] = some[name]
    return columns


def _gather(data: Bytes, at: Ints, size: int) -> Bytes:
    """The `size` bytes at each position, a line for each. (Arrow copies them twice as fast as numpy.)"""
    if size <= _INLINE or not len(at):
        return windows(data, size)[at].view(np.uint8).reshape(-1, size)
    views = np.zeros((len(at), 4), np.int32)
    views[:, 0], views[:, 3] = size, at
    lines = pa.Array.from_buffers(pa.binary_view(), len(at), [None, pa.py_buffer(views), pa.py_buffer(data)])
    return np.frombuffer(lines.cast(pa.binary()).buffers()[2], np.uint8, len(at) * size).reshape(-1, size)


def _templates(data: Bytes, at: Ints, sizes: Ints) -> Iterator[_RecordTemplate | None]:
    """The shapes of the tails there, None for one that is odd."""
    counts = np.bincount(np.minimum(sizes, _TAIL_MAX + 1))
    for size in np.flatnonzero(counts).tolist():
        if size > _TAIL_MAX:
            yield None
            return
        rows = np.arange(len(at)) if counts[size] == len(at) else np.flatnonzero(sizes == size)
        tails = _gather(data, at[rows], size)
        while len(rows):
            parsed = _parse(tails[0].tobytes())
            if parsed is None:
                yield None
                return
            topic, values = parsed
            alike = _alike(tails, values)
            if alike.all():
                yield _RecordTemplate(rows, tails, topic, values)
                break
            yield _RecordTemplate(rows[alike], tails[alike], topic, values)
            rows, tails = rows[~alike], tails[~alike]


def _parse(tail: bytes) -> tuple[str, dict[str, tuple[int, int]]] | None:
    """The topic of a tail, and where in it the values of its properties are; None if anything is odd."""
    properties_at = 1 + tail[0] + 2
    if tail[0] > layout.V1_TOPIC_SIZE_MAX or properties_at > len(tail):
        return None
    size = int.from_bytes(tail[properties_at - 2 : properties_at])
    values: dict[str, tuple[int, int]] = {}
    try:
        topic = tail[1 : properties_at - 2].decode()
        at = properties_at
        for piece in tail[properties_at:].removesuffix(b"\x02").split(b"\x02") if size else ():
            name, mark, value = piece.partition(b"\x01")
            if not name or not value or b"\x01" in value or name.decode() in values:
                return None
            values[name.decode()] = at + len(name) + len(mark), at + len(piece)
            at += len(piece) + 1
    except UnicodeDecodeError:
        return None
    return (topic, values) if properties_at + size == len(tail) else None


def _alike(tails: Bytes, values: dict[str, tuple[int, int]]) -> NDArray[np.bool_]:
    """Which tails are those of the first one's shape: the same but for the values, and no separator in these."""
    fixed = np.ones(tails.shape[1], bool)
    for start, end in values.values():
        fixed[start:end] = False
    separators = int(np.isin(tails[0], (1, 2)).sum())
    alike = np.ones(len(tails), bool)
    step = max(_SCRATCH_BYTES // tails.shape[1], 1)
    for at in range(0, len(tails), step):
        some = tails[at : at + step]
        same = some == tails[0]
        separates = some - np.uint8(1) < 2  # 0x01 or 0x02
        # Mostly all are alike, which is quicker to see by columns.
        if not same.all(axis=0)[fixed].all() or np.count_nonzero(separates) != len(some) * separators:
            alike[at : at + step] = np.where(fixed, same, ~separates).all(axis=1)
    return alike


def _strings(count: int, found: list[tuple[Ints, _RecordTemplate, int, int]], *, nulls: bool) -> pa.Array:
    """An array of `count` texts: those at the rows given are columns `start` to `end` of a shape's tails."""
    sizes = np.zeros(count, np.int32)
    for rows, _, start, end in found:
        sizes[rows] = end - start
    offsets = np.concatenate((np.zeros(1, np.int32), np.cumsum(sizes, dtype=np.int32)))
    buffer = pa.allocate_buffer(int(offsets[-1]))  # Arrow keeps its memory: no page is faulted in anew
    text = np.frombuffer(buffer, np.uint8)
    for rows, shape, start, end in found:
        tails, size = shape.tails, end - start
        values = np.ndarray(len(tails), f"V{size}", buffer=tails, offset=start, strides=(tails.shape[1],))
        windows(text, size)[offsets[rows]] = values
    validity = None
    if nulls and (sizes == 0).any():
        validity = pa.py_buffer(np.packbits(sizes > 0, bitorder="little"))
    array = pa.Array.from_buffers(pa.binary(), count, [validity, pa.py_buffer(offsets), buffer])
    return array.cast(pa.string())
