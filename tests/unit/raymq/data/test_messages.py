"""Tests of converting the rows of a table to messages: each kind of field, and values that are refused."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from ray.data._internal.object_extensions.arrow import ArrowPythonObjectArray
from ray.data._internal.tensor_extensions.arrow import ArrowTensorArray

from raymq.client.producer.table_rows import TableRows
from raymq.common.errors import InvalidArgumentError, MessageIllegalError
from raymq.data.messages import MessageFields, to_messages

# Ignore deprecation warnings that Ray itself raises.
pytestmark = pytest.mark.filterwarnings("ignore:.* is deprecated:DeprecationWarning:ray.data.context")


def messages(rows: pa.Table | dict[str, Any], **options: Any) -> dict[str, list[Any]]:
    """Convert the rows of a table to messages. Returns the columns that a producer receives."""
    table = to_messages(rows if isinstance(rows, pa.Table) else pa.table(rows), MessageFields(**options))
    plain = table.drop_columns(["deliver_time"]) if "deliver_time" in table.column_names else table
    TableRows("orders", plain).check(0, table.num_rows, 1 << 20)
    return {name: table[name].to_pylist() for name in table.column_names}


def test_a_whole_row_is_json() -> None:
    rows = {
        "a": [1, None],
        "b": ["x", "ü"],
        "c": [b"\x00\xff", None],
        "d": [datetime(2026, 1, 2, 3), None],
        "e": [[1], []],
    }
    [first, second] = map(json.loads, messages(rows)["body"])
    assert first == {"a": 1, "b": "x", "c": "AP8=", "d": "2026-01-02T03:00:00", "e": [1]}
    assert second == {"a": None, "b": "ü", "c": None, "d": None, "e": []}


def test_a_tensor_is_a_list() -> None:
    tensors = ArrowTensorArray.from_numpy(np.arange(4, dtype=np.int64).reshape(2, 2))
    assert messages({"x": tensors})["body"] == [b'{"x":[0,1]}', b'{"x":[2,3]}']


@pytest.mark.parametrize(
    ("column", "serializer", "expected"),
    [
        (pa.array([b"\x00x"]), "json", [b"\x00x"]),
        (pa.array([b"\x00x"], pa.large_binary()), "bytes", [b"\x00x"]),
        (pa.array(["text"]), "json", ["text"]),
        (pa.array([7]), "json", [b"7"]),
        (pa.array([7]), "string", ["7"]),
        (pa.array([[1, 2]]), "json", [b"[1,2]"]),
        (pa.array([{"a": 1}]), "json", [b'{"a":1}']),
        (pa.array([1.5]), "bytes", ["1.5"]),
    ],
)
def test_a_body_field_is_taken_as_it_is_or_serialized(column: pa.Array, serializer: Any, expected: list[Any]) -> None:
    assert messages({"x": column}, body="x", value_serializer=serializer)["body"] == expected


@pytest.mark.parametrize(
    ("column", "serializer", "expected"),
    [
        (["k", None], "string", ["k", None]),
        ([b"k", None], "bytes", ["k", None]),
        ([7, None], "string", ["7", None]),
        ([True, None], "string", ["True", None]),
        (["k", None], "json", ['"k"', None]),
        ([[1, 2], None], "json", ["[1,2]", None]),
    ],
)
def test_a_key_is_the_first_key_and_the_sharding_key(column: list[Any], serializer: Any, expected: list[Any]) -> None:
    found = messages({"id": column, "x": ["a", "b"]}, body="x", key="id", key_serializer=serializer)
    assert (found["keys"], found["sharding_key"]) == (expected, expected)


def test_more_keys_follow_the_key_without_duplicates() -> None:
    rows = {"id": ["a", None, "c"], "more": [["b", "a"], ["x"], None], "x": ["1", "2", "3"]}
    assert messages(rows, body="x", key="id", keys="more")["keys"] == [["a", "b"], ["x"], ["c"]]
    assert messages(rows, body="x", keys="more")["keys"] == [["b", "a"], ["x"], None]
    texts = {"id": ["a", None], "more": ["b", None], "x": ["1", "2"]}
    assert messages(texts, body="x", key="id", keys="more")["keys"] == [["a", "b"], []]
    assert messages(texts, body="x", keys="more")["keys"] == ["b", None]


def test_a_sharding_key_may_be_another_field() -> None:
    found = messages({"id": ["a"], "shard": [7], "x": ["1"]}, body="x", key="id", sharding_key="shard")
    assert (found["keys"], found["sharding_key"]) == (["a"], ["7"])


@pytest.mark.parametrize(
    "column",
    [
        pa.array([[("a", "1"), ("b", "2")], []], pa.map_(pa.string(), pa.string())),
        pa.array([[("a", b"1"), ("b", b"2")], []], pa.map_(pa.string(), pa.binary())),
        pa.array([{"a": 1, "b": "2"}, {"a": None, "b": None}]),
        pa.array([{"a": b"1", "b": b"2"}, None]),
    ],
)
def test_properties_are_a_map_or_a_struct(column: pa.Array) -> None:
    found = messages({"more": column, "x": ["1", "2"]}, body="x", properties="more")["properties"]
    assert [dict(row or ()) for row in found] == [{"a": "1", "b": "2"}, {}]


@pytest.mark.parametrize(
    "column",
    [
        pa.array([1_700_000_000_123, None]),
        pa.array([1_700_000_000_123_000, None], pa.timestamp("us", tz="Asia/Tokyo")),
        pa.array([datetime(2023, 11, 14, 22, 13, 20, 123000), None]),
    ],
)
def test_a_time_is_ms_or_a_timestamp(column: pa.Array) -> None:
    table = to_messages(pa.table({"at": column, "x": ["1", "2"]}), MessageFields(body="x", deliver_at="at"))
    times = table["deliver_time"].cast(pa.timestamp("ms", table["deliver_time"].type.tz)).cast(pa.int64())
    assert times.to_pylist() == [1_700_000_000_123, None]


def test_tags_are_a_text() -> None:
    assert messages({"kind": ["a", None], "x": ["1", "2"]}, body="x", tags="kind")["tags"] == ["a", None]


def test_fields_that_are_not_there_are_all_named() -> None:
    with pytest.raises(InvalidArgumentError, match=r"no field body_field='b', keys_field='k'; their fields are x, y"):
        messages({"x": [1], "y": [2]}, body="b", keys="k", tags="x")


@pytest.mark.parametrize(
    "options", [{"value_serializer": "avro"}, {"key_serializer": "xml"}, {"value_serializer": "bytes"}]
)
def test_serializers_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError):
        MessageFields(**options)


def test_values_that_cannot_be_are_refused() -> None:
    with pytest.raises(MessageIllegalError, match="not UTF-8"):
        messages({"id": [b"\xff"], "x": ["1"]}, body="x", key="id")
    with pytest.raises(InvalidArgumentError, match="deliver_at_field='at' has type string"):
        messages({"at": ["soon"], "x": ["1"]}, body="x", deliver_at="at")
    with pytest.raises(MessageIllegalError, match="the row cannot be written as JSON"):
        messages({"x": ArrowPythonObjectArray.from_objects([object()])})


TEXTS = pa.array(["x", None])


@pytest.mark.parametrize("serializer", ["json", "string", "bytes"])
@pytest.mark.parametrize(
    "column",
    [TEXTS, TEXTS.cast(pa.binary()), pa.array([7, None]), pa.array([{"a": 1}, None]), pa.nulls(2)],
    ids=["text", "binary", "number", "struct", "nulls only"],
)
def test_a_null_body_is_refused_whatever_else_its_block_holds(column: pa.Array, serializer: str) -> None:
    with pytest.raises(MessageIllegalError, match="field 'body' is null in"):
        messages({"body": column}, body="body", value_serializer=serializer)


def test_an_optional_field_that_is_null_throughout_a_block_is_left_out() -> None:
    rows = {"body": ["x", "y"], "part": pa.nulls(2)}
    parts = {"tags": "part", "keys": "part", "properties": "part", "sharding_key": "part", "key": "part"}
    for serializer in ("json", "string"):
        found = messages(rows, body="body", key_serializer=serializer, **parts)
        assert {name: values for name, values in found.items() if any(values)} == {"body": ["x", "y"]}
