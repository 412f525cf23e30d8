"""Mends damaged ranges of a log with another replica's bytes: a slave's from its master, a master's from a slave.

    holes ─▶ log_range of the other replica ─▶ mend: checked, written in place, on disk

A change of when damage is mended belongs here; how bytes are checked and written, in storage.replication.mend. A
Replicator mends before it copies, so a slave acknowledges nothing with damage that its master can mend, and looks for
new damage every MEND_INTERVAL_S. Nothing here survives the process, and everything it calls is safe to repeat.

May wait for: Storage.
"""

from __future__ import annotations

import logging
from typing import Any, Final, Protocol

from actors.core.replica.orders import Following
from raymq.errors import InvalidArgumentError, NotMasterError
from raymq.protocol.store import Hole

MEND_INTERVAL_S: Final = 5.0
MEND_MAX_BYTES: Final = 64 << 20
"""A larger damaged range is not mended: its bytes pass through the memory of three processes."""
HOLES_MAX: Final = 1000
"""The most ranges that are mended at a time."""
MEND_CALL_TIMEOUT_S: Final = 10.0

logger = logging.getLogger(__name__)


class StorageCalls(Protocol):
    """Calls the methods of a storage actor (raymq.remoting.actor_ref.ActorRef)."""

    @property
    def name(self) -> str: ...
    def call(self, method: str, *arguments: Any, timeout_s: float) -> Any: ...


def mend_both(master: StorageCalls, slave: StorageCalls, following: Following) -> int:
    """Mend a slave's log, then its master's. Returns the number of bytes that were replaced.

    RaymqError: a call failed, which it does when a role changes. What was mended until then stays mended.
    """
    mended = _mend(slave, master, following.epoch, is_slave=True)
    return mended + _mend(master, slave, following.epoch, is_slave=False)


def _mend(damaged: StorageCalls, other: StorageCalls, epoch: int, *, is_slave: bool) -> int:
    """Mend one log by the bytes of another one, which is the same."""
    holes: tuple[Hole, ...] = damaged.call("log_holes", timeout_s=MEND_CALL_TIMEOUT_S)
    mended = 0
    for hole in holes[:HOLES_MAX]:
        if hole.size > MEND_MAX_BYTES:
            logger.error("%s: %d damaged bytes at %d are too many to mend", damaged.name, hole.size, hole.offset)
            continue
        data = other.call("log_range", epoch, hole.offset, hole.size, timeout_s=MEND_CALL_TIMEOUT_S)
        if data is None and not is_slave:
            continue  # another slave may have the bytes
        try:
            damaged.call("mend_log", epoch, hole.offset, data, timeout_s=MEND_CALL_TIMEOUT_S)
        except NotMasterError:
            raise
        except InvalidArgumentError as error:
            logger.warning("%s: the damaged bytes at %d were not mended: %s", damaged.name, hole.offset, error)
            continue
        if data is not None:
            mended += hole.size
            logger.warning("%s: %d damaged bytes at %d came from %s", damaged.name, hole.size, hole.offset, other.name)
    return mended
