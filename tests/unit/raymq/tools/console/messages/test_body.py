"""Tests of how the console shows message bodies. Every byte string becomes a harmless text of limited length, and JSON
keeps each token unchanged."""

from __future__ import annotations

import json
import unicodedata

import pytest
from hypothesis import given, strategies as st

from raymq.tools.console.messages.body import (
    BODY_SHOWN_MAX_BYTES,
    BodyForm,
    hex_rows,
    is_text,
    preview,
    view_body,
    visible,
)

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def is_harmless(text: str) -> bool:
    return all(char in "\n\t\u200c\u200d" or unicodedata.category(char) not in ("Cc", "Cf", "Cs") for char in text)


@given(st.binary(max_size=200) | st.text().map(lambda text: text.encode(errors="surrogatepass")))
def test_any_body_in_any_form_is_harmless_and_bounded(body: bytes) -> None:
    for form in (None, *BodyForm):
        shown = view_body(body, form)
        assert is_harmless(shown.text)
        assert (shown.size, shown.cut) == (len(body), False)
    line = preview(body, 40)
    assert is_harmless(line)
    assert "\n" not in line
    assert len(line) <= 60


@given(st.lists(JSON_VALUES) | st.dictionaries(st.text(), JSON_VALUES))
def test_json_in_lines_is_the_same_json(value: object) -> None:
    shown = view_body(json.dumps(value, ensure_ascii=True).encode())
    assert shown.form is BodyForm.JSON
    assert json.loads(shown.text) == value


def test_json_has_a_line_for_each_value_and_its_numbers_as_they_were() -> None:
    shown = view_body(b'{"id":12345678901234567890.10, "tags" : ["a",[]], "none":{}}')
    lines = ["{", '  "id": 12345678901234567890.10,', '  "tags": [', '    "a",', "    []", "  ],", '  "none": {}', "}"]
    assert shown.text.split("\n") == lines


def test_a_number_of_many_digits_is_still_json() -> None:
    assert view_body(b"[" + b"9" * 10_000 + b"]").form is BodyForm.JSON


@pytest.mark.parametrize("body", [b"[" * 30_000 + b"]" * 30_000, b"{", b"[1,", b'{"a": NaN,}', b"12", b'"text"', b""])
def test_a_body_that_is_not_a_json_object_or_list_is_text(body: bytes) -> None:
    assert view_body(body, BodyForm.JSON).form is BodyForm.TEXT
    assert view_body(body).form is BodyForm.TEXT


def test_brackets_do_not_grow_into_megabytes_of_spaces() -> None:
    deep = b"[" * 400 + b",".join([b"1"] * 100_000) + b"]" * 400
    shown = view_body(deep)
    assert shown.form is BodyForm.JSON
    assert shown.cut
    assert len(shown.text) == BODY_SHOWN_MAX_BYTES


def test_a_long_text_is_cut_between_characters() -> None:
    body = "aé".encode() * 40_000
    shown = view_body(body)
    assert (shown.form, shown.cut, shown.shown, shown.size) == (BodyForm.TEXT, True, BODY_SHOWN_MAX_BYTES, 120_000)
    assert set(shown.text) == {"a", "é"}


def test_a_long_body_that_is_no_text_is_cut() -> None:
    shown = view_body(bytes(4 * 1024 * 1024))
    assert (shown.form, shown.cut, shown.shown) == (BodyForm.HEX, True, BODY_SHOWN_MAX_BYTES)
    assert shown.text.count("\n") == BODY_SHOWN_MAX_BYTES // 16 - 1


def test_hex_has_place_bytes_and_characters() -> None:
    rows = hex_rows(b"<b>\x00\xff 0123456789z").split("\n")
    assert rows[0] == "00000000  3c 62 3e 00 ff 20 30 31 32 33 34 35 36 37 38 39  <b>.. 0123456789"
    assert rows[1] == "00000010  7a" + " " * 45 + "  z"


def test_controls_are_written_out_and_words_are_not_harmed() -> None:
    assert visible("a\x1b[2J\u202eb\x00\r\nc\td") == "a\\x1b[2J\\u202eb\\x00\nc\td"
    assert visible("می\u200cخواهم 👩\u200d🚀") == "می\u200cخواهم 👩\u200d🚀"


def test_text_is_utf_8_without_controls() -> None:
    assert is_text("größe\n\t".encode())
    assert not is_text("größe".encode("latin-1"))
    assert not is_text(b"a\x00b")
    assert is_text("é".encode()[:1], whole=False)
    assert not is_text("é".encode()[:1])


def test_a_preview_is_one_line_with_an_end_that_shows_that_there_is_more() -> None:
    assert preview(b"one\n two", 40) == "one two"
    assert preview(b"x" * 41, 40) == "x" * 39 + "…"
    assert preview(b"\xff\x00", 40) == "ff 00"
    assert preview(b"\xff" * 40, 40) == "ff " * 13 + "…"
