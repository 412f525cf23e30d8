"""Orders that the Controller gives to a broker group's replicas, and the accounts that they give it.

The Controller sends an Order (Lead, Renew, Follow or Drain) to a Storage actor and gets a ReplicaState back. A
Replicator reads from the master by LogRequest and reports Copied. All of them are values that travel between actors;
none is on disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from storage.replication.epochs import SyncStateSet

MASTER_LEASE_S: Final = 1.5
"""How long a master may acknowledge after an account of itself that the Controller has answered."""


class ReplicaRole(Enum):
    """FENCED neither takes appends nor follows: how every replica of a group of several starts."""

    FENCED = "FENCED"
    MASTER = "MASTER"
    SLAVE = "SLAVE"


@dataclass(frozen=True, slots=True)
class FollowerLag:
    """How far a follower is behind its master: bytes it does not have, and how long ago the master stored the first of
    them, in s; both 0 when it has everything."""

    lag_bytes: int
    lag_s: float


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """One replica's account of itself. Offsets are physical.

    `store_id` names the directory. `incarnation` counts its openings and, with the process's monotonic clock `clock_s`,
    orders the accounts. `epoch` is the newest one it knows of, `master` whom it follows (itself for a master, None
    while fenced). `end_offset` is the end of what is on its disk; `log_epoch` is the epoch of the last record there.
    `sync_state_set` is the newest it has stored. `draining`: a master that takes no more appends because it was asked
    to hand over. `proposal`: the set that a master asks for, based on the version that it names. `lags`: a master's
    followers, as far as they have asked it for its log. `in_sync`: who is in sync with a master, itself included.
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

    @property
    def age(self) -> tuple[int, float]:
        """Of two accounts of one directory, the one with the larger age was given later."""
        return self.incarnation, self.clock_s

    @property
    def rank(self) -> tuple[int, int]:
        """How much of the group's log it has: of two replicas, the larger one has everything of the other's."""
        return self.log_epoch, self.end_offset


@dataclass(frozen=True, slots=True)
class Lead:
    """Have `replica` lead in the set's epoch, with a lease that counts from `clock_s` on its own clock."""

    group: str
    replica: int
    sync_state_set: SyncStateSet
    clock_s: float


@dataclass(frozen=True, slots=True)
class Renew:
    """Prolong the master's lease, from `clock_s` on its own clock, and tell it the set, and who does not answer."""

    group: str
    replica: int
    sync_state_set: SyncStateSet
    clock_s: float
    dead: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Follow:
    """Have `replica` follow `master` in `epoch`."""

    group: str
    replica: int
    epoch: int
    master: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Have the master take no more appends: `to` is to lead as soon as it has everything."""

    group: str
    replica: int
    epoch: int
    to: int


Order = Lead | Renew | Follow | Drain
"""What the Controller tells a replica."""


@dataclass(frozen=True, slots=True)
class GroupLeader:
    """Who leads a broker group: `master` None with a `reason` while nobody does."""

    group: str
    master: int | None
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Following:
    """Whom a slave follows. `position`: where it goes on, None while it is not aligned with the master's log."""

    master: int
    epoch: int
    store_id: str
    position: int | None
    learner: bool

    def request(self, replica: int, next_offset: int, acked_offset: int) -> LogRequest:
        """What this slave, `replica`, asks its master for."""
        return LogRequest(replica, self.store_id, self.learner, self.epoch, next_offset, acked_offset)


@dataclass(frozen=True, slots=True)
class LogRequest:
    """A follower asks for the log from `next_offset` on, and says that everything before `acked_offset` is on its disk.

    The second is less only where the follower knows that there is more to come: what a master has at its end is asked
    for when everything before is on disk, so an acknowledgement never waits for the next message.
    """

    follower: int
    store_id: str
    learner: bool
    epoch: int
    next_offset: int
    acked_offset: int


@dataclass(frozen=True, slots=True)
class Copied:
    """What became of a chunk: where the slave goes on, up to where all is on its disk, and how many bytes it took."""

    next_offset: int
    acked_offset: int
    copied_bytes: int
