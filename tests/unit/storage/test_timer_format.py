"""RocketMQ's timer log and timer wheel (spec/storage.md §12, fact 29)."""

from __future__ import annotations

import pytest

from raymq.record.hashing import java_hash
from raymq.record.layout import RecordError
from storage.timer_format import (
    NO_PREVIOUS,
    TIMER_LOG_FILE_BYTES,
    UNIT_BYTES,
    WHEEL_FILE_BYTES,
    WHEEL_SLOTS,
    TimerMagic,
    TimerUnit,
    WheelSlot,
    last_unit_position,
    wheel_slot,
)

WRITTEN_MS = 1_700_000_000_000
UNIT = TimerUnit(NO_PREVIOUS, TimerMagic.DEFAULT, WRITTEN_MS, 5000, 0, 101, java_hash("T"))
UNIT_TEXT = "00000034ffffffffffffffff000000010000018bcfe5680000001388000000000000000000000065000000540000000000000000"


def test_fact_29_a_timer_unit():
    assert UNIT.encode().hex() == UNIT_TEXT
    assert TimerUnit.parse(bytes.fromhex(UNIT_TEXT)) == UNIT
    assert len(UNIT.encode()) == UNIT_BYTES == 52


def test_fact_29_the_slot_of_a_time_and_the_last_unit_of_a_file():
    assert wheel_slot(WRITTEN_MS + 5000) == 512_005
    assert last_unit_position() == 104_857_532
    assert WHEEL_FILE_BYTES == 38_707_200


def test_a_slot_comes_round_again_after_two_weeks():
    assert wheel_slot(WRITTEN_MS + WHEEL_SLOTS * 1000) == wheel_slot(WRITTEN_MS)
    assert wheel_slot(WRITTEN_MS + 999) == wheel_slot(WRITTEN_MS) != wheel_slot(WRITTEN_MS + 1000)


def test_behind_the_last_unit_the_end_of_the_file_has_room():
    for file_bytes in (68, 119, 120, TIMER_LOG_FILE_BYTES):
        last = last_unit_position(file_bytes)
        assert last % UNIT_BYTES == 0
        assert last + UNIT_BYTES + 16 <= file_bytes < last + 2 * UNIT_BYTES + 16


def test_units_are_found_by_position():
    second = UNIT._replace(previous=0, magic=TimerMagic.DEFAULT | TimerMagic.DELETE, physical_offset=101)
    data = UNIT.encode() + second.encode()
    assert TimerUnit.parse(data, second.previous) == UNIT
    assert TimerUnit.parse(memoryview(data), 52) == second


@pytest.mark.parametrize("position", [1, 52, 60])
def test_where_no_unit_is_none_is_read(position):
    end_of_file = (60).to_bytes(4) + bytes(8) + bytes.fromhex("cbd43194") + bytes(44)
    with pytest.raises(RecordError):
        TimerUnit.parse(UNIT.encode() + end_of_file, position)


def test_a_slot_names_its_units():
    slot = WheelSlot(time_ms=WRITTEN_MS, first=52, last=520, units=3, magic=0)
    assert slot.encode().hex() == "000000006553f100" + f"{52:016x}{520:016x}{3:08x}{0:08x}"
    assert WheelSlot.parse(bytes(32) + slot.encode(), 32) == slot
    with pytest.raises(RecordError):
        WheelSlot.parse(slot.encode()[:-1])
