"""The messages between the Controller, the Storage actors and the Replicators of a broker group.

The Controller sends an Order (Lead, Renew, Follow or Drain) to a Storage actor and receives a ReplicaState. A Broker
reads the GroupLeader from the Controller. A Replicator receives a Following from the slave, reads the master's log with
LogRequest, and receives a Copied from the slave. This module defines the messages; the decisions are in
actors.core.replica.role, actors.core.replica.sync_state and placement.election.

None of these messages survives a crash: each is rebuilt from the replicas' files (storage.replication) and from the
Controller's journal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from storage.replication.epochs import ReplicaMembers, SyncStateSet

MASTER_LEASE_S: Final = 1.5
"""Lease, in seconds, of a master. The master may acknowledge appends for this time after it sent a state report that
the Controller has answered."""


class ReplicaRole(Enum):
    """The role of a replica. A FENCED replica accepts no appends and follows no master. In a group of several replicas,
    each replica starts fenced."""

    FENCED = "FENCED"
    MASTER = "MASTER"
    SLAVE = "SLAVE"


@dataclass(frozen=True, slots=True)
class FollowerLag:
    """The lag of a follower: the number of missing bytes, and the seconds since the master stored the first of these
    bytes.

    Both are 0 if the follower has everything.
    """

    lag_bytes: int
    lag_s: float


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """One replica's report of its state. Offsets are physical.

    `store_id` names the store's directory. `incarnation` counts how often the directory was opened; together with
    `clock_s`, the process's monotonic clock, it orders the reports. `epoch` is the newest known epoch. `master` is the
    replica that this replica follows (itself for a master, None while fenced). `end_offset` is the end of the log on
    the replica's disk, and `log_epoch` the epoch of the last record in this log. `sync_state_set` is the newest stored
    set. `draining`: True for a master that accepts no more appends because another replica should lead. `proposal`: the
    set that a master proposes, based on the version that it names. `lags`: the lags of a master's followers that have
    read its log. `in_sync`: the replicas in sync with a master, itself included. `failed`: the failure of the replica's
    disk, empty while the disk works. A failed replica acknowledges nothing after this report, whatever its lease, until
    its process has been restarted.

    `confirm_floor`: the highest confirm offset on the replica's disk; a log that ends before it lacks acknowledged
    messages. `hole_bytes`: the number of damaged bytes in the log. `caught_up`: True if this process has led, or has
    had everything that its master had confirmed. From that time on it has missed no message acknowledged while it was
    in the sync-state set. `refusal`: the reason why the replica does not follow its master, or "". `members`: the
    newest members of the broker group on the replica's disk; None if the group's replicas were never changed.
    `wall_ms`: the wall clock of the replica's node, in ms since 1970, 0 if unknown. It is only compared with other
    nodes' clocks. `hole_lackers`: for a master whose log has holes, the replicas that have reported in this epoch that
    they lack the intact bytes of every hole, too; None for other replicas, and for a log without holes.
    """

    replica: int
    store_id: str
    incarnation: int
    clock_s: float
    role: ReplicaRole
    epoch: int
    master: int | None
    log_epoch: int
    end_offset: int
    confirm_offset: int
    sync_state_set: SyncStateSet | None
    draining: bool = False
    proposal: SyncStateSet | None = None
    lags: Mapping[int, FollowerLag] = field(default_factory=dict)
    in_sync: frozenset[int] = frozenset()
    failed: str = ""
    confirm_floor: int = 0
    hole_bytes: int = 0
    caught_up: bool = False
    refusal: str = ""
    members: ReplicaMembers | None = None
    wall_ms: int = 0
    hole_lackers: frozenset[int] | None = None

    @property
    def reaches_floor(self) -> bool:
        """True if the replica's log does not end before its confirm floor. The log may have holes."""
        return self.end_offset >= self.confirm_floor

    @property
    def complete(self) -> bool:
        """False if the replica's log is known to lack acknowledged messages, else True."""
        return self.reaches_floor and not self.hole_bytes

    @property
    def age(self) -> tuple[int, float]:
        """The sort key of a replica's reports: of two reports about the same directory, the later report has the larger
        key."""
        return self.incarnation, self.clock_s

    @property
    def rank(self) -> tuple[int, int]:
        """The sort key by which replicas are compared: the epoch of the log's last record, and the end of the log. A
        replica with a larger rank has every message of a replica with a smaller rank."""
        return self.log_epoch, self.end_offset


@dataclass(frozen=True, slots=True)
class Lead:
    """Order: `replica` becomes the master in the epoch of the given sync-state set. Its lease counts from `clock_s` on
    the replica's own clock.

    Only the process that sent the report may execute the order, because the log of a later process may have lost its
    end. The set has the id of the replica's directory, and `incarnation` is the incarnation of that directory.
    """

    group: str
    replica: int
    sync_state_set: SyncStateSet
    clock_s: float
    incarnation: int


@dataclass(frozen=True, slots=True)
class Renew:
    """Order: extend the master's lease, counted from `clock_s` on the master's own clock.

    `sync_state_set`: the Controller's current sync-state set. `dead`: the replicas that do not answer the Controller.
    """

    group: str
    replica: int
    sync_state_set: SyncStateSet
    clock_s: float
    dead: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Follow:
    """Order: `replica` follows `master` in `epoch`."""

    group: str
    replica: int
    epoch: int
    master: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Order: the master stops accepting appends. The replica `to` becomes the master as soon as `to` has every
    message."""

    group: str
    replica: int
    epoch: int
    to: int


Order = Lead | Renew | Follow | Drain
"""An order of the Controller to one replica."""


@dataclass(frozen=True, slots=True)
class GroupLeader:
    """The master of a broker group and its epoch. If there is no master, `master` is None and `reason` states why.

    `replicas`: the replicas of the group, in ascending order. `stores`: the ids of the directories in the sync-state
    set. A change of `stores` shows that a replica may lack the broker's snapshot. `ordered`: the values of the section
    `replication` that commands have changed, so that raymq.yaml's values no longer count.
    """

    group: str
    master: int | None
    epoch: int
    reason: str
    replicas: tuple[int, ...]
    stores: frozenset[str]
    ordered: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Following:
    """The master that a slave follows. `position`: the next offset to read; None until the slave's log is aligned with
    the master's log."""

    master: int
    epoch: int
    store_id: str
    position: int | None
    learner: bool


@dataclass(frozen=True, slots=True)
class LogRequest:
    """A follower's request for the master's log from `next_offset` on. The log before `acked_offset` is on the
    follower's disk.

    While the follower writes to disk, `acked_offset` is less than `next_offset`. An acknowledgement does not wait for
    the next request, because it can be sent in its own frame (ACK_LOG).
    """

    follower: int
    store_id: str
    learner: bool
    epoch: int
    next_offset: int
    acked_offset: int


@dataclass(frozen=True, slots=True)
class Copied:
    """A slave's answer to a chunk of the log: the next offset to read, the end of the log on the slave's disk, and the
    number of appended bytes."""

    next_offset: int
    acked_offset: int
    copied_bytes: int
