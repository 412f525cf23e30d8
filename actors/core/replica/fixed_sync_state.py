"""What a master knows of its followers where roles are fixed (replication.broker_role, spec/storage.md §11.1).

Nobody else ever leads, so what is on the master's own disk is confirmed, and the sync-state set stays the master alone:
should another be allowed to lead one day, it is known that only the master has everything for sure. In sync here means
close enough behind to be of use, and counts for `min_in_sync_replicas`, for readers and for people. An append that
waits for copies waits for followers that have it, in sync or not. Nothing here survives the process.
"""

from __future__ import annotations

from actors.core.replica.sync_state import MasterSyncState
from storage.replication.epochs import SyncStateSet


class FixedSyncState(MasterSyncState):
    """The followers of a master that leads for ever. In sync is who has asked within `not_catchup_s`, is heard by the
    Controller, and lacks less than `max_gap_bytes` (RocketMQ's haMaxGapNotInSync)."""

    def __init__(
        self,
        replica: int,
        first: SyncStateSet,
        end_offset: int,
        now_s: float,
        *,
        not_catchup_s: float,
        max_gap_bytes: int,
    ) -> None:
        super().__init__(replica, first, end_offset, now_s, not_catchup_s=not_catchup_s)
        self._max_gap_bytes = max_gap_bytes
        self._silent: frozenset[int] = frozenset()

    def silent(self, names: frozenset[int]) -> None:
        """The Controller does not hear these, and hears all others."""
        self._silent = names

    def in_sync(self, now_s: float) -> frozenset[int]:
        """The replicas in sync now, this one included."""
        near = {
            name
            for name, follower in self._followers.items()
            if not follower.learner
            and name not in self._silent
            and now_s - follower.asked_s <= self._not_catchup_s
            and self._own_end - follower.acked_offset < self._max_gap_bytes
        }
        return frozenset(near | {self._replica})

    def copies(self, end_offset: int) -> int:
        """How many replicas, this one included and learners not, have everything before `end_offset`."""
        others = sum(
            follower.acked_offset >= end_offset and not follower.learner for follower in self._followers.values()
        )
        return others + (self._own_end >= end_offset)

    def propose(self, now_s: float) -> SyncStateSet | None:
        """No other set, ever."""
        return None

    def _confirm(self) -> None:
        self.confirm_offset = self._own_end
