"""A simulation of a broker group of three replicas, their Controller, a producer and a consumer, in virtual time and
with faults.

The decisions are real (placement.election, actors.core.replica.role and sync_state). Everything below the decisions is
simulated: disks that lose unflushed data, a network that delays, reorders and loses messages and can be cut, processes
that are killed or paused, and clocks. Equal seeds give equal traces.

A log is a list of (epoch, message), and an offset counts records. tests.support.replication_sim.checks has the rules
that must hold during and after a simulation. The clock, the network and the faults belong in this module.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

from placement.election import FIXED_MASTER, ControlRules
from raymq.common.errors import InvalidArgumentError
from storage.replication.epochs import ReplicaMembers
from tests.support.replication_sim.checks import Checks
from tests.support.replication_sim.client import CLIENT, Client
from tests.support.replication_sim.clock import DRIFT_MAX
from tests.support.replication_sim.controller import CONTROLLER, Controller
from tests.support.replication_sim.node import Node

GRACE_S = 20.0
"""Longest time, in seconds, that the simulated Controller waits for replicas that do not answer before it elects a
master. It is longer than the longest restart of a process plus the longest delay of a status report."""
ACCOUNT_DELAY_MAX_S = 10.0
CHANGES = ("grow", "shrink", "replace", "cancel")
"""Kinds of faults that are changes of the group's replicas. Each change is ordered once."""
CHANGE_FAULTS = (
    *(*CHANGES, "grow", "replace"),
    *(
        "kill",
        "power",
        "master",
        "pause",
        "cut",
        "oneway",
        "controller",
        "journal",
        "heal",
        "wipe",
        "blackout",
        "balance",
    ),
)
"""Kinds of faults for simulations in which the replicas change."""
GROWN_MAX = 5
ROT_FAULTS = ("rot", "rot each", "rot all", "wipe", "kill", "cut")
"""Kinds of faults after which replicas repair damaged records, or copy them as holes (records that stay
damaged)."""
ALL_FAULTS = (
    *("kill", "power", "master", "blackout", "pause", "cut", "oneway", "heal", "controller", "journal", "balance"),
    *("rot", "rot each", "rot all", "shorten", "shorten all", "accounts", "wipe", "disk", "clock", "clock"),
)
"""All kinds of faults, for simulations in which they happen together."""


Action = Callable[..., object]
Deliver = Callable[[Action, tuple[Any, ...]], None]
Event = tuple[float, int, tuple[int, int] | None, Deliver | None, Action, tuple[Any, ...]]
"""An event of a simulation: its time, its number, and the arguments of World.send. An event that is no message has no
path."""


@dataclass(frozen=True)
class Bugs:
    """Switches that put known bugs into the simulation, to test its checks. The checks must find each of these
    bugs."""

    skip_truncation: bool = False
    skip_fencing: bool = False
    acknowledge_early: bool = False
    elect_outside: bool = False
    lead_anew: bool = False
    ignore_floor: bool = False
    lead_as_any_process: bool = False
    give_holes_at_once: bool = False
    overwrite_by_holes: bool = False
    count_early: bool = False
    remove_at_once: bool = False
    elect_removed: bool = False
    forget_members: bool = False
    lease_by_wall_clock: bool = False
    prefer_undamaged: bool = False
    share_elected_set: bool = False


class World:
    """One simulation: its clock, events, network and processes.

    `trace`: a line for each event. `checks.faults`: a sentence for each broken rule. `cut`: the pairs (sender,
    receiver) whose messages are dropped. `loss`: the share of messages that the network loses. If `all_ack` is False,
    an append waits for the copies of all replicas, not for the confirm offset. If `async_flush` is True, written data
    counts as stored, and power is never cut. `grace_s`: as in ControlRules. `drift`: the largest drift of a
    monotonic clock. `destroyed`: the messages whose last intact copy a fault destroyed. `mended`: number of repaired
    records. `copied_holes`: number of damaged records that a master copied to a slave as damaged.
    """

    def __init__(
        self,
        seed: int,
        *,
        replicas: int = 3,
        bugs: Bugs = Bugs(),
        min_in_sync: int = 1,
        fixed: bool = False,
        all_ack: bool = True,
        async_flush: bool = False,
        grace_s: float = GRACE_S,
        drift: float = DRIFT_MAX,
    ) -> None:
        self.rng = random.Random(seed)
        self._draw = self.rng.random
        self.clock_dice, self.drift = random.Random(seed * 104_729 + 5), drift
        self.bugs, self.fixed, self.all_ack, self.async_flush = bugs, fixed, all_ack, async_flush
        self.min_in_sync = min_in_sync if all_ack else replicas
        self.now = 0.0
        self.trace: list[str] = []
        self.checks = Checks()
        self.destroyed: set[int] = set()
        self.mended = self.copied_holes = 0
        self.has_rot = False
        """True if disks damage records in this simulation. If False, replicas do not request intact records from each
        other."""
        self._events: list[Event] = []
        self._count = 0
        self.cut: set[tuple[int, int]] = set()
        self.loss = self.rng.choice([0.0, 0.01, 0.1])
        self._late_accounts_until_s: dict[int, float] = {}
        self.rules = ControlRules(
            unclean=bugs.elect_outside,
            fixed_master=FIXED_MASTER if fixed else None,
            grace_s=0.0 if bugs.elect_outside else grace_s,
        )
        self.planned = frozenset(range(replicas))
        self.nodes = {name: Node(self, name) for name in range(replicas)}
        self._pickable = list(self.nodes.values())
        self.changes = 0
        """Number of steps of changes of the group's replicas."""
        self._followed: set[ReplicaMembers] = set()
        """The members that a decision has ever had."""
        self.removed: frozenset[int] = frozenset()
        """The replicas that have left the group. Nobody reads or repairs records from their disks any more."""
        self.controller = Controller(self)
        self.client = Client(self)

    def follow_members(self, members: ReplicaMembers) -> None:
        """Start the processes of replicas that were added, and end the processes of replicas that have left.

        A replica that answers must not take the last intact copy of a record with it. The copy counts as destroyed if
        the replica does not answer, if its disk has failed, or if no process has reported the damage of the other
        copies to the Controller yet. It also counts as destroyed if the replica had left before the journal was lost,
        so that it does not leave by a new decision.
        """
        self.changes += 1
        leaving, before = members.removed - self.removed, _mendable(self)
        self.removed = members.removed
        reporting = self.controller.control.reporting(self.controller.clock.read_s())
        answering = {name for name in reporting if not self.nodes[name].failure}
        found = set().union(*(node.disk.named for node in _group(self) if self._has_reported(node)))
        lost = {record for record in before if not _is_intact(self, record)}
        waits = bool(leaving & answering) and members not in self._followed
        self._followed.add(members)
        self.note_destroyed({record for record in lost if not waits or record[0] not in found})
        for name in sorted(members.joining - self.nodes.keys()):
            self.nodes[name] = Node(self, name)
        self._pickable = list(self.nodes.values())
        for name in sorted(members.removed):
            self.at(self.rng.uniform(0.0, 3.0), self.nodes[name].remove)

    def _has_reported(self, node: Node) -> bool:
        """Return True if the replica's present process runs, and the Controller has received a report from it."""
        account = self.controller.control._accounts.get(node.name)
        return node.alive and account is not None and account.state.incarnation == node.disk.incarnation

    def restart_members(self, replicas: frozenset[int]) -> None:
        """Start the processes of removed replicas that belong to the group again, because the journal lost the removal
        before any replica had received it. A replica without its directory is not started, because the group has no
        master."""
        self.removed -= replicas
        for name in sorted(replicas):
            if self.nodes[name].is_removed and self.nodes[name].disk.incarnation:
                self.nodes[name].is_removed = False
                self.nodes[name].start()

    def say(self, text: str) -> None:
        self.trace.append(f"{self.now:.4f} {text}")

    def note_destroyed(self, records: Collection[tuple[int, int, int]]) -> None:
        """Record that a fault destroyed the last intact copy of each of the given log records."""
        self.destroyed |= {message for _, _, message in records}

    def at(self, delay_s: float, action: Action, *args: Any) -> None:
        """Call `action(*args)` after a delay."""
        self._count += 1
        heappush(self._events, (self.now + delay_s, self._count, None, None, action, args))

    def delay_accounts(self, replica: int, for_s: float) -> None:
        """Delay the status reports that a replica sends to the Controller in the next `for_s` seconds."""
        self._late_accounts_until_s[replica] = self.now + for_s

    def account_delay_s(self, replica: int) -> float:
        """Return the simulated delay, in seconds, of a status report that the replica sends to the Controller
        now."""
        late = self.now < self._late_accounts_until_s.get(replica, 0.0)
        return self.rng.uniform(0.0, ACCOUNT_DELAY_MAX_S) if late else 0.0

    def send(
        self,
        path: tuple[int, int],
        deliver: Deliver | None,
        action: Action,
        args: tuple[Any, ...],
        *,
        late_s: float = 0.0,
    ) -> None:
        """Send a message through the simulated network: deliver it after a random delay, or lose it. Messages may
        overtake each other.

        `path`: the sender and the receiver. `deliver`: the receiver's method that calls `action(*args)` when its
        process runs; None if the receiver always runs.
        """
        draw = self._draw
        if draw() < self.loss or path in self.cut:
            return
        # These are the numbers of random.uniform, without a further call for each message.
        delay_s = 0.1 + (3.0 - 0.1) * draw() if draw() < 0.02 else 0.0005 + (0.02 - 0.0005) * draw()
        self._count += 1
        heappush(self._events, (self.now + (delay_s + late_s), self._count, path, deliver, action, args))

    def pick_node(self) -> Node:
        """Return a random replica. The choice is that of random.choice, which costs three calls of Python."""
        nodes, getrandbits = self._pickable, self.rng.getrandbits
        bits = len(nodes).bit_length()
        index = getrandbits(bits)
        while index >= len(nodes):
            index = getrandbits(bits)
        return nodes[index]

    def run(self, until_s: float) -> None:
        events = self._events
        while events and events[0][0] <= until_s:
            self.now, _, path, deliver, action, args = heappop(events)
            if path is not None and path in self.cut:
                continue
            if deliver is None:
                action(*args)
            else:
                deliver(action, args)
        self.now = until_s

    def heal(self) -> None:
        """End all faults: every process runs, and the network loses no message."""
        self.cut.clear()
        self.loss = 0.0
        self._late_accounts_until_s.clear()
        for node in self.nodes.values():
            node.resume()
            node.start()
        self.controller.start()


def run_seed(
    seed: int, *, bugs: Bugs = Bugs(), duration_s: float = 30.0, only: Collection[str] = (), **options: Any
) -> World:
    """Run the simulation with one seed, end all faults and check the result.

    `options`: arguments of World. `only`: the kinds of faults to inject; empty for all kinds.
    """
    world = World(seed, bugs=bugs, **options)
    world.has_rot = any(kind.startswith("rot") for kind in only)
    faults = random.Random(seed * 7919 + 1)
    at_s = 1.0
    while at_s < duration_s:
        world.run(at_s)
        _one_fault(world, faults, only)
        at_s += faults.expovariate(1 / 1.2)
    world.run(duration_s)
    world.heal()
    world.run(duration_s + 8.0)
    world.client.stopped = True
    world.run(duration_s + 20.0)
    world.checks.check_end(world)
    return world


def _end_process(world: World, node: Node, after_s: float, away_s: float) -> None:
    """End the process of a replica whose disk failed, and start a new process later. The disk may lose
    unflushed data."""
    incarnation = node.disk.incarnation

    def end() -> None:
        if node.alive and node.disk.incarnation == incarnation:
            node.kill(power=not world.async_flush)
            world.at(away_s, node.start)

    world.at(after_s, end)


def _one_fault(world: World, rng: random.Random, only: Collection[str]) -> None:
    node = rng.choice(list(world.nodes.values()))
    rare = rng.choice(["wipe", "journal", "blackout", "shorten", "shorten all", "accounts"])
    kind = rng.choice([*"kill kill power master pause cut oneway controller heal balance".split(), rare])
    if only:
        kind = rng.choice(sorted(only))
    if kind == "master":  # cut the power of the master only
        node = next((one for one in world.nodes.values() if one.leads()), node)
    world.say(f"fault {kind} {node.name}")
    if kind in ("kill", "power", "master", "blackout"):
        for one in world.nodes.values() if kind == "blackout" else (node,):
            # With `async_flush`, records are acknowledged without a flush, and a power cut may lose them. So with
            # `async_flush` the power is never cut.
            one.kill(power=kind != "kill" and not world.async_flush)
            world.at(rng.uniform(0.3, 4.0), one.start)
    elif kind == "pause":
        node.pause()
        world.at(rng.uniform(0.2, 6.0), node.resume)
    elif kind in ("cut", "oneway"):
        others = [CONTROLLER, CLIENT, *(name for name in world.nodes if name != node.name)]
        for other in rng.sample(others, rng.randint(1, len(others))):
            world.cut.add((node.name, other))
            if kind == "cut":
                world.cut.add((other, node.name))
        world.at(rng.uniform(0.5, 6.0), world.cut.clear)
    elif kind == "controller" and world.controller.alive:
        world.controller.kill()
        world.at(rng.uniform(0.2, 3.0), world.controller.start)
    elif kind == "wipe" and all(node.disk.store_id == f"store-{node.name}" for node in world.nodes.values()):
        # A disk with all data may be wiped if another disk also has all data. A disk outside of the sync-state set may
        # always be wiped. With fixed roles any disk may be wiped, because after a loss of data no replica leads.
        members = _counted_members(world)
        keeps_all = len(members) > 1 and bool(_have_everything(world) - {node.name})
        if keeps_all or (members and node.name not in members) or world.fixed:
            before = _mendable(world)
            node.wipe()
            world.note_destroyed({record for record in before if not _is_intact(world, record)})
            world.at(rng.uniform(0.3, 4.0), node.start)
    elif kind in ("shorten", "shorten all", "shorten all below the floor"):
        _shorten(world, rng, node, everybody=kind != "shorten", below_floor=kind.endswith("floor"))
    elif kind in ("rot", "rot all"):
        _rot(world, rng, node, everybody=kind == "rot all")
    elif kind == "rot each":
        _rot_each(world, rng)
    elif kind == "disk":
        broken = next((one for one in world.nodes.values() if one.leads()), node) if rng.random() < 0.7 else node
        broken.fail_disk()
        _end_process(world, broken, rng.uniform(0.1, 4.0), rng.uniform(0.3, 2.0))
    elif kind == "accounts":
        for one in rng.sample(list(world.nodes.values()), rng.randint(1, len(world.nodes))):
            world.delay_accounts(one.name, rng.uniform(1.0, 10.0))
    elif kind == "journal":
        world.controller.kill()
        world.controller.records.clear()
        world.at(rng.uniform(0.2, 3.0), world.controller.start)
    elif kind == "balance" and world.controller.alive:
        world.controller.control.designate(node.name, world.controller.clock.read_s())
    elif kind in CHANGES:
        _change_replicas(world, rng, kind)
    elif kind == "clock":
        rng.choice([node, world.controller]).clock.step()
    elif kind == "heal":
        world.cut.clear()


def _change_replicas(world: World, rng: random.Random, kind: str) -> None:
    """Order a change of the group's replicas, if the Controller runs and can accept the order."""
    control = world.controller.control
    staying = sorted(control.members.staying)
    count = len(staying)
    if not world.controller.alive:
        return
    try:
        if kind == "cancel":
            record = control.cancel_change()
        elif kind == "replace":
            record = control.change_replicas(count, rng.choice(staying))
        else:
            wanted = rng.randint(1, count) if kind == "shrink" else rng.randint(count, GROWN_MAX)
            record = control.change_replicas(wanted)
    except InvalidArgumentError as error:
        world.say(f"refused: {error}")
    else:
        world.controller.keep(record)


def _shorten(world: World, rng: random.Random, node: Node, *, everybody: bool, below_floor: bool) -> None:
    """Make one replica lose the end of its log. In half of the cases the replica is the master. Nothing happens unless
    another member of the sync-state set has a log with all messages, and each record that is lost here is intact on
    another disk. The other logs may be damaged, so that no replica has an intact log afterwards.

    With `everybody`, the processes of all replicas end, too. With `below_floor`, the shortened log ends before the
    confirm floor (the confirm offset on the replica's disk), so that the replica can detect the loss.
    """
    if rng.random() < 0.5:
        node = next((one for one in world.nodes.values() if one.leads()), node)
    if not node.disk.flushed or not _have_everything(world, intact=False) - {node.name}:
        return
    restarts_s = {one: rng.uniform(0.3, 4.0) for one in (world.nodes if everybody else (node.name,))}
    # Choose the offset at which the log will end. With `below_floor`, this end lies before the confirm floor (the
    # confirm offset on the replica's disk). Otherwise, in half of the cases, the end lies at the floor or later: then
    # only the newest records are lost.
    floor = min(node.disk.floor.offset, node.disk.flushed)
    if below_floor:
        end = rng.randint(0, max(floor - 1, 0)) if floor else node.disk.flushed
    else:
        end = rng.randint(rng.choice([0, floor]), node.disk.flushed)
    lost = {record for record in _damaged(world) if record[0] >= end and node.disk.has_intact(record)}
    if not all(_is_intact(world, record, node) for record in lost):
        return
    for one, after_s in restarts_s.items():
        world.nodes[one].kill(power=False)
        world.at(after_s, world.nodes[one].start)
    node.shorten(end)


def _rot(world: World, rng: random.Random, node: Node, *, everybody: bool) -> None:
    """Damage a record on the disk of one replica, which is the master in half of the cases. Another member of the
    sync-state set keeps all records intact.

    With `everybody`, the record is damaged on each disk that has it, so no replica can repair it. The record is never
    the last of a log. A damaged last record would be cut off like a torn tail, and the fault "shorten" already covers
    this.
    """
    if rng.random() < 0.5:
        node = next((one for one in world.nodes.values() if one.leads()), node)
    if node.disk.last_intact < 1:
        return
    offset = rng.randrange(node.disk.last_intact)
    record = node.disk.log[offset]
    victims = [node]
    if everybody:
        victims = [
            one
            for one in world.nodes.values()
            if one.disk.log[offset : offset + 1] == [record] and one.disk.last_intact > offset
        ]
    elif not _have_everything(world) - {node.name}:
        return
    # The fault damages only records at this offset. So no other record can lose its last intact copy.
    before = {(offset, *one.disk.log[offset]) for one in _group(world) if one.disk.is_intact(offset)}
    for one in victims:
        one.rot(offset)
        world.at(rng.uniform(0.3, 4.0), one.start)
    world.note_destroyed({record for record in before if not _is_intact(world, record)})


def _rot_each(world: World, rng: random.Random) -> None:
    """End all processes. Then damage one record on each disk; each damaged record is still intact on another disk.
    Afterwards no replica has an intact log, but the replicas can repair each other. The last record of a log is never
    damaged."""
    for node in world.nodes.values():
        here = (offset for offset in range(node.disk.last_intact) if node.disk.is_intact(offset))
        offsets = [offset for offset in here if _is_intact(world, (offset, *node.disk.log[offset]), node)]
        node.kill(power=False)
        world.at(rng.uniform(0.3, 4.0), node.start)
        if offsets:
            node.rot(rng.choice(offsets))


def _is_intact(world: World, record: tuple[int, int, int], besides: Node | None = None) -> bool:
    """Return True if a record is intact on at least one disk of the group. The disk of `besides` does not count.
    `record`: offset, epoch and message."""
    return any(node.disk.has_intact(record) for node in _group(world) if node is not besides)


def _mendable(world: World) -> set[tuple[int, int, int]]:
    """Return offset, epoch and message of each record that is damaged on a disk of the group, and intact on another
    disk of the group."""
    return {record for record in _damaged(world) if _is_intact(world, record)}


def _damaged(world: World) -> set[tuple[int, int, int]]:
    """Return offset, epoch and message of each record that is damaged on at least one disk of the group."""
    return {(offset, *node.disk.log[offset]) for node in _group(world) for offset in node.disk.damaged}


def _group(world: World) -> list[Node]:
    return [node for name, node in world.nodes.items() if name not in world.removed]


def _counted_members(world: World) -> frozenset[int]:
    """Return the members of the sync-state set. The members of the former set count, too, if this set may be valid
    again: if the elected master does not lead yet, or has not received a smaller set."""
    if not world.controller.records:
        return frozenset()
    record = world.controller.records[-1]
    return frozenset({*record.sync_state_set.members, *record.elected_from, *record.shrunk_from})


def _have_everything(world: World, *, intact: bool = True) -> frozenset[int]:
    """Return the members of the sync-state set that lost no message: their disks have every message that was
    acknowledged, or that a consumer read. With `intact`, none of these messages is damaged on their disks.

    A replica that was elected although it was no member counts only from the time at which it leads. Until then its
    election may be annulled, and the former members are again the only ones."""
    if not world.controller.records:
        return frozenset()
    record, control = world.controller.records[-1], world.controller.control
    stores = record.sync_state_set.stores
    if record.elected_from and control.set_in_force is None:
        stores = {name: store_id for name, store_id in stores.items() if name in record.elected_from}
    wanted, seen = set(world.checks.acknowledged), len(world.checks.seen)
    return frozenset(
        name
        for name, node in world.nodes.items()
        if stores.get(name) == node.disk.store_id
        and node.disk.flushed >= seen
        and wanted - world.destroyed <= node.disk.messages(intact=intact)
    )
