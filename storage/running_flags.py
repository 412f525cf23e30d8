"""The running flags of a store: a bit for each reason why it must not be read or written (spec/storage.md §9).

The numbers are RocketMQ's, but for DISK_CRITICAL. Flags are not on disk: a store that is opened again starts without
any, and finds out anew.
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
"""The flags that forbid the records of a broker's state, and the deletion of a topic. A disk that is too full for
messages, or for the index, has room for offsets, members and leases, so that consumers go on."""
AGAINST_REPLICATION = AGAINST_STATE & ~RunningFlag.FENCED | RunningFlag.DISK_CRITICAL | RunningFlag.INDEX_ERROR
"""The flags that forbid a master's chunks of messages. A fenced store takes chunks, and nothing else. The disk of a
replica may be fuller than its master's: then half of what a full disk has left is for chunks."""
AGAINST_REPLICATED_STATE = AGAINST_REPLICATION & ~RunningFlag.DISK_CRITICAL & ~RunningFlag.INDEX_ERROR
"""The flags that forbid a master's chunks of nothing but a broker's state."""


class RunningFlags:
    """The flags of one store, each with the reason why it is set. Thread-safe; plain reads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Changed with the lock, which keeps `any_set` right.
        self._reasons: dict[RunningFlag, str] = {}
        self.any_set = False
        """True if any flag is set."""

    def set_flag(self, flag: RunningFlag, reason: str) -> bool:
        """Forbid reading or writing until `clear_flag`; callers are told the reason. True if the flag was not set
        before. The first reason stays."""
        with self._lock:
            if flag in self._reasons:
                return False
            self._reasons[flag] = reason
            self.any_set = True
            return True

    def clear_flag(self, flag: RunningFlag) -> bool:
        """Remove a flag with its reason; True if it was set."""
        with self._lock:
            was_set = self._reasons.pop(flag, None) is not None
            self.any_set = bool(self._reasons)
            return was_set

    @property
    def bits(self) -> int:
        """The flags as one number, as RocketMQ counts them."""
        return sum(map(int, self._reasons.copy()))

    @property
    def readable(self) -> bool:
        """True unless reading is forbidden."""
        return RunningFlag.NOT_READABLE not in self._reasons

    @property
    def not_writable_reason(self) -> str:
        """The reasons why no append is taken; empty if appends are taken."""
        return self.reason_against(AGAINST_APPENDS)

    def reason_against(self, flags: RunningFlag) -> str:
        """The reasons of those of `flags` that are set, joined; empty if none of them is."""
        return "; ".join([reason for flag, reason in self._reasons.copy().items() if flag & flags])
