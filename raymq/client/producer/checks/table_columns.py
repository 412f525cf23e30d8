"""The columns of an Arrow table that can be sent: their names and types, and the conversion of types that hold the same
values in another layout.

pandas and polars give categories as dictionaries, and other libraries give list views or byte strings of fixed size.
Such a column is accepted if its values have a type that can be sent. `plain_type` returns the type of the values, and
`plain_column` converts a column.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raymq.common.errors import InvalidArgumentError, MessageIllegalError
from raymq.records.kernels.byte_column import int_array

_PANDAS_INDEX: Final = re.compile(r"__index_level_\d+__")
"""The name that pandas gives the column of an index without a name, for example after rows were filtered out."""
_LIST_KINDS: Final = (pa.types.is_list_view, pa.types.is_large_list_view, pa.types.is_fixed_size_list)


_WITHOUT_VIEWS: Final = {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}
"""For each Arrow view type, the plain type with the same values. A dictionary column whose values have a view type is
converted to the plain type, because Arrow's `take` does not support view types."""


def sendable_columns(table: pa.Table) -> pa.Table:
    """Return a table with the columns that are sent, without pandas' unnamed index. Columns other than `body` have
    plain types; `plain_column` converts bodies later, some at a time. Raises InvalidArgumentError, which names all
    columns that cannot be sent, and MessageIllegalError for a sharding key of more than 63 bits and a sign."""
    unnamed = [name for name in table.column_names if _PANDAS_INDEX.fullmatch(name)]
    table = table.drop_columns(unnamed) if unnamed else table
    _check_columns(table.schema)
    table = plain_table(table, except_column="body")
    if "sharding_key" in table.column_names and pa.types.is_uint64(table.schema.field("sharding_key").type):
        number = table.column_names.index("sharding_key")
        table = table.set_column(number, "sharding_key", _signed(table.column(number)))
    return table


def plain_table(table: pa.Table, *, except_column: str = "") -> pa.Table:
    """Return the table with plain columns (`plain_column`), except the column `except_column`."""
    for number, field in enumerate(table.schema):
        if field.name != except_column and field.type != plain_type(field.type):
            table = table.set_column(number, field.name, plain_column(table.column(number)))
    return table


def plain_type(kind: pa.DataType) -> pa.DataType:
    """Return the plain Arrow type with the same values: without dictionaries, run-end encoding, list views and fixed
    sizes."""
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        values = plain_type(kind.value_type)
        return _WITHOUT_VIEWS.get(values, values)
    if pa.types.is_large_list(kind) or pa.types.is_large_list_view(kind):
        return pa.large_list(plain_type(kind.value_type))
    if pa.types.is_list(kind) or any(is_kind(kind) for is_kind in _LIST_KINDS):
        return pa.list_(plain_type(kind.value_type))
    if pa.types.is_map(kind):
        return pa.map_(plain_type(kind.key_type), plain_type(kind.item_type))
    return pa.binary() if pa.types.is_fixed_size_binary(kind) else kind


def plain_column(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Convert a column to the type `plain_type(column.type)`, and return it. Its values stay the same."""
    return pa.chunked_array(map(_plain, column.chunks), plain_type(column.type))


def is_text(kind: pa.DataType) -> bool:
    """True if a column's type is one of Arrow's string types. False for a dictionary of strings."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _plain(array: pa.Array) -> pa.Array:
    kind, plain = array.type, plain_type(array.type)
    if kind == plain:
        return array
    if pa.types.is_dictionary(kind):
        values = array.dictionary
        return _plain(values.cast(_WITHOUT_VIEWS.get(values.type, values.type)).take(array.indices))
    if pa.types.is_run_end_encoded(kind):
        return _plain(pc.run_end_decode(array))
    if any(is_kind(kind) for is_kind in _LIST_KINDS):
        # Convert the list view here, because Arrow's own cast of a list view with nulls loses entries (pyarrow 26.0.1).
        lengths = np.asarray(pc.fill_null(pc.list_value_length(array), 0)).astype(np.int64)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        made = pa.LargeListArray.from_arrays(int_array(offsets), _plain(array.flatten()), mask=array.is_null())
        return made.cast(plain)
    return array.cast(plain)


def _signed(keys: pa.ChunkedArray) -> pa.ChunkedArray:
    try:
        return keys.cast(pa.int64())
    except pa.ArrowInvalid:
        row = pc.index(pc.greater(keys, pa.scalar(2**63 - 1, pa.uint64())), True).as_py()
        raise MessageIllegalError(
            f"row {row}: the sharding key {keys[row].as_py()} is greater than 2**63 - 1; no row was sent"
        ) from None


def _is_list_of_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind)) and is_text(kind.value_type)


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind))


def _is_text_map(kind: pa.DataType) -> bool:
    return bool(pa.types.is_map(kind)) and is_text(kind.key_type) and is_text(kind.item_type)


_KINDS: Final[dict[str, tuple[Callable[[pa.DataType], Any], str]]] = {
    "body": (lambda kind: _is_bytes(kind) or is_text(kind), "binary or string"),
    "tags": (is_text, "string"),
    "keys": (lambda kind: is_text(kind) or _is_list_of_text(kind), "string or list of strings"),
    "properties": (_is_text_map, "map of string to string"),
    "sharding_key": (lambda kind: is_text(kind) or pa.types.is_integer(kind), "string or integer"),
}
"""For each column name: a function that checks the type of the column's values, and the name of the expected
type."""


def _check_columns(schema: pa.Schema) -> None:
    """Check a table's columns. Raises one InvalidArgumentError that names all faults."""
    wrong = [f"column {name!r} is unknown" for name in schema.names if name not in _KINDS]
    wrong += [f"column {name!r} exists twice" for name, count in Counter(schema.names).items() if count > 1]
    wrong += [] if "body" in schema.names else ["column 'body' is missing"]
    for field in schema:
        if field.name in _KINDS and not pa.types.is_null(plain_type(field.type)):
            fits, expected = _KINDS[field.name]
            if not fits(plain_type(field.type)):
                wrong.append(f"column {field.name!r} is {field.type}, not {expected}")
    if wrong:
        raise InvalidArgumentError(f"this table cannot be sent: {'; '.join(wrong)} (columns: {', '.join(_KINDS)})")
