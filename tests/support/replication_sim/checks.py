"""The checks of the replication simulation: what clients were told and shown, compared with what the replicas have.

A rule that every simulated broker group must keep belongs here: nothing acknowledged is lost, nothing a consumer saw
is undone, no message is stored twice, and one replica at most acknowledges in an epoch.
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
    """The clients' view of a simulation, and the rules it broke.

    `acknowledged` has each acknowledged message's epoch, `masters` the replica that acknowledges in each epoch, `seen`
    the messages a consumer saw, by offset, and `faults` a sentence for each rule broken.
    """

    acknowledged: dict[int, int] = field(default_factory=dict)
    masters: dict[int, int] = field(default_factory=dict)
    seen: list[int] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def acknowledge(self, epoch: int, replica: int, message: int) -> None:
        """A replica acknowledges a message: no other may in the same epoch."""
        if self.masters.setdefault(epoch, replica) != replica:
            self.faults.append(f"replicas {self.masters[epoch]} and {replica} both acknowledge in epoch {epoch}")
        self.acknowledged[message] = epoch

    def see(self, start: int, messages: list[int]) -> None:
        """A consumer is shown messages from an offset on: those it saw there before must be the same."""
        known = self.seen[start : start + len(messages)]
        if known != messages[: len(known)]:
            self.faults.append(f"a consumer saw {known[:5]} at {start}, now there is {messages[:5]}")
        self.seen += messages[len(known) :] if start + len(known) == len(self.seen) else []

    def refuse(self, replica: int, epoch: int) -> None:
        """A replica refuses to be cut, because its master lacks acknowledged messages: the election was wrong."""
        self.faults.append(f"replica {replica} refuses to follow the master of epoch {epoch}")

    def give_hole(self, world: World, master: Node, offset: int, may_have: Collection[int]) -> None:
        """A master gives a hole as a hole: no member of its set may have the intact record, nor, in the first moments
        of its epoch, any replica."""
        has_waited = world.now - master.holes.led_since_s >= HOLE_WAIT_S
        record = (offset, *master.disk.log[offset])
        for name in sorted(may_have if has_waited else world.nodes):
            if record in world.nodes[name].disk.intact():
                self.faults.append(f"replica {master.name} gives the hole at {offset}, which {name} could mend")

    def _check_damage(self, world: World, master: Node) -> None:
        """Nothing acknowledged is damaged in the end, unless a fault has destroyed the last intact copy."""
        for node in world.nodes.values():
            if node.name in master.members():
                damaged = {node.disk.log[offset][1] for offset in node.disk.damaged}
                kept = sorted(damaged & set(self.acknowledged) - world.destroyed)
                if kept:
                    self.faults.append(f"replica {node.name} has damage at {kept[:10]}, which others could mend")
        holes = {frozenset(world.nodes[name].disk.damaged) for name in master.members()}
        if len(holes) > 1:
            self.faults.append(f"replicas have different holes: {sorted(map(sorted, holes))}")

    def check_end(self, world: World) -> None:
        """After healing, all acknowledged messages must be stored, each once, and the replicas must agree."""
        masters = [node for node in world.nodes.values() if node.leads()]
        if not masters and (_every_copy_is_lost(world) or _no_member_is_whole(world)):
            world.say("rightly refused")
            return
        if len(masters) != 1:
            self.faults.append(f"{len(masters)} replicas lead: {world.controller.control.reason}")
            return
        [master] = masters
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
    """True if the directory of a member is lost and all other members have damage, so that nobody may lead."""
    record = world.controller.control.record
    stores = record.sync_state_set.stores if record is not None else {}
    own = [name for name, store_id in stores.items() if world.nodes[name].disk.store_id == store_id]
    return len(own) < len(stores) and not any(world.nodes[name].state().complete for name in own)


def _every_copy_is_lost(world: World) -> bool:
    """True if the disks of all members of the sync state set that may lead were replaced, so that nobody leads. With
    fixed roles only the fixed master may."""
    record, fixed = world.controller.control.record, world.rules.fixed_master
    stores = record.sync_state_set.stores if record is not None else {}
    replaced = [world.nodes[name].disk.store_id != stores[name] for name in stores if fixed in (None, name)]
    return bool(replaced) and all(replaced)
