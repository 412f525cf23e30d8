"""Reads the properties that recovery needs (tags, producers, earlier queues) from thousands of records at a time.

If enough records share the same property layouts, the values are read per layout
(raymq.records.kernels.property_shapes). Otherwise they are read from one text that joins all properties. Both methods
give the same result. The result is None if anything is doubtful: a property that occurs twice, or a number with
characters other than digits. The caller must then read the records one by one.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raymq.common.java_text import decode_utf8
from raymq.common.message import (
    PROPERTY_INNER_MULTI_DISPATCH,
    PROPERTY_PRODUCER_EPOCH,
    PROPERTY_PRODUCER_ID,
    PROPERTY_REAL_TOPIC,
    PROPERTY_SEQUENCE,
    PROPERTY_TAGS,
)
from raymq.records.format.hashing import tags_code
from raymq.records.format.layout import windows
from raymq.records.kernels.fields import Bytes, FieldOffsets, Ints
from raymq.records.kernels.property_shapes import PropertyShape, find_property_shapes

_SEPARATOR: Final = 0x02
_DIGITS_MAX: Final = 18
_COMPARED_MAX_BYTES: Final = 128
_PRODUCER_NAMES: Final = (PROPERTY_PRODUCER_ID, PROPERTY_PRODUCER_EPOCH, PROPERTY_SEQUENCE)


class Producers(NamedTuple):
    """The producers of a block's records. Each array has one element per record that has a producer."""

    # The row numbers, in the block, of the records that have a producer, ascending.
    rows: Ints
    # For each record that has a producer: the index of this producer in the list `instances`.
    codes: Ints
    # For each record, the sequence number that its producer assigned to it.
    sequences: Ints
    # The distinct producer instances: (producer id, epoch).
    instances: list[tuple[str, int]]


_NOBODY: Final = Producers(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64), [])


class FoundProperties(NamedTuple):
    """The facts about the properties of a block's n records that recovery needs."""

    # The hash code of each record's tags, 0 for a record without tags; shape (n,).
    tags_codes: Ints
    producers: Producers
    # True for each record that is in a delay queue, or that was in a delay queue before its delivery to the present
    # queue.
    was_moved: NDArray[np.bool_]
    # True if any of the n records may have properties that name additional queues (multi-dispatch). Such a record also
    # has an entry (unit) in each additional queue (multi_dispatch.py).
    has_light_queue_units: bool


def read_properties(data: Bytes, fields: FieldOffsets) -> FoundProperties | None:
    """Read the properties of the records that have the field offsets `fields`. Returns None if the caller must read the
    records one by one."""
    shapes = find_property_shapes(data, fields.properties_at, fields.properties_size)
    if shapes is None:
        return _found_in_texts(_PropertyTexts(data, fields), len(fields.starts))
    return _found_in_shapes(shapes, len(fields.starts))


def _found_in_shapes(shapes: list[PropertyShape], count: int) -> FoundProperties | None:
    codes, moved = np.zeros(count, np.int64), np.zeros(count, bool)
    for shape in shapes:
        tags = shape.get(PROPERTY_TAGS.encode())
        if tags is not None:
            codes[shape.rows] = tags.tags_codes()
        if shape.get(PROPERTY_REAL_TOPIC.encode()) is not None:
            moved[shape.rows] = True
    producers = _producers_in_shapes(shapes)
    if producers is None:
        return None
    elsewhere = any(PROPERTY_INNER_MULTI_DISPATCH.encode() in shape.values for shape in shapes)
    return FoundProperties(codes, producers, moved, elsewhere)


def _producers_in_shapes(shapes: list[PropertyShape]) -> Producers | None:
    """Return the producers of records that are grouped by property layout (`PropertyShape`). Returns None if some
    producer properties are missing or illegal: the caller must then read the records one by one."""
    # `numbers`: the number that each producer instance (id and epoch) gets here. `columns`: one item for each property
    # layout. It contains the rows with a producer, and for each of these rows the number of the producer instance and
    # the sequence number.
    numbers: dict[tuple[str, int], int] = {}
    columns: list[tuple[Ints, Ints, Ints]] = []
    for shape in shapes:
        producer_id, epoch, sequence = (shape.get(name.encode()) for name in _PRODUCER_NAMES)
        if producer_id is None and epoch is None and sequence is None:
            continue
        if producer_id is None or epoch is None or sequence is None:
            return None
        sequences = sequence.numbers()
        ids, id_codes = producer_id.distinct()
        epochs, epoch_codes = epoch.distinct()
        if sequences is None or not all(map(_is_number, epochs)):
            return None
        # Each pair of a producer id and an epoch is one producer instance.
        keys = id_codes * len(epochs) + epoch_codes
        pairs, codes = np.unique(keys, return_inverse=True) if keys.any() else (keys[:1], keys)
        instances = [divmod(pair, len(epochs)) for pair in pairs.tolist()]
        known = [
            numbers.setdefault((decode_utf8(ids[code]), int(epochs[epoch_code])), len(numbers))
            for code, epoch_code in instances
        ]
        columns.append((shape.rows, np.array(known, np.int64)[codes], sequences))
    if not columns:
        return _NOBODY
    rows, codes, sequences = (np.concatenate(column) for column in zip(*columns, strict=True))
    if len(columns) > 1:
        order = np.argsort(rows, kind="stable")
        rows, codes, sequences = rows[order], codes[order], sequences[order]
    return Producers(rows, codes, sequences, list(numbers))


def _is_number(text: bytes) -> bool:
    return text.isdigit() and len(text) <= _DIGITS_MAX


def _found_in_texts(properties: _PropertyTexts, count: int) -> FoundProperties | None:
    codes, producers = _tags_codes(properties, count), _producers(properties)
    real_topics = properties.values(PROPERTY_REAL_TOPIC)
    if codes is None or producers is None or real_topics is None:
        return None
    moved = np.zeros(count, bool)
    moved[real_topics[0]] = True
    return FoundProperties(codes, producers, moved, properties.has(PROPERTY_INNER_MULTI_DISPATCH))


class _PropertyTexts:
    """The properties of many records, joined in one text. A piece of the text is one property (name, 0x01, value); a
    separator follows each piece."""

    def __init__(self, data: Bytes, fields: FieldOffsets) -> None:
        # The texts of all records' properties, joined into one text. `_row_ends`: for each record, the position in the
        # joined text at which its properties end.
        self.text, self._row_ends = _join(data, fields.properties_at, fields.properties_size)
        self.bytes = np.frombuffer(self.text, np.uint8)
        # `text` joins the properties of all records, with a separator after each property. For each property, `_ends`
        # has the position of the separator after it, and `_starts` the position of its first byte.
        self._ends = np.flatnonzero(self.bytes == _SEPARATOR)
        self._starts = np.empty_like(self._ends)
        self._starts[0] = 0
        self._starts[1:] = self._ends[:-1] + 1
        # The first four bytes of each property as a number. Comparing these numbers is enough to distinguish most
        # property names.
        self._beginnings = windows(self.bytes, 4)[self._starts].view(np.uint32)

    def has(self, name: str) -> bool:
        """True if one of the records may have the property `name`. The result may be a false positive, because `name`
        may occur inside another text."""
        return f"{name}\x01".encode() in self.text

    def values(self, name: str) -> tuple[Ints, Ints, Ints] | None:
        """Return the rows of the records that have the property `name`, and the start and end of each value in `text`.

        An empty value counts as no value. Returns None if a record has the property twice. In such a record the last
        occurrence counts, so the caller must read the records one by one.
        """
        mark = f"{name}\x01".encode()
        # Find the properties that begin with the first four bytes of the name. Keep the properties that have the whole
        # name and a value.
        pieces = np.flatnonzero(self._beginnings == np.frombuffer(mark, np.uint32, 1)[0])
        at, end = self._starts[pieces] + len(mark), self._ends[pieces]
        filled = at < end
        at, end = at[filled], end[filled]
        same = windows(self.bytes, len(mark))[at - len(mark)] == np.void(mark)
        at, end = at[same], end[same]
        # Find the record of each property value: the first record whose property text ends after the value's start.
        rows = np.searchsorted(self._row_ends, at, "right")
        return None if (rows[1:] == rows[:-1]).any() else (rows, at, end)


def distinct_texts(data: Bytes, at: Ints, end: Ints) -> tuple[list[bytes], Ints]:
    """Return the distinct texts in `data` among the ranges `at` to `end` (at least one range), and for each range the
    index of its text."""
    sizes, width = end - at, int((end - at).max())
    # Indices of the texts that differ from the text before them. If the texts cannot be compared quickly, the indices
    # of all texts.
    firsts = np.arange(len(at))
    if 0 < width <= _COMPARED_MAX_BYTES and int(at.max()) + width <= len(data):
        # Each row of `texts` is one text, padded with zeros. Adjacent texts are mostly equal, so copy a text only if it
        # differs from the previous text.
        texts = windows(data, width)[at].view(np.uint8).reshape(-1, width)
        if int(sizes.min()) < width:
            texts[np.arange(width) >= sizes[:, None]] = 0
        differs = (texts[1:] != texts[:-1]).any(axis=1) | (sizes[1:] != sizes[:-1])
        firsts = np.concatenate(([0], np.flatnonzero(differs) + 1))
    # Give each distinct text a number. Then repeat a text's number for the following records, up to the next record
    # whose text differs.
    view = data.data
    found = [bytes(view[one:other]) for one, other in zip(at[firsts].tolist(), end[firsts].tolist(), strict=True)]
    code_of = {text: code for code, text in enumerate(dict.fromkeys(found))}
    codes = np.array([code_of[text] for text in found], np.int64)
    return list(code_of), np.repeat(codes, np.diff(firsts, append=len(at)))


def _join(data: Bytes, at: Ints, sizes: Ints) -> tuple[bytes, Ints]:
    """Join texts of `data` into one text. Text i starts at position at[i] and has sizes[i] bytes; in the result, at
    least one separator follows each text.

    Returns the joined text, and for each text its end in the joined text. The joined text has 16 extra bytes, so that
    fixed-width reads near its end stay inside it.
    """
    ends, width = at + sizes, int(sizes.max()) + 1
    if width * len(at) <= 2 * (int(sizes.sum()) + len(at)) and int(ends.min()) >= width:
        # If the texts have similar lengths, copy all of them in one operation, as the rows of a table. The table may
        # have at most twice as many bytes as the texts. Each row begins with separators and ends with a text.
        rows = windows(data, width)[ends - width].view(np.uint8).reshape(-1, width)
        rows[np.arange(width) < (width - sizes)[:, None]] = _SEPARATOR
        return rows.tobytes() + b"\x02" + bytes(16), np.arange(width, width * len(at) + 1, width)
    texts = [data.data[start:end] for start, end in zip(at.tolist(), ends.tolist(), strict=True)]
    return b"\x02".join(texts) + b"\x02" + bytes(16), np.cumsum(sizes + 1)


def _tags_codes(properties: _PropertyTexts, count: int) -> Ints | None:
    """Return the hash code of each record's tags, 0 for a record without tags. Return None if a record has the tags
    property twice."""
    found = properties.values(PROPERTY_TAGS)
    if found is None:
        return None
    rows, at, end = found
    codes = np.zeros(count, np.int64)
    if len(rows):
        tags, numbers = distinct_texts(properties.bytes, at, end)
        codes[rows] = np.array([tags_code(decode_utf8(tag)) for tag in tags], np.int64)[numbers]
    return codes


def _producers(properties: _PropertyTexts) -> Producers | None:
    """Return the producer id, epoch and sequence of each record that has these properties.

    Returns None if a record has only some of the three properties, or has one of them twice. Also returns None if a
    number has characters other than digits.
    """
    found = [properties.values(name) for name in _PRODUCER_NAMES]
    if any(values is None for values in found):
        return None
    (rows, id_at, id_end), (epoch_rows, epoch_at, epoch_end), (sequence_rows, at, end) = (one for one in found if one)
    if not np.array_equal(rows, epoch_rows) or not np.array_equal(rows, sequence_rows):
        return None
    if not len(rows):
        return _NOBODY
    sequences = _numbers(properties.bytes, at, end)
    ids, id_codes = distinct_texts(properties.bytes, id_at, id_end)
    epochs, epoch_codes = distinct_texts(properties.bytes, epoch_at, epoch_end)
    if sequences is None or not all(map(_is_number, epochs)):
        return None
    # A producer instance is a pair of a producer id and an epoch. Number the instances in the order of these pairs.
    pairs, codes = np.unique(id_codes * len(epochs) + epoch_codes, return_inverse=True)
    indices = [divmod(pair, len(epochs)) for pair in pairs.tolist()]
    instances = [(decode_utf8(ids[code]), int(epochs[epoch_code])) for code, epoch_code in indices]
    return Producers(rows, codes, sequences, instances)


def _numbers(text: Bytes, at: Ints, end: Ints) -> Ints | None:
    """Parse decimal numbers in the text. Number i is at the bytes from `at[i]` up to `end[i]`. Return None if a number
    is too long or has characters other than digits."""
    sizes = end - at
    numbers = np.zeros(len(at), np.int64)
    if sizes.max() > _DIGITS_MAX:
        return None
    # Parse all numbers of one length together: multiply the matrix of their digits by the powers of ten.
    for size in np.unique(sizes).tolist():
        chosen = np.flatnonzero(sizes == size)
        digits = windows(text, size)[at[chosen]].view(np.uint8).reshape(-1, size) - np.uint8(ord("0"))
        if (digits > 9).any():
            return None
        numbers[chosen] = digits.astype(np.int64) @ (10 ** np.arange(size - 1, -1, -1, dtype=np.int64))
    return numbers
