"""What a store may do now: one bit per reason against it, RocketMQ's numbers (spec/storage.md §9).

Nothing of this is on disk: a store that is opened again starts without a flag, and finds out anew.
"""

from __future__ import annotations

from enum import IntFlag


class RunningFlag(IntFlag):
    """Why a store must not be read or written."""

    NOT_READABLE = 1
    NOT_WRITABLE = 2
    QUEUE_ERROR = 4
    INDEX_ERROR = 8
    DISK_FULL = 16
    FENCED = 32
    QUEUE_DISK_FULL = 64


AGAINST_APPENDS = RunningFlag(127) & ~RunningFlag.NOT_READABLE
AGAINST_REPLICATION = AGAINST_APPENDS & ~RunningFlag.FENCED
"""A fenced store takes nothing but what its master sends."""


class RunningFlags:
    """The flags of one store, each with the reason why it is set. Plain reads; one dict operation per change."""

    def __init__(self) -> None:
        self._reasons: dict[RunningFlag, str] = {}

    def set(self, flag: RunningFlag, reason: str) -> bool:
        """Set a flag; True if it was not set before. The first reason stays."""
        if flag in self._reasons:
            return False
        self._reasons[flag] = reason
        return True

    def clear(self, flag: RunningFlag) -> bool:
        """Take a flag away; True if it was set."""
        return self._reasons.pop(flag, None) is not None

    @property
    def any_set(self) -> bool:
        return bool(self._reasons)

    @property
    def bits(self) -> int:
        """All flags as RocketMQ counts them."""
        return sum(self._reasons.copy())

    @property
    def readable(self) -> bool:
        return RunningFlag.NOT_READABLE not in self._reasons

    @property
    def not_writable_reason(self) -> str:
        """Why no append is taken; empty if appends are taken."""
        return self.reason_against(AGAINST_APPENDS)

    def reason_against(self, flags: RunningFlag) -> str:
        """Why what `flags` forbid must not be; empty if none of them is set."""
        return "; ".join([reason for flag, reason in self._reasons.copy().items() if flag & flags])
