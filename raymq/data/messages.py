"""Converts rows of a dataset into messages: the fields that become the body, keys and properties, and the table that a
writer accepts. The module has no side effects.

A message's body is the row as JSON, or one field of the row. Its key, tags, properties and times come from other
fields. The table has the columns of `Producer.send_table`, and `deliver_time`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Literal

import msgspec
import numpy as np
import pyarrow as pa

from raymq.client.producer.checks.table_columns import plain_table
from raymq.common.errors import InvalidArgumentError, MessageIllegalError
from raymq.records.kernels.byte_column import ByteColumn, text_array

Serializer = Literal["json", "string", "bytes"]
_SERIALIZERS: Final = ("json", "string", "bytes")
_TEXTS: Final = pa.map_(pa.string(), pa.string())


@dataclass(frozen=True, slots=True)
class MessageFields:
    """The names of the row's fields that become the body, the key, the tags and other parts of a message. None for a
    part that no field provides. The docstring of `raymq.data.write_topic` describes the fields."""

    body: str | None = None
    key: str | None = None
    tags: str | None = None
    keys: str | None = None
    properties: str | None = None
    sharding_key: str | None = None
    deliver_at: str | None = None
    value_serializer: Serializer = "json"
    key_serializer: Serializer = "string"

    def __post_init__(self) -> None:
        for option, value in (("value_serializer", self.value_serializer), ("key_serializer", self.key_serializer)):
            if value not in _SERIALIZERS:
                raise InvalidArgumentError(f"{option}={value!r} must be one of {', '.join(_SERIALIZERS)}")
        if self.body is None and self.value_serializer != "json":
            raise InvalidArgumentError(
                f"value_serializer={self.value_serializer!r} applies to one field: pass body_field, or write "
                "whole rows as 'json'"
            )

    def check(self, names: Sequence[str]) -> None:
        """Raise InvalidArgumentError unless `names`, the columns of the rows, include each field from which a part of
        the message is made."""
        given = [(one.name, getattr(self, one.name)) for one in fields(self) if not one.name.endswith("_serializer")]
        missing = [f"{option}_field={name!r}" for option, name in given if name is not None and name not in names]
        if missing:
            raise InvalidArgumentError(
                f"the rows have no field {', '.join(missing)}; their fields are {', '.join(names) or 'none'}"
            )


def to_messages(rows: pa.Table, chosen: MessageFields) -> pa.Table:
    """Convert rows into a table of messages, in the same order. Raises InvalidArgumentError if a field does not exist
    or has an unsuitable type, and MessageIllegalError if a value cannot be serialized."""
    chosen.check(rows.column_names)
    rows = plain_table(rows)
    columns: dict[str, pa.ChunkedArray | pa.Array] = {"body": _bodies(rows, chosen)}
    if chosen.tags is not None:
        columns["tags"] = rows[chosen.tags]
    keys = None if chosen.key is None else _texts(chosen.key, rows[chosen.key], chosen.key_serializer)
    if keys is not None or chosen.keys is not None:
        columns["keys"] = _keys(keys, None if chosen.keys is None else rows[chosen.keys])
    if chosen.sharding_key is not None:
        columns["sharding_key"] = _texts(chosen.sharding_key, rows[chosen.sharding_key], "string")
    elif keys is not None:
        columns["sharding_key"] = keys
    if chosen.properties is not None:
        columns["properties"] = _properties(rows[chosen.properties])
    if chosen.deliver_at is not None:
        columns["deliver_time"] = _times(chosen.deliver_at, rows[chosen.deliver_at])
    return pa.table(columns)


def _bodies(rows: pa.Table, chosen: MessageFields) -> pa.Array | pa.ChunkedArray:
    if chosen.body is None:
        return _json(rows.to_pylist(), "the row")
    column = rows[chosen.body]
    # check for nulls before the type: in a block with only nulls, the column's Arrow type is null
    if column.null_count:
        raise MessageIllegalError(
            f"field {chosen.body!r} is null in {column.null_count} of {len(column)} rows, but a message needs a "
            "body: filter these rows out, or fill the field"
        )
    if _is_text(column.type) or _is_binary(column.type):
        return column
    if chosen.value_serializer == "json":
        return _json(column.to_pylist(), f"field {chosen.body!r}")
    return _texts(chosen.body, column, chosen.value_serializer)


def _json(values: Sequence[Any], what: str) -> pa.Array:
    try:
        return ByteColumn.of(list(map(_ENCODER.encode, values))).array().cast(pa.binary())
    except (TypeError, ValueError) as error:
        raise MessageIllegalError(f"{what} cannot be written as JSON ({error}); pass body_field") from None


def _plain(value: Any) -> Any:
    """Convert a value into a type that JSON supports. An array or tensor becomes a list. Raises TypeError if JSON does
    not support the value."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    raise TypeError(f"JSON cannot represent a {type(value).__name__}")


_ENCODER: Final = msgspec.json.Encoder(enc_hook=_plain)


def _texts(name: str, column: pa.ChunkedArray, serializer: Serializer) -> pa.Array | pa.ChunkedArray:
    """Convert a column into text; null stays null. Bytes are decoded as UTF-8. Raises MessageIllegalError if bytes are
    not valid UTF-8."""
    if _is_binary(column.type):
        try:
            return column.cast(pa.large_binary()).cast(pa.large_string()).cast(pa.string())
        except pa.ArrowInvalid:
            raise MessageIllegalError(f"field {name!r} has bytes that are not UTF-8 text") from None
    if _is_text(column.type):
        return column if serializer != "json" else _each(column, lambda value: _ENCODER.encode(value).decode())
    if pa.types.is_integer(column.type):
        return column.cast(pa.string())
    encode = (lambda value: _ENCODER.encode(value).decode()) if serializer == "json" else str
    return _each(column, encode)


def _each(column: pa.ChunkedArray, text_of: Callable[[Any], str]) -> pa.Array:
    return text_array([None if value is None else text_of(value) for value in column.to_pylist()])


def _keys(first: pa.Array | pa.ChunkedArray | None, more: pa.ChunkedArray | None) -> pa.Array | pa.ChunkedArray:
    """Return the keys of each message, combined from two columns: the key in `first`, then the keys in `more` that
    differ from this key."""
    if first is None:
        assert more is not None
        return more if _is_list(more.type) or _is_text(more.type) else more.cast(pa.string())
    if more is None:
        return first
    pairs = zip(first.to_pylist(), more.to_pylist(), strict=True)
    lists = [[*([] if one is None else [one]), *(key for key in _as_list(rest) if key != one)] for one, rest in pairs]
    return pa.array(lists, pa.list_(pa.string()))


def _as_list(keys: Any) -> list[str]:
    return [] if keys is None else [keys] if isinstance(keys, str) else list(keys)


def _properties(column: pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Convert a column of maps or structs into properties. If a field of a struct is null, the property is
    omitted."""
    if not pa.types.is_struct(column.type):
        return column.cast(_TEXTS) if pa.types.is_map(column.type) else column
    rows = [
        None if row is None else [(name, _property(value)) for name, value in row.items() if value is not None]
        for row in column.to_pylist()
    ]
    return pa.array(rows, _TEXTS)


def _property(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _times(name: str, column: pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    if pa.types.is_timestamp(column.type) or pa.types.is_null(column.type):
        return column
    if pa.types.is_integer(column.type):
        return column.cast(pa.int64()).cast(pa.timestamp("ms"))
    raise InvalidArgumentError(
        f"deliver_at_field={name!r} has type {column.type}; it must be a timestamp, or an integer in ms since 1970"
    )


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_binary(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind))


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))
