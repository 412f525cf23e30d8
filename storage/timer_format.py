"""The files in which RocketMQ keeps messages that are due at a time: how to read and write their parts (spec §12).

On disk, big-endian; this store keeps such messages in ordinary queues (scheduler.py) and makes none of these files, but
a directory that RocketMQ wrote may have them

    timerlog/00000000000000000000     units of 52 bytes, then 16 bytes that say that the log goes on in the next file

    unit    | size 4 = 52 | previous 8 | magic 4 | write_time 8 | delay 4 | physical_offset 8 | record_size 4 |
            | topic_hash 4 | reserved 8, zero |
    end     | what is left of the file 4 | 0 8 | BLANK magic 4 |

    timerwheel                        1,209,600 slots of 32 bytes

    slot    | time 8, in units of the precision | first 8 | last 8 | units 4 | magic 4 |

A slot's `last` and a unit's `previous` are positions in the timer log: from the slot the units of one second hang
together, newest first.
"""

from __future__ import annotations

import struct
from enum import IntFlag
from typing import Final, NamedTuple

from raymq.record.layout import RecordError

PRECISION_MS: Final = 1000
WHEEL_SLOTS: Final = 2 * 604_800
"""Twice a week of seconds: a time and the same time a wheel's turn later never share a slot."""
TIMER_LOG_FILE_BYTES: Final = 100 << 20
NO_PREVIOUS: Final = -1

_UNIT: Final = struct.Struct(">iqiqiqii8x")
_SLOT: Final = struct.Struct(">qqqii")
_END_BYTES: Final = 16
UNIT_BYTES: Final = _UNIT.size
SLOT_BYTES: Final = _SLOT.size
WHEEL_FILE_BYTES: Final = WHEEL_SLOTS * SLOT_BYTES


class TimerMagic(IntFlag):
    """What is to be done with the message when its time has come."""

    DEFAULT = 1
    ROLL = 2
    DELETE = 4


class TimerUnit(NamedTuple):
    """One message that waits. Times are in ms, `previous` is where the unit before it in its slot starts in the timer
    log; the record is the one of `record_size` bytes at `physical_offset` of the commit log."""

    previous: int
    magic: int
    write_time_ms: int
    delay_ms: int
    physical_offset: int
    record_size: int
    topic_hash: int

    def encode(self) -> bytes:
        return _UNIT.pack(UNIT_BYTES, *self)

    @classmethod
    def parse(cls, data: bytes | memoryview, position: int = 0) -> TimerUnit:
        """The unit at `position` of `data`. RecordError if there is none, as at the end of a file."""
        try:
            size, *values = _UNIT.unpack_from(data, position)
        except struct.error:
            raise RecordError(f"a timer unit is cut at byte {position}") from None
        if size != UNIT_BYTES:
            raise RecordError(f"no timer unit at byte {position}: its size is {size}")
        return cls(*values)


class WheelSlot(NamedTuple):
    """The messages of one second: the first and the last of `units`, as positions in the timer log."""

    time_ms: int
    first: int
    last: int
    units: int
    magic: int

    def encode(self, precision_ms: int = PRECISION_MS) -> bytes:
        return _SLOT.pack(self.time_ms // precision_ms, *self[1:])

    @classmethod
    def parse(cls, data: bytes | memoryview, position: int = 0, precision_ms: int = PRECISION_MS) -> WheelSlot:
        """The slot at byte `position` of the wheel. RecordError if it is cut short."""
        try:
            time, *rest = _SLOT.unpack_from(data, position)
        except struct.error:
            raise RecordError(f"a slot of the timer wheel is cut at byte {position}") from None
        return cls(time * precision_ms, *rest)


def wheel_slot(time_ms: int, precision_ms: int = PRECISION_MS) -> int:
    """The number of the slot that a message due at `time_ms` is in; it is at byte 32 times this of the wheel."""
    return time_ms // precision_ms % WHEEL_SLOTS


def last_unit_position(file_bytes: int = TIMER_LOG_FILE_BYTES) -> int:
    """Where the last unit of a full timer-log file starts: behind it the file's end still has room."""
    return ((file_bytes - _END_BYTES) // UNIT_BYTES - 1) * UNIT_BYTES
