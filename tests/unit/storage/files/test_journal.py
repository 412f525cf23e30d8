"""Tests that a journal file keeps the newest value of each key, even after crashes."""

from __future__ import annotations

import pytest

from raymq.common.errors import StoreCorruptError
from storage.files import journal
from storage.files.journal import Journal


def test_the_newest_value_of_each_key_is_kept(tmp_path):
    one = Journal(tmp_path / "journal")
    for number in range(5):
        one.put("a", {"n": number})
    one.put("b", [1])
    assert Journal(tmp_path / "journal").values == {"a": {"n": 4}, "b": [1]}


def test_a_line_cut_anywhere_is_forgotten_and_the_others_are_kept(tmp_path):
    path = tmp_path / "journal"
    first = Journal(path)
    first.put("a", 1)
    whole = path.read_bytes()
    first.put("a", 2)
    full = path.read_bytes()
    for end in range(len(whole), len(full) - 1):
        path.write_bytes(full[:end])
        again = Journal(path)
        assert again.values == {"a": 1}
        again.put("a", 3)
        assert Journal(path).values == {"a": 3}


def test_damage_before_the_end_is_an_error(tmp_path):
    path = tmp_path / "journal"
    one = Journal(path)
    one.put("a", 1)
    one.put("b", 2)
    data = bytearray(path.read_bytes())
    data[12] ^= 1
    path.write_bytes(data)
    with pytest.raises(StoreCorruptError, match="line 1"):
        Journal(path)


def test_outdated_lines_are_dropped(tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "REWRITE_LINES", 20)
    path = tmp_path / "journal"
    one = Journal(path)
    for number in range(100):
        one.put("a", number)
    assert len(path.read_bytes().splitlines()) <= 23
    assert Journal(path).values == {"a": 99}
