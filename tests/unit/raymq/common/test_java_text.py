"""Tests of converting between bytes and text as Java does."""

from __future__ import annotations

import pytest

from raymq.common.java_text import decode_utf8, parse_number
from raymq.records.format.hashing import index_key_hash, tags_code
from raymq.records.format.layout import decode_properties


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", ""),
        (b"plain", "plain"),
        ("消息 😀".encode(), "消息 😀"),
        (b"x\xed\xa0\x80y", "x\ufffdy"),
        (b"\xed\xa0\x80\xed\xb0\x80", "\ufffd\ufffd"),
        (b"x\xed\xbf\xbf", "x\ufffd"),
        (b"x\xed\xa0", "x\ufffd"),
        (b"x\xed\xa0y", "x\ufffdy"),
        (b"x\xedy", "x\ufffdy"),
        (b"\xed\x9f\xbf", "\ud7ff"),
        (b"\xed\xa0\x80\x80", "\ufffd\ufffd"),
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b"\xe0\x80\x80", "\ufffd\ufffd\ufffd"),
        (b"\xf0\x9f\x98", "\ufffd"),
        (b"\xf4\x90\x80\x80", "\ufffd\ufffd\ufffd\ufffd"),
        (b"\xf0\xed\xa0\x80", "\ufffd\ufffd"),
    ],
)
def test_malformed_text_is_replaced_as_in_java(data, text):
    assert decode_utf8(data) == text


def test_a_tag_and_a_key_with_an_encoded_surrogate_hash_as_in_java():
    """A tag and a key that contain an encoded surrogate have the hash codes of Java. The expected value is the tag code
    of `x ED A0 80 y` as RocketMQ 4.9.8 writes it."""
    properties = decode_properties(b"TAGS\x01x\xed\xa0\x80y\x02KEYS\x01k\xed\xa0\x80z")
    assert tags_code(properties["TAGS"]) == 0x20C294
    assert index_key_hash("S", properties["KEYS"]) == index_key_hash("S", "k\ufffdz")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("17", 17),
        ("+17", 17),
        ("-17", -17),
        ("007", 7),
        ("٣", 3),
        ("9" * 18, 10**18 - 1),
        ("9" * 19, None),
        ("", None),
        ("+", None),
        ("+-1", None),
        (" 1", None),
        ("1_0", None),
        ("1\n", None),
        (None, None),
    ],
)
def test_numbers_are_read_as_in_java(text, number):
    assert parse_number(text) == number
