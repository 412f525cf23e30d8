"""The checks of the replication simulation. They compare the messages that clients sent and read with the logs of the
replicas.

Add to this module each rule that every simulated broker group must keep. Examples: nothing acknowledged is lost,
nothing that a consumer read changes, no message is stored twice, and at most one replica acknowledges in an epoch.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.support.replication_sim.holes import HOLE_WAIT_S

if TYPE_CHECKING:
    from tests.support.replication_sim.node import Node
    from tests.support.replication_sim.world import World


@dataclass
class Checks:
    """Collects what the clients of a simulation see, and the rules that the simulation broke.

    `acknowledged`: by message, the epoch in which the message was acknowledged. `masters`: by epoch, the replica that
    acknowledges messages. `seen`: the messages that a consumer read, by offset. `faults`: a sentence for each broken
    rule.
    """

    acknowledged: dict[int, int] = field(default_factory=dict)
    masters: dict[int, int] = field(default_factory=dict)
    seen: list[int] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def acknowledge(self, epoch: int, replica: int, message: int) -> None:
        """Record that a replica acknowledges a message to the producer. Records a fault if another replica has
        acknowledged any message in the same epoch, because an epoch has only one master."""
        if self.masters.setdefault(epoch, replica) != replica:
            self.faults.append(f"replicas {self.masters[epoch]} and {replica} both acknowledge in epoch {epoch}")
        self.acknowledged[message] = epoch

    def see(self, start: int, messages: list[int]) -> None:
        """Record the messages that a consumer reads from an offset on. Reports a broken rule if an earlier read of
        these offsets returned other messages."""
        known = self.seen[start : start + len(messages)]
        if known != messages[: len(known)]:
            self.faults.append(f"a consumer saw {known[:5]} at {start}, now there is {messages[:5]}")
        self.seen += messages[len(known) :] if start + len(known) == len(self.seen) else []

    def refuse(self, replica: int, epoch: int) -> None:
        """Record that a replica refuses to truncate its log because its master lacks acknowledged messages. This breaks
        a rule: a replica that lacks acknowledged messages must not become the master."""
        self.faults.append(f"replica {replica} refuses to follow the master of epoch {epoch}")

    def give_hole(self, world: World, master: Node, offset: int, may_have: Collection[int]) -> list[str]:
        """Check that a master sends a damaged record (a hole) to a slave as damaged only if no other replica can still
        repair it. Returns a sentence for each replica that can, which are broken rules if the slave takes the hole. A
        slave takes nothing from the master of an earlier epoch.

        `may_have`: the only replicas that are checked after the master has led for HOLE_WAIT_S; before that, all
        replicas are checked. None of the checked replicas may have the intact record.
        """
        has_waited = world.now - master.holes.led_since_s >= HOLE_WAIT_S
        record = (offset, *master.disk.log[offset])
        return [
            f"replica {master.name} gives the hole at {offset}, which {name} could mend"
            for name in sorted(may_have if has_waited else world.nodes)
            if world.nodes[name].disk.has_intact(record)
        ]

    def _check_damage(self, world: World, master: Node) -> None:
        """Check at the end that no acknowledged message is damaged, unless a fault has destroyed its last intact
        copy."""
        for node in world.nodes.values():
            if node.name in master.members():
                damaged = {node.disk.log[offset][1] for offset in node.disk.damaged}
                kept = sorted(damaged & set(self.acknowledged) - world.destroyed)
                if kept:
                    self.faults.append(f"replica {node.name} has damage at {kept[:10]}, which others could mend")
        holes = {frozenset(world.nodes[name].disk.damaged) for name in master.members()}
        if len(holes) > 1:
            self.faults.append(f"replicas have different holes: {sorted(map(sorted, holes))}")

    def _check_disks(self, world: World) -> None:
        """Check that a group without a master still has each acknowledged message intact on a disk, so that an operator
        can save it. Messages whose last intact copy a fault destroyed are left out."""
        intact = {
            message
            for node in world.nodes.values()
            for offset, (_, message) in enumerate(node.disk.log)
            if offset not in node.disk.damaged
        }
        lost = sorted(set(self.acknowledged) - intact - world.destroyed)
        if lost:
            self.faults.append(f"no replica may lead, and no disk has {lost[:10]} of {len(self.acknowledged)}")

    def check_end(self, world: World) -> None:
        """Check, after all faults have ended, that each acknowledged message is stored exactly once and that the
        replicas' logs are equal up to the visible end."""
        masters = [node for node in world.nodes.values() if node.leads()]
        if not masters and _every_copy_is_lost(world):
            world.say("rightly refused: the disks were replaced")
            return
        if not masters and (_no_member_is_whole(world) or _waits_for_a_removed(world)):
            world.say("rightly refused")
            self._check_disks(world)
            return
        if len(masters) != 1:
            self.faults.append(f"{len(masters)} replicas lead: {world.controller.control.reason}")
            return
        [master] = masters
        control = world.controller.control
        if control.members.is_changing:
            self.faults.append(f"the change of the replicas has not ended: {control.change_waits}")
        messages = [message for _, message in master.disk.log]
        lost = sorted(set(self.acknowledged) - set(messages) - world.destroyed)
        if lost:
            self.faults.append(f"lost {lost[:10]} of {len(self.acknowledged)}")
        if len(set(messages)) != len(messages):
            self.faults.append("a message is in the log twice")
        self._check_damage(world, master)
        self.see(0, messages[: master.visible])
        if len(self.seen) > len(messages):
            self.faults.append("a consumer saw what is gone")
        for node in world.nodes.values():
            if node.name in master.members() and node.disk.log[: master.visible] != master.disk.log[: master.visible]:
                self.faults.append(f"replica {node.name} differs from master {master.name}")


def _no_member_is_whole(world: World) -> bool:
    """Return True if one sync-state member has lost its directory and all other members have damaged logs, or logs that
    end before the highest confirm floor. Then no replica may lead."""
    record = world.controller.control.record
    stores = record.sync_state_set.stores if record is not None else {}
    own = [
        world.nodes[name].state() for name, store_id in stores.items() if world.nodes[name].disk.store_id == store_id
    ]
    floor = max((state.confirm_floor for state in own), default=0)
    return len(own) < len(stores) and not any(state.complete and state.end_offset >= floor for state in own)


def _waits_for_a_removed(world: World) -> bool:
    """Return True if the journal is lost, and the Controller waits for a replica that has left the group without its
    directory. The journal had the removal, and no replica had received it. Then only an operator knows that the replica
    is gone for good."""
    control = world.controller.control
    gone = {name for name, node in world.nodes.items() if node.is_removed and not node.disk.incarnation}
    return control.record is None and bool(gone & control.replicas)


def _every_copy_is_lost(world: World) -> bool:
    """Return True if all disks of the sync-state set's members that may lead were replaced, so that no replica may lead
    any more.

    With fixed roles only the fixed master may lead.
    """
    record, fixed = world.controller.control.record, world.rules.fixed_master
    stores = record.sync_state_set.stores if record is not None else {}
    replaced = [world.nodes[name].disk.store_id != stores[name] for name in stores if fixed in (None, name)]
    return bool(replaced) and all(replaced)
