"""The role of one replica: it leads, follows, or is fenced. Decisions of a Storage actor in a group of several.

    FENCED ──lead(epoch)──▶ MASTER ──lease over──▶ MASTER that takes no appends ──renew──▶ MASTER
       └────follow(epoch, master)──▶ SLAVE ◀── follow of a newer epoch ── any

The effect of the Controller's orders on a replica belongs here. TRANSITIONS has every order that is carried out; all
others are refused.

An order of an epoch older than the newest known is refused, so no replica that was replaced can be made master again. A
master takes appends, and acknowledges them, only while it holds a lease: the Controller elects another master only when
the last lease is over. So two masters never acknowledge at the same time, even if one is cut off or hung.

The caller keeps what must survive the process: it stores an epoch before it leads in it, and passes the newest epoch on
its disk to the constructor. Time is an argument, on the clock of the process.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final

from actors.core.replica.orders import ReplicaRole
from raymq.common.errors import InvalidArgumentError, NotMasterError


class RoleOrder(Enum):
    """An order of the Controller, reduced to its effect on the role."""

    LEAD = "lead"
    RENEW = "renew"
    FOLLOW = "follow"
    DRAIN = "drain"


class EpochAge(Enum):
    """The epoch of an order, compared with the replica's newest known epoch."""

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
"""The role after an order, by the role before it. An order that is missing here is refused with NotMasterError."""


class ReplicaRoleState:
    """The role of one replica. `epoch` is the newest known epoch, at first the one on its disk."""

    def __init__(self, broker_name: str, replica: int, epoch: int) -> None:
        self._broker_name = broker_name
        self.replica = replica
        self.epoch = epoch
        self.role = ReplicaRole.FENCED
        self.master: int | None = None
        """The replica that leads in `epoch`: this one for a master, None while fenced."""
        self.draining = False
        """True for a master that takes no more appends, because another replica should lead."""
        self._lease_until_s = 0.0

    def lead(self, epoch: int, lease_until_s: float) -> bool:
        """Lead in `epoch`, which the caller has stored. Returns True if this replica did not lead in it before.
        Repeating it renews the lease.

        NotMasterError: the epoch is older than the newest known one, or another replica leads it.
        """
        after = self._role_after(RoleOrder.LEAD, epoch)
        again = epoch == self.epoch
        self.epoch, self.role, self.master = epoch, after, self.replica
        self._lease_until_s = max(lease_until_s, self._lease_until_s if again else 0.0)
        self.draining = self.draining and again
        return not again

    def renew(self, epoch: int, lease_until_s: float) -> None:
        """Prolong the lease of the master of `epoch`. NotMasterError: this replica is not that master."""
        self.role = self._role_after(RoleOrder.RENEW, epoch)
        self._lease_until_s = max(lease_until_s, self._lease_until_s)

    def follow(self, epoch: int, master: int) -> bool:
        """Follow `master` in `epoch`. Returns True if that is new. NotMasterError: the epoch is older, or this replica
        leads it.
        """
        after = self._role_after(RoleOrder.FOLLOW, epoch)
        if master == self.replica:
            raise InvalidArgumentError(f"replica {master} of {self._broker_name} cannot follow itself")
        new = (self.epoch, self.role, self.master) != (epoch, after, master)
        self.epoch, self.role, self.master = epoch, after, master
        self._lease_until_s, self.draining = 0.0, False
        return new

    def drain(self, epoch: int) -> None:
        """Take no more appends until the next epoch, because another replica should lead.

        NotMasterError unless this replica is the master of `epoch`.
        """
        self.role = self._role_after(RoleOrder.DRAIN, epoch)
        self.draining = True

    def _role_after(self, order: RoleOrder, epoch: int) -> ReplicaRole:
        """Return the role after an order. NotMasterError: the order is refused."""
        age = EpochAge((epoch > self.epoch) - (epoch < self.epoch))
        after = TRANSITIONS[self.role].get((order, age))
        if after is None:
            raise NotMasterError(self._broker_name, self.epoch)
        return after

    def leads(self, now_s: float) -> bool:
        """True if this replica may acknowledge appends now."""
        return self.role is ReplicaRole.MASTER and now_s < self._lease_until_s

    def check_append(self, epoch: int | None, now_s: float) -> None:
        """Raise NotMasterError unless this replica takes appends of `epoch` now; None: the client sent no epoch."""
        if not self.leads(now_s) or self.draining or epoch not in (None, self.epoch):
            raise NotMasterError(self._broker_name, self.epoch)

    def check_chunk(self, epoch: int) -> None:
        """Raise NotMasterError unless this replica follows in `epoch`, and so takes chunks of that epoch's master."""
        if self.role is not ReplicaRole.SLAVE or epoch != self.epoch:
            raise NotMasterError(self._broker_name, self.epoch)

    def check_asked(self, epoch: int) -> None:
        """Raise NotMasterError unless this replica is the master of `epoch`, whose log followers read. Needs no
        lease.
        """
        if self.role is not ReplicaRole.MASTER or epoch != self.epoch:
            raise NotMasterError(self._broker_name, self.epoch)
