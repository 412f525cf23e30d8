"""Mends damaged ranges of a log with another replica's bytes: a slave's from its master, a master's from a slave.

    holes ─▶ log_part of the other replica ─▶ mend_log: checked, written in place, on disk ─▶ the next part
                                          └─▶ note_lacking: the other replica has no intact bytes for the rest

When damage is mended belongs here; how bytes are checked and written, in storage.replication.mend. A Replicator mends
before it copies, so a slave acknowledges nothing with damage that its master can mend. It checks for new damage every
MEND_INTERVAL_S. A part is a few whole records, so a large hole needs little memory. Nothing here survives the process,
and everything it calls is safe to repeat.

May wait for: Storage.
"""

from __future__ import annotations

import logging
from typing import Any, Final, Protocol

from actors.core.replica.orders import Following
from raymq.common.errors import InvalidArgumentError, NotMasterError
from raymq.common.protocol.store import Hole

MEND_INTERVAL_S: Final = 5.0
HOLES_MAX: Final = 1000
"""The most ranges that are mended at a time."""
MEND_CALL_TIMEOUT_S: Final = 10.0

logger = logging.getLogger(__name__)


class StorageCalls(Protocol):
    """Calls the methods of a storage actor (raymq.remoting.actor_ref.ActorRef)."""

    @property
    def name(self) -> str: ...
    def call(self, method: str, *arguments: Any, timeout_s: float) -> Any: ...


def mend_both(master: StorageCalls, slave: StorageCalls, following: Following, replica: int) -> int:
    """Mend the log of a slave, which is `replica`, then its master's. Returns the number of bytes that were replaced.

    RaymqError: a call failed, as after a change of roles. Mended ranges stay mended.
    """
    mended = _mend(slave, master, following.epoch, following.master)
    return mended + _mend(master, slave, following.epoch, replica)


def _mend(damaged: StorageCalls, other: StorageCalls, epoch: int, replica: int) -> int:
    """Mend one log with the bytes of another, equal log, the log of `replica`."""
    holes: tuple[Hole, ...] = damaged.call("log_holes", timeout_s=MEND_CALL_TIMEOUT_S)
    mended = 0
    for hole in holes[:HOLES_MAX]:
        try:
            mended += _mend_hole(damaged, other, epoch, replica, hole)
        except NotMasterError:
            raise
        except InvalidArgumentError as error:
            logger.warning("%s: the damaged bytes at %d were not mended: %s", damaged.name, hole.offset, error)
    return mended


def _mend_hole(damaged: StorageCalls, other: StorageCalls, epoch: int, replica: int, hole: Hole) -> int:
    """Mend one hole part by part, and report each rest that the other log lacks, too. Returns the replaced bytes."""
    position, rest, mended = hole.offset, hole.offset, 0
    while position < hole.end_offset:
        left = hole.end_offset - position
        part: tuple[int, bytes] | None = other.call("log_part", epoch, position, left, timeout_s=MEND_CALL_TIMEOUT_S)
        begin, data = (hole.end_offset, b"") if part is None else part
        if data:
            damaged.call("mend_log", epoch, begin, data, timeout_s=MEND_CALL_TIMEOUT_S)
            logger.warning("%s: %d damaged bytes at %d came from %s", damaged.name, len(data), begin, other.name)
            mended += len(data)
        if begin > rest:
            damaged.call("note_lacking", epoch, replica, rest, timeout_s=MEND_CALL_TIMEOUT_S)
        position = rest = begin + len(data)
    return mended
