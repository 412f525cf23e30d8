"""The damaged records of a simulated replica: how its process meets them, mends them, and passes them on.

The disk changes bytes while no process runs. The next process finds them: at the log's end they look like a torn tail
and are cut, unless the file of holes names them; before it they are holes. A slave and its master mend each other
before they copy and again every MEND_S. When a master gives a hole as a hole is decided by the real HoleReports.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from actors.core.replica.hole_reports import HoleReports

if TYPE_CHECKING:
    from tests.support.replication_sim.node import Node

Record = tuple[int, int]
"""The epoch and the message of a record."""

MEND_S = 1.0
HOLE_WAIT_S = 3.0
"""Stands for the longer wait of the real master: the simulated faults are shorter, too."""


class Holes:
    """The damage that one process of a replica knows of.

    `shared` are the offsets that its master lacks, too; `mended` is true once the process was mended in this epoch.
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
        """The number of holes that another replica may mend."""
        return len(self._node.disk.damaged - self.shared)

    def lead(self) -> None:
        self.led_since_s = self._node.world.now
        self._reports = HoleReports(self._node.name, self.led_since_s, HOLE_WAIT_S)

    def follow(self) -> None:
        self.shared.clear()
        self.mended = False

    def intact(self, offset: int) -> Record | None:
        """The record at an offset, if it is whole and on disk."""
        disk = self._node.disk
        return disk.log[offset] if offset < disk.flushed and offset not in disk.damaged else None

    def parts(self, offsets: list[int]) -> list[tuple[int, Record | None]]:
        return [(offset, self.intact(offset)) for offset in offsets]

    def mend(self, parts: list[tuple[int, Record | None]], other: int, *, of_master: bool) -> None:
        """Mend holes by another replica's records, or note that it lacks them; `of_master`: this is the master."""
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

    def may_give(self, offset: int) -> bool:
        """True if a slave may get the hole at an offset as a hole. A check that knows all disks judges the decision."""
        node, world = self._node, self._node.world
        assert node.sync is not None
        may_have = node.sync.sync_state_set.members | node.members()
        reason = self._reports.reason_to_wait(offset, may_have, world.now)
        if reason and not world.bugs.give_holes_at_once:
            return False
        world.copied_holes += 1
        world.checks.give_hole(world, node, offset, may_have)
        return True

    def take(self, offset: int) -> None:
        """Append a hole of the master: the record is there, its bytes are damaged."""
        self._node.disk.damage(offset)
        self._node.disk.named.add(offset)
        self.shared.add(offset)
