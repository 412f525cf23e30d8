"""Decides when a master may send a hole of its log (a damaged range that is kept) to a slave. It may do so only if no
replica can repair the hole now.

A hole is repaired if any replica has the intact bytes. Each Replicator checks every few seconds, and reports to the
master each hole for which its slave has no intact bytes. The master sends the damaged bytes only if

  - it has led for HOLE_WAIT_S, so that a replica with the bytes had time to return to the set; and
  - every member of the sync-state set, and every replica in sync, has reported that it lacks the bytes.

A member that does not answer leaves the sync-state set within seconds, if the Controller agrees; until then the slave
waits. A replica with the intact bytes may return later. It still has them, because a hole is only appended at the end
of a log, never written over intact bytes. This replica then repairs the other replicas.

Reports are valid only in one epoch: the next master collects new reports.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

HOLE_WAIT_S: Final = 30.0
"""Time, in seconds, that a new master waits before it sends a hole (a damaged log range) to a slave. A replica with the
intact bytes may return in this time."""


class HoleReports:
    """The reports of replicas about the holes (damaged log ranges) of one master, in one epoch."""

    def __init__(self, replica: int, now_s: float, wait_s: float = HOLE_WAIT_S) -> None:
        """Start to collect replicas' reports about holes (damaged log ranges) when `replica` becomes the master, at
        `now_s`. In the first `wait_s` seconds no hole may be sent to slaves."""
        self._replica, self._until_s = replica, now_s + wait_s
        self._lacking: dict[int, set[int]] = {}
        """The replicas that lack the intact bytes of a hole (damaged log range), by the hole's offset."""

    def note_lacking(self, replica: int, hole_offset: int) -> None:
        """Record that a replica has no intact bytes for the hole (damaged log range) at `hole_offset`."""
        self._lacking.setdefault(hole_offset, set()).add(replica)

    def all_lack(self, hole_offset: int, known: Collection[int]) -> bool:
        """Return True if every other replica in `known` has reported that it lacks the intact bytes of the hole
        (damaged log range) at `hole_offset`."""
        return set(known) <= self._lacking.get(hole_offset, set()) | {self._replica}

    def lackers(self, hole_offsets: Collection[int]) -> frozenset[int] | None:
        """Return the replicas that have reported that they lack the intact bytes of every hole (damaged log range) at
        the given offsets; None without a hole."""
        lacking = [self._lacking.get(offset, set()) for offset in hole_offsets]
        return frozenset(set.intersection(*lacking)) if lacking else None

    def reason_to_wait(self, hole_offset: int, may_have: Collection[int], now_s: float) -> str:
        """Return the reason why the hole (damaged log range) at `hole_offset` must not be sent to a slave yet; empty if
        it may be sent.

        `may_have`: the members of the sync-state set and the replicas in sync.
        """
        unknown = set(may_have) - self._lacking.get(hole_offset, set()) - {self._replica}
        if unknown:
            return f"replica {', '.join(map(str, sorted(unknown)))} may have the intact bytes"
        if now_s < self._until_s:
            return f"another replica may still send the intact bytes in the next {self._until_s - now_s:.0f} s"
        return ""
