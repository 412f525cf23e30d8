"""Tests that a message filter selects the same messages in both evaluations: message by message, and over the bytes of
many records at once."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given, settings, strategies as st

import raymq
from raymq.records.filters.columns import FALSE, NULL, RAISES, TRUE, Evaluation, matching
from raymq.records.filters.sql import truth_of
from raymq.records.filters.text_columns import TextColumn
from raymq.records.filters.values import IncomparableError
from raymq.records.format.encode import encode_batch
from raymq.records.format.layout import decode_properties, encode_properties
from raymq.records.kernels.property_columns import find_properties
from tests.support.cases import examples

NAMES = ["a", "b", "ab", "price", "NOTE"]
TEXTS = ["x", "axb", "ax", "true", "TRUE", "5", "05", "+5", "-5", "5.0", " 5", "5.", ".5", "-0.0", "0.0", "0", "1e3"]
TEXTS += ["NaN", "Infinity", "3000000000", "2147483647", "-2147483648", "9223372036854775807", "9223372036854775808"]
TEXTS += [
    "0" * 20 + "5",
    "0x1p3",
    "7d",
    "ü",
    "it's",
    "1.2.3",
    "+",
    "-",
    ".",
    "12345678901234567890.5",
    "0.1",
    "x" * 300,
]
NUMBERS = [
    "0",
    "5",
    "1",
    "2147483648",
    "3000000000",
    "9223372036854775807",
    "5.0",
    ".5",
    "1e3",
    "0.1",
    "-5",
    "--5",
    "-.5",
]


pieces = st.lists(st.sampled_from([b"a", b"ab", b"b", b"5", b"\x01", b"\x02", b"x" * 300]), max_size=14).map(b"".join)


def quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


names = st.sampled_from(NAMES)
texts = st.one_of(st.sampled_from(TEXTS), st.from_regex(r"[+-]?[0-9]{1,12}(\.[0-9]{1,6})?", fullmatch=True))
literals = st.one_of(st.sampled_from(TEXTS).map(quoted), st.sampled_from([*NUMBERS, "TRUE", "false"]))
lists = st.lists(texts.map(quoted), min_size=1, max_size=4).map(", ".join)
numeric = st.one_of(names, names, st.sampled_from(NUMBERS), names.map("-{}".format))


def conditions(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    operands = st.one_of(names, literals, inner.map("({})".format), inner.map("-({})".format))
    return st.one_of(
        st.builds("({} {} {})".format, inner, st.sampled_from(["AND", "OR"]), inner),
        st.builds("NOT ({})".format, inner),
        st.builds("{} {} {}".format, operands, st.sampled_from(["=", "<>"]), operands),
        st.builds("{} {}".format, operands, st.sampled_from(["IS NULL", "IS NOT NULL"])),
        st.builds(
            "{} {} {}".format, operands, st.sampled_from(["CONTAINS", "NOT STARTSWITH", "endswith"]), texts.map(quoted)
        ),
    )


simple = st.one_of(
    st.builds("{} {} {}".format, numeric, st.sampled_from([">", ">=", "<", "<="]), numeric),
    st.builds("{} {}BETWEEN {} AND {}".format, names, st.sampled_from(["", "NOT "]), numeric, numeric),
    st.builds(
        "{} {}IN ({})".format,
        names,
        st.sampled_from(["", "not "]),
        st.lists(texts.map(quoted), min_size=1, max_size=4).map(", ".join),
    ),
    st.builds("{} {} {}".format, names, st.sampled_from(["=", "<>"]), literals),
    st.builds("{} {} {}".format, names, st.sampled_from(["=", "<>"]), names),
    st.sampled_from(["TRUE", "FALSE", "NULL", "a", "not b"]),
)
expressions = st.recursive(simple, conditions, max_leaves=6)
messages = st.lists(st.dictionaries(names, texts, max_size=5), min_size=1, max_size=40)


def compiled(text: str) -> raymq.SqlFilter | None:
    try:
        return raymq.sql(text)
    except raymq.FilterExpressionError:
        return None


def reference(expression: raymq.SqlFilter, properties: dict[str, str]) -> int:
    try:
        return {True: TRUE, False: FALSE, None: NULL}[truth_of(expression.plan, properties)]
    except IncomparableError:
        return RAISES


@settings(max_examples=examples(200))
@given(expressions, messages)
@example("a = -0.0 or a > b", [{"a": "0.0", "b": "-0.0"}, {"a": "-0.0", "b": "0.0"}])
@example("a > b", [{"a": "NaN", "b": "Infinity"}, {"a": "NaN", "b": "NaN"}, {"a": "-.5", "b": "-5."}])
@example("a > 0.5 or b = 1", [{"a": "1234567890123456.5", "b": "1"}, {"a": "x", "b": "1"}])
@example("(a = 1) = b or TRUE = (a contains 'x')", [{"a": "1", "b": "true"}, {"b": "x"}, {}])
@example("b = (a = 1)", [{"a": "1", "b": "true"}, {"a": "1", "b": "no"}, {"b": "x"}, {"a": "x", "b": "true"}])
def test_both_evaluations_give_the_same_truths(text: str, properties: list[dict[str, str]]) -> None:
    expression = compiled(text)
    if expression is None:
        return
    texts = [encode_properties(one) for one in properties]
    sizes = np.array([len(one) for one in texts])
    data = np.frombuffer(b"".join(b"\x00" + one for one in texts), np.uint8)
    at = np.cumsum(sizes + 1) - sizes
    found = find_properties(data, at, sizes, [name.encode() for name in expression.names])
    columns = {name: TextColumn(values) for name, values in zip(expression.names, found, strict=True)}
    truths = Evaluation(columns, len(properties)).truths(expression.plan)
    assert truths.tolist() == [reference(expression, one) for one in properties]


@settings(max_examples=examples(200))
@given(
    st.lists(
        st.lists(st.sampled_from([b"a", b"ab", b"b", b"5", b"\x01", b"\x02", b"x" * 300]), max_size=14).map(b"".join)
    ),
    st.binary(max_size=4),
)
def test_properties_are_found_as_they_are_decoded(texts: list[bytes], behind: bytes) -> None:
    sizes = np.array([len(one) for one in texts], np.int64)
    data = np.frombuffer(b"".join(b"\x01" + one for one in texts) + behind, np.uint8)
    at = np.cumsum(sizes + 1) - sizes
    for name, column in zip(["a", "ab", "b"], find_properties(data, at, sizes, [b"a", b"ab", b"b"]), strict=True):
        found = [column.value(row).decode() if column.present[row] else None for row in range(len(texts))]
        assert found == [decode_properties(one).get(name) for one in texts]


@settings(max_examples=examples(50))
@given(expressions, messages, st.integers(0, 3))
def test_a_filter_selects_records_as_it_selects_their_messages(
    text: str, properties: list[dict[str, str]], damaged: int
) -> None:
    expression = compiled(text)
    if expression is None:
        return
    batch = encode_batch(
        [raymq.Message("orders", b"x" * (1 + 7 * row % 50), properties=one) for row, one in enumerate(properties)],
        0,
        born_host=("127.0.0.1", 5000),
        born_timestamp_ms=1_700_000_000_000,
        message_ids=[f"{row:032X}" for row in range(len(properties))],
    )
    starts = np.cumsum(batch.sizes) - batch.sizes
    data = bytearray(batch.records)
    expected = [expression.matches(one) for one in properties]
    if damaged < len(properties):
        # Change the magic number of one record. The filter must select this damaged record, so that a reader learns of
        # the damage.
        data[int(starts[damaged]) + 4] ^= 0xFF
        expected[damaged] = True
    assert matching(bytes(data), starts.astype(np.int64), expression).tolist() == expected
