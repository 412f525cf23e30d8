"""The damaged records of a simulated replica: how its process finds, repairs and forwards them.

A disk changes bytes while no process runs, and the next process finds the damage. Damage at the log's end looks like a
torn tail: the damaged records are cut off, unless the file of holes lists them. A damaged record before the end is kept
and called a hole. A slave and its master repair each other's holes before they copy, and again every MEND_S. The real
HoleReports decides when a master may copy a hole to its slaves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from actors.core.replica.hole_reports import HoleReports

if TYPE_CHECKING:
    from tests.support.replication_sim.node import Node

Record = tuple[int, int]
"""A record of a simulated log: its epoch and its message."""

MEND_S = 1.0
HOLE_WAIT_S = 3.0
"""Seconds that a simulated master waits before it copies a hole (a damaged record) to its slaves. The real master waits
longer, but the simulated faults are shorter, too."""


class Holes:
    """The damaged records (holes) that a replica's process has found.

    `shared`: offsets of holes for which the master lacks the intact record, too. `mended`: True if the process has
    tried to repair its holes in this epoch.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self.shared: set[int] = set()
        self.mended = False
        self.led_since_s = 0.0
        self._reports = HoleReports(node.name, self.led_since_s)
        disk = node.disk
        while disk.log and len(disk.log) - 1 in disk.damaged - disk.named:
            disk.truncate(len(disk.log) - 1)
        disk.flushed = min(disk.flushed, len(disk.log))
        disk.named = set(disk.damaged)

    @property
    def unshared(self) -> int:
        """Return the number of holes (damaged records) that another replica may be able to repair."""
        return len(self._node.disk.damaged - self.shared)

    @property
    def lackers(self) -> frozenset[int] | None:
        """Return the replicas that lack the intact records of all holes of this master, too; None without a hole."""
        return self._reports.lackers(self._node.disk.damaged)

    def lead(self) -> None:
        self.led_since_s = self._node.world.now
        self._reports = HoleReports(self._node.name, self.led_since_s, HOLE_WAIT_S)

    def follow(self) -> None:
        self.shared.clear()
        self.mended = False

    def intact(self, offset: int) -> Record | None:
        """Return the record at a physical offset of the log. Returns None if the record is damaged or not
        flushed."""
        disk = self._node.disk
        return disk.log[offset] if disk.is_intact(offset) else None

    def parts(self, offsets: list[int]) -> list[tuple[int, Record | None]]:
        return [(offset, self.intact(offset)) for offset in offsets]

    def mend(self, parts: list[tuple[int, Record | None]], other: int, *, of_master: bool) -> None:
        """Repair this replica's holes (damaged records) with the records of the replica `other`. If `other` does not
        have the intact record of a hole either, record that both replicas lack it. `of_master`: True if this replica is
        the master."""
        disk, world = self._node.disk, self._node.world
        for offset, record in parts:
            if offset not in disk.damaged:
                continue
            if record is not None:
                if disk.log[offset] != record:
                    world.checks.faults.append(f"replica {self._node.name} is mended with another record at {offset}")
                disk.mend(offset)
                self.shared.discard(offset)
                world.say(f"{self._node.name} is mended at {offset} by {other}")
                world.mended += 1
            elif of_master:
                self._reports.note_lacking(other, offset)
            else:
                self.shared.add(offset)

    def give(self, offset: int) -> list[str] | None:
        """Copy the hole (damaged record) of the master at `offset` to a slave. Returns None if the master must wait.
        Else returns the rules that the copy breaks if the slave takes it: no replica may have the intact bytes on its
        simulated disk."""
        node, world = self._node, self._node.world
        assert node.sync is not None
        may_have = node.sync.sync_state_set.members | node.members()
        reason = self._reports.reason_to_wait(offset, may_have, world.now)
        if reason and not world.bugs.give_holes_at_once:
            return None
        world.copied_holes += 1
        return world.checks.give_hole(world, node, offset, may_have)

    def take(self, offset: int) -> None:
        """Mark the record at an offset as a hole (a record with damaged bytes) that this replica has copied from the
        master."""
        self._node.disk.damage(offset)
        self._node.disk.named.add(offset)
        self.shared.add(offset)
