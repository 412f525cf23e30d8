"""What storage actors, Replicators and the Controller tell each other about the replicas of a broker group.

A broker group has replicas 0, 1, …; each is a store of its own. One of them leads (the master) in an *epoch*, a number
that grows with each start of leading; the others follow. The *sync-state set* are the replicas that have everything
up to the *confirm offset*: any of them may lead next, and consumers see nothing beyond it (spec/storage.md §11.2).

What survives a crash: the epochs in each replica's epoch file, the sync-state set in each member's
`config/syncStateSet.json` and in the Controller's journal. The rest is heard anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple

LEASE_S: Final = 1.5
"""How long a master may acknowledge after an account of itself that the Controller has answered."""


class EpochEntry(NamedTuple):
    """`epoch` began with the record at `start_offset`."""

    epoch: int
    start_offset: int


class ReplicaRole(Enum):
    """FENCED neither takes appends nor follows: how every replica of a group of several starts."""

    FENCED = "FENCED"
    MASTER = "MASTER"
    SLAVE = "SLAVE"


@dataclass(frozen=True, slots=True)
class SyncStateSet:
    """The replicas that may lead next. Newer is what has the larger (`epoch`, `version`).

    `stores`: member to the id of its store directory. A directory that was lost and begun anew is no member.
    """

    epoch: int
    version: int
    stores: Mapping[int, str]

    @property
    def members(self) -> frozenset[int]:
        return frozenset(self.stores)

    @property
    def order(self) -> tuple[int, int]:
        return self.epoch, self.version


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


@dataclass(frozen=True, slots=True)
class EpochHistory:
    """A master's epochs, and the end of what is on its disk: what a follower compares with its own."""

    entries: tuple[EpochEntry, ...]
    min_offset: int
    end_offset: int


@dataclass(frozen=True, slots=True)
class LogChunk:
    """Bytes of a master's log from `physical_offset` on: whole records of one file and of one epoch, `entry`.

    Empty when there was nothing in time. `confirm_offset` is the master's, and `end_offset` where its disk ends.
    """

    physical_offset: int
    data: bytes
    entry: EpochEntry | None
    confirm_offset: int
    end_offset: int


def common_end(mine: Sequence[EpochEntry], my_end: int, theirs: Sequence[EpochEntry], their_end: int) -> int | None:
    """Up to where two logs are the same; None if nothing is (spec/storage.md §11.2, handshake truncation).

    The newest epoch that began at the same place in both, up to where the first of the two leaves it.
    """
    ends = dict(with_ends(theirs, their_end))
    for entry, end in reversed(with_ends(mine, my_end)):
        if entry in ends:
            return min(end, ends[entry])
    return None


def with_ends(entries: Sequence[EpochEntry], end_offset: int) -> list[tuple[EpochEntry, int]]:
    """Each epoch with where it ends: where the next begins, or at the log's end."""
    return list(zip(entries, [*(entry.start_offset for entry in entries[1:]), end_offset], strict=False))
