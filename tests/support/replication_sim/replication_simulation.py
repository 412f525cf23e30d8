"""A broker group of three replicas, their Controller, a producer and a consumer, in virtual time and with faults.

The decisions are the real ones (placement.election, actors.core.replica.role and sync_state); what is simulated is
everything they rest on: disks that lose what was not flushed, a network that delays, reorders, loses and cuts,
processes that are killed or stand still, clocks. A run is a function of its seed: same seed, same trace.

A log is a list of (epoch, message); an offset counts records. What is checked, while it runs and at its end, is in
`Checks`.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from actors.core.replica.orders import Drain, Follow, Lead, Renew, ReplicaRole, ReplicaState
from actors.core.replica.role import ReplicaRoleState
from actors.core.replica.sync_state import FixedSyncState, MasterSyncState
from placement.election import FIXED_MASTER, ControlRules, GroupControl, Record
from raymq.errors import NotMasterError
from storage.replication.epochs import EpochEntry, SyncStateSet, common_end

GROUP = "broker-a"
CONTROLLER = -1
CLIENT = -2
PING_S = 0.3
CHUNK_MAX = 20


@dataclass(frozen=True)
class Bugs:
    """Mistakes to plant. Each must be found by the checks."""

    skip_truncation: bool = False
    skip_fencing: bool = False
    acknowledge_early: bool = False
    elect_outside: bool = False
    lead_anew: bool = False


@dataclass
class Disk:
    """What a replica's directory holds. Records before `flushed` survive a power cut."""

    store_id: str
    log: list[tuple[int, int]] = field(default_factory=list)
    flushed: int = 0
    epochs: list[EpochEntry] = field(default_factory=list)
    sync_state_set: SyncStateSet | None = None
    incarnation: int = 0
    _offsets: dict[int, int] = field(default_factory=dict)

    def append(self, records: Iterable[tuple[int, int]]) -> None:
        """Epochs and messages, behind what is there."""
        for record in records:
            self._offsets.setdefault(record[1], len(self.log))
            self.log.append(record)

    def truncate(self, end: int) -> None:
        """Keep what is before `end`."""
        for _, message in self.log[end:]:
            if self._offsets.get(message, -1) >= end:
                del self._offsets[message]
        del self.log[end:]

    def offset_of(self, message: int) -> int | None:
        """Where the log has a message first."""
        return self._offsets.get(message)


@dataclass
class Checks:
    """What was acknowledged and seen, and what is wrong with it."""

    acknowledged: dict[int, int] = field(default_factory=dict)
    masters: dict[int, int] = field(default_factory=dict)
    seen: list[int] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def acknowledge(self, epoch: int, replica: int, message: int) -> None:
        if self.masters.setdefault(epoch, replica) != replica:
            self.faults.append(f"replicas {self.masters[epoch]} and {replica} both acknowledge in epoch {epoch}")
        self.acknowledged[message] = epoch

    def see(self, start: int, messages: list[int]) -> None:
        known = self.seen[start : start + len(messages)]
        if known != messages[: len(known)]:
            self.faults.append(f"a consumer saw {known[:5]} at {start}, now there is {messages[:5]}")
        self.seen += messages[len(known) :] if start + len(known) == len(self.seen) else []


class Simulation:
    """One run. `trace` says what happened; `checks.faults` what went wrong."""

    def __init__(
        self, seed: int, *, replicas: int = 3, bugs: Bugs = Bugs(), min_in_sync: int = 1, fixed: bool = False
    ) -> None:
        self.rng = random.Random(seed)
        self.bugs, self.min_in_sync, self.fixed = bugs, min_in_sync, fixed
        self.now = 0.0
        self.trace: list[str] = []
        self.checks = Checks()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self.cut: set[tuple[int, int]] = set()
        self.loss = self.rng.choice([0.0, 0.01, 0.1])
        self.rules = ControlRules(unclean=bugs.elect_outside, fixed_master=FIXED_MASTER if fixed else None)
        self.nodes = {name: Node(self, name) for name in range(replicas)}
        self.controller = Controller(self)
        self.client = Client(self)

    def say(self, text: str) -> None:
        self.trace.append(f"{self.now:.4f} {text}")

    def at(self, delay_s: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + delay_s, self._count, action))

    def send(self, sender: int, receiver: int, deliver: Callable[[], None]) -> None:
        """Deliver later, perhaps much later, perhaps never; two messages may change places."""
        if self.rng.random() < self.loss or (sender, receiver) in self.cut:
            return
        slow = self.rng.random() < 0.02
        delay_s = self.rng.uniform(0.1, 3.0) if slow else self.rng.uniform(0.0005, 0.02)
        self.at(delay_s, lambda: None if (sender, receiver) in self.cut else deliver())

    def run(self, until_s: float) -> None:
        while self._events and self._events[0][0] <= until_s:
            self.now, _, action = heapq.heappop(self._events)
            action()
        self.now = until_s

    def heal(self) -> None:
        """No more faults: everything runs and hears each other."""
        self.cut.clear()
        self.loss = 0.0
        for node in self.nodes.values():
            node.resume()
            node.start()
        self.controller.start()

    def verify(self) -> None:
        """After healing: what was acknowledged is there, once, and the replicas agree."""
        masters = [node for node in self.nodes.values() if node.leads()]
        if not masters and self._every_copy_is_lost():
            self.say("rightly refused")
            return
        if len(masters) != 1:
            self.checks.faults.append(f"{len(masters)} replicas lead: {self.controller.control.reason}")
            return
        [master] = masters
        messages = [message for _, message in master.disk.log]
        lost = sorted(set(self.checks.acknowledged) - set(messages))
        if lost:
            self.checks.faults.append(f"lost {lost[:10]} of {len(self.checks.acknowledged)}")
        if len(set(messages)) != len(messages):
            self.checks.faults.append("a message is in the log twice")
        self.checks.see(0, messages[: master.visible])
        if len(self.checks.seen) > len(messages):
            self.checks.faults.append("a consumer saw what is gone")
        for node in self.nodes.values():
            if node.name in master.members() and node.disk.log[: master.visible] != master.disk.log[: master.visible]:
                self.checks.faults.append(f"replica {node.name} differs from master {master.name}")

    def _every_copy_is_lost(self) -> bool:
        """Whether the disks of all members of the set were replaced, so that nobody may lead."""
        record = self.controller.control.record
        stores = record.sync_state_set.stores if record is not None else {}
        return bool(stores) and all(self.nodes[name].disk.store_id != store_id for name, store_id in stores.items())


class Node:
    """A replica: a disk, and a process when it runs."""

    def __init__(self, world: Simulation, name: int) -> None:
        self.world, self.name = world, name
        self.disk = Disk(f"store-{name}")
        self.alive = self.paused = False
        self._held: list[Callable[[], None]] = []
        self.start()

    # Faults

    def start(self) -> None:
        if self.alive:
            return
        self.alive = True
        self.disk.incarnation += 1
        epoch = self.disk.epochs[-1].epoch if self.disk.epochs else 0
        self.role = ReplicaRoleState(GROUP, self.name, epoch)
        self.sync: MasterSyncState | None = None
        self.pending: list[tuple[int, int, int]] = []
        self.visible = 0
        self.handshaken = False
        self._asked_s = -1.0
        incarnation = self.disk.incarnation
        self.world.say(f"{self.name} starts as {incarnation} with {len(self.disk.log)}")
        self._loop(incarnation)

    def kill(self, *, power: bool) -> None:
        """End the process; with `power` what was not flushed is gone, but for a part."""
        if power:
            kept = self.world.rng.randint(self.disk.flushed, len(self.disk.log))
            self.disk.truncate(kept)
            self.disk.flushed = kept
        if self.alive:
            self.world.say(f"{self.name} dies, power {power}")
        self.alive = self.paused = False
        self._held.clear()

    def wipe(self) -> None:
        """The disk is replaced by an empty one."""
        self.kill(power=False)
        self.disk = Disk(f"{self.disk.store_id}'")

    def pause(self) -> None:
        self.paused = self.alive

    def resume(self) -> None:
        if self.paused:
            self.paused = False
            held, self._held = self._held, []
            for action in held:
                self.deliver(action)

    def deliver(self, action: Callable[[], None]) -> None:
        """A message arrives at whatever process runs."""
        if self.paused:
            self._held.append(action)
        elif self.alive:
            try:
                action()
            except NotMasterError:
                pass  # the caller is not told: its message was lost, for all it knows

    # What a replica says of itself, and its orders

    def account(self) -> ReplicaState:
        return ReplicaState(
            self.name,
            self.disk.store_id,
            self.disk.incarnation,
            self.world.now,
            self.role.role,
            self.role.epoch,
            self.role.master,
            self.disk.log[self.disk.flushed - 1][0] if self.disk.flushed else 0,
            self.disk.flushed,
            self.visible,
            self.disk.sync_state_set,
            self.role.draining,
            self.sync.propose(self.world.now) if self.sync is not None and self.leads() else None,
        )

    def leads(self) -> bool:
        return self.alive and not self.paused and self.role.leads(self.world.now)

    def members(self) -> frozenset[int]:
        return self.sync.in_sync(self.world.now) if self.sync is not None else frozenset()

    def lead(self, order: Lead) -> None:
        first, until_s = order.sync_state_set, order.clock_s + self.world.rules.lease_s
        if not self.role.lead(first.epoch, until_s):
            return
        self.disk.flushed = len(self.disk.log)
        self.disk.epochs = [entry for entry in self.disk.epochs if entry.start_offset < len(self.disk.log)]
        self.disk.epochs.append(EpochEntry(first.epoch, len(self.disk.log)))
        self.disk.sync_state_set = first
        start = (self.name, first, len(self.disk.log), self.world.now)
        self.sync = (
            FixedSyncState(*start, not_catchup_s=2.0, max_gap_bytes=10)
            if self.world.fixed
            else MasterSyncState(*start, not_catchup_s=2.0)
        )
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
            self.pending.clear()

    def drain(self, order: Drain) -> None:
        self.role.drain(order.epoch)

    def note(self, newest: SyncStateSet | None) -> None:
        known = self.disk.sync_state_set
        if newest is not None and (known is None or newest.order > known.order):
            self.disk.sync_state_set = newest

    # The master's side

    def append(self, message: int) -> None:
        """A producer's message. A repeat waits for what is stored already."""
        self._unless_unfenced(lambda: self.role.check_append(None, self.world.now))
        if self.sync is None or len(self.members()) < self.world.min_in_sync:
            return
        offset = self.disk.offset_of(message)
        if offset is None:
            offset = len(self.disk.log)
            self.disk.append([(self.role.epoch, message)])
        self.pending.append((offset + 1, message, self.role.epoch))
        incarnation, target = self.disk.incarnation, len(self.disk.log)
        self.world.at(self.world.rng.uniform(0.0005, 0.004), lambda: self._flushed(incarnation, target))

    def _unless_unfenced(self, check: Callable[[], None]) -> None:
        if not self.world.bugs.skip_fencing:
            check()

    def _flushed(self, incarnation: int, end: int) -> None:
        if not self.alive or self.disk.incarnation != incarnation:
            return
        if self.paused:
            self._held.append(lambda: self._flushed(incarnation, end))
            return
        self.disk.flushed = max(self.disk.flushed, min(end, len(self.disk.log)))
        self._settle()

    def _settle(self) -> None:
        """Acknowledge and show what the set has."""
        if self.sync is None:
            return
        self.sync.flushed(self.disk.flushed, self.world.now)
        if not (self.role.leads(self.world.now) or self.world.bugs.skip_fencing):
            return
        limit = self.disk.flushed if self.world.bugs.acknowledge_early else self.sync.confirm_offset
        self.visible = max(self.visible, limit)
        for _, message, epoch in [entry for entry in self.pending if entry[0] <= limit]:
            self.world.checks.acknowledge(epoch, self.name, message)
            self.world.client.answered(self.name, message)
        self.pending = [entry for entry in self.pending if entry[0] > limit]

    def give_epochs(self, asker: Node, epoch: int) -> None:
        self.role.check_asked(epoch)
        epochs, end = list(self.disk.epochs), self.disk.flushed
        self.world.send(self.name, asker.name, lambda: asker.deliver(lambda: asker.take_epochs(epoch, epochs, end)))

    def give_log(self, asker: Node, store_id: str, epoch: int, start: int) -> None:
        self._unless_unfenced(lambda: self.role.check_asked(epoch))
        if self.sync is None:
            return
        self.sync.asked(asker.name, store_id, start, self.world.now)
        self._settle()
        records = self.disk.log[start : min(self.disk.flushed, start + CHUNK_MAX)]
        records = [record for record in records if record[0] == records[0][0]]
        entry = next((e for e in self.disk.epochs if records and e.epoch == records[0][0]), None)
        confirm = self.sync.confirm_offset
        self.world.send(
            self.name, asker.name, lambda: asker.deliver(lambda: asker.take_log(epoch, start, records, entry, confirm))
        )

    # The follower's side

    def _loop(self, incarnation: int) -> None:
        if not self.alive or self.disk.incarnation != incarnation:
            return
        if not self.paused:
            self._ask()
        self.world.at(0.05, lambda: self._loop(incarnation))

    def _ask(self) -> None:
        if self.role.role is not ReplicaRole.SLAVE or self.role.master is None:
            return
        master, epoch, start = self.world.nodes[self.role.master], self.role.epoch, self.disk.flushed
        store_id = self.disk.store_id

        def ask() -> None:
            if handshaken:
                master.give_log(self, store_id, epoch, start)
            else:
                master.give_epochs(self, epoch)

        handshaken = self.handshaken
        self.world.send(self.name, master.name, lambda: master.deliver(ask))

    def take_epochs(self, epoch: int, epochs: list[EpochEntry], end: int) -> None:
        self._unless_unfenced(lambda: self.role.check_chunk(epoch))
        if self.handshaken:
            return
        common = common_end(self.disk.epochs, len(self.disk.log), epochs, end) or 0
        if not self.world.bugs.skip_truncation:
            self.disk.truncate(common)
            self.disk.epochs = [entry for entry in self.disk.epochs if entry.start_offset < common]
        self.disk.flushed = len(self.disk.log)
        self.visible = min(self.visible, len(self.disk.log))
        self.handshaken = True
        self._ask()

    def take_log(
        self, epoch: int, start: int, records: list[tuple[int, int]], entry: EpochEntry | None, confirm: int
    ) -> None:
        self._unless_unfenced(lambda: self.role.check_chunk(epoch))
        if not self.handshaken or start != len(self.disk.log) or self.disk.flushed != start:
            return
        if entry is not None and (not self.disk.epochs or self.disk.epochs[-1].epoch < entry.epoch):
            self.disk.epochs.append(entry)
        self.disk.append(records)
        self.visible = max(self.visible, min(confirm, start))
        if records:
            incarnation, end = self.disk.incarnation, len(self.disk.log)
            self.world.at(self.world.rng.uniform(0.0005, 0.004), lambda: self._follow_on(incarnation, end))

    def _follow_on(self, incarnation: int, end: int) -> None:
        self._flushed(incarnation, end)
        if self.alive and not self.paused and self.disk.incarnation == incarnation:
            self._ask()


class Controller:
    """The shell around GroupControl: pings, and carries its actions out in order."""

    def __init__(self, world: Simulation) -> None:
        self.world = world
        self.journal: list[Record] = []
        self.alive = False
        self._life = 0
        self.start()

    def start(self) -> None:
        if self.alive:
            return
        self.alive = True
        self._life += 1
        control = LeadsWithAnyDirectory if self.world.bugs.lead_anew else GroupControl
        self.control = control(GROUP, frozenset(self.world.nodes), self.world.rules)
        if self.journal:
            self.control.resume(self.journal[-1], self.world.now)
        self._loop(self._life)

    def kill(self) -> None:
        self.world.say("the controller dies")
        self.alive = False

    def _loop(self, life: int) -> None:
        if not self.alive or self._life != life:
            return
        for node in self.world.nodes.values():
            self._ping(node, life)
        self._carry_out(self.control.tick(self.world.now))
        self.world.at(PING_S, lambda: self._loop(life))

    def _ping(self, node: Node, life: int) -> None:
        newest = self.control.record.sync_state_set if self.control.record is not None else None

        def answer() -> None:
            node.note(newest)
            account = node.account()
            self.world.send(node.name, CONTROLLER, lambda: self._heard(account, life))

        self.world.send(CONTROLLER, node.name, lambda: node.deliver(answer))

    def _heard(self, account: ReplicaState, life: int) -> None:
        if self.alive and self._life == life:
            self.control.heard(account, self.world.now)
            self._carry_out(self.control.tick(self.world.now))

    def _journal(self, record: Record) -> None:
        self.journal.append(record)
        self.world.say(f"journal {record.epoch} {record.master} {sorted(record.sync_state_set.members)}")

    def _carry_out(self, actions: list[Any]) -> None:
        for action in actions:
            if isinstance(action, Record):
                self._journal(action)
                continue
            node = self.world.nodes[action.replica]
            method: Callable[[Any], None] = {
                Lead: node.lead,
                Renew: node.renew,
                Follow: node.follow,
                Drain: node.drain,
            }[type(action)]
            self.world.send(
                CONTROLLER, node.name, lambda node=node, method=method, a=action: node.deliver(lambda: method(a))
            )


class LeadsWithAnyDirectory(GroupControl):
    """A planted bug, where roles are fixed."""

    def _elect(self, alive: dict[int, ReplicaState]) -> list[Any]:
        assert self.record is not None
        return self._begin(alive[FIXED_MASTER], self.record) if FIXED_MASTER in alive else []


class Client:
    """A producer that sends each message until it is acknowledged, and a consumer that reads what masters show."""

    def __init__(self, world: Simulation) -> None:
        self.world = world
        self.sent = 0
        self.unanswered: set[int] = set()
        self.stopped = False
        self._loop()

    def answered(self, replica: int, message: int) -> None:
        self.world.send(replica, CLIENT, lambda: self.unanswered.discard(message))

    def _loop(self) -> None:
        if not self.stopped and len(self.unanswered) < 20:
            self.unanswered.add(self.sent)
            self.sent += 1
        for message in sorted(self.unanswered)[:5]:
            node = self.world.rng.choice(list(self.world.nodes.values()))
            self.world.send(CLIENT, node.name, lambda node=node, m=message: node.deliver(lambda: node.append(m)))
        node = self.world.rng.choice(list(self.world.nodes.values()))
        self.world.send(CLIENT, node.name, lambda: node.deliver(lambda: self._read(node)))
        self.world.at(0.03, self._loop)

    def _read(self, node: Node) -> None:
        if node.role.role is not ReplicaRole.FENCED:
            start = max(len(self.world.checks.seen) - 5, 0)
            shown = [message for _, message in node.disk.log[start : node.visible]]
            if shown:
                self.world.checks.see(start, shown)


def run_seed(
    seed: int, *, bugs: Bugs = Bugs(), min_in_sync: int = 1, fixed: bool = False, duration_s: float = 30.0
) -> Simulation:
    """Run one seed to its end, healed and checked. `fixed`: replica 0 leads for ever."""
    world = Simulation(seed, bugs=bugs, min_in_sync=min_in_sync, fixed=fixed)
    faults = random.Random(seed * 7919 + 1)
    at_s = 1.0
    while at_s < duration_s:
        world.run(at_s)
        _one_fault(world, faults)
        at_s += faults.expovariate(1 / 1.2)
    world.run(duration_s)
    world.heal()
    world.run(duration_s + 8.0)
    world.client.stopped = True
    world.run(duration_s + 20.0)
    world.verify()
    return world


def _one_fault(world: Simulation, rng: random.Random) -> None:
    node = rng.choice(list(world.nodes.values()))
    kind = rng.choice(
        [*"kill kill power pause cut oneway controller heal balance".split(), rng.choice(["wipe", "journal"])]
    )
    world.say(f"fault {kind} {node.name}")
    if kind in ("kill", "power"):
        node.kill(power=kind == "power")
        world.at(rng.uniform(0.3, 4.0), node.start)
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
        # One disk of several that have everything may be lost; the only one may not, unless it may lead alone: then
        # nobody leads from there on.
        members = world.controller.journal[-1].sync_state_set.members if world.controller.journal else frozenset()
        if len(members) > 1 or (members and node.name not in members) or world.fixed:
            node.wipe()
            world.at(rng.uniform(0.3, 4.0), node.start)
    elif kind == "journal":
        world.controller.kill()
        world.controller.journal.clear()
        world.at(rng.uniform(0.2, 3.0), world.controller.start)
    elif kind == "balance" and world.controller.alive:
        world.controller.control.designate(node.name, world.now)
    elif kind == "heal":
        world.cut.clear()
