"""Tests of Java's string hash function, for one text and for many texts at once."""

from __future__ import annotations

import pytest

from raymq.records.format.hashing import index_key_hash, index_key_hashes, java_hash, tags_code


def java_hash_by_definition(text: str) -> int:
    data = text.encode("utf-16-be", "surrogatepass")
    value = 0
    for index in range(0, len(data), 2):
        value = (value * 31 + int.from_bytes(data[index : index + 2])) & 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


@pytest.mark.parametrize(
    "text", ["", "a", "TagA", "x" * 511, "x" * 512, "x" * 513, "消息" * 400, "😀", "a😀b", "\ud800"]
)
def test_hash_is_java_s_for_every_length_and_plane(text: str) -> None:
    assert java_hash(text) == java_hash_by_definition(text)


def test_tags_code_is_zero_without_a_tag() -> None:
    assert tags_code(None) == tags_code("") == 0


def test_tags_code_hashes_the_whole_text_of_several_tags() -> None:
    assert tags_code("TagA || TagB") == 1359775119


@pytest.mark.parametrize(
    "keys",
    [
        [],
        ["KEY1"],
        ["KEY1", "ORDERID_100", "x" * 700],
        ["消息", "k"],
        ["😀", "plain"],
        ["", "after an empty key"],
    ],
)
def test_hashes_of_many_index_keys_equal_the_hash_of_each(keys: list[str]) -> None:
    assert index_key_hashes("TopicTest", keys).tolist() == [index_key_hash("TopicTest", key) for key in keys]


def test_index_key_hash_covers_topic_separator_and_key() -> None:
    assert index_key_hash("TopicTest", "KEY1") == abs(java_hash("TopicTest#KEY1"))


def test_index_key_hash_of_the_smallest_int_is_zero() -> None:
    rest = (-(2**31) - java_hash_by_definition("T#") * 31**5 - sum(48 * 31**power for power in range(5))) % 2**32
    key = ""
    for power in (4, 3, 2, 1, 0):
        key += chr(48 + rest // 31**power)
        rest %= 31**power
    assert java_hash(f"T#{key}") == -(2**31)
    assert index_key_hash("T", key) == 0
    assert index_key_hashes("T", [key]).tolist() == [0]
