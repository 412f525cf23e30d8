"""The role of one replica (master, slave or fenced): the decisions of a Storage actor in a group of several replicas.

    FENCED ──lead(epoch)──▶ MASTER ──lease over──▶ MASTER that takes no appends ──renew──▶ MASTER
       └────follow(epoch, master)──▶ SLAVE ◀── follow of a newer epoch ── any

This module defines the effect of the Controller's orders on a replica. TRANSITIONS has every order that is executed;
all other orders are rejected.

An order of an epoch older than the newest known epoch is rejected, so a replica that was replaced cannot become the
master again. A master accepts appends, and acknowledges them, only while it holds a lease. The Controller elects
another master only after the last lease has expired. So two masters never acknowledge at the same time, even if one is
partitioned or hung.

The caller makes durable the state that must survive the process: it stores an epoch before the replica leads in it, and
passes the newest epoch on disk to the constructor. The methods get the current time, on the process's clock, as an
argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final

from actors.core.replica.orders import ReplicaRole
from raymq.common.errors import InvalidArgumentError, NotMasterError


class RoleOrder(Enum):
    """The kind of an order from the Controller that affects the role of a replica."""

    LEAD = "lead"
    RENEW = "renew"
    FOLLOW = "follow"
    DRAIN = "drain"


class EpochAge(Enum):
    """The comparison of an order's epoch with the replica's newest known epoch."""

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
        (RoleOrder.LEAD, EpochAge.SAME): ReplicaRole.MASTER,  # a repeated LEAD order renews the lease
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
"""By a replica's current role, the orders that it accepts (kind of order, age of the order's epoch), each with the role
that follows. Every other order is rejected with NotMasterError."""


class ReplicaRoleState:
    """The role of one replica. `epoch` is the newest known epoch; at first it is the epoch on the replica's
    disk."""

    def __init__(self, broker_name: str, replica: int, epoch: int) -> None:
        self._broker_name = broker_name
        self.replica = replica
        self.epoch = epoch
        self.role = ReplicaRole.FENCED
        self.master: int | None = None
        """The replica that leads in `epoch`: this replica if it is the master, None while fenced."""
        self.draining = False
        """True if this replica is a master that accepts no more appends, because another replica should become the
        master."""
        self._lease_until_s = 0.0

    def lead(self, epoch: int, lease_until_s: float) -> bool:
        """Become the master in `epoch`, which the caller has stored. Returns True if this replica was not yet the
        master in that epoch. Repeating the call renews the lease.

        Raises NotMasterError if the epoch is older than the newest known epoch, or if another replica leads in it.
        """
        after = self._role_after(RoleOrder.LEAD, epoch)
        again = epoch == self.epoch
        self.epoch, self.role, self.master = epoch, after, self.replica
        self._lease_until_s = max(lease_until_s, self._lease_until_s if again else 0.0)
        self.draining = self.draining and again
        return not again

    def renew(self, epoch: int, lease_until_s: float) -> None:
        """Extend the lease of the master of `epoch`. Raises NotMasterError if this replica is not the master of
        `epoch`."""
        self.role = self._role_after(RoleOrder.RENEW, epoch)
        self._lease_until_s = max(lease_until_s, self._lease_until_s)

    def follow(self, epoch: int, master: int) -> bool:
        """Follow `master` in `epoch`. Returns True if the role, the epoch or the master changed. Raises NotMasterError
        if `epoch` is older than the newest known epoch, or if this replica leads in `epoch`."""
        after = self._role_after(RoleOrder.FOLLOW, epoch)
        if master == self.replica:
            raise InvalidArgumentError(f"replica {master} of broker group {self._broker_name!r} cannot follow itself")
        new = (self.epoch, self.role, self.master) != (epoch, after, master)
        self.epoch, self.role, self.master = epoch, after, master
        self._lease_until_s, self.draining = 0.0, False
        return new

    def drain(self, epoch: int) -> None:
        """Stop accepting appends until the next epoch, so that another replica can become the master.

        Raises NotMasterError unless this replica is the master of `epoch`.
        """
        self.role = self._role_after(RoleOrder.DRAIN, epoch)
        self.draining = True

    def _role_after(self, order: RoleOrder, epoch: int) -> ReplicaRole:
        """Return the role that the replica has after an order. Raises NotMasterError if the order is rejected."""
        age = EpochAge((epoch > self.epoch) - (epoch < self.epoch))
        after = TRANSITIONS[self.role].get((order, age))
        if after is None:
            raise NotMasterError(self._broker_name, self.epoch)
        return after

    def leads(self, now_s: float) -> bool:
        """Return True if this replica is the master and holds a lease, so that it may acknowledge appends now."""
        return self.role is ReplicaRole.MASTER and now_s < self._lease_until_s

    def accepts_append(self, epoch: int | None, now_s: float) -> bool:
        """Return True if this replica accepts appends of `epoch` now. `epoch` is None if the client sent no epoch."""
        return self.leads(now_s) and not self.draining and epoch in (None, self.epoch)

    def check_append(self, epoch: int | None, now_s: float) -> None:
        """Raise NotMasterError unless this replica accepts appends of `epoch` now (`accepts_append`)."""
        if not self.accepts_append(epoch, now_s):
            raise NotMasterError(self._broker_name, self.epoch)

    def check_chunk(self, epoch: int) -> None:
        """Raise NotMasterError unless this replica is a slave in `epoch`: only then does it accept chunks of that
        epoch's master."""
        if self.role is not ReplicaRole.SLAVE or epoch != self.epoch:
            raise NotMasterError(self._broker_name, self.epoch)

    def check_asked(self, epoch: int) -> None:
        """Raise NotMasterError unless this replica is the master of `epoch`, so that followers may read its log. For
        these reads the master needs no lease."""
        if self.role is not ReplicaRole.MASTER or epoch != self.epoch:
            raise NotMasterError(self._broker_name, self.epoch)
