"""Tests of a replica's epoch file (spec/storage.md §11.2), and of finding the common prefix of two replicas' logs by
their epoch files."""

from __future__ import annotations

import pytest

from raymq.common.errors import InvalidArgumentError, StoreCorruptError
from storage.replication.epoch_file import (
    CONFIRM_FILE,
    CONFIRM_SLOT_BYTES,
    EPOCH_FILE,
    ConfirmFile,
    EpochFile,
    decode_epochs,
    encode_epochs,
)
from storage.replication.epochs import ConfirmFloor, EpochEntry, common_end, first_lost_offset

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


def test_a_confirm_offset_is_read_back_and_only_rises(tmp_path):
    confirm = ConfirmFile(tmp_path)
    assert confirm.floor == (0, 0)
    for epoch, offset in [(5, 1000), (6, 900), (6, 2000)]:
        confirm.raise_to(epoch, offset)
    assert ConfirmFile(tmp_path).floor == confirm.floor == ConfirmFloor(6, 2000)
    confirm.reset(ConfirmFloor(7, 500))
    assert ConfirmFile(tmp_path).floor == ConfirmFloor(7, 500)
    assert (tmp_path / CONFIRM_FILE).stat().st_size == 2 * CONFIRM_SLOT_BYTES


@pytest.mark.parametrize("byte", [0, 4, 12, 27, 512, 515, 524, 539])
def test_a_damaged_byte_costs_at_most_the_newest_confirm_offset(tmp_path, byte):
    confirm = ConfirmFile(tmp_path)
    confirm.raise_to(5, 1000)
    confirm.raise_to(5, 2000)
    data = bytearray((tmp_path / CONFIRM_FILE).read_bytes())
    data[byte] ^= 1
    (tmp_path / CONFIRM_FILE).write_bytes(data)
    assert ConfirmFile(tmp_path).floor in [(5, 1000), (5, 2000)]
    assert (ConfirmFile(tmp_path).floor == (5, 2000)) == (byte >= CONFIRM_SLOT_BYTES)


@pytest.mark.parametrize("cut", range(29))
def test_a_torn_write_leaves_the_confirm_offset_before_or_after(tmp_path, cut):
    confirm = ConfirmFile(tmp_path)
    for offset in (1000, 2000):
        confirm.raise_to(5, offset)
    before = (tmp_path / CONFIRM_FILE).read_bytes()
    confirm.raise_to(6, 3000)
    after = (tmp_path / CONFIRM_FILE).read_bytes()
    [start] = [slot for slot in (0, CONFIRM_SLOT_BYTES) if before[slot : slot + 28] != after[slot : slot + 28]]
    torn = before[:start] + after[start : start + cut] + before[start + cut :]
    (tmp_path / CONFIRM_FILE).write_bytes(torn)
    assert ConfirmFile(tmp_path).floor in [(5, 2000), (6, 3000)]


def test_two_damaged_slots_are_logged_as_an_error(tmp_path, caplog):
    (tmp_path / CONFIRM_FILE).write_bytes(b"x" * 2 * CONFIRM_SLOT_BYTES)
    assert ConfirmFile(tmp_path).floor == (0, 0)
    assert "is damaged" in caplog.text


@pytest.mark.parametrize(
    ("theirs", "their_end", "lost_from"),
    [
        # the other replica's log has only records of epoch 6, the epoch of the confirm offset
        ([EpochEntry(6, 0)], 1200, None),
        ([EpochEntry(6, 0)], 900, 900),
        ([EpochEntry(6, 0), EpochEntry(7, 1000)], 1000, None),
        ([EpochEntry(6, 0), EpochEntry(7, 800)], 2000, 800),
        ([EpochEntry(6, 0), EpochEntry(7, 800), EpochEntry(9, 1500)], 2000, 800),
        ([EpochEntry(5, 0), EpochEntry(7, 0)], 2000, 0),  # the other replica's log was started again from offset 0
        # the other replica's list of epochs begins at offset 4800, because retention deleted the earlier part of its
        # log
        ([EpochEntry(9, 4800)], 5000, None),
    ],
)
def test_a_newer_epoch_that_began_before_the_confirm_offset_lacks_confirmed_messages(theirs, their_end, lost_from):
    assert first_lost_offset(ConfirmFloor(6, 1000), theirs, their_end) == lost_from
