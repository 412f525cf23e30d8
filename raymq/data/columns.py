"""The columns of a topic's dataset: the columns of `ray.data.read_kafka`, followed by raymq's own columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
from ray.data._internal.arrow_block import _BATCH_SIZE_PRESERVING_STUB_COL_NAME

from raymq.common.errors import InvalidArgumentError
from raymq.records.kernels.byte_column import int_array, numbers_of

TIMESTAMP_CREATE_TIME: Final = 1
"""The value of `timestamp_type` for every message, in Kafka's numbering: `timestamp` is the time at which the producer
created the message."""

SCHEMA: Final = pa.schema(
    [
        pa.field("offset", pa.int64()),
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("topic", pa.string()),
        pa.field("partition", pa.int32()),
        pa.field("timestamp", pa.int64()),
        pa.field("timestamp_type", pa.int32()),
        pa.field("headers", pa.map_(pa.string(), pa.binary())),
        pa.field("broker_name", pa.string()),
        pa.field("tags", pa.string()),
        pa.field("keys", pa.list_(pa.string())),
        pa.field("message_id", pa.string()),
        pa.field("store_timestamp", pa.int64()),
        pa.field("reconsume_times", pa.int32()),
    ]
)
"""The columns of `read_topic`. Times are in ms since 1970. `value` is the body, `headers` are the properties. `key` is
the first of the `keys`; null if the message has no keys."""
NAMED_COLUMNS: Final = [pa.field("error", pa.string())]
"""Columns that a dataset has only if they are requested by name. `error` is the reason why a message is unreadable;
null for readable messages."""
_FIELDS: Final = {field.name: field for field in (*SCHEMA, *NAMED_COLUMNS)}

_STUB: Final = pa.field(_BATCH_SIZE_PRESERVING_STUB_COL_NAME, pa.null())
"""The placeholder column that Ray Data uses for blocks with rows but no columns, for example in a count."""


def schema_of(columns: Sequence[str]) -> pa.Schema:
    """Return the schema with the given columns of SCHEMA and NAMED_COLUMNS, in the given order. Raises
    InvalidArgumentError if a column does not exist or is named twice."""
    unknown = [name for name in columns if name not in _FIELDS]
    if unknown:
        raise InvalidArgumentError(
            f"unknown column {', '.join(map(repr, unknown))}; the columns of a topic are {', '.join(_FIELDS)}"
        )
    if len(set(columns)) < len(columns):
        raise InvalidArgumentError(f"columns={list(columns)!r} names a column twice")
    return pa.schema([_FIELDS[name] for name in columns])


def needed_of(columns: Sequence[str]) -> list[str]:
    """Return the columns of a scan (raymq.records.kernels.columns) from which the given dataset columns are computed.
    The result has at least one column."""
    return sorted({_SOURCES[name] for name in columns} - {""}) or ["queue_offset"]


def to_block(batch: pa.RecordBatch, columns: Sequence[str]) -> pa.RecordBatch:
    """Convert a batch of a scan into a block with the given dataset columns. The batch must have at least the columns
    that `needed_of` returns."""
    if not columns:
        return pa.RecordBatch.from_arrays([pa.nulls(batch.num_rows)], schema=pa.schema([_STUB]))
    return pa.RecordBatch.from_arrays([_column(batch, name) for name in columns], schema=schema_of(columns))


def _column(batch: pa.RecordBatch, name: str) -> pa.Array:
    if name == "timestamp_type":
        return int_array(np.full(batch.num_rows, TIMESTAMP_CREATE_TIME, np.int32))
    column = batch.column(_SOURCES[name])
    convert = _CONVERTED.get(name)
    return column if convert is None else convert(column)


def _first_keys(keys: pa.ListArray) -> pa.Array:
    offsets = numbers_of(keys.offsets, np.int32).astype(np.int64)
    return keys.values.cast(pa.binary()).take(int_array(offsets[:-1], offsets[1:] == offsets[:-1]))


def _milliseconds(times: pa.Array) -> pa.Array:
    return times.cast(pa.timestamp("ms", tz="UTC")).view(pa.int64())


_SOURCES: Final = {
    "offset": "queue_offset",
    "key": "keys",
    "value": "body",
    "topic": "topic",
    "partition": "queue_id",
    "timestamp": "born_timestamp",
    "timestamp_type": "",
    "headers": "properties",
    "broker_name": "broker_name",
    "tags": "tags",
    "keys": "keys",
    "message_id": "message_id",
    "store_timestamp": "store_timestamp",
    "reconsume_times": "reconsume_times",
    "error": "error",
}
_CONVERTED: Final[dict[str, Callable[[pa.Array], pa.Array]]] = {
    "key": _first_keys,
    "timestamp": _milliseconds,
    "store_timestamp": _milliseconds,
    "headers": lambda properties: properties.cast(SCHEMA.field("headers").type),
}
