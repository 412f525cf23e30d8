"""TableRows: the rows of an Arrow table as messages in columns, checked without a Python object per row.

A quick pass over the columns' bytes finds the rows that may be illegal, for example because a tag begins with a space
or a property exists twice. Only these rows are converted to Message objects. The constructor of Message decides if the
row is illegal, and raises the error.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raymq.client.producer.checks.batches import check_record_size
from raymq.client.producer.checks.table_columns import is_text, plain_column, sendable_columns
from raymq.common.errors import InvalidArgumentError, MessageIllegalError
from raymq.common.message import RESERVED_PROPERTIES, USUAL_PROPERTIES_BYTES, Message
from raymq.records.kernels.byte_column import ByteColumn, mask_of, sizes_of, text_array
from raymq.records.kernels.fields import Ints
from raymq.records.kernels.message_columns import MessageColumns
from raymq.records.kernels.property_text import (
    ListColumn,
    PropertyTexts,
    java_hashes,
    long_hashes,
    property_sizes,
    property_texts,
)

Mask = NDArray[np.bool_]

_RESERVED: Final = text_array(sorted(RESERVED_PROPERTIES))


def _bytes_in(values: str) -> NDArray[np.bool_]:
    """Return an array of 256 flags, one for each byte value. A flag is True if the UTF-8 text of `values` contains the
    byte."""
    marked = np.zeros(256, np.bool_)
    marked[list(values.encode("latin-1"))] = True
    return marked


_MAY_BEGIN_SPACE: Final = _bytes_in("".join(map(chr, range(0x21))) + "\x7f\xc2\xe1\xe2\xe3")
"""Bytes with which white space can begin in UTF-8. The set includes a few other bytes, which only cause unnecessary
checks."""
_MAY_END_SPACE: Final = _bytes_in("".join(map(chr, [*range(0x21), *range(0x7F, 0x100)])))
"""Bytes that can be the last byte of white space in UTF-8. A few other bytes are included, and only lead to unnecessary
checks of texts."""


class TableRows:
    """The rows of a table for `topic`. Raises InvalidArgumentError if the columns cannot be sent.

    `count`: the number of rows. `keyed`: the table has a column of sharding keys. `unkeyed`: the number of rows without
    a sharding key.
    """

    def __init__(self, topic: str, table: pa.Table | pa.RecordBatch) -> None:
        if isinstance(table, pa.RecordBatch):
            table = pa.Table.from_batches([table])
        if not isinstance(table, pa.Table):
            raise InvalidArgumentError(f"send_table expects a pyarrow Table or RecordBatch, not {type(table).__name__}")
        table = sendable_columns(table)
        self.topic = topic
        self.count: int = table.num_rows
        self.keyed = "sharding_key" in table.column_names
        self.unkeyed = table.column("sharding_key").null_count if self.keyed else self.count
        self.table = table
        """The table, with only the columns that are sent. All columns have plain Arrow types, except `body`, which
        keeps the type that the caller passed."""

    def check(self, first: int, count: int, max_body_bytes: int) -> None:
        """Check `count` rows of the table from row `first` on. `max_body_bytes`: the maximum length of a row's message
        body. Raises MessageIllegalError, which names the first illegal row."""
        part = _RowColumns(self.table.slice(first, count))
        for index in np.flatnonzero(part.doubtful(max_body_bytes)).tolist():
            try:
                message = self._message(first + index)
                if len(message.body) > max_body_bytes:
                    raise MessageIllegalError(
                        f"a message body of {len(message.body)} bytes exceeds this producer's "
                        f"max_message_size_bytes of {max_body_bytes}"
                    )
                check_record_size(message)
            except MessageIllegalError as error:
                raise MessageIllegalError(f"row {first + index}: {error}; no row was sent") from None

    def read(self, first: int, count: int) -> tuple[MessageColumns, Ints | None, Mask | None]:
        """Return the messages of `count` checked rows from row `first` on. If the table has sharding keys, also returns
        the hash of each row's key, and a mask that is False for rows without a key."""
        part = _RowColumns(self.table.slice(first, count))
        codes = None
        if part.tags is not None and part.tags.present.any():
            codes = java_hashes(part.tags.texts)
        texts = property_texts(part.tags, part.keys, part.properties)
        columns = MessageColumns(self.topic, ByteColumn.of(part.arrays["body"]), texts, codes)
        return columns, *part.sharding_keys()

    def _message(self, row: int) -> Message:
        """Convert a row of the table to a Message. The constructor of Message checks the row."""
        [values] = self.table.slice(row, 1).to_pylist()
        body = values["body"]
        if body is None:
            raise MessageIllegalError("the message body is null")
        pairs = values.get("properties") or ()
        properties = dict(pairs)
        if len(properties) < len(pairs):
            raise MessageIllegalError("a property name occurs twice")
        encoded = body if isinstance(body, bytes) else body.encode()
        return Message(self.topic, encoded, values.get("tags"), values.get("keys") or (), properties)


class _RowColumns:
    """The columns of n consecutive rows of a table. `arrays`: each column as one Arrow array of n values.

    A column that has only nulls is omitted. Raises MessageIllegalError if a text is not UTF-8.
    """

    def __init__(self, table: pa.Table) -> None:
        self.rows: int = table.num_rows
        self.arrays = {}
        for name, column in zip(table.column_names, table.columns, strict=True):
            if name == "body" or not pa.types.is_null(column.type):
                plain = plain_column(column)
                self.arrays[name] = plain.chunk(0) if plain.num_chunks == 1 else plain.combine_chunks()
        self._doubtful: Mask = np.zeros(self.rows, np.bool_)
        self.tags = self._text("tags")
        keys = self.arrays.get("keys")
        self.keys = self._key() if keys is None or is_text(keys.type) else self._list("keys")
        self.properties = None if "properties" not in self.arrays else self._list("properties")

    def doubtful(self, max_body_bytes: int) -> Mask:
        """Return a mask, shape (n,), of the rows that need a check one by one because they may be illegal. The mask
        includes all illegal rows and a few legal rows."""
        body = self.arrays["body"]
        if pa.types.is_null(body.type):
            return np.ones(self.rows, np.bool_)
        for name in ("body", "sharding_key"):
            if name in self.arrays and is_text(self.arrays[name].type):
                _check_utf8(name, self.arrays[name])
        sizes = sizes_of(body)
        doubtful: Mask = self._doubtful | (sizes == 0) | (sizes > max_body_bytes)
        if self.tags is not None:
            doubtful |= _doubtful_texts(self.tags.texts, forbidden=b"", stripped=True) & self.tags.present
        if isinstance(self.keys, PropertyTexts):
            doubtful |= _doubtful_texts(self.keys.texts, forbidden=b" ", stripped=False) & self.keys.present
        elif self.keys is not None:
            doubtful |= _of_rows(_doubtful_texts(self.keys.parts[0], forbidden=b" ", stripped=False), self.keys)
        if self.properties is not None:
            doubtful |= _doubtful_properties(self.properties)
        doubtful |= property_sizes(self.tags, self.keys, self.properties) > USUAL_PROPERTIES_BYTES
        return doubtful

    def sharding_keys(self) -> tuple[Ints, Mask] | tuple[None, None]:
        """Return the hash of each row's sharding key, and a mask that is False for rows without a key. Returns (None,
        None) if the table has no sharding keys."""
        keys = self.arrays.get("sharding_key")
        if keys is None:
            return None, None
        if is_text(keys.type):
            texts, present = ByteColumn.of_nullable(keys)
            return java_hashes(texts), present
        present = mask_of(keys.is_valid()) if keys.null_count else np.ones(len(keys), np.bool_)
        numbers = keys.cast(pa.int64())
        longs = np.frombuffer(numbers.buffers()[1], np.int64)[numbers.offset : numbers.offset + len(numbers)]
        return long_hashes(longs), present

    def _text(self, name: str) -> PropertyTexts | None:
        array = self.arrays.get(name)
        if array is None:
            return None
        _check_utf8(name, array)
        return PropertyTexts(*ByteColumn.of_nullable(array))

    def _key(self) -> PropertyTexts | None:
        """Return the message keys of the rows as one text per row. Returns None if a row has more than one message key.
        An empty text counts as no key."""
        keys = self._text("keys")
        return None if keys is None else PropertyTexts(keys.texts, keys.present & (keys.texts.sizes > 0))

    def _list(self, name: str) -> ListColumn:
        array = self.arrays[name]
        width: Any = np.int64 if pa.types.is_large_list(array.type) else np.int32
        starts = np.frombuffer(array.buffers()[1], width)[array.offset :][: len(array) + 1].astype(np.int64)
        entries = array.values.slice(int(starts[0]), int(starts[-1] - starts[0]))
        parts = entries.flatten() if pa.types.is_map(array.type) else [entries]
        starts -= starts[0]
        hidden = None
        # An Arrow array may contain entries for a list that is null. These entries belong to no row, so skip them.
        if array.null_count:
            counts = np.diff(starts)
            hidden = np.repeat(~mask_of(array.is_valid()), counts)
            np.cumsum(counts * mask_of(array.is_valid()), out=starts[1:])
        found = []
        for part in parts:
            _check_utf8(name, part)
            texts, present = ByteColumn.of_nullable(part)
            if hidden is not None and hidden.any():
                texts, present = texts.take(np.flatnonzero(~hidden)), present[~hidden]
            found.append(texts)
            if not present.all():
                self._doubtful |= _of_rows(~present, ListColumn((texts,), starts))
        return ListColumn(tuple(found), starts)


def _check_utf8(name: str, array: pa.Array) -> None:
    try:
        array.validate(full=True)
    except pa.ArrowInvalid as error:
        raise MessageIllegalError(f"column {name!r} has text that is not UTF-8 ({error}); no row was sent") from None


def _of_rows(entries: Mask, column: ListColumn) -> Mask:
    """Return a mask of the rows that have at least one marked list entry. `entries`: for each entry of the list column
    `column`, True if the entry is marked."""
    marked = np.zeros(len(column.starts) - 1, np.bool_)
    marked[np.searchsorted(column.starts, np.flatnonzero(entries), side="right") - 1] = True
    return marked


def _doubtful_texts(texts: ByteColumn, *, forbidden: bytes, stripped: bool) -> Mask:
    """Return a mask of the texts that may be illegal. The mask marks all illegal texts and a few legal texts.

    A text is illegal if it is blank, or contains a separator or a `forbidden` byte. If `stripped`, white space at
    either end, the string `||` and the text `*` are illegal, too.
    """
    first, last = int(texts.offsets[0]), int(texts.offsets[-1])
    units = texts.data[first:last]
    starts, ends = texts.offsets[:-1] - first, texts.offsets[1:] - first
    doubtful: Mask = starts == ends
    if not len(units):
        return doubtful
    found = (units == 1) | (units == 2)
    for byte in forbidden:
        found |= units == byte
    if stripped:
        bars = units == ord("|")
        found[1:] |= bars[1:] & bars[:-1]
    if found.any():
        doubtful[np.searchsorted(ends, np.flatnonzero(found), side="right")] = True
    first_units = units[np.minimum(starts, len(units) - 1)]
    spaced = _MAY_BEGIN_SPACE[first_units]
    if stripped:
        doubtful |= (ends - starts == 1) & (first_units == ord("*"))
        spaced = spaced | _MAY_END_SPACE[units[np.maximum(ends - 1, 0)]]
    for row in np.flatnonzero(spaced & ~doubtful).tolist():
        text = units[starts[row] : ends[row]].tobytes().decode()
        doubtful[row] = not text.strip() or (stripped and text != text.strip())
    return doubtful


def _doubtful_properties(column: ListColumn) -> Mask:
    """Return a mask of the rows whose properties may be illegal: a property occurs twice, or a name or value may be
    illegal."""
    names, values = column.parts
    entries = _doubtful_texts(names, forbidden=b"", stripped=False)
    entries |= _doubtful_texts(values, forbidden=b"", stripped=False)
    coded = names.array().cast(pa.string()).dictionary_encode()
    codes = np.frombuffer(coded.indices.buffers()[1], np.int32)[coded.offset : coded.offset + len(names)]
    reserved = mask_of(pc.is_in(coded.dictionary, value_set=_RESERVED))
    entries |= reserved[codes] if len(codes) else False
    doubtful = _of_rows(entries, column)
    rows = np.repeat(np.arange(len(doubtful)), np.diff(column.starts))
    # Usually all rows have the same property names in the same order, so the codes of the names increase within each
    # row and need no sort.
    if not ((codes[1:] > codes[:-1]) | (rows[1:] != rows[:-1])).all():
        order = np.lexsort((codes, rows))
        twice = (codes[order][1:] == codes[order][:-1]) & (rows[order][1:] == rows[order][:-1])
        doubtful[rows[order][1:][twice]] = True
    return doubtful
