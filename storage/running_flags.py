"""The running flags of a store: one bit for each reason why the store must not be read or written (spec/storage.md §9).

The bit values are RocketMQ's, except DISK_CRITICAL. Flags are not on disk: a store that is opened again starts without
flags, and sets them again if their reasons persist.
"""

from __future__ import annotations

import threading
from enum import IntFlag


class RunningFlag(IntFlag):
    """A state of the store in which reads, or some writes, are not allowed."""

    NOT_READABLE = 1
    NOT_WRITABLE = 2
    QUEUE_ERROR = 4
    INDEX_ERROR = 8
    DISK_FULL = 16
    FENCED = 32
    QUEUE_DISK_FULL = 64
    DISK_CRITICAL = 128


AGAINST_APPENDS = RunningFlag(127) & ~RunningFlag.NOT_READABLE
"""The running flags that forbid appends of messages to the store."""
AGAINST_STATE = AGAINST_APPENDS & ~RunningFlag.DISK_FULL & ~RunningFlag.INDEX_ERROR
"""The running flags that forbid appending records of a broker's state, and deleting a topic.

A disk that is too full for messages, or for the index, still has space for offsets, members and leases, so that
consumers can continue.
"""
AGAINST_REPLICATION = AGAINST_STATE & ~RunningFlag.FENCED | RunningFlag.DISK_CRITICAL | RunningFlag.INDEX_ERROR
"""The running flags that forbid appending a master's log chunks that contain messages. The flag FENCED is not among
them, because a fenced store accepts a master's log chunks, and no other appends.

A replica's disk may be fuller than its master's disk. So half of the space that is left on a full disk is reserved for
chunks.
"""
AGAINST_REPLICATED_STATE = AGAINST_REPLICATION & ~RunningFlag.DISK_CRITICAL & ~RunningFlag.INDEX_ERROR
"""The running flags that forbid appending a chunk that was copied from the master's log. They apply if all records of
the chunk belong to a broker's own state (no users' messages)."""


class RunningFlags:
    """The running flags of one store, each with the reason why it is set. Thread-safe; readers take no lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # The running flags that are set now, each with the reason. Changed only under the lock, so that `any_set`
        # agrees with these reasons.
        self._reasons: dict[RunningFlag, str] = {}
        self.any_set = False
        """True if at least one running flag of the store is set. A running flag forbids reading or writing the
        store."""

    def set_flag(self, flag: RunningFlag, reason: str) -> bool:
        """Set a flag that forbids reading or writing the store, until `clear_flag`. Callers that are refused get the
        reason.

        Returns True if the flag was not set before. If it was already set, its first reason stays.
        """
        with self._lock:
            if flag in self._reasons:
                return False
            self._reasons[flag] = reason
            self.any_set = True
            return True

    def clear_flag(self, flag: RunningFlag) -> bool:
        """Clear a running flag of the store, and the flag's reason. A running flag forbids reads or writes of the
        store. Returns True if the flag was set."""
        with self._lock:
            was_set = self._reasons.pop(flag, None) is not None
            self.any_set = bool(self._reasons)
            return was_set

    @property
    def bits(self) -> int:
        """The running flags that are set now, as one number with RocketMQ's bit values."""
        return sum(map(int, self._reasons.copy()))

    @property
    def readable(self) -> bool:
        """True if no running flag forbids reading the store."""
        return RunningFlag.NOT_READABLE not in self._reasons

    @property
    def not_writable_reason(self) -> str:
        """The reasons why the store refuses appends; empty if it accepts appends."""
        return self.reason_against(AGAINST_APPENDS)

    def reason_against(self, flags: RunningFlag) -> str:
        """Return the reasons of those flags in `flags` that are set, joined to one text; empty if none of the flags is
        set."""
        return "; ".join([reason for flag, reason in self._reasons.copy().items() if flag & flags])
