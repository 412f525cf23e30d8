"""Hashes of the keys by which records are found. Each function computes them from the bytes of many records
(spec/storage.md §3).

The keys of a record are its unique id and each word of its KEYS property, in this order. The hashed text is
`TOPIC#KEY`. raymq also indexes an inner batch by the keys of its messages; RocketMQ does not.
"""

from __future__ import annotations

import logging
from typing import Final

import numpy as np
from numpy.typing import NDArray

from raymq.common.java_text import decode_utf8
from raymq.common.message import PROPERTY_KEYS, PROPERTY_UNIQ_KEY
from raymq.records.format.dispatch import dispatch_view
from raymq.records.format.hashing import index_key_hash, java_hash
from raymq.records.format.inner_batch import inner_keys
from raymq.records.format.layout import (
    SYS_FLAG_INNER_BATCH,
    SYS_FLAG_TRANSACTION_MASK,
    SYS_FLAG_TRANSACTION_ROLLBACK,
    RecordError,
    windows,
)
from raymq.records.kernels.fields import Bytes, FieldOffsets, Ints, find_fields
from raymq.records.kernels.index_hashes import key_hashes
from raymq.records.kernels.property_shapes import PropertyShape, Values, find_property_shapes
from storage.index.index_file import IndexEntries

logger = logging.getLogger(__name__)

_UNIQUE_NAME: Final = f"{PROPERTY_UNIQ_KEY}\x01".encode()
_KEYS_NAME: Final = f"{PROPERTY_KEYS}\x01".encode()
_SPACE: Final = 0x20
_SEPARATOR: Final = 0x02
_WINDOW_SPARE_BYTES: Final = 16
_HASH_OF_MARK: Final = ord("#")


def index_entries(data: Bytes, starts: Ints, physical_offset: int) -> IndexEntries:
    """Return the index entries of the log records at the positions `starts` of `data`. The first byte of `data` is at
    `physical_offset` in the log.

    Records of rolled-back transactions are left out. Raises RecordError if a record is damaged.
    """
    fields = find_fields(data, starts)
    shapes = find_property_shapes(data, fields.properties_at, fields.properties_size)
    found = None if shapes is None else _hashes_in_shapes(data, fields, shapes)
    rows, hashes = _hashes(data, fields) if found is None else found
    inner = np.flatnonzero(fields.sys_flag & SYS_FLAG_INNER_BATCH)
    if len(inner):
        rows, hashes = _with_inner(data, fields, inner, rows, hashes)
    kept = (fields.sys_flag[rows] & SYS_FLAG_TRANSACTION_MASK) != SYS_FLAG_TRANSACTION_ROLLBACK
    rows = rows[kept]
    return IndexEntries(
        hashes[kept], starts[rows] + physical_offset, fields.store_timestamp[rows].astype(np.int64, copy=False)
    )


def _with_inner(
    data: Bytes, fields: FieldOffsets, inner: Ints, rows: Ints, hashes: NDArray[np.int32]
) -> tuple[Ints, NDArray[np.int32]]:
    """Add the keys of the messages in inner batches. Returns the record numbers and hashes of all keys, ordered by
    record: the given ones, and the keys of the messages in the inner batches at `inner`.

    A damaged inner batch has only the keys of its own record.
    """
    for row in inner.tolist():
        start = int(fields.starts[row])
        record = data.data[start : start + int(fields.head["total_size"][row])]
        try:
            topic, keys = dispatch_view(record).topic, inner_keys(record)
        except RecordError as error:
            logger.error("an inner batch is indexed only by its own keys, not by the keys of its messages: %s", error)
            continue
        added = np.array([index_key_hash(topic, key) for key in keys], np.int32)
        added = np.setdiff1d(added, hashes[rows == row])
        rows, hashes = np.concatenate((rows, np.full(len(added), row))), np.concatenate((hashes, added))
    order = np.argsort(rows, kind="stable")
    return rows[order], hashes[order]


def _hashes_in_shapes(
    data: Bytes, fields: FieldOffsets, shapes: list[PropertyShape]
) -> tuple[Ints, NDArray[np.int32]] | None:
    """Compute the key hashes of records that are grouped by property layout (`PropertyShape`). The result is the same
    as that of `_hashes`.

    Returns None if a topic or a key is not ASCII, or if the words of KEYS differ in length within one layout.
    """
    topics, topics_odd = _java_hashes(data, fields.topic_at, fields.topic_size)
    if topics_odd.any():
        return None
    before = topics * np.uint32(31) + np.uint32(_HASH_OF_MARK)
    rows: list[Ints] = []
    hashes: list[NDArray[np.uint32]] = []
    # `hashes[i]` has the hash of one key for each of several records. numbers[i]: this key's number among the keys of
    # its record (0 = the first key).
    numbers: list[int] = []
    for shape in shapes:
        keys = _keys_of(shape)
        if keys is None:
            return None
        for number, key in enumerate(keys):
            found = key.java_hashes()
            if found is None:
                return None
            rows.append(shape.rows)
            hashes.append(found + before[shape.rows] * np.uint32(pow(31, key.table.shape[1], 1 << 32)))
            numbers.append(number)
    if len(rows) == 1:
        return rows[0], key_hashes(hashes[0])
    if not rows:
        return np.zeros(0, np.int64), np.zeros(0, np.int32)
    # Put the hashes into the order of their records. The hashes of one record stay in the order of the record's keys.
    all_rows = np.concatenate(rows)
    all_numbers = np.repeat(np.array(numbers), [len(column) for column in rows])
    order = np.argsort(all_rows * (max(numbers) + 1) + all_numbers, kind="stable")
    return all_rows[order], key_hashes(np.concatenate(hashes))[order]


def _keys_of(shape: PropertyShape) -> list[Values] | None:
    """Return the keys of records with the same property layout, one column per key: the unique id, then the words of
    KEYS.

    Returns None if the words are not at the same positions in all records.
    """
    unique, keys = shape.get(PROPERTY_UNIQ_KEY.encode()), shape.get(PROPERTY_KEYS.encode())
    found = [] if unique is None else [unique]
    if keys is not None:
        columns = keys.table[:, keys.varies]
        if (columns == _SPACE).any():
            return None
        at = 0
        for word in keys.first().split(b" "):
            if word:
                found.append(keys.part(at, at + len(word)))
            at += len(word) + 1
    return found


def _hashes(data: Bytes, fields: FieldOffsets) -> tuple[Ints, NDArray[np.int32]]:
    """Return two arrays with one element per index key, in the order in which the index stores the keys: the number of
    the key's record, and the key's hash.

    Texts are handled as ranges `at` to `end` of one byte array, so that no Python step is needed per record.
    """
    view = data.data
    # `text`: the property texts of all records, joined in the order of their sizes. `text_rows`: the record number of
    # each text. Text number i ends before row_ends[i].
    text, text_rows = _properties(data, fields)
    row_ends = np.cumsum(fields.properties_size[text_rows] + 1)
    # Each piece NAME\x01VALUE lies between two separators.
    piece_ends = np.flatnonzero(text == _SEPARATOR)
    piece_starts = np.empty_like(piece_ends)
    piece_starts[:1] = 0
    piece_starts[1:] = piece_ends[:-1] + 1
    unique_at, unique_end = _values(text, piece_starts, piece_ends, _UNIQUE_NAME)
    keys_at, keys_end = _values(text, piece_starts, piece_ends, _KEYS_NAME)
    # `named_rows`: for each property value, the index of the property text that contains the value. The value's
    # position decides this index.
    for values_at in (unique_at, keys_at):
        named_rows = np.searchsorted(row_ends, values_at, "right")
        if (named_rows[1:] == named_rows[:-1]).any():
            # A property occurs twice in a record. Its last occurrence counts (spec §1, Properties), so hash the records
            # one by one.
            return _hashes_one_by_one(data, fields)
    keys_at, keys_end = _words(text, keys_at, keys_end)
    # Sort the keys by record. Within a record the unique id is first, followed by the words of the property KEYS in
    # their order.
    rows = text_rows[np.searchsorted(row_ends, np.concatenate([unique_at, keys_at]), "right")]
    order = np.argsort(rows * 2 + (np.arange(len(rows)) >= len(unique_at)), kind="stable")
    at, end = np.concatenate([unique_at, keys_at])[order], np.concatenate([unique_end, keys_end])[order]
    rows = rows[order]
    # Compute the hash of TOPIC#KEY from the hashes of its parts: h(a + b) = h(a) * 31**len(b) + h(b), modulo 2**32.
    topics, topics_odd = _java_hashes(data, fields.topic_at, fields.topic_size)
    hashes, keys_odd = _java_hashes(text, at, end - at)
    hashes += (topics[rows] * np.uint32(31) + np.uint32(_HASH_OF_MARK)) * _powers(end - at)
    result = key_hashes(hashes)
    # Java hashes UTF-16 units, not bytes, so a text that is not ASCII is hashed separately.
    for entry in np.flatnonzero(topics_odd[rows] | keys_odd).tolist():
        row = int(rows[entry])
        topic = bytes(view[fields.topic_at[row] : fields.topic_at[row] + fields.topic_size[row]])
        key = text[at[entry] : end[entry]].tobytes()
        result[entry] = index_key_hash(decode_utf8(topic), decode_utf8(key))
    return rows, result


def _properties(data: Bytes, fields: FieldOffsets) -> tuple[Bytes, Ints]:
    """Join the properties of all records. A separator follows each record's properties, even if they end with a
    separator.

    Returns the joined text, and the record numbers in the order of their properties. The text has spare bytes at its
    end, so that fixed-width reads stay inside it. Properties of equal size are copied together, because few sizes
    occur.
    """
    at, sizes = fields.properties_at, fields.properties_size
    order = np.argsort(sizes, kind="stable")
    lengths, counts = np.unique(sizes, return_counts=True)
    text = np.empty(int(sizes.sum()) + len(sizes) + _WINDOW_SPARE_BYTES, np.uint8)
    text[-_WINDOW_SPARE_BYTES:] = 0
    position = first = 0
    for length, count in zip(lengths.tolist(), counts.tolist(), strict=True):
        # `block`: a view of a part of `text`, with one row for each property text of this length. The last column is
        # for the separator.
        block = text[position : position + count * (length + 1)].reshape(count, length + 1)
        if length:
            found = windows(data, length)[at[order[first : first + count]]]
            block[:, :length] = found.view(np.uint8).reshape(count, length)
        block[:, length] = _SEPARATOR
        position, first = position + block.size, first + count
    return text, order


def _values(text: Bytes, starts: Ints, ends: Ints, name: bytes) -> tuple[Ints, Ints]:
    """Find the properties whose text begins with `name`, and return the ranges of their values in `text`. Empty values
    are left out."""
    # Compare the first four bytes of all properties as one number. Compare further bytes only for properties that
    # match.
    named = windows(text, 4)[starts].view(np.uint32) == np.frombuffer(name, np.uint32, 1)[0]
    candidates = np.flatnonzero(named)
    at, end = starts[candidates] + len(name), ends[candidates]
    for index in range(4, len(name)):
        fits = text[at - len(name) + index] == name[index]
        at, end = at[fits], end[fits]
    filled = at < end
    return at[filled], end[filled]


def _words(text: Bytes, at: Ints, end: Ints) -> tuple[Ints, Ints]:
    """Split each value into words at the spaces, and return the words' ranges. The values are the ranges `at` to `end`
    of the text."""
    spaces = np.flatnonzero(text == _SPACE)
    if not len(at) or not len(spaces):
        return at, end
    # value[i]: the number of the last property value that begins before the i-th space. If the space lies after the end
    # of this value, it belongs to no value, and is dropped in the next step.
    value = np.searchsorted(at, spaces, "right") - 1
    spaces = spaces[(value >= 0) & (spaces < end[value])]
    # A space ends one word and begins the next word. Two adjacent spaces enclose an empty word, which is dropped.
    at, end = np.sort(np.concatenate([at, spaces + 1])), np.sort(np.concatenate([end, spaces]))
    filled = at < end
    return at[filled], end[filled]


def _hashes_one_by_one(data: Bytes, fields: FieldOffsets) -> tuple[Ints, NDArray[np.int32]]:
    rows, hashes = [], []
    for row, start in enumerate(fields.starts.tolist()):
        view = dispatch_view(data.data, start)
        rows += [row] * len(view.keys)
        hashes += [index_key_hash(view.topic, key) for key in view.keys]
    return np.array(rows, np.int64), np.array(hashes, np.int32)


def _powers(exponents: Ints) -> NDArray[np.uint32]:
    """Return 31 raised to each exponent, modulo 2**32."""
    table = np.full(int(exponents.max(initial=0)) + 1, 31, np.uint32)
    table[0] = 1
    powers: NDArray[np.uint32] = np.multiply.accumulate(table, dtype=np.uint32)[exponents]
    return powers


def _java_hashes(data: Bytes, at: Ints, size: Ints) -> tuple[NDArray[np.uint32], NDArray[np.bool_]]:
    """Return Java's hash of each text, unsigned, and a mask of the texts that are not ASCII. The hashes of these texts
    are wrong.

    Texts of one length are hashed together, because few lengths occur, often only one.
    """
    hashes = np.zeros(len(at), np.uint32)
    odd = np.zeros(len(at), bool)
    lengths = np.unique(size)
    for length in lengths.tolist():
        if not length:
            continue
        chosen = slice(None) if len(lengths) == 1 else np.flatnonzero(size == length)
        units = windows(data, length)[at[chosen]].view(np.uint8).reshape(-1, length)
        # `units`: a matrix of bytes. Each row is one of the texts that have `length` bytes.
        if len(units) > 1 and (units == units[0]).all():
            hashes[chosen] = java_hash(units[0].tobytes().decode("latin-1")) & 0xFFFFFFFF
        else:
            # Compute h = h * 31 + byte, column by column, for all texts at once.
            columns = np.ascontiguousarray(units.T)
            found = columns[0].astype(np.uint32)
            for column in columns[1:]:
                found *= 31
                found += column
            hashes[chosen] = found
        odd[chosen] = (units >= 0x80).any(axis=1) if (units >= 0x80).any() else False
    return hashes, odd
