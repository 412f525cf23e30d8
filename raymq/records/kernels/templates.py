"""Reads the topics and properties of many records at once, by the templates that most records share.

Most messages of a topic are similar: after the body they have the same topic and the same property names, with values
of a few lengths. The bytes from the end of a record's body to the end of the record are its *tail*. Tails that differ
only in property values have one *template*. One tail of a template is parsed. Each property value is at the same
position in all tails of the template, so the values are copied as a column of a table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raymq.records.format import layout
from raymq.records.format.layout import windows
from raymq.records.kernels.byte_column import int_array, text_array, text_scalar
from raymq.records.kernels.fields import Bytes, Ints

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
"""numpy type of a record's header with IPv4 hosts, up to the body."""

_FIELDS: Final = (
    ("total_size", np.int32),
    ("magic", np.int32),
    ("body_crc", np.int32),
    ("queue_id", np.int32),
    ("queue_offset", np.int64),
    ("sys_flag", np.int64),
    ("born_timestamp", np.int64),
    ("store_timestamp", np.int64),
    ("body_size", np.int64),
)

_ROWS_PER_TEMPLATE: Final = 64
"""Minimum average number of records per template (shared layout of topic and properties). With fewer records per
template, it is faster to decode each record separately."""
_TRIED: Final = 4
"""Number of templates (shared layouts of topic and properties) to find before the average number of records per
template is checked."""
_TAIL_MAX: Final = 4096
"""Maximum length in bytes of a record's tail (the bytes after its body). If a tail is longer, the records are decoded
without templates."""
_SCRATCH_BYTES: Final = 100_000
"""Number of bytes of record tails (the bytes after the records' bodies) that are decoded at a time. The memory
allocator reuses a block of this size. It would return a larger block to the operating system, and each new block would
fault in its pages again."""
INLINE_MAX: Final = 12
"""Maximum length, in bytes, of a value that Arrow's view layout stores in the view itself, without a separate
buffer."""
_ZERO: Final = int_array(np.zeros(1, np.int32))[0]
_NO_TEXTS: Final = text_array([])


@dataclass(frozen=True, slots=True)
class RecordTemplate:
    """A group of records that share one template (the same topic and property layout). Their tails (the bytes after the
    body) differ only in the property values."""

    rows: Ints
    """The indices of the m records that share this template, shape (m,)."""
    tails: Bytes
    """The tails of the records in this group, as a table of bytes with one row per record. A tail is the part of a
    record after its body. All tails have the same length."""
    topic: str
    values: dict[str, tuple[int, int]]
    """The start and end of each property's value in a record's tail, by the property's name."""


@dataclass(frozen=True, slots=True)
class TemplatedRecords:
    """A group of n records that share a few templates (layouts of topic and properties). Each record has one of the
    templates."""

    head: dict[str, NDArray[Any]]
    """The records' header fields (_FIELDS), by name; each array has shape (n,)."""
    body_at: Ints
    """The position of each record's body in the data, shape (n,)."""
    _templates: list[RecordTemplate]

    def have_topic(self, topic: str) -> bool:
        """True if all records belong to `topic`."""
        return all(template.topic == topic for template in self._templates)

    def topics(self) -> pa.Array:
        """Return the topic of each record."""
        names = [template.topic for template in self._templates]
        if len(set(names)) <= 1:
            return pa.repeat(text_scalar(names[0]), len(self.body_at))
        # The records have several topics: for each record, take the topic of the record's template.
        codes = np.zeros(len(self.body_at), np.int32)
        for code, template in enumerate(self._templates):
            codes[template.rows] = code
        return text_array(names).take(int_array(codes))

    def column(self, name: str) -> pa.Array:
        """Return the value of property `name` in each record, null if the record does not have the property. Raises
        ArrowInvalid if a value is not UTF-8."""
        found = [
            (template.rows, template, *template.values[name]) for template in self._templates if name in template.values
        ]
        if not found:
            return pa.nulls(len(self.body_at), pa.string())
        return _strings(len(self.body_at), found, nulls=True)

    def pairs(self, wanted: Callable[[str], bool]) -> pa.MapArray:
        """Return a map array with each record's properties; only names that satisfy `wanted` are included. Raises
        ArrowInvalid if a value is not UTF-8."""
        chosen = [[name for name in template.values if wanted(name)] for template in self._templates]
        if not any(chosen):
            return pa.MapArray.from_arrays(pa.repeat(_ZERO, len(self.body_at) + 1), _NO_TEXTS, _NO_TEXTS)
        # Count the wanted properties (name-value pairs) of each record. The cumulative sums of these counts are the
        # positions in the Arrow map array at which each record's pairs begin.
        counts = np.zeros(len(self.body_at), np.int32)
        for template, names in zip(self._templates, chosen, strict=True):
            counts[template.rows] = len(names)
        offsets = np.concatenate((np.zeros(1, np.int32), np.cumsum(counts, dtype=np.int32)))
        # In the map array, the name-value pairs of a record follow each other. Pair j of each record with this template
        # (layout of topic and properties) has the name names[j], stored as a code (an index into `known`). The value of
        # the pair is copied from the record's tail (the bytes after the body).
        known = list(dict.fromkeys(name for names in chosen for name in names))
        codes = np.zeros(int(offsets[-1]), np.int32)
        found = []
        for template, names in zip(self._templates, chosen, strict=True):
            for number, name in enumerate(names):
                entries = offsets[template.rows].astype(np.int64) + number
                codes[entries] = known.index(name)
                found.append((entries, template, *template.values[name]))
        keys = text_array(known).take(int_array(codes))
        return pa.MapArray.from_arrays(int_array(offsets), keys, _strings(len(codes), found, nulls=False))


def find_templates(data: Bytes, starts: Ints) -> TemplatedRecords | None:
    """Group the records at positions `starts` by templates (layouts of topic and properties). Records are checked as in
    `raymq.records.kernels.fields.find_fields`.

    Returns None if a record is damaged, has IPv6 hosts, a long topic or unusual properties, or if too few records share
    a template. The caller must then use `find_fields`.
    """
    if not len(starts) or starts.min() < 0 or starts.max() > len(data) - HEAD.itemsize:
        return None
    head = _heads(data, starts)
    body_size, body_at = head["body_size"], starts + HEAD.itemsize
    tail_at, ends = body_at + body_size, starts + head["total_size"]
    # Accept only V1 records with IPv4 hosts whose tails (the bytes after the body) lie inside the buffer. The two
    # length fields of a tail already take 3 bytes.
    plain = (head["magic"] == layout.MAGIC_V1) & (head["sys_flag"] & layout.SYS_FLAG_HOSTS_MASK == 0)
    if not (plain & (body_size >= 0) & (tail_at + 3 <= ends) & (ends <= len(data))).all():
        return None
    templates: list[RecordTemplate] = []
    left = len(starts)
    for template in _templates(data, tail_at, ends - tail_at):
        if template is None or len(templates) > len(starts) // _ROWS_PER_TEMPLATE:
            return None
        templates.append(template)
        left -= len(template.rows)
        # Record tails (the bytes after the body) of the most common size are processed first. If too few of these tails
        # share a template (the same topic and property layout), tails of rarer sizes probably share none either. Then
        # the function returns None.
        if left and len(templates) >= _TRIED and len(starts) - left < len(templates) * _ROWS_PER_TEMPLATE:
            return None
    return TemplatedRecords(head, body_at, templates)


def _heads(data: Bytes, starts: Ints) -> dict[str, NDArray[Any]]:
    """Return the header fields (_FIELDS) of the records at `starts`, each as an array of shape (len(starts),)."""
    columns = {name: np.empty(len(starts), dtype) for name, dtype in _FIELDS}
    step = _SCRATCH_BYTES // HEAD.itemsize
    for at in range(0, len(starts), step):
        # Copy the whole headers once; each header field is then a strided view of this copy.
        some = _gather(data, starts[at : at + step], HEAD.itemsize).view(HEAD)[:, 0]
        for name, column in columns.items():
            column[at : at + step] = some[name]
    return columns


def _gather(data: Bytes, at: Ints, size: int) -> Bytes:
    """Return an array of shape (n, size): the `size` bytes of `data` from each of the n positions in `at`."""
    # For long values, Arrow copies twice as fast as numpy.
    if size <= INLINE_MAX or not len(at):
        return windows(data, size)[at].view(np.uint8).reshape(-1, size)
    # An Arrow view of a long value has four numbers: the value's size, its first four bytes (not needed for a copy),
    # its buffer's number (0) and its position in the buffer.
    views = np.zeros((len(at), 4), np.int32)
    views[:, 0], views[:, 3] = size, at
    lines = pa.Array.from_buffers(pa.binary_view(), len(at), [None, pa.py_buffer(views), pa.py_buffer(data)])
    return np.frombuffer(lines.cast(pa.binary()).buffers()[2], np.uint8, len(at) * size).reshape(-1, size)


def _templates(data: Bytes, at: Ints, sizes: Ints) -> Iterator[RecordTemplate | None]:
    """Yield the templates of the record tails (the bytes after each body). `at` and `sizes`: positions and sizes of the
    tails. Tails of the most common size come first. Yields None last if a tail is longer than _TAIL_MAX, unusual or
    damaged."""
    counts = np.bincount(np.minimum(sizes, _TAIL_MAX + 1))
    if len(counts) > _TAIL_MAX + 1:
        yield None
        return
    found = np.flatnonzero(counts)
    for size in found[np.argsort(-counts[found], kind="stable")].tolist():
        # Process the record tails (the bytes after the body) of one size at a time, as the rows of a table. Only tails
        # of equal size can share a template.
        rows = np.arange(len(at)) if counts[size] == len(at) else np.flatnonzero(sizes == size)
        tails = _gather(data, at[rows], size)
        # Each iteration creates a template (a shared layout of topic and properties) from the first remaining record
        # tail, and selects all tails that match it. The other tails remain for the next iteration.
        while len(rows):
            parsed = _parse(tails[0].tobytes())
            if parsed is None:
                yield None
                return
            topic, values = parsed
            alike = _alike(tails, values)
            if alike.all():
                yield RecordTemplate(rows, tails, topic, values)
                break
            yield RecordTemplate(rows[alike], tails[alike], topic, values)
            rows, tails = rows[~alike], tails[~alike]


def _parse(tail: bytes) -> tuple[str, dict[str, tuple[int, int]]] | None:
    """Parse a record's tail (the bytes after its body). Returns the topic, and the start and end of each property's
    value in the tail, by the property's name. Returns None if the tail is unusual or damaged."""
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
    """Return a mask of the record tails (the bytes after the body) that have the same template as the first tail; shape
    (m,) for m tails. A tail with this template differs from the first tail only in the property values. Its property
    values contain no separator."""
    # `fixed`: mask of the byte positions in a record tail that are outside of all property values.
    fixed = np.ones(tails.shape[1], bool)
    for start, end in values.values():
        fixed[start:end] = False
    # Number of separator bytes (0x01 and 0x02) in each record tail that fits the template. A record tail is the bytes
    # after a record's body. All its separators are outside of the property values.
    separators = int(np.count_nonzero((tails[0] == 1) | (tails[0] == 2)))
    alike = np.ones(len(tails), bool)
    step = max(_SCRATCH_BYTES // tails.shape[1], 1)
    for at in range(0, len(tails), step):
        some = tails[at : at + step]
        same = some == tails[0]
        # `separates`: for each byte, True if it is a separator of properties (0x01 or 0x02)
        separates = some - np.uint8(1) < 2
        # Fast path: usually all record tails match the template. Then the bytes at the fixed positions (outside of the
        # property values) are equal in all tails, and the values contain no separator. Otherwise compare each tail
        # separately.
        if not same.all(axis=0)[fixed].all() or np.count_nonzero(separates) != len(some) * separators:
            alike[at : at + step] = np.where(fixed, same, ~separates).all(axis=1)
    return alike


def _strings(count: int, found: list[tuple[Ints, RecordTemplate, int, int]], *, nulls: bool) -> pa.Array:
    """Return an array of `count` texts. They are parts of record tails (the bytes of a record after its body). For each
    entry (rows, template, start, end) of `found`, text number rows[i] is a part of the template's i-th record tail: its
    bytes from `start` to `end`. All other texts are empty. If `nulls` is true, empty texts are null. Raises
    ArrowInvalid if a text is not UTF-8."""
    # Arrow stores texts as a buffer with all texts back to back, and an array of offsets, which are computed from the
    # sizes.
    sizes = np.zeros(count, np.int32)
    for rows, _, start, end in found:
        sizes[rows] = end - start
    offsets = np.concatenate((np.zeros(1, np.int32), np.cumsum(sizes, dtype=np.int32)))
    # Allocate the buffer with Arrow's allocator: it reuses memory, so the pages need not be faulted in again.
    buffer = pa.allocate_buffer(int(offsets[-1]))
    text = np.frombuffer(buffer, np.uint8)
    for rows, template, start, end in found:
        # View the bytes from `start` to `end` of each record tail as one opaque value, so that one assignment copies
        # the values of all tails.
        tails, size = template.tails, end - start
        values = np.ndarray(len(tails), f"V{size}", buffer=tails, offset=start, strides=(tails.shape[1],))
        windows(text, size)[offsets[rows]] = values
    validity = None
    if nulls and (sizes == 0).any():
        validity = pa.py_buffer(np.packbits(sizes > 0, bitorder="little"))
    array = pa.Array.from_buffers(pa.binary(), count, [validity, pa.py_buffer(offsets), buffer])
    return array.cast(pa.string())
