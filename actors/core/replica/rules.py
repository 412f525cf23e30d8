"""The rules of a broker group with several replicas: for which copies its master waits, and which replicas are in sync.

The rules come from the section `replication` of raymq.yaml (actors.replica.storage_actor), and are the same for all
replicas of a group.
"""

from __future__ import annotations

from dataclasses import dataclass

from actors.core.replica.hole_reports import HOLE_WAIT_S
from actors.core.replica.sync_state import FixedSyncState, MasterSyncState
from storage.replication.epochs import ReplicaMembers, SyncStateSet


@dataclass(frozen=True, slots=True)
class ReplicaRules:
    """The conditions under which a master acknowledges an append (RocketMQ's settings, spec/storage.md §11.1). Times
    are in s.

    `fixed_roles`: True if no other replica ever becomes the master; a replica that lacks less than `max_gap_bytes` is
    then in sync. `hole_wait_s`: the time before damaged bytes that no replica can repair are copied
    (actors.core.replica.hole_reports). `may_lose_confirmed`: True if a slave may give up acknowledged messages that its
    master lacks (enable_elect_unclean_master).
    """

    lease_s: float
    in_sync_replicas: int = 1
    min_in_sync_replicas: int = 1
    all_ack_in_sync_state_set: bool = True
    slave_timeout_s: float = 3.0
    not_catchup_s: float = 15.0
    slave_read_enable: bool = False
    fixed_roles: bool = False
    max_gap_bytes: int = 256 << 20
    may_lose_confirmed: bool = False
    hole_wait_s: float = HOLE_WAIT_S

    def required_in_sync(self, members: ReplicaMembers | None) -> int:
        """Return the minimum number of replicas in sync. With fewer replicas in sync, the master rejects messages.

        `members`: the members of the broker group, whose minimum counts more than raymq.yaml's; None if they were never
        changed. With fixed roles the master accepts messages even if copies are missing: then only the send status
        differs.
        """
        least = self.min_in_sync_replicas if members is None else members.min_in_sync or self.min_in_sync_replicas
        return least if self.fixed_roles else max(least, self.in_sync_replicas)

    def begin(self, replica: int, first: SyncStateSet, end_offset: int, now_s: float) -> MasterSyncState:
        """Create the object in which a new master records the progress of its followers. `first`: the master's
        sync-state set. `end_offset`: the end of the master's log."""
        if not self.fixed_roles:
            return MasterSyncState(replica, first, end_offset, now_s, not_catchup_s=self.not_catchup_s)
        return FixedSyncState(
            replica,
            first,
            end_offset,
            now_s,
            not_catchup_s=self.not_catchup_s,
            max_gap_bytes=self.max_gap_bytes,
        )
