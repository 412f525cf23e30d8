"""Tests that converting a table to messages by columns gives the same messages as converting it row by row, and refuses
the same rows."""

from __future__ import annotations

import re
import sys
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings, strategies as st

from raymq.client.producer.checks.batches import check_record_size
from raymq.client.producer.queue_selector import select_queue_by_hash
from raymq.client.producer.table_rows import TableRows
from raymq.common.errors import MessageIllegalError
from raymq.common.message import MAX_PROPERTIES_BYTES, Message
from raymq.records.format.encode import encode_batch
from raymq.records.format.hashing import java_hash, tags_code
from raymq.records.kernels.byte_column import ByteColumn
from raymq.records.kernels.message_columns import MessageColumns
from raymq.records.kernels.property_text import java_hashes, long_hashes
from tests.support.cases import examples

LEGAL = st.text("abcé漢𝄞 ", max_size=6).map(lambda text: f"x{text}x")
ODD = st.text("ab *|\x01\x02\t\x1c\x85\xa0\u2003\u3000é漢", max_size=4)
KINDS = st.sampled_from([pa.string(), pa.large_string(), pa.string_view()])


@st.composite
def tables(draw: st.DrawFn) -> pa.Table:
    """Hypothesis strategy for tables with every column type, slices and several chunks. Most rows are legal."""
    odd = draw(st.booleans())
    text = LEGAL | ODD if odd else LEGAL
    count = draw(st.integers(1, 8))
    kind = draw(KINDS)
    key = text if odd else LEGAL.map(lambda value: value.replace(" ", ""))
    keys_kind = draw(st.sampled_from([kind, pa.list_(kind), pa.large_list(kind)]))
    keys = st.none() | (key if keys_kind == kind else st.lists(st.none() | key if odd else key, max_size=3))
    names = st.sampled_from(["a", "b", "é", "KEYS", "CLUSTER"]) | text if odd else st.sampled_from(["a", "b", "é", "c"])
    pairs = st.lists(st.tuples(names, st.none() | text if odd else text), max_size=3)
    if not odd:
        pairs = st.dictionaries(names, text, max_size=3).map(lambda values: list(values.items()))
    body = st.binary(max_size=9) if odd else st.binary(min_size=1, max_size=9)
    columns: dict[str, tuple[st.SearchStrategy[Any], pa.DataType]] = {
        "body": (st.none() | body if odd else body, draw(st.sampled_from([pa.binary(), pa.binary_view()]))),
        "tags": (st.none() | (text if odd else LEGAL), kind),
        "keys": (keys, keys_kind),
        "properties": (st.none() | pairs, pa.map_(kind, kind)),
        "sharding_key": (st.none() | st.text(max_size=5), kind),
    }
    if draw(st.booleans()):
        columns["sharding_key"] = (st.none() | st.integers(-(2**63), 2**63 - 1), pa.int64())
    chosen = ["body", *draw(st.lists(st.sampled_from(["tags", "keys", "properties", "sharding_key"]), unique=True))]
    chunks = []
    for _ in range(draw(st.integers(1, 2))):
        arrays = [
            pa.array(draw(st.lists(columns[n][0], min_size=count, max_size=count)), columns[n][1]) for n in chosen
        ]
        chunks.append(pa.record_batch(arrays, chosen).slice(draw(st.integers(0, count - 1))))
    return pa.Table.from_batches(chunks)


def one_by_one(table: pa.Table) -> tuple[list[Message], str]:
    """Convert the table's rows to messages, up to the first illegal row. Returns the messages, and the error of that
    row."""
    messages: list[Message] = []
    for row, values in enumerate(table.to_pylist()):
        pairs = values.get("properties") or []
        try:
            if values["body"] is None:
                raise MessageIllegalError("the message body is null")
            if len(dict(pairs)) < len(pairs):
                raise MessageIllegalError("a property name occurs twice")
            message = Message("t", values["body"], values.get("tags"), values.get("keys") or (), dict(pairs))
            check_record_size(message)
        except MessageIllegalError as error:
            return messages, f"row {row}: {error}; no row was sent"
        messages.append(message)
    return messages, ""


@settings(max_examples=examples(150))
@given(tables())
@example(pa.table({"body": [b"a", b"b"], "keys": pa.array([None, ""])}))
def test_rows_read_by_columns_equal_rows_read_one_by_one(table: pa.Table) -> None:
    rows = TableRows("t", table)
    expected, refusal = one_by_one(table)
    if refusal:
        with pytest.raises(MessageIllegalError, match=f"^{re.escape(refusal)}$"):
            rows.check(0, rows.count, 1000)
        return
    rows.check(0, rows.count, 1000)
    columns, hashes, keyed = rows.read(0, rows.count)
    assert list(columns) == expected
    made = encode_batch(expected, 0, born_host=("::1", 1), born_timestamp_ms=1, message_ids=[""] * len(expected))
    texts = columns.properties.tolist() if columns.properties is not None else [b""] * len(expected)
    ends = np.cumsum(made.sizes).tolist()
    for text, end in zip(texts, ends, strict=True):
        assert made.records[:end].endswith(len(text).to_bytes(2) + text)
    codes = np.zeros(len(expected), np.int64) if columns.tag_codes is None else columns.tag_codes
    assert codes.tolist() == made.tag_codes.tolist()
    if hashes is None or keyed is None:
        assert "sharding_key" not in table.column_names
        return
    queues = range(7)
    for value, number, has_key in zip(table["sharding_key"].to_pylist(), hashes.tolist(), keyed.tolist(), strict=True):
        assert has_key == (value is not None)
        if has_key:
            assert queues[abs(number) % 7] == select_queue_by_hash(queues, expected[0], value)  # type: ignore[arg-type]


@given(tables(), st.data())
def test_slices_of_columns_equal_the_messages_of_their_rows(table: pa.Table, data: st.DataObject) -> None:
    rows = TableRows("t", table)
    expected, refusal = one_by_one(table)
    if refusal:
        return
    columns, _, _ = rows.read(0, rows.count)
    part = data.draw(st.slices(len(expected)))
    assert list(columns[part]) == expected[part]
    order = data.draw(st.permutations(range(len(expected))))
    assert list(columns.take(np.array(order))) == [expected[row] for row in order]
    plain = MessageColumns("t", ByteColumn.of([b"plain"]))
    assert list(MessageColumns.chained([columns[:1], plain, columns[1:]])) == [expected[0], plain[0], *expected[1:]]


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=9)))
def test_hashes_of_many_texts_equal_the_hash_of_each(texts: list[str]) -> None:
    column = ByteColumn.of([text.encode() for text in texts])
    assert java_hashes(column).tolist() == [java_hash(text) for text in texts]
    half = len(texts) // 2
    assert java_hashes(column.slice(half, len(texts))).tolist() == [tags_code(text) for text in texts[half:]]


def test_numbers_of_64_bits_hash_as_in_java() -> None:
    # The expected values are the results of Java's Long.hashCode. Long.hashCode(1L << 32) is 1,
    # Long.hashCode(-2147483649L) is -2147483648, and the hash code of an Integer is its value.
    numbers = np.array([5, -(2**31), 2**31 - 1, 1 << 32, -(2**31) - 1, -(2**63)], np.int64)
    assert long_hashes(numbers).tolist() == [5, -(2**31), 2**31 - 1, 1, -(2**31), -(2**31)]


@pytest.mark.parametrize("space", [chr(code) for code in range(sys.maxunicode) if chr(code).isspace()])
@pytest.mark.parametrize("tag", ["{}x", "x{}", "{}"])
def test_every_white_space_at_the_end_of_a_tag_is_found(space: str, tag: str) -> None:
    table = pa.table({"body": [b"x", b"y"], "tags": ["good", tag.format(space)]})
    with pytest.raises(MessageIllegalError, match="row 1: "):
        TableRows("t", table).check(0, 2, 1000)


@pytest.mark.parametrize("size", [MAX_PROPERTIES_BYTES - 900, MAX_PROPERTIES_BYTES - 100, MAX_PROPERTIES_BYTES])
@pytest.mark.parametrize("column", ["tags", "keys", "properties"])
def test_a_row_fits_a_record_by_columns_as_it_does_alone(size: int, column: str) -> None:
    kind = pa.map_(pa.string(), pa.string()) if column == "properties" else pa.string()
    value: Any = [("n", "v" * size)] if column == "properties" else "v" * size
    table = pa.table({"body": [b"x", b"y"], column: pa.array([None, value], kind)})
    _, refusal = one_by_one(table)
    assert bool(refusal) == (size > MAX_PROPERTIES_BYTES - 101)
    if refusal:
        with pytest.raises(MessageIllegalError, match=f"^{re.escape(refusal)}$"):
            TableRows("t", table).check(0, 2, 1000)
    else:
        TableRows("t", table).check(0, 2, 1000)


def test_entries_of_a_null_list_are_no_keys() -> None:
    keys = pa.ListArray.from_arrays([0, 2, 4], pa.array(["a", "b", "c", "d"]), mask=pa.array([True, False]))
    columns, _, _ = TableRows("t", pa.table({"body": [b"x", b"y"], "keys": keys})).read(0, 2)
    assert [message.keys for message in columns] == [(), ("c", "d")]


def test_text_that_is_not_utf8_is_refused() -> None:
    text = pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff"]).buffers())
    for name in ("body", "tags", "keys", "sharding_key"):
        table = pa.table({"body": [b"x"], name: text} if name != "body" else {"body": text})
        with pytest.raises(MessageIllegalError, match=f"column '{name}' has text that is not UTF-8"):
            TableRows("t", table).check(0, 1, 1000)
