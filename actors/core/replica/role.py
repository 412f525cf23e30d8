"""The role of one replica: whether it leads, follows, or neither. Decisions of a Storage actor in a group of several.

    FENCED ──lead(epoch)──▶ MASTER ──lease over──▶ MASTER that takes no appends ──renew──▶ MASTER
       └────follow(epoch, master)──▶ SLAVE ◀── follow of a newer epoch ── any

A change of what an order of the Controller does to a replica belongs here. TRANSITIONS has every order that is carried
out; all others are refused.

An order of an epoch older than the newest known is refused, so no replica that was replaced can be made master again. A
master takes appends, and acknowledges them, only while it holds a lease: the Controller elects another only when the
last lease it granted is over. So two masters never acknowledge at the same time, even when one is cut off or stood
still.

What survives the process is the caller's work: it stores an epoch before it leads in it, and hands in the newest one
that it finds on its disk. Time comes in as an argument, on the clock of the process.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final

from actors.core.replica.orders import ReplicaRole
from raymq.common.errors import InvalidArgumentError, NotMasterError


class RoleOrder(Enum):
    """An order of the Controller, as far as the role is concerned."""

    LEAD = "lead"
    RENEW = "renew"
    FOLLOW = "follow"
    DRAIN = "drain"


class EpochAge(Enum):
    """The epoch of an order, compared with the newest epoch that the replica knows."""

    OLDER = -1
    SAME = 0
    NEWER = 1


TRANSITIONS: Final[Mapping[ReplicaRole, Mapping[tuple[RoleOrder, EpochAge], ReplicaRole]]] = {
    ReplicaRole.FENCED: {
        (RoleOrder.LEAD, EpochAge.NEWER): ReplicaRole.MASTER,
        (RoleOrder.FOLLOW, EpochAge.SAME): ReplicaRole.SLAVE,
        (RoleOrder.FOLLOW, EpochAge.NEWER): ReplicaRole.SLAVE,
    },
    ReplicaRole.MASTER: {
        (RoleOrder.LEAD, EpochAge.SAME): ReplicaRole.MASTER,  # repeated: it renews the lease
        (RoleOrder.LEAD, EpochAge.NEWER): ReplicaRole.MASTER,
        (RoleOrder.RENEW, EpochAge.SAME): ReplicaRole.MASTER,
        (RoleOrder.DRAIN, EpochAge.SAME): ReplicaRole.MASTER,
        (RoleOrder.FOLLOW, EpochAge.NEWER): ReplicaRole.SLAVE,
    },
    ReplicaRole.SLAVE: {
        (RoleOrder.LEAD, EpochAge.NEWER): ReplicaRole.MASTER,
        (RoleOrder.FOLLOW, EpochAge.SAME): ReplicaRole.SLAVE,
        (RoleOrder.FOLLOW, EpochAge.NEWER): ReplicaRole.SLAVE,
    },
}
"""The role after an order, by the role before it. An order that is not here is refused with NotMasterError."""


class ReplicaRoleState:
    """The role of one replica. `epoch` is the newest epoch it knows of, at first the one on its disk."""

    def __init__(self, broker_name: str, replica: int, epoch: int) -> None:
        self._broker_name = broker_name
        self.replica = replica
        self.epoch = epoch
        self.role = ReplicaRole.FENCED
        self.master: int | None = None
        """The replica that leads in `epoch`: itself for a master, None while fenced."""
        self.draining = False
        """True for a master that takes no more appends, because another replica is to lead."""
        self._lease_until_s = 0.0

    def lead(self, epoch: int, lease_until_s: float) -> bool:
        """Lead in `epoch`. True if that is new: the caller has stored the epoch by now. Repeating it renews the lease.

        NotMasterError for an epoch that is older than the newest known, or that another replica leads.
        """
        after = self._role_after(RoleOrder.LEAD, epoch)
        again = epoch == self.epoch
        self.epoch, self.role, self.master = epoch, after, self.replica
        self._lease_until_s = max(lease_until_s, self._lease_until_s if again else 0.0)
        self.draining = self.draining and again
        return not again

    def renew(self, epoch: int, lease_until_s: float) -> None:
        """Prolong the lease of the master of `epoch`. NotMasterError if this replica is not that master."""
        self.role = self._role_after(RoleOrder.RENEW, epoch)
        self._lease_until_s = max(lease_until_s, self._lease_until_s)

    def follow(self, epoch: int, master: int) -> bool:
        """Follow `master` in `epoch`. True if that is new. NotMasterError for an older epoch, and for its own."""
        after = self._role_after(RoleOrder.FOLLOW, epoch)
        if master == self.replica:
            raise InvalidArgumentError(f"replica {master} of {self._broker_name} cannot follow itself")
        new = (self.epoch, self.role, self.master) != (epoch, after, master)
        self.epoch, self.role, self.master = epoch, after, master
        self._lease_until_s, self.draining = 0.0, False
        return new

    def drain(self, epoch: int) -> None:
        """Take no more appends, because another replica is to lead; until the next epoch.

        NotMasterError unless this replica is the master of `epoch`.
        """
        self.role = self._role_after(RoleOrder.DRAIN, epoch)
        self.draining = True

    def _role_after(self, order: RoleOrder, epoch: int) -> ReplicaRole:
        """The role that an order leads to; NotMasterError if it is refused."""
        age = EpochAge((epoch > self.epoch) - (epoch < self.epoch))
        after = TRANSITIONS[self.role].get((order, age))
        if after is None:
            raise NotMasterError(self._broker_name, self.epoch)
        return after

    def leads(self, now_s: float) -> bool:
        """True if it may acknowledge appends now."""
        return self.role is ReplicaRole.MASTER and now_s < self._lease_until_s

    def check_append(self, epoch: int | None, now_s: float) -> None:
        """NotMasterError unless this replica takes appends of `epoch` now; None: the client does not know the epoch."""
        if not self.leads(now_s) or self.draining or epoch not in (None, self.epoch):
            raise NotMasterError(self._broker_name, self.epoch)

    def check_chunk(self, epoch: int) -> None:
        """NotMasterError unless this replica follows in `epoch`, and so takes chunks of that epoch's master."""
        if self.role is not ReplicaRole.SLAVE or epoch != self.epoch:
            raise NotMasterError(self._broker_name, self.epoch)

    def check_asked(self, epoch: int) -> None:
        """NotMasterError unless this replica is the master of `epoch`, whose log followers read. A lease is not
        needed."""
        if self.role is not ReplicaRole.MASTER or epoch != self.epoch:
            raise NotMasterError(self._broker_name, self.epoch)
