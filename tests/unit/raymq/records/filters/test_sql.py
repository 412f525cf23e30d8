"""Tests of `raymq.sql`: the filter object, its errors, and its limits."""

from __future__ import annotations

import pickle

import pytest

import raymq
from raymq.records.filters import parser


def test_a_filter_is_a_value_with_its_text() -> None:
    paid = raymq.sql("price > 5 AND region = 'eu' AND price < 9")
    assert paid == raymq.SqlFilter("price > 5 AND region = 'eu' AND price < 9")
    assert paid != raymq.sql("price > 5")
    assert {paid: 1}[pickle.loads(pickle.dumps(paid))] == 1
    assert str(paid) == paid.text
    assert paid.names == ("price", "region")
    assert paid.matches({"price": "6", "region": "eu"})
    assert not paid.matches({"price": "cheap", "region": "eu"})


def test_an_error_names_the_text_the_place_and_the_mend() -> None:
    with pytest.raises(raymq.FilterExpressionError) as caught:
        raymq.sql("price != 5")
    error = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(error, raymq.InvalidArgumentError)
    assert (error.text, error.position, error.code) == ("price != 5", 7, 23)
    assert "price != 5" in str(error)
    assert "character 7" in str(error)
    assert "<>" in str(error)


@pytest.mark.parametrize(
    ("text", "mend"),
    [
        ("a == 5", "single ="),
        ('a = "x"', "single quotes"),
        ("a = 'x", "close the text"),
        ("a in (1)", "single quotes"),
        ("a contains b", "single quotes"),
        ("a = 1 and", "too early"),
        ("a = null", "IS NULL"),
        ("a > '5'", "without quotes"),
        ("a > 1 > 0", "AND or OR"),
        ("5", "compare it"),
        ("not 5", "compare it"),
        ("-a", "compare it"),
        ("a = 1 and 5", "compare it"),
        ("a between 7 and 3", "lower number first"),
        ("a > 0.0", "write 0"),
        ("a > 9223372036854775808", "float"),
        ("TRUE = 'x'", "another kind"),
        ("   ", "empty"),
    ],
)
def test_each_refusal_has_a_correction(text: str, mend: str) -> None:
    for _ in range(2):  # The second call gets the same error from the cache of parsed expressions.
        with pytest.raises(raymq.FilterExpressionError, match=mend):
            raymq.sql(text)


@pytest.mark.parametrize("text", [None, 5, b"a = 1"])
def test_an_expression_is_a_text(text: object) -> None:
    with pytest.raises(raymq.FilterExpressionError):
        raymq.sql(text)  # type: ignore[arg-type]  # what a caller without types may pass


def test_length_and_depth_are_bounded_and_chains_are_not_deep() -> None:
    chain = " or ".join(f"a = {number}" for number in range(1, 2_000))
    assert raymq.sql(chain).matches({"a": "1999"})
    assert raymq.sql("(" * 5_000 + "a = 1" + ")" * 5_000).matches({"a": "1"})
    with pytest.raises(raymq.FilterExpressionError, match="deep"):
        raymq.sql("not " * 5_000 + "a")
    with pytest.raises(raymq.FilterExpressionError, match="characters"):
        raymq.sql("a = '" + "x" * parser.TEXT_MAX + "'")


@pytest.mark.parametrize(
    ("text", "properties", "matches"),
    [
        ("a = 1 -- one\n and b = 2", {"a": "1", "b": "2"}, True),
        ("nothing = 1", {"nothing": "1"}, True),
        ("inside IN ('x')", {"inside": "x"}, True),
        ("_a$1 = 'ü'", {"_a$1": "ü"}, True),
        ("a = 2147483648", {"a": "2147483648"}, True),
        ("a = 2147483647", {"a": "2147483648"}, False),
        ("a = -9223372036854775807", {"a": "-9223372036854775807"}, True),
        ("a > 1e3", {"a": "0x1p20"}, True),
        ("a > 1e3", {"a": "5000d"}, True),
        ("a > 1e3", {"a": "\t5000f "}, True),
        ("a > 1e3", {"a": "5_000"}, False),
        ("a > 1e3", {"a": "inf"}, False),
        ("a > 1e300", {"a": "1e999"}, True),
        ("a > 1e300", {"a": "0x1p9999"}, True),
        ("a = 5", {"a": "0" * 5_000 + "5"}, True),
        ("a = 5", {"a": "9" * 5_000}, False),
        ("a > b", {"a": "0.0", "b": "-0.0"}, True),
        ("a > b", {"a": "NaN", "b": "Infinity"}, True),
        ("a >= b", {"a": "NaN", "b": "NaN"}, True),
        ("(a = 1) = b", {"a": "1", "b": "true"}, False),
        ("b = (a = 1)", {"a": "1", "b": "true"}, True),
        ("-(a = 1) is null", {"a": "1"}, True),
        ("- -5 = a", {"a": "5"}, True),
    ],
)
def test_corners_of_the_language(text: str, properties: dict[str, str], matches: bool) -> None:
    assert raymq.sql(text).matches(properties) is matches
