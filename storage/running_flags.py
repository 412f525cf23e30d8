"""The running flags of a store: a bit for each reason why it must not be read or written (spec/storage.md §9).

The numbers are RocketMQ's, but for DISK_CRITICAL. Flags are not on disk: a store that is opened again starts without
flags, and sets them again if their reasons persist.
"""

from __future__ import annotations

import threading
from enum import IntFlag


class RunningFlag(IntFlag):
    """A reason why a store must not be read or written."""

    NOT_READABLE = 1
    NOT_WRITABLE = 2
    QUEUE_ERROR = 4
    INDEX_ERROR = 8
    DISK_FULL = 16
    FENCED = 32
    QUEUE_DISK_FULL = 64
    DISK_CRITICAL = 128


AGAINST_APPENDS = RunningFlag(127) & ~RunningFlag.NOT_READABLE
"""The flags that forbid appends of messages."""
AGAINST_STATE = AGAINST_APPENDS & ~RunningFlag.DISK_FULL & ~RunningFlag.INDEX_ERROR
"""The flags that forbid records of a broker's state, and the deletion of a topic.

A disk that is too full for messages, or for the index, still has room for offsets, members and leases, so that
consumers can continue.
"""
AGAINST_REPLICATION = AGAINST_STATE & ~RunningFlag.FENCED | RunningFlag.DISK_CRITICAL | RunningFlag.INDEX_ERROR
"""The flags that forbid a master's chunks of messages. A fenced store takes only chunks.

A replica's disk may be fuller than its master's: then half of a full disk's free space is for chunks.
"""
AGAINST_REPLICATED_STATE = AGAINST_REPLICATION & ~RunningFlag.DISK_CRITICAL & ~RunningFlag.INDEX_ERROR
"""The flags that forbid a master's chunks that hold only a broker's state."""


class RunningFlags:
    """The flags of one store, each with the reason why it is set. Thread-safe, without a lock for readers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Changed under the lock, which keeps `any_set` consistent.
        self._reasons: dict[RunningFlag, str] = {}
        self.any_set = False
        """True if any flag is set."""

    def set_flag(self, flag: RunningFlag, reason: str) -> bool:
        """Forbid reading or writing until `clear_flag`. Refused callers get the reason.

        Returns True if the flag was not set before. If it was, its first reason stays.
        """
        with self._lock:
            if flag in self._reasons:
                return False
            self._reasons[flag] = reason
            self.any_set = True
            return True

    def clear_flag(self, flag: RunningFlag) -> bool:
        """Remove a flag with its reason. Returns True if it was set."""
        with self._lock:
            was_set = self._reasons.pop(flag, None) is not None
            self.any_set = bool(self._reasons)
            return was_set

    @property
    def bits(self) -> int:
        """Return the flags as one number, with RocketMQ's bits."""
        return sum(map(int, self._reasons.copy()))

    @property
    def readable(self) -> bool:
        """True unless a flag forbids reading."""
        return RunningFlag.NOT_READABLE not in self._reasons

    @property
    def not_writable_reason(self) -> str:
        """The reasons why no appends are taken; empty if appends are taken."""
        return self.reason_against(AGAINST_APPENDS)

    def reason_against(self, flags: RunningFlag) -> str:
        """Return the joined reasons of those `flags` that are set; empty if none is set."""
        return "; ".join([reason for flag, reason in self._reasons.copy().items() if flag & flags])
