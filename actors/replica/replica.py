"""One replica of a group of several: a store that leads, follows, or is fenced.

This module changes a replica's role, reports its state and repairs damage. The work in each role is in master_side.py
and follower_side.py, and the part common to all roles in group_replica.py. The decisions about roles and copies are in
actors.core.replica. The module does not use Ray: `actors.replica.storage_actor` is the actor that runs a replica.

    master     append ──┬─▶ flush ──────────────────────────────────────▶ both are there ──▶ acknowledge
                        └─▶ chunks for the followers, who flush them and say so ──┘
    slave      align with the master's epochs (cut what differs) ──▶ append its chunks, ask for more

Followers get records as soon as the master has written them, so that all disks flush at the same time. So after a power
failure a master may have less of the log than its followers. That is safe for three reasons. First, a message is
acknowledged, and visible to consumers, only after the master's own disk has it, too. Second, a restarted master never
continues to lead in its epoch (actors.core.replica.role), and a follower cuts the records that the next epoch's master
does not have. Third, in one epoch no follower cuts anything, because it never has more than its master sends. With
fixed roles followers get only records that are on the master's disk. So if a copy is longer than the master's log, the
master's disk has lost messages (placement.election).

A replica whose disk has failed stops leading, whatever its lease. It neither acknowledges messages nor makes them
visible, answers appends with NotMasterError, and reports the failure, so that the Controller elects another replica at
once. Its process is restarted soon (actors.replica.failed_disk). After the restart only the records that recovery reads
from the disk count.

Consumers see messages up to the confirm offset, which every member of the sync-state set has
(actors.core.replica.sync_state). Between a start and the first order the replica is fenced: it accepts no appends, and
its messages are not visible.

These values survive a crash, in files beside the store: the epochs and the highest confirm offset
(storage.replication.epoch_file), the directory's id and the newest sync-state set that the replica has received
(storage.replication.replica_files). An epoch is on disk before its master accepts the first append, and a confirm
offset before it is reported. A log that ends before the confirm offset lacks acknowledged messages: the replica reports
this, and is elected only if no other replica has these messages. If a master lacks acknowledged messages, a follower
refuses to cut its own log below the confirm offset: it keeps its bytes, does not follow, and reports the reason.
"""

from __future__ import annotations

import logging
import math
import time
from typing import Any, Final

from actors.core.replica.hole_reports import HoleReports
from actors.core.replica.orders import (
    Drain,
    Follow,
    Lead,
    Order,
    Renew,
    ReplicaRole,
    ReplicaState,
)
from actors.replica.follower_side import FollowerSide
from actors.replica.log_mender import HOLES_MAX
from actors.replica.master_side import MasterSide
from raymq.common.errors import (
    NotMasterError,
)
from raymq.common.protocol.store import (
    Hole,
)
from storage.replication.epochs import (
    ReplicaMembers,
    SyncStateSet,
)
from storage.running_flags import RunningFlag

ORDER_WAIT_S: Final = 0.3

logger = logging.getLogger(__name__)


class Replica(MasterSide, FollowerSide):
    """One replica of a broker group. Thread-safe.

    It executes the Controller's orders, reports its state, and repairs damage. Its base classes have the methods of a
    master and of a follower.
    """

    def obey(
        self, order: Order | None, newest: SyncStateSet | None, members: ReplicaMembers | None = None
    ) -> ReplicaState:
        """Execute an order of the Controller, unless the order is outdated. First store the sync-state set `newest` and
        the members of the broker group. Returns this replica's state report afterwards.

        While the log is being aligned, which may take long, Lead and Follow orders are skipped: the Controller repeats
        them.
        """
        try:
            with self._changed:
                if newest is not None:
                    self._files.note_set(newest)
                if members is not None:
                    self._files.note_members(members)
                    self._note_removed()
            self._carry_out(order)
        except NotMasterError as error:
            logger.info(
                "broker group %s, replica %d does not execute the order %s: %s",
                self._broker_name,
                self._replica,
                order,
                error,
            )
        except OSError as error:
            # Mark this replica's disk as failed, because a sync-state set or an epoch could not be written to disk.
            self._refuse_without_room(error)
            self._store.gate.fail(error)
        return self.account()

    def _note_removed(self) -> None:
        """If this replica is the master, stop counting the copies of replicas that have left the broker group."""
        if self._sync is not None and self._files.members is not None:
            self._sync.note_removed(self._files.members.removed)

    def _carry_out(self, order: Order | None) -> None:
        if isinstance(order, (Lead, Follow)):
            if not self._order_lock.acquire(timeout=ORDER_WAIT_S):
                return
            try:
                if isinstance(order, Lead):
                    self._lead(order)
                else:
                    self._follow(order)
            finally:
                self._order_lock.release()
        elif isinstance(order, Renew):
            with self._changed:
                self._role.renew(order.sync_state_set.epoch, order.clock_s + self._rules.lease_s)
                if self._sync is not None:
                    self._sync.silent(order.dead)
                    self._sync.decided(order.sync_state_set)
                    self._files.note_set(self._sync.sync_state_set)
                self._show_confirmed()
                # The order may have changed the master's lease or the sync-state set. So wake the appends that wait for
                # replicas: they must check again if they are complete.
                self._store.gate.progress.notify()
        elif isinstance(order, Drain):
            with self._changed:
                self._role.drain(order.epoch)

    def _lead(self, order: Lead) -> None:
        """Become the master. On return the epoch is on disk, and this replica accepts appends."""
        first = order.sync_state_set
        elected = first.stores.get(self._replica), order.incarnation
        if elected != (self._files.store_id, self._files.incarnation):
            raise NotMasterError(self._broker_name, self._role.epoch)
        if first.epoch > self._role.epoch:
            end = self._store.gate.flush_all()
            floor = self._confirm_file.floor.offset
            if end < floor:
                logger.error(
                    "broker group %s, replica %d leads in epoch %d without the acknowledged messages from "
                    "physical offset %d to %d, because no answering replica has these messages",
                    *(self._broker_name, self._replica, first.epoch, end, floor),
                )
                self._give_up_confirmed(first.epoch, end)
            self._epochs.truncate_from(end)
            self._begin_epoch(first.epoch, end)
        with self._changed:
            self._files.note_set(first)
            if not self._role.lead(first.epoch, order.clock_s + self._rules.lease_s):
                return
            end = self._store.gate.stored_offset
            self._caught_up, self._refusal = True, ""
            self._note_confirmed(end)
            self._sync = self._rules.begin(self._replica, first, end, self._clock_s())
            self._note_removed()
            self._hole_reports = HoleReports(self._replica, self._clock_s(), self._rules.hole_wait_s)
            self._store.show(end)
            self._notified_offset = -1
            self._wake_all()
        logger.warning(
            "broker group %s, replica %d leads in epoch %d from physical offset %d",
            self._broker_name,
            self._replica,
            first.epoch,
            end,
        )
        self._store.flags.clear_flag(RunningFlag.FENCED)
        self._store.schedule.start_delivery()

    def _follow(self, order: Follow) -> None:
        """Become a slave. From the return on, this replica appends only its master's chunks."""
        with self._changed:
            if not self._role.follow(order.epoch, order.master):
                return
            self._sync, self._aligned, self._last_chunk_s, self._refusal = None, False, -math.inf, ""
            self._shared_holes = frozenset()
            self._wake_all()
        logger.warning(
            "broker group %s, replica %d follows replica %d in epoch %d",
            self._broker_name,
            self._replica,
            order.master,
            order.epoch,
        )
        self._store.schedule.stop_delivery()
        self._store.fence(f"replica {self._replica} of broker group {self._broker_name!r} is not the master")

    def account(self) -> ReplicaState:
        """Return this replica's state report for the Controller. Before the return, the report's confirm offset is
        written to disk."""
        self._remember_confirmed()
        with self._changed:
            end = self._store.gate.stored_offset
            confirmed = self._store.visible_offset if self._sync is None else self._sync.confirm_offset
            return ReplicaState(
                replica=self._replica,
                store_id=self._files.store_id,
                incarnation=self._files.incarnation,
                clock_s=self._clock_s(),
                role=self._role.role,
                epoch=self._role.epoch,
                master=self._role.master,
                log_epoch=self._epochs.epoch_at(end),
                end_offset=end,
                confirm_offset=min(confirmed, self._confirm_file.floor.offset),
                sync_state_set=self._files.sync_state_set,
                draining=self._role.draining,
                proposal=self._proposal(),
                lags={} if self._sync is None else self._sync.lags(self._clock_s()),
                in_sync=frozenset() if self._sync is None else self._sync.in_sync(self._clock_s()),
                failed=self._store.gate.failure,
                confirm_floor=self._confirm_file.floor.offset,
                hole_bytes=self._hole_bytes(),
                caught_up=self._caught_up,
                refusal=self._refusal,
                members=self._files.members,
                wall_ms=time.time_ns() // 1_000_000,
                hole_lackers=self._hole_lackers(),
            )

    def _proposal(self) -> SyncStateSet | None:
        if self._sync is None or not self._may_acknowledge:
            return None
        return self._sync.propose(self._clock_s())

    def status(self) -> dict[str, Any]:
        account = self.account()
        newest = account.sync_state_set
        in_sync = account.in_sync or (newest.members if newest is not None else ())
        return {
            "replica": self._replica,
            "role": account.role.value,
            "epoch": account.epoch,
            "master": account.master,
            "in_sync": sorted(in_sync),
            "end_offset": account.end_offset,
            "confirm_offset": account.confirm_offset,
            "refusal": account.refusal,
            "damaged_bytes": sum(hole.size for hole in self.holes),
            "lag_bytes": {follower: lag.lag_bytes for follower, lag in account.lags.items()},
            "lag_s": {follower: lag.lag_s for follower, lag in account.lags.items()},
        }

    @property
    def holes(self) -> tuple[Hole, ...]:
        """Return the holes (damaged ranges) of this replica's log, in ascending order."""
        return self._store.mender.holes

    def _hole_bytes(self) -> int:
        """Return the number of damaged bytes in this log that another replica may have intact. Bytes that this
        replica's master also lacks are not counted."""
        return sum(hole.size for hole in self._store.mender.holes if hole.offset not in self._shared_holes)

    def _hole_lackers(self) -> frozenset[int] | None:
        if self._sync is None:
            return None
        return self._hole_reports.lackers([hole.offset for hole in self._store.mender.holes[:HOLES_MAX]])

    def read_part(self, epoch: int, physical_offset: int, size: int) -> tuple[int, bytes] | None:
        """Return the offset and the bytes of the first intact records in a range of this log; None if the range has
        none.

        Called for another replica, whose log is damaged in this range (LogChunks.read_part). Raises NotMasterError
        unless this log equals the log of the epoch's master.
        """
        with self._changed:
            self._check_same_log(epoch)
            store = self._store
        return store.chunks.read_part(physical_offset, size)

    def mend(self, epoch: int, physical_offset: int, data: bytes) -> None:
        """Replace damaged bytes of this log with another replica's bytes. Durable on return.

        Raises NotMasterError unless this log equals the log of the epoch's master, and the errors of HoleMender.mend.
        """
        with self._order_lock, self._failing_on_disk_errors():
            with self._changed:
                self._check_same_log(epoch)
                store = self._store
            store.mender.mend(physical_offset, data)

    def note_lacking(self, epoch: int, replica: int, physical_offset: int) -> None:
        """Record that another replica (`replica`) also lacks the bytes of this replica's hole (damaged range of the
        log) at `physical_offset`.

        A slave records only the report of its master: then neither replica has intact bytes for the hole. A master
        sends its damaged bytes to its slaves after every replica in sync has reported the hole. Raises NotMasterError
        unless this replica's log equals the log of the epoch's master.
        """
        with self._order_lock, self._changed:
            self._check_same_log(epoch)
            if self._role.role is ReplicaRole.MASTER:
                self._hole_reports.note_lacking(replica, physical_offset)
            elif replica == self._role.master:
                self._shared_holes |= {physical_offset}

    def _may_be_mended(self, hole: Hole) -> bool:
        with self._changed:
            if self._sync is None:
                return True
            now_s = self._clock_s()
            known = self._sync.sync_state_set.members | self._sync.in_sync(now_s) | self._sync.lags(now_s).keys()
            return not self._hole_reports.all_lack(hole.offset, known)

    def report_log(self, epoch: int, physical_offset: int, size: int) -> None:
        """Note that a follower refused the records in a range of this master's log, because they fail their checks.

        The report is not believed: the store checks the range itself, later and in another thread. Raises
        NotMasterError unless this replica is the master of `epoch`.
        """
        with self._changed:
            self._role.check_asked(epoch)
            store = self._store
        store.reported.note(physical_offset, size)

    def _check_same_log(self, epoch: int) -> None:
        """Raise NotMasterError unless this replica is the master of `epoch`, or follows in `epoch` and its log is
        aligned with the master's log."""
        if self._role.role is ReplicaRole.SLAVE and self._aligned:
            self._role.check_chunk(epoch)
        else:
            self._role.check_asked(epoch)
