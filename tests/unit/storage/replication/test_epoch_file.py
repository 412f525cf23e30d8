"""Tests of a replica's epoch file (spec/storage.md §11.2), and of finding the common prefix of two replicas' logs by
their epoch files."""

from __future__ import annotations

import pytest

from raymq.common.errors import InvalidArgumentError, StoreCorruptError
from storage.files.config_files import ConfigFiles
from storage.files.damage import DamageNotes
from storage.replication.epoch_file import (
    CONFIRM_FILE,
    CONFIRM_SLOT_BYTES,
    EPOCH_FILE,
    EPOCHS_FILE,
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


def test_each_flipped_bit_of_an_epoch_file_is_noticed() -> None:
    """A line feed with a changed bit may still separate lines in Python: a vertical tab, a form feed, or U+001E."""
    text = encode_epochs([EpochEntry(101, 0), EpochEntry(202, 1420), EpochEntry(303, 2840)])
    for bit in range(8 * len(text)):
        damaged = bytearray(text)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match=r"\S"):
            decode_epochs(bytes(damaged))


COPIES = (EPOCH_FILE, f"{EPOCH_FILE}.bak", f"config/{EPOCHS_FILE}", f"config/{EPOCHS_FILE}.bak")


def test_epochs_are_kept_in_every_copy(tmp_path):
    file = EpochFile(tmp_path)
    assert file.entries == ()
    file.begin_epoch(1, 0)
    file.begin_epoch(2, GIB)
    for name in COPIES[:2]:
        assert (tmp_path / name).read_bytes() == b"2\n1895893516\n1-0\n2-1073741824\n"
    assert ConfigFiles(tmp_path).read(EPOCHS_FILE) == '{"epochs": [[1, 0], [2, 1073741824]]}'
    assert EpochFile(tmp_path).entries == ((1, 0), (2, GIB))


def test_a_store_of_an_earlier_version_has_the_previous_text_as_bak(tmp_path):
    (tmp_path / EPOCH_FILE).write_bytes(encode_epochs([EpochEntry(1, 0), EpochEntry(2, 5)]))
    (tmp_path / f"{EPOCH_FILE}.bak").write_bytes(encode_epochs([EpochEntry(1, 0)]))
    config = ConfigFiles(tmp_path)
    assert EpochFile(tmp_path, config).entries == ((1, 0), (2, 5))
    assert config.damage.texts == ()
    # An earlier version opens the store again, and begins an epoch.
    (tmp_path / EPOCH_FILE).write_bytes(encode_epochs([EpochEntry(1, 0), EpochEntry(2, 5), EpochEntry(4, 9)]))
    assert EpochFile(tmp_path).entries == ((1, 0), (2, 5), (4, 9))


@pytest.mark.parametrize(
    "damage", ["", "x", "3\n1725254278\n1-0\n", "1\n1\n1-0\n", "1\n1725254278\n1-1\n", "2\n0\n2-5\n1-9\n", None]
)
@pytest.mark.parametrize("name", COPIES)
def test_a_damaged_copy_loses_no_epoch_and_is_written_again(tmp_path, name, damage):
    file = EpochFile(tmp_path)
    file.begin_epoch(1, 0)
    file.begin_epoch(2, 5)
    good = (tmp_path / name).read_bytes()
    if damage is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(damage)
    config = ConfigFiles(tmp_path)
    assert EpochFile(tmp_path, config).entries == ((1, 0), (2, 5))
    assert len(config.damage.texts) == 1
    assert EpochFile(tmp_path).entries == ((1, 0), (2, 5))
    if name in COPIES[:2]:
        assert (tmp_path / name).read_bytes() == good
    kept = [path.read_text() for path in tmp_path.rglob("*.damaged-1")]
    assert kept == ([] if damage is None else [damage])


@pytest.mark.parametrize("name", COPIES)
def test_an_older_version_of_a_copy_loses_no_epoch(tmp_path, name):
    file = EpochFile(tmp_path)
    file.begin_epoch(1, 0)
    older = (tmp_path / name).read_bytes()
    for epoch in (2, 3):
        file.begin_epoch(epoch, 5 * epoch)
    (tmp_path / name).write_bytes(older)
    config = ConfigFiles(tmp_path)
    assert EpochFile(tmp_path, config).entries == ((1, 0), (2, 10), (3, 15))
    assert len(config.damage.texts) == 1


def test_damage_to_all_copies_is_an_error_that_changes_nothing(tmp_path):
    EpochFile(tmp_path).begin_epoch(1, 0)
    for name in COPIES:
        (tmp_path / name).write_text("{")
    with pytest.raises(StoreCorruptError, match=r"no intact copy .* Restore one"):
        EpochFile(tmp_path)
    assert [(tmp_path / name).read_text() for name in COPIES] == ["{"] * 4


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


@pytest.mark.parametrize("name", [CONFIRM_FILE, f"{CONFIRM_FILE}.bak"])
@pytest.mark.parametrize("byte", [0, 4, 12, 27, 100, 512, 515, 524, 539, 1000, "empty", "cut", "missing", "older"])
def test_damage_to_one_copy_does_not_change_the_confirm_offset(tmp_path, name, byte):
    confirm = ConfirmFile(tmp_path)
    confirm.raise_to(5, 1000)
    data = older = bytearray((tmp_path / name).read_bytes())
    confirm.raise_to(5, 2000)
    confirm.raise_to(5, 3000)
    good = (tmp_path / name).read_bytes()
    if isinstance(byte, int):
        data = bytearray(good)
        data[byte] ^= 1
    else:
        data = {"empty": b"", "cut": good[:520], "missing": b"", "older": older}[byte]
    (tmp_path / name).write_bytes(data)
    if byte == "missing":
        (tmp_path / name).unlink()
    damage = DamageNotes()
    assert ConfirmFile(tmp_path, damage).floor == (5, 3000)
    assert len(damage.texts) == (0 if byte == "missing" else 1)
    assert ConfirmFile(tmp_path, damage).floor == (5, 3000)
    assert len(damage.texts) == (0 if byte == "missing" else 1)


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
    for name in (CONFIRM_FILE, f"{CONFIRM_FILE}.bak"):
        (tmp_path / name).write_bytes(b"x" * 2 * CONFIRM_SLOT_BYTES)
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
