"""Decodes records into Arrow columns, without a Python object per message.

`decode_columns` reads the same bytes as `raymq.records.format.decode.read_record` and returns the same values, one
column at a time. numpy finds the offsets of each record's fields, and Arrow copies the small fields. Bodies are not
copied: their column is a `binary_view` over the buffer, which may be a mapped file. A damaged message also has a row,
with a null body and the reason in column `error` (raymq.records.kernels.column_bodies).

Properties are split for all rows at once. A row may have text that is not UTF-8, a property without a value or a
repeated name; only software other than raymq writes such rows. In this case the whole call uses `_decode_rows`, which
is slower and returns the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raymq.common.errors import InvalidArgumentError
from raymq.common.message import PROPERTY_KEYS, PROPERTY_TAGS, PROPERTY_UNIQ_KEY, RESERVED_PROPERTIES
from raymq.common.namespaces import Namespace
from raymq.records.format import layout
from raymq.records.format.layout import Buffer, windows
from raymq.records.format.places import RecordPlaces
from raymq.records.kernels.byte_column import int_array, mask_of, numbers_of, text_array, text_scalar
from raymq.records.kernels.column_bodies import BODY_TYPES, Bodies, BodyType, read_bodies, slices_of, spread
from raymq.records.kernels.fields import (
    Bytes,
    DamagedRowsError,
    FieldOffsets,
    Ints,
    check_places,
    check_seals,
    check_topics,
    find_fields,
    find_intact,
)
from raymq.records.kernels.messages import read_messages
from raymq.records.kernels.templates import find_templates

Unreadable = Literal["null", "raise"]
"""How a table represents an unreadable message: "null" gives a null body, "raise" raises BodyUnreadableError."""

_TIMESTAMP: Final = pa.timestamp("ms", tz="UTC")
SCHEMA: Final = pa.schema(
    [
        pa.field("topic", pa.string()),
        pa.field("broker_name", pa.string()),
        pa.field("queue_id", pa.int32()),
        pa.field("queue_offset", pa.int64()),
        pa.field("tags", pa.string()),
        pa.field("keys", pa.list_(pa.string())),
        pa.field("body", pa.binary_view()),
        pa.field("properties", pa.map_(pa.string(), pa.string())),
        pa.field("born_timestamp", _TIMESTAMP),
        pa.field("store_timestamp", _TIMESTAMP),
        pa.field("message_id", pa.string()),
    ]
)
"""The columns of a batch of messages. Bodies have a view type. `properties` has only the user's properties, as in
`MessageExt`. `tags` may be null."""
MORE_COLUMNS: Final = [
    pa.field("reconsume_times", pa.int32()),
    pa.field("body_size", pa.int32()),
    pa.field("error", pa.string()),
]
"""Columns that a batch has only if they are requested by name. `reconsume_times`: 0 except in retry topics.
`body_size`: the length of the body in bytes, for callers that do not need the body. `error`: the reason why a message
is unreadable; null for readable messages."""
_NEED_BODIES: Final = frozenset(("body", "body_size", "error"))
"""The columns that need decompressed bodies. If a batch has none of these columns, compressed bodies are not
decompressed."""
_BODY_INDEX: Final = SCHEMA.get_field_index("body")
_SCHEMAS: Final = {name: SCHEMA.set(_BODY_INDEX, pa.field("body", kind)) for name, kind in BODY_TYPES.items()}
_NO_TEXT: Final = text_scalar("")


def shown_batch(batch: pa.RecordBatch, names: Namespace) -> pa.RecordBatch:
    """Return a batch whose topic column has the names that users of a namespace see. Returns the batch itself if it has
    no topic column."""
    index = batch.schema.get_field_index("topic")
    if not names or index < 0 or not batch.num_rows:
        return batch
    stored = batch.column(index)
    shown = {topic: names.unwrap(topic) for topic in stored.unique().to_pylist()}
    if len(shown) == 1:
        column = pa.repeat(pa.scalar(next(iter(shown.values())), stored.type), len(stored))
    else:
        column = pa.array([shown[topic] for topic in stored.to_pylist()], stored.type)
    return batch.set_column(index, batch.schema.field(index), column)


def decode_columns(
    buffer: Buffer,
    starts: NDArray[np.int64],
    *,
    broker_name: str,
    body_type: BodyType = "binary_view",
    check_crc: bool = False,
    columns: Sequence[str] | None = None,
    places: RecordPlaces | None = None,
    unreadable: Unreadable = "null",
    max_decompressed_bytes: int | None = None,
) -> pa.RecordBatch:
    """Decode the messages of the records at positions `starts` (in any order) of `buffer` into a batch.

    `columns`: by default the columns of SCHEMA; otherwise a selection of SCHEMA and MORE_COLUMNS, in this order.
    Columns outside the selection are not decoded. Without the column `body` no body is read, except that compressed
    bodies are decompressed if `body_size` or `error` is requested.

    With `body_type` "binary_view" the body column refers to `buffer` and keeps it alive, so `buffer` must not change;
    only compressed bodies get new memory. `check_crc`: also compare each body's CRC, and the property CRC of a record
    that has one. `places`: the expected places of the records, with the same indices as `starts`. A record that does
    not agree with its place counts as damaged.

    The batch has a row for each start. An unreadable body is null. In the row of a damaged record, everything is null
    except the values of its place. With `unreadable` "raise", the first unreadable message raises BodyUnreadableError.

    `max_decompressed_bytes`: the batch ends before its decompressed bodies exceed this number of bytes, but has at
    least one row if `starts` is not empty. The caller decodes the remaining records in another call.

    Raises InvalidArgumentError if the buffer has 2 GiB or more, or if `body_type` or a column is unknown.
    """
    check_unreadable(unreadable)
    schema = schema_with(body_type, columns)
    if len(buffer) > np.iinfo(np.int32).max:
        raise InvalidArgumentError(f"a buffer of {len(buffer)} bytes is too long for Arrow's views; decode it in parts")
    data = np.frombuffer(buffer, dtype=np.uint8)
    starts = np.asarray(starts, dtype=np.int64)
    order = _Order(broker_name, body_type, check_crc, schema, unreadable == "raise", max_decompressed_bytes)
    try:
        return _decode_intact(data, starts, order, places)
    except DamagedRowsError:
        return _decode_damaged(data, starts, order, places)


@dataclass(frozen=True, slots=True)
class _Order:
    """The arguments of one call of `decode_columns`."""

    broker_name: str
    body_type: BodyType
    check_crc: bool
    schema: pa.Schema
    raises: bool
    limit: int | None

    def bodies(self, data: Bytes, at: Ints, size: Ints, sys_flag: Ints, crc: NDArray[Any]) -> Bodies:
        """Read the records' bodies. The bodies are decompressed only if a requested column needs this, or if an
        unreadable body raises an error. They are kept only for the column `body`."""
        names = self.schema.names
        decompresses = self.raises or not _NEED_BODIES.isdisjoint(names)
        expected = crc if self.check_crc else None
        return read_bodies(
            data, at, size, sys_flag, expected, self.limit, decompresses=decompresses, keeps="body" in names
        )

    def check(self, bodies: Bodies, data: Bytes, starts: Ints, places: RecordPlaces | None) -> None:
        """Raise BodyUnreadableError for the first unreadable body, if `decode_columns` was called with `unreadable`
        "raise"."""
        if self.raises and bodies.errors:
            row = min(bodies.errors)
            known = RecordPlaces.unknown(self.broker_name) if places is None else places
            [message] = read_messages(
                data.data, starts[row : row + 1], broker_name=self.broker_name, places=known.pick(slice(row, row + 1))
            )
            raise message.body_error or known.place(row).error(bodies.errors[row], record_damaged=False)


def _decode_intact(
    data: Bytes, starts: Ints, order: _Order, places: RecordPlaces | None, bodies: Bodies | None = None
) -> pa.RecordBatch:
    """Decode records whose headers and fields are intact; their bodies may be unreadable. Raises DamagedRowsError if a
    record is damaged. `bodies`: the records' bodies, if an earlier attempt already read them."""
    batch = _decode_by_templates(data, starts, order, places, bodies)
    if batch is not None:
        return batch
    fields = find_fields(data, starts)
    if places is not None:
        check_places(data, starts, places)
        check_topics(data, fields, places.queue.topic)
    if bodies is None:
        if order.check_crc:
            check_seals(data, starts, fields.head, fields.body_at, fields.body_size)
        bodies = order.bodies(data, fields.body_at, fields.body_size, fields.sys_flag, fields.head["body_crc"])
        if bodies.rows < len(starts):
            return _decode_first(data, starts, order, places, bodies)
    order.check(bodies, data, starts, places)
    properties = _split_properties(slices_of(data, fields.properties_at, fields.properties_size).cast(pa.binary()))
    topic = _topics(data, fields)
    if properties is None or topic is None:
        return _decode_rows(data, starts, order, bodies)

    def message_ids() -> pa.Array:
        found = properties.column(PROPERTY_UNIQ_KEY)
        return pc.coalesce(found, _offset_ids(data, fields, found.is_null())) if found.null_count else found

    makers: dict[str, Callable[[], pa.Array]] = {
        "topic": lambda: topic,
        "broker_name": lambda: pa.repeat(text_scalar(order.broker_name), len(fields.starts)),
        "queue_id": lambda: int_array(fields.head["queue_id"].astype(np.int32)),
        "queue_offset": lambda: int_array(fields.head["queue_offset"].astype(np.int64)),
        "tags": lambda: properties.column(PROPERTY_TAGS),
        "keys": lambda: _split_keys(properties.column(PROPERTY_KEYS)),
        "properties": properties.user_map,
        "born_timestamp": lambda: _timestamps(fields.head["born_timestamp"]),
        "store_timestamp": lambda: _timestamps(fields.store_timestamp),
        "message_id": message_ids,
        "reconsume_times": lambda: _reconsume_times(data, fields.body_at),
        **bodies.makers(order.body_type),
    }
    return pa.RecordBatch.from_arrays([makers[name]() for name in order.schema.names], schema=order.schema)


def _decode_first(
    data: Bytes, starts: Ints, order: _Order, places: RecordPlaces | None, bodies: Bodies
) -> pa.RecordBatch:
    """Decode only the first `bodies.rows` records. The decompressed bodies of all records together would exceed the
    size limit of one batch."""
    some = None if places is None else places.pick(slice(bodies.rows))
    return _decode_intact(data, starts[: bodies.rows], order, some, bodies)


def _decode_damaged(data: Bytes, starts: Ints, order: _Order, places: RecordPlaces | None) -> pa.RecordBatch:
    """Decode records, at least one of them damaged, into a batch of columns."""
    _, rows, damaged = find_intact(data, starts, places, check_crc=order.check_crc)
    known = RecordPlaces.unknown(order.broker_name) if places is None else places
    if order.raises:
        first = min(damaged)
        # Decode the records before the first damaged record first. If one of them has an unreadable body, its error
        # must be raised, not the error of the damaged record. The size limit may end the batch before the damaged
        # record.
        batch = _decode_intact(data, starts[:first], order, known.pick(slice(first))) if first else None
        if batch is None or batch.num_rows == first:
            raise known.place(first).error(damaged[first])
        return batch
    batch = _decode_intact(data, starts[rows], order, known.pick(rows))
    end = len(starts) if batch.num_rows == len(rows) else int(rows[batch.num_rows])
    return spread(batch, rows[: batch.num_rows], end, damaged, known)


def check_unreadable(unreadable: Unreadable) -> None:
    """Raise InvalidArgumentError unless `unreadable` is "null" or "raise"."""
    if unreadable not in ("null", "raise"):
        raise InvalidArgumentError(f'unreadable={unreadable!r} must be "null" or "raise"')


def schema_with(body_type: BodyType, columns: Sequence[str] | None = None) -> pa.Schema:
    """Return the schema of a batch: all columns of SCHEMA, or only the given `columns` of SCHEMA and MORE_COLUMNS, in
    this order. Bodies have the type `body_type`. Raises InvalidArgumentError if `body_type` is invalid, or if `columns`
    is empty or has unknown or repeated names."""
    if body_type not in _SCHEMAS:
        raise InvalidArgumentError(f"body_type={body_type!r} must be one of {', '.join(_SCHEMAS)}")
    schema = _SCHEMAS[body_type]
    if columns is None:
        return schema
    schema = _with_more(schema)
    unknown = [name for name in columns if name not in schema.names]
    if isinstance(columns, str) or not columns or unknown or len(set(columns)) < len(columns):
        raise InvalidArgumentError(
            f"columns={columns!r} must be a list of different names from {', '.join(schema.names)}"
        )
    return pa.schema([schema.field(name) for name in columns])


def _with_more(schema: pa.Schema) -> pa.Schema:
    return pa.schema([*schema, *MORE_COLUMNS])


def _decode_by_templates(
    data: Bytes, starts: Ints, order: _Order, places: RecordPlaces | None, bodies: Bodies | None
) -> pa.RecordBatch | None:
    """Decode records that mostly share a template (raymq.records.kernels.templates), like `_decode_intact`. Returns
    None if too few records share a template, or if the records need the slower decoding."""
    records = find_templates(data, starts)
    if records is None:
        return None
    if places is not None:
        if places.queue.topic and not records.have_topic(places.queue.topic):
            return None
        check_places(data, starts, places)
    head = records.head
    if bodies is None:
        if order.check_crc:
            check_seals(data, starts, head, records.body_at, head["body_size"])
        bodies = order.bodies(data, records.body_at, head["body_size"], head["sys_flag"], head["body_crc"])
        if bodies.rows < len(starts):
            return _decode_first(data, starts, order, places, bodies)
    order.check(bodies, data, starts, places)
    makers: dict[str, Callable[[], pa.Array]] = {
        "topic": records.topics,
        "broker_name": lambda: pa.repeat(text_scalar(order.broker_name), len(starts)),
        "queue_id": lambda: int_array(head["queue_id"]),
        "queue_offset": lambda: int_array(head["queue_offset"]),
        "tags": lambda: records.column(PROPERTY_TAGS),
        "keys": lambda: _split_keys(records.column(PROPERTY_KEYS)),
        "properties": lambda: records.pairs(lambda name: name not in RESERVED_PROPERTIES),
        "born_timestamp": lambda: _timestamps(head["born_timestamp"]),
        "store_timestamp": lambda: _timestamps(head["store_timestamp"]),
        "message_id": lambda: records.column(PROPERTY_UNIQ_KEY),
        "reconsume_times": lambda: _reconsume_times(data, records.body_at),
        **bodies.makers(order.body_type),
    }
    try:
        made = {name: makers[name]() for name in order.schema.names}
    except pa.ArrowInvalid:
        return None
    if "message_id" in made and made["message_id"].null_count:
        return None
    return pa.RecordBatch.from_arrays(list(made.values()), schema=order.schema)


def _reconsume_times(data: Bytes, body_at: Ints) -> pa.Array:
    # The distance from the reconsume-times field to the body is equal for IPv4 and IPv6 hosts, so count back from the
    # start of the body.
    at = body_at - (layout.BODY_OFFSET - layout.RECONSUME_TIMES_OFFSET)
    return int_array(windows(data, 4)[at].view(">i4").astype(np.int32))


def _timestamps(milliseconds: NDArray[Any]) -> pa.Array:
    return int_array(milliseconds.astype(np.int64, copy=False)).view(_TIMESTAMP)


def _topics(data: Bytes, fields: FieldOffsets) -> pa.Array | None:
    """Return the Arrow column of the records' topics. Returns None if a topic is not UTF-8. A fast path serves the
    usual case that all records have the same topic."""
    at, size = fields.topic_at, fields.topic_size
    try:
        if len(at) and size[0] and (size == size[0]).all():
            texts = windows(data, int(size[0]))[at]
            if (texts == texts[0]).all():
                return pa.repeat(text_scalar(texts[0].tobytes().decode()), len(at))
        return slices_of(data, at, size).cast(pa.binary()).cast(pa.string())
    except (UnicodeDecodeError, pa.ArrowInvalid):
        return None


def _offset_ids(data: Bytes, fields: FieldOffsets, missing: pa.BooleanArray) -> pa.Array:
    """Return a column with offset message ids. A row has an id only if `missing` is True, because its message has no
    unique id. All other rows are null."""
    ids: list[str | None] = [None] * len(missing)
    for row in np.flatnonzero(mask_of(missing)).tolist():
        at = int(fields.store_host_at[row])
        width = 20 if fields.sys_flag[row] & layout.SYS_FLAG_STORE_HOST_IPV6 else 8
        physical_offset = int(fields.head["physical_offset"][row]) & 0xFFFFFFFFFFFFFFFF
        ids[row] = f"{data[at : at + width].tobytes().hex().upper()}{physical_offset:016X}"
    return text_array(ids)


@dataclass(frozen=True, slots=True)
class _Properties:
    """The properties of all rows of a batch, as a flat list with one entry per property, in the order of the
    rows."""

    row_count: int
    rows: Ints
    """For each property entry, the number of the row (message) to which the property belongs, in ascending
    order."""
    codes: NDArray[np.int32]
    """For each property entry: the index of the property's name in `names`."""
    names: list[str]
    segments: pa.Array
    """The text of all property entries, with four segments per entry: name, 0x01, value, 0x02. The name of entry i is
    segment 4i, and the value is segment 4i + 2."""

    def column(self, name: str) -> pa.Array:
        """Return the value of property `name` in each row. The value is null if the row does not have the
        property."""
        if name not in self.names:
            return pa.nulls(self.row_count, pa.string())
        pieces = np.flatnonzero(self.codes == self.names.index(name))
        # No row has a property name twice. So if this property has as many entries as there are rows, each row has
        # exactly one entry, in the order of the rows.
        if len(pieces) == self.row_count:
            return self.segments.take(int_array(4 * pieces + 2))
        indices = np.zeros(self.row_count, dtype=np.int64)
        absent = np.ones(self.row_count, dtype=bool)
        indices[self.rows[pieces]] = 4 * pieces + 2
        absent[self.rows[pieces]] = False
        return self.segments.take(int_array(indices, absent))

    def user_map(self) -> pa.MapArray:
        """Return each row's properties as a map, without the reserved properties."""
        of_user = np.array([name not in RESERVED_PROPERTIES for name in self.names], dtype=bool)
        pieces = np.flatnonzero(of_user[self.codes]) if of_user.any() else np.zeros(0, dtype=np.int64)
        counts = np.bincount(self.rows[pieces], minlength=self.row_count)
        return pa.MapArray.from_arrays(
            _offsets(counts), self.segments.take(int_array(4 * pieces)), self.segments.take(int_array(4 * pieces + 2))
        )


def _offsets(counts: NDArray[np.int64]) -> pa.Array:
    """Return the offsets of an Arrow list or map column. `counts`: the number of elements in each row."""
    offsets = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=offsets[1:])
    return int_array(offsets)


def _split_properties(column: pa.Array) -> _Properties | None:
    """Split the property bytes of each row. Returns None if a row has malformed or repeated properties, for which the
    rules of `decode_properties` are needed."""
    rows = len(column)
    try:
        # The result of this cast is not used. The cast checks the texts: it raises an error if a text is not UTF-8.
        column.cast(pa.string())
    except pa.ArrowInvalid:
        return None
    # Read the Arrow buffers of the column with the records' property texts directly. The property text of row i is
    # text[bounds[i]:bounds[i + 1]].
    _, offsets_buffer, text_buffer = column.buffers()
    bounds = np.frombuffer(offsets_buffer, dtype=np.int32)[: rows + 1].astype(np.int64)
    text = np.frombuffer(text_buffer, dtype=np.uint8)[: bounds[-1]] if bounds[-1] else np.zeros(0, dtype=np.uint8)
    row_ends = bounds[1:]
    # `ends`: the position of the separator 0x02 that ends each property. `nexts`: the position after each property's
    # 0x02, where the next property begins.
    ends = np.flatnonzero(text == 2)
    nexts = ends + 1
    filled = row_ends[row_ends > bounds[:-1]]
    unterminated = filled[text[filled - 1] != 2]
    if len(unterminated):  # the property text of a row may lack the 0x02 after its last property
        ends = np.sort(np.concatenate([ends, unterminated]))
        nexts = np.minimum(ends + 1, row_ends[np.searchsorted(row_ends, ends)])
    # `marks`: the positions of the separator 0x01, which is between the name and the value of a property. Return None
    # unless each property has exactly one 0x01, and a name and a value that are not empty.
    marks = np.flatnonzero(text == 1)
    starts = np.concatenate([np.zeros(1, dtype=np.int64), nexts])
    if len(marks) != len(ends) or not ((starts[:-1] < marks) & (marks + 1 < ends)).all():
        return None
    # Make an Arrow array of texts with four entries per property (name, 0x01, value, 0x02), over the same bytes without
    # a copy.
    bounds_of_parts = np.empty(4 * len(marks) + 1, dtype=np.int32)
    for part, positions in enumerate((starts, marks, marks + 1, ends)):
        bounds_of_parts[part::4] = positions
    buffers = [None, pa.py_buffer(bounds_of_parts), pa.py_buffer(text)]
    segments = pa.Array.from_buffers(pa.string(), 4 * len(marks), buffers)
    names = segments.take(int_array(np.arange(0, 4 * len(marks), 4))).dictionary_encode()
    codes = numbers_of(names.indices, np.int32)
    # `pieces_up_to`: for each row, the number of properties of all rows up to this row's end. `piece_rows`, computed
    # from these numbers: for each property, its row.
    pieces_up_to = np.searchsorted(nexts, row_ends, side="right")
    piece_rows = np.repeat(np.arange(rows), np.diff(pieces_up_to, prepend=0))
    if _has_repeated_names(piece_rows, codes):
        return None
    return _Properties(rows, piece_rows, codes, names.dictionary.to_pylist(), segments)


def _has_repeated_names(rows: Ints, codes: NDArray[np.int32]) -> bool:
    """True if a row has a property name twice. `rows` and `codes`: the row number and the name code of each
    property."""
    # `codes`: the number (code) of each property's name. If the codes ascend within each row, no row has a name twice,
    # and the slow check below is not needed. Codes ascend in most batches, because all rows have the same property
    # names in the same order.
    if ((codes[1:] > codes[:-1]) | (rows[1:] != rows[:-1])).all():
        return False
    # Sort the properties by name, and by row within each name, so that repeated names of a row are adjacent.
    order = np.argsort(codes, kind="stable")
    codes, rows = codes[order], rows[order]
    return bool(((codes[1:] == codes[:-1]) & (rows[1:] == rows[:-1])).any())


def _split_keys(column: pa.Array) -> pa.Array:
    """Split each row's KEYS value into a list of keys at spaces. Empty keys are dropped, and a missing value gives an
    empty list."""
    if column.null_count == len(column):
        return pa.ListArray.from_arrays(_offsets(np.zeros(len(column), np.int64)), text_array([]))
    tokens = pc.split_pattern(column.drop_null(), " ")
    counts = np.zeros(len(column), dtype=np.int64)
    counts[mask_of(column.is_valid())] = numbers_of(tokens.value_lengths(), np.int32)
    keys = tokens.flatten()
    filled = pc.not_equal(keys, _NO_TEXT)
    if filled.true_count < len(keys):
        rows = np.repeat(np.arange(len(column)), counts)
        counts = np.bincount(rows[mask_of(filled)], minlength=len(column))
        keys = keys.filter(filled)
    return pa.ListArray.from_arrays(_offsets(counts), keys)


def _decode_rows(data: Bytes, starts: Ints, order: _Order, bodies: Bodies) -> pa.RecordBatch:
    """Decode records by creating a message for each record, in cases that the faster functions do not support."""
    messages = read_messages(data.data, starts, broker_name=order.broker_name, check_crc=False)
    keys, pairs = [message.keys for message in messages], [message.properties for message in messages]
    makers: dict[str, Callable[[], pa.Array]] = {
        "topic": lambda: text_array([message.topic for message in messages]),
        "broker_name": lambda: text_array([order.broker_name] * len(messages)),
        "queue_id": lambda: int_array(np.array([message.queue_id for message in messages], np.int32)),
        "queue_offset": lambda: int_array(np.array([message.queue_offset for message in messages], np.int64)),
        "tags": lambda: text_array([message.tags for message in messages]),
        "keys": lambda: pa.ListArray.from_arrays(_lengths(keys), text_array([key for row in keys for key in row])),
        "properties": lambda: pa.MapArray.from_arrays(
            _lengths(pairs),
            text_array([name for row in pairs for name in row]),
            text_array([value for row in pairs for value in row.values()]),
        ),
        "born_timestamp": lambda: _timestamps(np.array([message.born_timestamp_ms for message in messages], np.int64)),
        "store_timestamp": lambda: _timestamps(
            np.array([message.store_timestamp_ms for message in messages], np.int64)
        ),
        "message_id": lambda: text_array([message.message_id for message in messages]),
        "reconsume_times": lambda: int_array(np.array([message.reconsume_times for message in messages], np.int32)),
        **bodies.makers(order.body_type),
    }
    return pa.RecordBatch.from_arrays([makers[name]() for name in order.schema.names], schema=order.schema)


def _lengths(rows: Sequence[Sized]) -> pa.Array:
    """Return the offsets array of an Arrow list or map column. In this column, row i has as many elements as
    `rows[i]`."""
    return _offsets(np.array([len(row) for row in rows], np.int64))
