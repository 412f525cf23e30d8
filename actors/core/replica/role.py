"""What one replica may do now: lead, follow, or neither; the decisions of a Storage actor in a group of several.

    FENCED ──lead(epoch)──▶ MASTER ──lease over──▶ MASTER that takes nothing ──renew──▶ MASTER
       └────follow(epoch, master)──▶ SLAVE ◀── follow of a newer epoch ── any

An order of an epoch older than the newest known is refused, so nobody who was replaced can be led back. A master takes
appends, and acknowledges them, only while it holds a lease: the Controller elects another only when the last lease it
granted is over, so two masters never acknowledge at a time, also when one is cut off or stood still.

What survives the process is the caller's: it stores an epoch before it leads in it, and hands in the newest one it
finds on its disk. Time comes in as an argument, on the clock of the process.
"""

from __future__ import annotations

from actors.core.replica.orders import ReplicaRole
from raymq.errors import InvalidArgumentError, NotMasterError


class ReplicaRoleState:
    """One replica. `epoch` is the newest epoch it knows of, from its disk at first."""

    def __init__(self, broker_name: str, replica: int, epoch: int) -> None:
        self._broker_name = broker_name
        self.replica = replica
        self.epoch = epoch
        self.role = ReplicaRole.FENCED
        self.master: int | None = None
        self.draining = False
        self._lease_until_s = 0.0

    def lead(self, epoch: int, lease_until_s: float) -> bool:
        """Lead in `epoch`. True if that is new: the caller has stored the epoch by now. Repeating it renews the lease.

        NotMasterError for an epoch that is older than the newest known, or that another replica leads.
        """
        again = self.role is ReplicaRole.MASTER and epoch == self.epoch
        if not again and epoch <= self.epoch:
            raise NotMasterError(self._broker_name, self.epoch)
        self.epoch, self.role, self.master = epoch, ReplicaRole.MASTER, self.replica
        self._lease_until_s = max(lease_until_s, self._lease_until_s if again else 0.0)
        self.draining = self.draining and again
        return not again

    def renew(self, epoch: int, lease_until_s: float) -> None:
        """Prolong the lease of the master of `epoch`. NotMasterError if this is not it."""
        self._require(epoch)
        self._lease_until_s = max(lease_until_s, self._lease_until_s)

    def follow(self, epoch: int, master: int) -> bool:
        """Follow `master` in `epoch`. True if that is new. NotMasterError for an older epoch."""
        if epoch < self.epoch or (epoch == self.epoch and self.role is ReplicaRole.MASTER):
            raise NotMasterError(self._broker_name, self.epoch)
        if master == self.replica:
            raise InvalidArgumentError(f"replica {master} of {self._broker_name} cannot follow itself")
        new = (self.epoch, self.role, self.master) != (epoch, ReplicaRole.SLAVE, master)
        self.epoch, self.role, self.master = epoch, ReplicaRole.SLAVE, master
        self._lease_until_s, self.draining = 0.0, False
        return new

    def drain(self, epoch: int) -> None:
        """Take no more appends: somebody else is to lead. Ends with the epoch. NotMasterError if this is no master."""
        self._require(epoch)
        self.draining = True

    def leads(self, now_s: float) -> bool:
        """Whether it may acknowledge now."""
        return self.role is ReplicaRole.MASTER and now_s < self._lease_until_s

    def check_append(self, epoch: int | None, now_s: float) -> None:
        """NotMasterError unless it takes appends of `epoch` now; None is a client that does not know the epoch."""
        if not self.leads(now_s) or self.draining or epoch not in (None, self.epoch):
            raise NotMasterError(self._broker_name, self.epoch)

    def check_chunk(self, epoch: int) -> None:
        """NotMasterError unless it follows in `epoch`, so that it takes what that epoch's master sends."""
        if self.role is not ReplicaRole.SLAVE or epoch != self.epoch:
            raise NotMasterError(self._broker_name, self.epoch)

    def check_asked(self, epoch: int) -> None:
        """NotMasterError unless it is the master of `epoch`, which its followers may ask. A lease is not needed."""
        self._require(epoch)

    def _require(self, epoch: int) -> None:
        if self.role is not ReplicaRole.MASTER or epoch != self.epoch:
            raise NotMasterError(self._broker_name, self.epoch)
