"""Tests that a journal file keeps the newest value of each key, even after crashes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from raymq.common.errors import StoreCorruptError, StoreError
from raymq.records.format.crc import crc32
from storage.files import disk, journal
from storage.files.journal import Journal, set_journal_aside
from storage.files.two_copies import DAMAGED_KEPT_MAX

pytestmark = pytest.mark.usefixtures("no_flushes")


def test_the_newest_value_of_each_key_is_kept(tmp_path):
    one = Journal(tmp_path / "journal")
    for number in range(5):
        one.put("a", {"n": number})
    one.put("b", [1])
    assert Journal(tmp_path / "journal").values == {"a": {"n": 4}, "b": [1]}


def write_twice(path: Path) -> tuple[bytes, bytes]:
    """Write a journal with two values of one key. Returns its content after the first value, and after the second."""
    first = Journal(path)
    first.put("a", 1)
    whole = path.read_bytes()
    first.put("a", 2)
    return whole, path.read_bytes()


def test_a_line_that_a_crash_cut_anywhere_is_forgotten_and_the_others_are_kept(tmp_path):
    path = tmp_path / "journal"
    whole, full = write_twice(path)
    for end in range(len(whole), len(full) - 1):
        # The crash came during the write of the first copy: the second copy does not have the line.
        path.write_bytes(full[:end])
        path.with_name("journal.bak").write_bytes(whole)
        again = Journal(path)
        assert again.values == {"a": 1}
        again.put("a", 3)
        assert Journal(path).values == {"a": 3}


@pytest.mark.parametrize("name", ["journal", "journal.bak"])
def test_a_flipped_bit_anywhere_in_one_copy_loses_no_value(tmp_path, name):
    path = tmp_path / "journal"
    one = Journal(path)
    for number in range(3):
        one.put("a", number)
        one.put("b", [number])
    good = (tmp_path / name).read_bytes()
    both = path.read_bytes()
    for position in range(len(good)):
        path.write_bytes(both)
        path.with_name("journal.bak").write_bytes(both)
        (tmp_path / name).write_bytes(good[:position] + bytes([good[position] ^ 4]) + good[position + 1 :])
        assert Journal(path).values == {"a": 2, "b": [2]}, position
    assert len(list(tmp_path.glob("*.damaged-*"))) == DAMAGED_KEPT_MAX


@pytest.mark.parametrize("name", ["journal", "journal.bak"])
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "older"])
def test_a_copy_that_is_missing_short_or_older_loses_no_value(tmp_path, name, damage):
    path = tmp_path / "journal"
    whole, _ = write_twice(path)
    journal = Journal(path)  # rewrites both copies
    journal.put("b", 3)
    content = {"missing": b"", "empty": b"", "cut": path.read_bytes()[:-9], "older": whole}[damage]
    (tmp_path / name).write_bytes(content)
    if damage == "missing":
        (tmp_path / name).unlink()
    assert Journal(path).values == {"a": 2, "b": 3}
    assert Journal(path).values == {"a": 2, "b": 3}


def test_a_crash_between_the_two_renames_of_a_rewrite_loses_no_value(tmp_path):
    path = tmp_path / "journal"
    _, full = write_twice(path)
    Journal(path)
    path.with_name("journal.bak").write_bytes(full)
    assert Journal(path).values == {"a": 2}


def test_a_write_that_failed_halfway_does_not_damage_the_next_line(tmp_path, monkeypatch):
    path = tmp_path / "journal"
    one = Journal(path)
    one.put("a", 1)

    def write_half(descriptor, position, data):
        os.pwrite(descriptor, data[: len(data) // 2], position)
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(disk, "pwrite_all", write_half)
        with pytest.raises(StoreError, match="may or may not be on disk"):
            one.put("a", 2)
    one.put("b", 3)
    for name in ("journal", "journal.bak"):
        (tmp_path / name).unlink()
        assert Journal(path).values == {"a": 1, "b": 3}


def test_damage_to_both_copies_is_an_error_that_changes_nothing(tmp_path):
    path = tmp_path / "journal"
    one = Journal(path)
    one.put("a", 1)
    one.put("b", 2)
    good = path.read_bytes()
    second = good.index(b"\n") + 1
    for position in (12, second + 12, len(good) - 1, len(good) - 3):
        data = good[:position] + bytes([good[position] ^ 4]) + good[position + 1 :]
        for name in ("journal", "journal.bak"):
            (tmp_path / name).write_bytes(data)
        if position == len(good) - 1:  # only the line feed is damaged: the line itself is intact in the other copy
            (tmp_path / "journal").write_bytes(good[:-1])
            assert Journal(path).values == {"a": 1, "b": 2}
            continue
        with pytest.raises(StoreCorruptError, match="also in its copy"):
            Journal(path)
        assert [(tmp_path / name).read_bytes() for name in ("journal", "journal.bak")] == [data, data]
    set_journal_aside(path)
    assert Journal(path).values == {}


def test_a_journal_of_an_earlier_version_is_read(tmp_path):
    path = tmp_path / "journal"
    texts = [b'{"key": "a", "value": 1}', b'{"key": "a", "value": 2}']
    lines = [b"%08x %b\n" % (crc32(text), text) for text in texts]
    path.write_bytes(b"".join(lines) + lines[0][:9])
    path.with_name("journal.bak").write_bytes(b"a copy from before a downgrade\n")
    assert Journal(path).values == {"a": 2}
    assert Journal(path).values == {"a": 2}


def test_outdated_lines_are_dropped(tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "REWRITE_LINES", 20)
    path = tmp_path / "journal"
    one = Journal(path)
    for number in range(100):
        one.put("a", number)
    assert len(path.read_bytes().splitlines()) <= 23
    assert Journal(path).values == {"a": 99}
