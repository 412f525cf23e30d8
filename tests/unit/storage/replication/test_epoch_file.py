"""The epoch file (spec/storage.md §11.2), and what of it is the same in two replicas."""

from __future__ import annotations

import pytest

from raymq.errors import InvalidArgumentError, StoreCorruptError
from storage.replication.epoch_file import EPOCH_FILE, EpochFile, decode_epochs, encode_epochs
from storage.replication.epochs import EpochEntry, common_end

GIB = 1 << 30


def test_fact_25_the_epoch_file():
    assert encode_epochs([EpochEntry(1, 0)]) == b"1\n1725254278\n1-0\n"
    assert encode_epochs([EpochEntry(1, 0), EpochEntry(2, GIB)]) == b"2\n1895893516\n1-0\n2-1073741824\n"
    assert decode_epochs(b"2\n1895893516\n1-0\n2-1073741824\n") == [(1, 0), (2, GIB)]
    assert decode_epochs(b"1\n0\n7-5\n") == [(7, 5)]


def test_epochs_are_kept_with_the_text_before_as_bak(tmp_path):
    file = EpochFile(tmp_path)
    assert file.entries == ()
    file.begin_epoch(1, 0)
    file.begin_epoch(2, GIB)
    assert (tmp_path / EPOCH_FILE).read_bytes() == b"2\n1895893516\n1-0\n2-1073741824\n"
    assert (tmp_path / f"{EPOCH_FILE}.bak").read_bytes() == b"1\n1725254278\n1-0\n"
    assert EpochFile(tmp_path).entries == ((1, 0), (2, GIB))


@pytest.mark.parametrize(
    "damage", ["", "x", "3\n1725254278\n1-0\n", "1\n1\n1-0\n", "1\n1725254278\n1-1\n", "2\n0\n2-5\n1-9\n"]
)
def test_a_damaged_file_gives_way_to_its_bak_and_two_are_an_error(tmp_path, damage):
    file = EpochFile(tmp_path)
    file.begin_epoch(1, 0)
    file.begin_epoch(2, 5)
    (tmp_path / EPOCH_FILE).write_text(damage)
    assert EpochFile(tmp_path).entries == ((1, 0),)
    (tmp_path / f"{EPOCH_FILE}.bak").write_text(damage)
    with pytest.raises(StoreCorruptError, match="damaged"):
        EpochFile(tmp_path)


@pytest.mark.parametrize("entry", [(2, 200), (1, 200), (3, 100), (3, 50)])
def test_an_epoch_must_have_a_larger_number_and_begin_later(tmp_path, entry):
    file = EpochFile(tmp_path)
    file.begin_epoch(2, 100)
    with pytest.raises(InvalidArgumentError):
        file.begin_epoch(*entry)
    assert EpochFile(tmp_path).entries == ((2, 100),)


def test_epochs_leave_with_the_log(tmp_path):
    file = EpochFile(tmp_path)
    for epoch, start in ((1, 0), (2, 100), (4, 300)):
        file.begin_epoch(epoch, start)
    file.forget_before(100)
    assert file.entries == ((2, 100), (4, 300))
    file.truncate_from(300)
    assert file.entries == ((2, 100),)
    file.forget_before(10_000)
    assert EpochFile(tmp_path).entries == ((2, 100),)


@pytest.mark.parametrize(
    ("mine", "my_end", "theirs", "their_end", "common"),
    [
        ([(1, 0)], 500, [(1, 0)], 700, 500),
        ([(1, 0)], 700, [(1, 0)], 500, 500),
        ([(1, 0)], 700, [(1, 0), (2, 600)], 900, 600),
        ([(1, 0), (2, 600)], 700, [(1, 0), (3, 650)], 900, 600),
        ([(1, 0), (2, 600)], 700, [(1, 0), (2, 600), (3, 680)], 900, 680),
        ([(5, 100)], 700, [(6, 100)], 900, None),
        ([], 0, [(1, 0)], 900, None),
    ],
)
def test_where_two_logs_part(mine, my_end, theirs, their_end, common):
    entries = [EpochEntry(*entry) for entry in mine], [EpochEntry(*entry) for entry in theirs]
    assert common_end(entries[0], my_end, entries[1], their_end) == common
