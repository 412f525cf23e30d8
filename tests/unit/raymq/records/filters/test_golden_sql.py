"""Tests of the golden facts about RocketMQ's filter expressions, including the few facts that raymq does not take over.

Expected results: T, F, N are true, false and NULL. X: the evaluation raises an error, so the message does not match. E:
the compiler refuses the expression.
"""

from __future__ import annotations

import pytest

import raymq
from raymq.records.filters.parser import compiled
from raymq.records.filters.sql import truth_of
from raymq.records.filters.values import IncomparableError

FACTS: list[tuple[int, str, dict[str, str], str]] = [
    (1, "a > 5", {"a": "6"}, "T"),
    (2, "a > 5", {}, "N"),
    (3, "a = 5", {"a": "05"}, "T"),
    (3, "a = 5", {"a": "+5"}, "T"),
    (4, "a = 5", {"a": " 5"}, "X"),
    (4, "a = 5", {"a": "5.0"}, "X"),
    (4, "a = 5", {"a": ""}, "X"),
    (5, "a = 5.0", {"a": "5"}, "T"),
    (6, "a > 5", {"a": "3000000000"}, "X"),
    (7, "a > 3000000000", {"a": "3000000001"}, "T"),
    (8, "a = 5.5", {"a": " 5.5 "}, "T"),
    (9, "a > 1.0", {"a": "NaN"}, "T"),
    (9, "a > 1.0", {"a": "Infinity"}, "T"),
    (10, "a = 1e3", {"a": "1000"}, "T"),
    (11, "a = 'x'", {"a": "X"}, "F"),
    (12, "a = 'it''s'", {"a": "it's"}, "T"),
    (13, "a <> 'x'", {}, "N"),
    (13, "a <> 'x'", {"a": "y"}, "T"),
    (14, "a > 'b'", {}, "E"),
    (14, "a > '5'", {}, "E"),
    (15, "a > b", {"a": "10", "b": "9"}, "T"),
    (15, "a > b", {"a": "x", "b": "9"}, "X"),
    (16, "a = b", {"a": "10", "b": "10.0"}, "F"),
    (17, "a = b", {}, "T"),
    (17, "a = b", {"a": "1"}, "F"),
    (17, "a = b", {"b": "1"}, "N"),
    (18, "a <> b", {}, "F"),
    (18, "a <> b", {"a": "1"}, "T"),
    (18, "a <> b", {"b": "1"}, "N"),
    (19, "1 = a", {}, "F"),
    (19, "a = 1", {}, "N"),
    (20, "a is null", {}, "T"),
    (20, "a is null", {"a": ""}, "F"),
    (21, "a = null", {}, "E"),
    (21, "a > null", {}, "E"),
    (21, "null is null", {}, "T"),
    (22, "a = true", {"a": "TRUE"}, "T"),
    (22, "a = true", {"a": "yes"}, "F"),
    (22, "a = true", {}, "N"),
    (23, "TRUE = a", {"a": "true"}, "X"),
    (24, "a = FALSE", {"a": "no"}, "T"),
    (25, "a", {"a": "true"}, "F"),
    (26, "not a", {"a": "true"}, "T"),
    (26, "not a", {}, "N"),
    (27, "TRUE or a = 1", {}, "T"),
    (28, "FALSE or a = 1", {}, "N"),
    (28, "FALSE and a = 1", {}, "F"),
    (29, "a = 1 or b = 2", {"b": "2"}, "T"),
    (29, "a = 1 or b = 2", {"b": "3"}, "N"),
    (30, "a = 1 and b = 2", {"b": "3"}, "F"),
    (30, "a = 1 and b = 2", {"b": "2"}, "N"),
    (31, "a > 5 or b = 1", {"a": "abc", "b": "1"}, "X"),
    (32, "b = 1 or a > 5", {"a": "abc", "b": "1"}, "T"),
    (33, "a between 3 and 7", {"a": "3"}, "T"),
    (33, "a between 3 and 7", {"a": "7"}, "T"),
    (33, "a between 3 and 7", {"a": "8"}, "F"),
    (34, "a between 7 and 3", {}, "E"),
    (34, "a not between 7 and 3", {"a": "5"}, "T"),
    (35, "a between -1 and -5", {"a": "-3"}, "F"),
    (36, "a between '3' and '7'", {}, "E"),
    (36, "a between null and 3", {}, "E"),
    (37, "3 between a and 7", {"a": "2"}, "T"),
    (38, "a between 1 and 3000000000", {"a": "2"}, "T"),
    (38, "a between 1 and 3000000000", {"a": "2999999999"}, "X"),
    (39, "a in ('x','y')", {"a": "x"}, "T"),
    (39, "a in ('x','y')", {}, "N"),
    (40, "a not in ('x','y')", {"a": "z"}, "T"),
    (40, "a not in ('x','y')", {}, "N"),
    (41, "a in ()", {}, "E"),
    (41, "a in (1,2)", {}, "E"),
    (41, "'x' in ('x')", {}, "E"),
    (42, "a contains 'x'", {"a": "axb"}, "T"),
    (42, "a contains 'x'", {}, "F"),
    (43, "a not contains 'x'", {}, "F"),
    (43, "not (a contains 'x')", {}, "T"),
    (44, "a contains ''", {"a": "axb"}, "F"),
    (45, "a startswith 'ax'", {"a": "axb"}, "T"),
    (45, "a endswith 'xb'", {"a": "axb"}, "T"),
    (46, "a contains b", {}, "E"),
    (46, "'axb' contains 'x'", {}, "T"),
    (47, "-a > 5", {"a": "-6"}, "N"),
    (48, "a = --5", {"a": "5"}, "T"),
    (49, "A > 5", {"a": "6"}, "N"),
    (50, "a > 5 !", {"a": "6"}, "E"),
    (52, "a = 5L", {"a": "5"}, "T"),
    (54, "a/*x*/=/*y*/5", {"a": "5"}, "T"),
    (54, "a = 1 /* open", {}, "E"),
    (55, "a.b = 1", {}, "E"),
    (56, "a != 5", {}, "E"),
    (56, "a == 5", {}, "E"),
    (56, 'a = "x"', {}, "E"),
    (59, "not a = 1", {"a": "2"}, "F"),
    (59, "not (a = 1)", {"a": "2"}, "T"),
    (60, "not not a = 1", {"a": "1"}, "F"),
    (61, "a = 1 = TRUE", {"a": "1"}, "T"),
    (61, "a = 1 = 1", {"a": "1"}, "F"),
    (62, "a > 1 > 0", {}, "E"),
    (62, "TRUE = 1", {}, "E"),
    (63, "1 = 1.0", {}, "T"),
    (63, "'1' = 1", {}, "T"),
    (63, "TRUE", {}, "T"),
    (63, "5", {}, "E"),
    (64, "a is not null and a > 5", {}, "F"),
    (64, "a is not null and a > 5", {"a": "7"}, "T"),
    (65, "a > 0.0", {}, "E"),
    (65, "a > 1e400", {}, "E"),
    (66, "a = 9223372036854775807", {"a": "9223372036854775807"}, "T"),
    (66, "a = 9223372036854775808", {}, "E"),
    (67, "a > .5", {"a": "1"}, "T"),
    (67, "a > 5.", {"a": "6"}, "T"),
    (67, "a > 1.e2", {"a": "101"}, "T"),
    (68, "a = 'x' or a = 'y' and b = 1", {"a": "x", "b": "2"}, "T"),
    (
        69,
        "a not in ('4','4','5') and b between 3 and 10 and c not contains 'axbc'",
        {"a": "3", "b": "3", "c": "ax"},
        "T",
    ),
    (70, "now > 1", {}, "N"),
    (70, "now > 1", {"now": "2"}, "T"),
    (71, "", {}, "E"),
    (71, "(a = 1", {}, "E"),
    (71, "a = 1 and", {}, "E"),
    (72, "a > 3.1E10", {"a": "3.1415E10"}, "T"),
]

QUIRKS_NOT_TAKEN_OVER: list[tuple[int, str, int, str]] = [
    (50, "a > 5 garbage", 7, "AND or OR"),
    (50, "a > 5 )", 7, "AND or OR"),
    (51, "a = 007", 6, "leading zeros"),
    (52, "a = 0L", 6, "zero without L"),
    (53, "a=5--c", 4, "line break"),
    (55, "a-b = 1", 2, "arithmetic"),
    (57, "a like 'x%'", 3, "CONTAINS"),
    (58, "a + 1 > 2", 3, "arithmetic"),
]
"""Expressions that RocketMQ compiles because it ignores tokens after a complete expression. raymq refuses each of these
expressions."""

MESSAGING_FACTS: list[tuple[int, str, dict[str, str], str]] = [
    (23, "", {}, "E"),
    (23, "a and between 2 and 10", {}, "E"),
    (23, "a between 10 and 0", {}, "E"),
    (23, "a > 100000000000000000000000", {}, "E"),
    (23, "value contains x", {}, "E"),
    (23, "value contains 123", {}, "E"),
    (24, "value contains 'x'", {"value": "axb"}, "T"),
    (24, "value startswith 'ax'", {"value": "axb"}, "T"),
    (24, "value endswith 'xb'", {"value": "axb"}, "T"),
    (24, "value not contains 'x'", {"value": "axb"}, "F"),
    (24, "value not startswith 'ax'", {"value": "axb"}, "F"),
    (24, "value not endswith 'xb'", {"value": "axb"}, "F"),
    (24, "value contains ''", {"value": "axb"}, "F"),
    (24, "value not contains ''", {"value": "axb"}, "F"),
    (24, "value contains 'x'", {}, "F"),
    (24, "value not contains 'x'", {}, "F"),
    (25, "a is null OR a='hello'", {}, "T"),
    (25, "a is null OR a='hello'", {"a": "hello"}, "T"),
    (25, "a is null OR a='hello'", {"a": "abc"}, "F"),
    (25, "a is not null", {}, "F"),
    (26, "a=TRUE OR b=FALSE", {"a": "true", "b": "false"}, "T"),
    (26, "a=TRUE OR b=FALSE", {"a": "false", "b": "true"}, "F"),
    (27, "a=3 and b<>4 And c>5 AND d<=4", {"a": "3", "b": "5", "c": "6", "d": "1"}, "T"),
    (27, "a=3 and b<>4 And c>5 AND d<=4", {"a": "4", "b": "5", "c": "6", "d": "1"}, "F"),
    *[(27, "a between 2 and 10", {"a": a}, truth) for a, truth in zip("2 3 10 1 11".split(), "TTTFF", strict=True)],
    *[(27, "a not between 2 and 10", {"a": a}, truth) for a, truth in zip("2 3 10 1 11".split(), "FFFTT", strict=True)],
    (28, "a > b", {"a": "10", "b": "20"}, "F"),
    (28, "a > b", {"a": "20", "b": "10"}, "T"),
    (28, "a > 3.14", {"a": "3.1415"}, "T"),
    (28, "TAGS='''''tag'''''", {"TAGS": "''tag''"}, "T"),
    (29, "a > 3", {"a": "3.5"}, "X"),
    (29, "a > 3.0", {"a": "3.5"}, "T"),
    (29, "a=3 OR b=4", {"a": "abc", "b": "4"}, "X"),
    (29, "a <> b", {"a": "1"}, "T"),
    (29, "a <> b", {"b": "1"}, "N"),
    (29, "NOT (a = 1)", {}, "N"),
    (29, "a not in ('x')", {}, "N"),
]


def _evaluated(text: str, properties: dict[str, str]) -> str:
    try:
        plan = compiled(text)
    except raymq.FilterExpressionError:
        return "E"
    try:
        return {True: "T", False: "F", None: "N"}[truth_of(plan, properties)]
    except IncomparableError:
        return "X"


@pytest.mark.parametrize(
    ("text", "properties", "result"),
    [pytest.param(*fact[1:], id=f"{fact[0]}: {fact[1]} {fact[2]}") for fact in FACTS]
    + [pytest.param(*fact[1:], id=f"messaging {fact[0]}: {fact[1]} {fact[2]}") for fact in MESSAGING_FACTS],
)
def test_expressions_evaluate_as_in_rocketmq(text: str, properties: dict[str, str], result: str) -> None:
    assert _evaluated(text, properties) == result
    if result != "E":
        assert raymq.sql(text).matches(properties) is (result == "T")


@pytest.mark.parametrize(
    ("text", "position", "mend"),
    [pytest.param(*quirk[1:], id=f"{quirk[0]}: {quirk[1]}") for quirk in QUIRKS_NOT_TAKEN_OVER],
)
def test_tokens_after_a_complete_expression_are_refused_with_a_correction(text: str, position: int, mend: str) -> None:
    with pytest.raises(raymq.FilterExpressionError, match=mend) as caught:
        raymq.sql(text)
    assert caught.value.position == position


def test_every_golden_fact_has_its_test() -> None:
    assert {fact[0] for fact in FACTS} | {quirk[0] for quirk in QUIRKS_NOT_TAKEN_OVER} == set(range(1, 73))
    assert {fact[0] for fact in MESSAGING_FACTS} == set(range(23, 30))
