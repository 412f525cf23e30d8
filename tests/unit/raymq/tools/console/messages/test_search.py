"""Tests of the console's form for searching messages. Each kind of start position results in a search, and an invalid
form in an error text."""

from __future__ import annotations

from contextlib import suppress
from inspect import signature
from typing import Any
from urllib.parse import parse_qsl

import pytest
from hypothesis import given, strategies as st

from raymq.client.admin.admin import Admin
from raymq.common.errors import InvalidArgumentError
from raymq.common.message import MessageQueue
from raymq.common.places import parse_position
from raymq.tools.console.messages.search import SearchForm

NOW_MS = 1_800_000_000_000
DEFAULTS = {"queue": None, "newest_first": True, "tags": "*", "contains": "", "limit": 50, "cursor": None}


@pytest.mark.parametrize(
    ("fields", "arguments"),
    [
        ({}, {}),
        ({"start": "earliest", "tags": " a || b "}, {"begin_ms": 0, "newest_first": False, "tags": "a || b"}),
        (
            {"start": "offset", "queue": "broker-a:3", "offset": "1700", "limit": "100"},
            {"queue": MessageQueue("t", "broker-a", 3), "begin_offset": 1700, "newest_first": False, "limit": 100},
        ),
        (
            {"start": "time", "begin": "-1h", "end": "2027-01-15T08:00:00Z", "text": "x"},
            {"begin_ms": NOW_MS - 3_600_000, "end_ms": NOW_MS, "newest_first": False, "contains": "x"},
        ),
        ({"start": "time", "end": "-1h"}, {"begin_ms": 0, "end_ms": NOW_MS - 3_600_000, "newest_first": False}),
        ({"cursor": "c", "unknown": "x"}, {"cursor": "c"}),
    ],
)
def test_fields_are_arguments_of_browse(fields: dict[str, str], arguments: dict[str, Any]) -> None:
    found = SearchForm.of(fields).arguments("t", NOW_MS)
    assert found == DEFAULTS | arguments
    signature(Admin.browse).bind(None, "t", **found)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"start": "sometimes"}, "not a start of a search"),
        ({"limit": "1000000"}, "cannot show"),
        ({"start": "offset", "offset": "1"}, "choose a queue"),
        ({"start": "offset", "queue": "broker-a:1", "offset": "-1"}, "the offset must be a whole number"),
        ({"start": "offset", "queue": "broker-a:1", "offset": "9" * 30}, "the offset must be a whole number"),
        ({"queue": "broker-a"}, "not a queue"),
        ({"start": "time", "begin": "yesterday"}, "not a time"),
        ({"start": "time", "begin": "-1h", "end": "-2h"}, "empty"),
    ],
)
def test_nonsense_is_refused(fields: dict[str, str], error: str) -> None:
    with pytest.raises(InvalidArgumentError, match=error):
        SearchForm.of(fields).arguments("t", NOW_MS)


@given(st.fixed_dictionaries({}, optional={name: st.text(max_size=20) for name in SearchForm.__slots__}))
def test_any_form_can_be_shown_again_and_is_a_query_or_an_error(fields: dict[str, str]) -> None:
    form = SearchForm.of(fields)
    assert SearchForm.of(dict(parse_qsl(form.address(), keep_blank_values=True))) == form
    with suppress(InvalidArgumentError):
        form.arguments("t", NOW_MS)


def test_a_place_is_a_queue_and_an_offset() -> None:
    assert parse_position("t", "a:b:3:17") == (MessageQueue("t", "a:b", 3), 17)
    for text in ("", "17", "b:17", "b:x:17", "b:1:x"):
        with pytest.raises(InvalidArgumentError):
            parse_position("t", text)
