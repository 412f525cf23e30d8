"""Decides when a master may give a hole of its log to a slave as a hole, because nobody can mend it now.

A hole is mended first, if any replica has the intact bytes: each Replicator looks every few seconds, and tells the
master of each hole for which its slave has nothing. So the master gives the damaged bytes only if

    - it has led for HOLE_WAIT_S: a replica that is not back in the set, and has the bytes, had time for it; and
    - every member of the sync-state set, and every replica in sync, has said that it lacks them.

A member that does not answer leaves the set within seconds, if the Controller agrees; until then the slave waits. The
intact bytes of a replica that comes back later are safe: a hole is appended at a log's end only, and the replica mends
the others.

A change of this rule belongs here. Nothing survives the epoch: its successor asks again.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

HOLE_WAIT_S: Final = 30.0
"""The time for which a new master waits for a replica that may have the intact bytes of a hole."""


class HoleReports:
    """The reports of replicas about the holes of one master, in one epoch."""

    def __init__(self, replica: int, now_s: float, wait_s: float = HOLE_WAIT_S) -> None:
        """`replica` begins to lead now, and waits for `wait_s`."""
        self._replica, self._until_s = replica, now_s + wait_s
        self._lacking: dict[int, set[int]] = {}
        """The replicas that lack the bytes of a hole, by the hole's offset."""

    def note_lacking(self, replica: int, hole_offset: int) -> None:
        """Note that a replica has no intact record in the hole at an offset."""
        self._lacking.setdefault(hole_offset, set()).add(replica)

    def reason_to_wait(self, hole_offset: int, may_have: Collection[int], now_s: float) -> str:
        """Why the hole at an offset is not given to a slave as a hole; empty if it may be.

        `may_have`: the members of the sync-state set and the replicas in sync.
        """
        unknown = set(may_have) - self._lacking.get(hole_offset, set()) - {self._replica}
        if unknown:
            return f"replica {', '.join(map(str, sorted(unknown)))} may have the intact bytes"
        if now_s < self._until_s:
            return f"another replica may bring the intact bytes in the next {self._until_s - now_s:.0f} s"
        return ""
