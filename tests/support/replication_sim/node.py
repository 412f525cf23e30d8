"""A simulated replica: its process, with the real role and the real sync state set, over a simulated disk.

Add to this module how a replica handles messages of a client, the Controller or another replica, and how a fault kills,
wipes or pauses a replica.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from actors.core.replica.orders import Drain, Follow, Lead, Renew, ReplicaRole, ReplicaState
from actors.core.replica.role import ReplicaRoleState
from actors.core.replica.sync_state import FixedSyncState, MasterSyncState
from raymq.common.errors import NotMasterError
from storage.replication.epochs import (
    ConfirmFloor,
    EpochEntry,
    ReplicaMembers,
    SyncStateSet,
    common_end,
    first_lost_offset,
)
from tests.support.replication_sim.clock import Clock
from tests.support.replication_sim.disk import Disk
from tests.support.replication_sim.holes import MEND_S, Holes, Record

if TYPE_CHECKING:
    from tests.support.replication_sim.world import World

GROUP = "broker-a"
CHUNK_MAX = 20


class Node:
    """A simulated replica: a disk, and a process while the replica runs."""

    def __init__(self, world: World, name: int) -> None:
        self.world, self.name = world, name
        self.disk = Disk(f"store-{name}")
        self._checks_role = not world.bugs.skip_fencing
        """False if a bug is planted: the process then ignores that its role or epoch has changed."""
        self.clock = Clock(world)
        self.alive = self.paused = self.is_removed = False
        self._held: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        self.start()

    # Methods that simulate faults of the replica

    def start(self) -> None:
        if self.alive or self.is_removed:
            return
        self.alive = True
        self.failure = ""
        self.disk.incarnation += 1
        epoch = self.disk.epochs[-1].epoch if self.disk.epochs else 0
        self.role = ReplicaRoleState(GROUP, self.name, epoch)
        self.sync: MasterSyncState | None = None
        self.pending: list[tuple[int, int, int]] = []
        self._first_pending_end = 0
        """The smallest end offset of a record in `pending`, if a record is pending."""
        self.visible = 0
        self.confirmed = ConfirmFloor(0, 0)
        self.handshaken = self.caught_up = False
        self.holes = Holes(self)
        self._asked_s = self._mended_s = -1.0
        incarnation = self.disk.incarnation
        self.world.say(f"{self.name} starts as {incarnation} with {len(self.disk.log)}")
        self._loop(incarnation)

    def kill(self, *, power: bool) -> None:
        """End the replica's process. With `power`, the disk also loses a random part of the unflushed records."""
        if power:
            kept = self.world.rng.randint(self.disk.flushed, len(self.disk.log))
            self.disk.truncate(kept)
            self.disk.flushed = kept
            self.clock.restart()
        if self.alive:
            self.world.say(f"{self.name} dies, power {power}")
        self.alive = self.paused = False
        self._held.clear()

    def remove(self) -> None:
        """End the replica's process for good, because the replica has left the group. Its disk stays as it is."""
        self.kill(power=False)
        self.is_removed = True

    def wipe(self) -> None:
        """End the replica's process, and replace its disk by an empty disk."""
        self.kill(power=False)
        self.disk = Disk(f"{self.disk.store_id}'")

    def shorten(self, end: int) -> None:
        """End the replica's process. Its directory remains, but its disk loses the records from offset `end`
        on."""
        self.kill(power=False)
        self.world.say(f"{self.name} loses {len(self.disk.log) - end} records from {end}, floor {self.disk.floor}")
        self.disk.truncate(end)
        self.disk.flushed = end

    def rot(self, offset: int) -> None:
        """End the replica's process, and damage the bytes of a record on its disk. The next process finds the
        damage."""
        self.kill(power=False)
        self.world.say(f"{self.name} has damage at {offset} of {len(self.disk.log)}")
        self.disk.damage(offset)

    def fail_disk(self) -> None:
        """Make all further flushes of the replica's process fail. The process continues and reports the
        failure."""
        if self.alive and not self.failure:
            self.world.say(f"the disk of {self.name} fails")
            self.failure = "its disk failed"
            self.pending.clear()

    def pause(self) -> None:
        self.paused = self.alive

    def resume(self) -> None:
        if self.paused:
            self.paused = False
            held, self._held = self._held, []
            for action, args in held:
                self.deliver(action, args)

    def deliver(self, action: Callable[..., object], args: tuple[Any, ...]) -> None:
        """Deliver a message to the replica's process: call `action(*args)`. While the process is paused, the message
        waits. If no process runs, the message is lost."""
        if self.paused:
            self._held.append((action, args))
        elif self.alive:
            try:
                action(*args)
            except NotMasterError:
                pass  # ignore the error: the node that sent this message gets no answer, as if the message were lost

    # Answers to the Controller's queries and orders

    def state(self) -> ReplicaState:
        if self.confirmed.offset > self.disk.floor.offset:
            self.disk.floor = self.confirmed
        return ReplicaState(
            self.name,
            self.disk.store_id,
            self.disk.incarnation,
            self.clock.read_s(),
            self.role.role,
            self.role.epoch,
            self.role.master,
            self.disk.log[self.disk.flushed - 1][0] if self.disk.flushed else 0,
            self.disk.flushed,
            self.visible,
            self.disk.sync_state_set,
            self.role.draining,
            self.sync.propose(self.clock.read_s()) if self.sync is not None and self.leads() else None,
            failed=self.failure,
            confirm_floor=self.disk.floor.offset,
            hole_bytes=self.holes.unshared,
            caught_up=self.caught_up,
            members=self.disk.members,
            hole_lackers=None if self.sync is None else self.holes.lackers,
        )

    def leads(self) -> bool:
        return self.alive and not self.paused and self.role.leads(self.clock.read_s()) and not self.failure

    def members(self) -> frozenset[int]:
        return self.sync.in_sync(self.clock.read_s()) if self.sync is not None else frozenset()

    def lead(self, order: Lead) -> None:
        first, until_s = order.sync_state_set, order.clock_s + self.world.rules.lease_s
        if self.failure:
            return
        elected = first.stores.get(self.name), order.incarnation
        if elected != (self.disk.store_id, self.disk.incarnation) and not self.world.bugs.lead_as_any_process:
            raise NotMasterError(GROUP, self.role.epoch)
        if not self.role.lead(first.epoch, until_s):
            return
        self.disk.flushed = len(self.disk.log)
        self.disk.epochs = [entry for entry in self.disk.epochs if entry.start_offset < len(self.disk.log)]
        self.disk.epochs.append(EpochEntry(first.epoch, len(self.disk.log)))
        self.disk.sync_state_set = first
        start = (self.name, first, len(self.disk.log), self.clock.read_s())
        self.sync = (
            FixedSyncState(*start, not_catchup_s=2.0, max_gap_bytes=10)
            if self.world.fixed
            else MasterSyncState(*start, not_catchup_s=2.0)
        )
        self._note_removed()
        if len(self.disk.log) < self.disk.floor.offset:
            self._give_up_confirmed(first.epoch, len(self.disk.log))
        self.caught_up = True
        self.holes.lead()
        self._note_confirmed(len(self.disk.log))
        self.pending.clear()
        self.world.say(f"{self.name} leads {first.epoch} from {len(self.disk.log)}")
        self._settle()

    def renew(self, order: Renew) -> None:
        self.role.renew(order.sync_state_set.epoch, order.clock_s + self.world.rules.lease_s)
        assert self.sync is not None
        self.sync.silent(order.dead)
        self.sync.decided(order.sync_state_set)
        self.disk.sync_state_set = self.sync.sync_state_set
        self._settle()

    def follow(self, order: Follow) -> None:
        if self.role.follow(order.epoch, order.master):
            self.world.say(f"{self.name} follows {order.master} in {order.epoch}")
            self.sync, self.handshaken = None, False
            self.holes.follow()
            self.pending.clear()

    def drain(self, order: Drain) -> None:
        self.role.drain(order.epoch)

    def note(self, newest: SyncStateSet | None, members: ReplicaMembers | None) -> None:
        known = self.disk.sync_state_set
        if newest is not None and (known is None or newest.order > known.order):
            self.disk.sync_state_set = newest
        if members is not None and (self.disk.members is None or members.version > self.disk.members.version):
            self.disk.members = members
        self._note_removed()

    def _note_removed(self) -> None:
        if self.sync is not None and self.disk.members is not None:
            self.sync.note_removed(self.disk.members.removed)

    # Methods of a replica that is the master

    def append(self, message: int) -> None:
        """Store a producer's message. If the log already has the message, it is not stored again, and the
        acknowledgement waits until the stored copy is confirmed."""
        if self._checks_role and not self.role.accepts_append(None, self.clock.read_s()):
            return
        if self.failure:
            return
        if self.sync is None or len(self.members()) < self.world.min_in_sync:
            return
        offset = self.disk.offset_of(message)
        if offset is None:
            offset = len(self.disk.log)
            self.disk.append([(self.role.epoch, message)])
        self._first_pending_end = min(self._first_pending_end, offset + 1) if self.pending else offset + 1
        self.pending.append((offset + 1, message, self.role.epoch))
        incarnation, target = self.disk.incarnation, len(self.disk.log)
        if self.world.async_flush:
            self._flushed(incarnation, target)
        else:
            self.world.at(self.world.rng.uniform(0.0005, 0.02), self._flushed, incarnation, target)

    def _check_asked(self, epoch: int) -> None:
        if self._checks_role:
            self.role.check_asked(epoch)

    def _check_chunk(self, epoch: int) -> None:
        if self._checks_role:
            self.role.check_chunk(epoch)

    def _flushed(self, incarnation: int, end: int) -> None:
        if not self.alive or self.disk.incarnation != incarnation or self.failure:
            return
        if self.paused:
            self._held.append((self._flushed, (incarnation, end)))
            return
        self.disk.flushed = max(self.disk.flushed, min(end, len(self.disk.log)))
        self._settle()

    def _settle(self) -> None:
        """Acknowledge the records that all members of the sync state set hold, and make the records visible to
        consumers."""
        sync, now_s = self.sync, self.clock.read_s()
        if sync is None:
            return
        sync.flushed(self.disk.flushed, now_s)
        if self.failure or (self._checks_role and not self.role.leads(now_s)):
            return
        limit = self.disk.flushed if self.world.bugs.acknowledge_early else sync.confirm_offset
        self.visible = max(self.visible, limit)
        self._note_confirmed(sync.confirm_offset)
        if not self.pending or not self._has_copies(self._first_pending_end, limit):
            return
        settled = [entry for entry in self.pending if self._has_copies(entry[0], limit)]
        for _, message, epoch in settled:
            self.world.checks.acknowledge(epoch, self.name, message)
            self.world.client.answered(self.name, message)
        self.pending = [entry for entry in self.pending if not self._has_copies(entry[0], limit)]
        self._first_pending_end = min((end for end, _, _ in self.pending), default=0)

    def _has_copies(self, end: int, limit: int) -> bool:
        if self.world.all_ack:
            return end <= limit
        assert self.sync is not None
        return end <= self.disk.flushed and self.sync.copies(end) >= len(self.world.nodes)

    @property
    def given_end(self) -> int:
        """Return the offset up to which followers may copy: the end of the written log. With fixed roles, the end of
        the flushed log."""
        return self.disk.flushed if self.world.fixed else len(self.disk.log)

    def give_epochs(self, asker: Node, epoch: int) -> None:
        self.role.check_asked(epoch)
        epochs, end = list(self.disk.epochs), self.given_end
        self._answer(asker, asker.take_epochs, epoch, epochs, end)

    def _answer(self, asker: Node, take: Callable[..., None], *args: Any) -> None:
        """Send an answer to the process that made the request: its `take(*args)` gets the answer. If that process has
        ended, drop the answer, because its connection has ended, too."""
        self.world.send((self.name, asker.name), None, asker.deliver_to, (asker.disk.incarnation, take, args))

    def deliver_to(self, incarnation: int, action: Callable[..., object], args: tuple[Any, ...]) -> None:
        """Deliver a message that only one process of the replica may receive; a later process does not get it."""
        if self.disk.incarnation == incarnation:
            self.deliver(action, args)

    def take_ack(self, follower: int, store_id: str, epoch: int, acked: int) -> None:
        self._check_asked(epoch)
        if self.sync is not None:
            self.sync.asked(follower, store_id, acked, self.clock.read_s())
            self._settle()

    def give_log(self, asker: Node, store_id: str, epoch: int, start: int, acked: int) -> None:
        self.take_ack(asker.name, store_id, epoch, acked)
        if self.sync is None:
            return
        end = min(self.given_end, start + CHUNK_MAX)
        if self.disk.damaged:
            end = min([end, *(hole for hole in self.disk.damaged if hole > start)])
        is_hole = start in self.disk.damaged and start < end
        broken = self.holes.give(start) if is_hole else []
        if broken is None:
            return
        records = self.disk.log[start : start + 1 if is_hole else end]
        records = [record for record in records if record[0] == records[0][0]]
        entry = next((e for e in self.disk.epochs if e.epoch == records[0][0]), None) if records else None
        confirm = self.sync.confirm_offset
        self._answer(asker, asker.take_log, epoch, start, records, entry, confirm, is_hole, broken)

    def give_parts(self, asker: Node, epoch: int, wanted: list[int]) -> None:
        """Send a slave the intact records for the slave's holes (damaged records), and request the records for this
        master's holes."""
        self._check_asked(epoch)
        parts, holes = self.holes.parts(wanted), sorted(self.disk.damaged)
        self._answer(asker, asker.take_parts, epoch, parts, holes)

    def give_parts_and_log(
        self, asker: Node, epoch: int, wanted: list[int], store_id: str, start: int, acked: int
    ) -> None:
        self.give_parts(asker, epoch, wanted)
        self.give_log(asker, store_id, epoch, start, acked)

    def take_slave_parts(self, slave: int, epoch: int, parts: list[tuple[int, Record | None]]) -> None:
        self._check_asked(epoch)
        if not self.failure:
            self.holes.mend(parts, slave, of_master=True)

    def _note_confirmed(self, offset: int) -> None:
        if offset > self.confirmed.offset:
            self.confirmed = ConfirmFloor(self.role.epoch, offset)

    def _give_up_confirmed(self, epoch: int, offset: int) -> None:
        self.confirmed = self.disk.floor = ConfirmFloor(epoch, offset)

    # Methods of a replica that follows a master

    def _loop(self, incarnation: int) -> None:
        if not self.alive or self.disk.incarnation != incarnation:
            return
        if not self.paused:
            self._ask()
        self.world.at(0.05, self._loop, incarnation)

    def _ask(self) -> None:
        if self.role.role is not ReplicaRole.SLAVE or self.role.master is None:
            return
        world, disk, epoch = self.world, self.disk, self.role.epoch
        master = world.nodes[self.role.master]
        store_id, start, acked = disk.store_id, len(disk.log), disk.flushed
        self.holes.mended = self.holes.mended or not world.has_rot
        give: Callable[..., None]
        request: tuple[Any, ...]
        if not self.handshaken:
            give, request = master.give_epochs, (self, epoch)
        elif world.has_rot and (not self.holes.mended or world.now - self._mended_s >= MEND_S):
            self._mended_s, wanted = world.now, sorted(disk.damaged)
            give, request = master.give_parts, (self, epoch, wanted)
            if self.holes.mended:
                give, request = master.give_parts_and_log, (self, epoch, wanted, store_id, start, acked)
        else:
            give, request = master.give_log, (self, store_id, epoch, start, acked)
        world.send((self.name, master.name), master.deliver, give, request)

    def take_epochs(self, epoch: int, epochs: list[EpochEntry], end: int) -> None:
        self._check_chunk(epoch)
        if self.handshaken or self.failure:
            return
        my_end = len(self.disk.log)
        common = min(common_end(self.disk.epochs, my_end, epochs, end) or 0, my_end)
        lost_from = first_lost_offset(self.disk.floor, epochs, end)
        if lost_from is not None:
            if common < min(my_end, self.disk.floor.offset) and not self.world.rules.unclean:
                self.world.checks.refuse(self.name, epoch)
                return
            self._give_up_confirmed(epoch, lost_from)
        if not self.world.bugs.skip_truncation:
            self.disk.truncate(common)
            self.disk.epochs = [entry for entry in self.disk.epochs if entry.start_offset < common]
        self.disk.flushed = len(self.disk.log)
        self.visible = min(self.visible, len(self.disk.log))
        self.handshaken = True
        self._ask()

    def take_parts(self, epoch: int, parts: list[tuple[int, Record | None]], holes: list[int]) -> None:
        """Repair this slave's holes (damaged records) with the master's records, and send the master the records for
        the master's holes."""
        self._check_chunk(epoch)
        if self.failure or not self.handshaken or self.role.master is None:
            return
        self.holes.mend(parts, self.role.master, of_master=False)
        self.holes.mended = True
        if self.world.bugs.overwrite_by_holes:
            for offset in holes:
                if offset < len(self.disk.log):
                    self.holes.take(offset)
        master, name, found = self.world.nodes[self.role.master], self.name, self.holes.parts(holes)
        if holes:
            self.world.send((name, master.name), master.deliver, master.take_slave_parts, (name, epoch, found))

    def take_log(
        self,
        epoch: int,
        start: int,
        records: list[Record],
        entry: EpochEntry | None,
        confirm: int,
        is_hole: bool,
        broken: list[str],
    ) -> None:
        """Append a chunk of the master's log. `broken`: the rules that the master has broken if this replica takes the
        chunk's hole."""
        self._check_chunk(epoch)
        if self.failure or not self.handshaken or start != len(self.disk.log) or start - self.disk.flushed > CHUNK_MAX:
            return
        if entry is not None and (not self.disk.epochs or self.disk.epochs[-1].epoch < entry.epoch):
            self.disk.epochs.append(entry)
        self.disk.append(records)
        if is_hole:
            self.world.checks.faults += broken
            self.holes.take(start)
            # a damaged range (hole) flushes the log, because the file of holes may only list records that are on disk
            self.disk.flushed = len(self.disk.log)
        self.visible = max(self.visible, min(confirm, start, self.disk.flushed))
        self._note_confirmed(min(confirm, self.disk.flushed))
        self.caught_up = self.caught_up or self.disk.flushed >= confirm
        if records:
            incarnation, end = self.disk.incarnation, len(self.disk.log)
            delay_s = 0.0 if self.world.async_flush else self.world.rng.uniform(0.0005, 0.02)
            self.world.at(delay_s, self._copied, incarnation, end)
            self._ask()  # request the next chunk of the log while this chunk is being flushed

    def _copied(self, incarnation: int, end: int) -> None:
        """Report to the master that a chunk of the log is flushed."""
        self._flushed(incarnation, end)
        if not self.alive or self.paused or self.disk.incarnation != incarnation:
            return
        if self.role.role is not ReplicaRole.SLAVE or self.role.master is None or not self.handshaken:
            return
        master = self.world.nodes[self.role.master]
        ack = self.name, self.disk.store_id, self.role.epoch, self.disk.flushed
        self.world.send((self.name, master.name), master.deliver, master.take_ack, ack)
