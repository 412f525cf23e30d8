"""Repairs damaged ranges of a log with another replica's bytes: a slave's log from its master, a master's log from a
slave.

    holes ─▶ log_part of the other replica ─▶ mend_log: checked, written in place, on disk ─▶ the next part
                                          └─▶ note_lacking: the other replica has no intact bytes for the rest

This module decides when damage is repaired; storage.replication.mend checks and writes the bytes. A Replicator repairs
damage before it copies chunks, so a slave never acknowledges damaged bytes that its master can repair. The Replicator
checks for new damage every MEND_INTERVAL_S. A hole (damaged range) is repaired in parts of a few whole records, so a
large hole needs little memory. No state of this module survives the process, and every call that it makes is safe to
repeat.

It may wait for Storage actors.
"""

from __future__ import annotations

import logging
from typing import Any, Final, Protocol

from actors.core.replica.orders import Following
from raymq.common.errors import InvalidArgumentError, NotMasterError
from raymq.common.protocol.store import Hole

MEND_INTERVAL_S: Final = 5.0
HOLES_MAX: Final = 1000
"""Maximum number of damaged log ranges (holes) that are repaired in one pass."""
MEND_CALL_TIMEOUT_S: Final = 10.0

logger = logging.getLogger(__name__)


class StorageCalls(Protocol):
    """Protocol of an object that calls methods of a storage actor (raymq.remoting.actor_ref.ActorRef)."""

    @property
    def name(self) -> str: ...
    def call(self, method: str, *arguments: Any, timeout_s: float) -> Any: ...


def mend_both(master: StorageCalls, slave: StorageCalls, following: Following, replica: int) -> int:
    """Repair the log of a slave, then the log of its master. Returns the number of replaced bytes. `replica`: the
    number of the slave.

    Raises RaymqError if a call failed, for example after a change of roles. Ranges that were already repaired stay
    repaired.
    """
    mended = _mend(slave, master, following.epoch, following.master)
    return mended + _mend(master, slave, following.epoch, replica)


def _mend(damaged: StorageCalls, other: StorageCalls, epoch: int, replica: int) -> int:
    """Repair the damaged ranges in the log of the storage actor `damaged`, with bytes from the storage actor `other`.
    Apart from damage, both logs have the same bytes. `replica`: the replica number of `other`."""
    holes: tuple[Hole, ...] = damaged.call("log_holes", timeout_s=MEND_CALL_TIMEOUT_S)
    mended = 0
    for hole in holes[:HOLES_MAX]:
        try:
            mended += _mend_hole(damaged, other, epoch, replica, hole)
        except NotMasterError:
            raise
        except InvalidArgumentError as error:
            logger.warning(
                "%s: the damaged bytes at physical offset %d were not repaired: %s", damaged.name, hole.offset, error
            )
    return mended


def _mend_hole(damaged: StorageCalls, other: StorageCalls, epoch: int, replica: int, hole: Hole) -> int:
    """Repair one hole (damaged log range) of store `damaged` part by part, with bytes from the log of store `other`. If
    `other` lacks intact bytes for the rest of the hole, report this to `damaged`. Returns the number of replaced bytes.
    """
    position, rest, mended = hole.offset, hole.offset, 0
    while position < hole.end_offset:
        left = hole.end_offset - position
        part: tuple[int, bytes] | None = other.call("log_part", epoch, position, left, timeout_s=MEND_CALL_TIMEOUT_S)
        begin, data = (hole.end_offset, b"") if part is None else part
        if data:
            damaged.call("mend_log", epoch, begin, data, timeout_s=MEND_CALL_TIMEOUT_S)
            logger.warning(
                "%s: %d damaged bytes at physical offset %d were repaired from %s",
                damaged.name,
                len(data),
                begin,
                other.name,
            )
            mended += len(data)
        if begin > rest:
            damaged.call("note_lacking", epoch, replica, rest, timeout_s=MEND_CALL_TIMEOUT_S)
        position = rest = begin + len(data)
    return mended
