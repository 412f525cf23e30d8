"""A broker group in one process, each of whose replicas has a disk of its own that can lose its power, and the clients
of this group, which record what was acknowledged and what was read.

The stores, the replication and the election are real. The clock is simulated, and the disks are LossyDisks: a power cut
loses unflushed bytes and names, and tears pages. A replica that is `away` is stopped, as by SIGSTOP.
"""

from __future__ import annotations

import random
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actors.core.replica.orders import MASTER_LEASE_S, ReplicaRole
from actors.core.replica.rules import ReplicaRules
from actors.replica.replica import Replica
from placement.election import GroupControl
from raymq.common.errors import RaymqError, ServiceNotAvailableError
from raymq.common.message import SendStatus
from raymq.remoting.lane_pool import LANE_NOT_OPENED
from storage.append.durability import StartedAppend
from tests.support.replicas.local_replicas import GROUP, LocalReplicas
from tests.support.stores.power import LossyDisk, LossyDisks
from tests.support.stores.stores import intact_bodies, make_batch

TOPIC = "orders"
QUEUES = (0, 1)
Place = tuple[int, int]
"""A queue and an offset in the queue."""


class PoweredReplicas(LocalReplicas):
    """Three replicas whose power can be cut. `disks` must be installed. `dice` decides which unflushed bytes a power
    cut destroys. `lies`: the replica whose disk does not flush the log, a fault that the checks must
    find. `control`: the Controller's election state, perhaps one with a planted mistake."""

    def __init__(
        self,
        root: Path,
        dice: random.Random,
        disks: LossyDisks,
        *,
        min_in_sync: int = 1,
        lies: int | None = None,
        control: type[GroupControl] = GroupControl,
        **store: Any,
    ) -> None:
        self.now_s = 1000.0
        self._dice, self._disks, self._lies = dice, disks, lies
        self._power: dict[int, LossyDisk] = {}
        self._lives = dict.fromkeys(range(3), 0)
        rules = ReplicaRules(
            lease_s=MASTER_LEASE_S, in_sync_replicas=min_in_sync, min_in_sync_replicas=min_in_sync, not_catchup_s=3.0
        )
        super().__init__(root, 3, rules, clock_s=lambda: self.now_s, dead_after_s=1.0, **store)
        self.control_state = control(GROUP, self.names, self.control_state.rules)

    def directory(self, name: int) -> Path:
        return self._home(name) / f"{GROUP}-{name}"

    def _home(self, name: int) -> Path:
        return self._root / f"{name}.{self._lives[name]}"

    def open(self, name: int) -> Replica:
        """Start a replica. If its power was cut, its disk has the image that the power cut left."""
        former = self._power.get(name)
        if former is None or former.lost:
            self._lives[name] += former is not None
            home = self._home(name)
            home.mkdir(parents=True)
            if former is not None:
                former.write_image(home)
            self._power[name] = self._disks.add(
                home,
                random.Random(self._dice.random()),
                on_loss=lambda: self.away.add(name),
                ends=True,
                lies="commitlog" if name == self._lies else "",
            )
        self.away.discard(name)
        return super().open(name)

    def lose_power(self, name: int, calls: int | None = None) -> None:
        """Cut the power of a replica now, or at a later call of its disk, after `calls` more calls."""
        if calls is None:
            self._power[name].lose_now()
        else:
            self._power[name].lose_after(calls)

    def has_power(self, name: int) -> bool:
        return name in self.replicas and not self._power[name].lost

    def end_process(self, name: int) -> None:
        """End the process of a replica whose power was cut, and remove its directory. The image of the power cut
        remains."""
        self.close(name)
        shutil.rmtree(self._home(name))

    def pass_time(self, seconds: float) -> None:
        """Let time pass, with rounds of the Controller and of all Replicators: first three times a second, then less
        often, so that a test takes less time."""
        until_s, often_s = self.now_s + seconds, self.now_s + 1.5
        while self.now_s < until_s:
            self.now_s = min(self.now_s + (0.3 if self.now_s < often_s else 0.9), until_s)
            self.turn()

    def turn(self) -> None:
        self.control(0)
        for name in sorted(self.replicas):
            self.try_copy(name)

    def try_copy(self, name: int) -> None:
        """Copy the master's log to a replica, as far as both work."""
        try:
            self.copy(name)
        except (RaymqError, KeyError, *LANE_NOT_OPENED):
            pass  # a replica changed its role or lost its power: copy again later, as the Replicator actor does

    def try_flush(self, replica: Replica) -> None:
        """Wait until a replica's log is on its disk, unless the replica has no power."""
        with suppress(ServiceNotAvailableError):
            replica.any_store.gate.flush_all()

    def leaders(self) -> list[Replica]:
        """Return the running replicas that are masters in their own view. A stopped or replaced master may be among
        them."""
        found = []
        for name, replica in self.replicas.items():
            if name not in self.away and replica._role.role is ReplicaRole.MASTER:
                found.append(replica)
        return found

    def is_whole(self) -> bool:
        """Return True if a master leads, all replicas are in sync, and their logs end at the same offset."""
        record = self.control_state.record
        if record is None or record.master is None or self.control_state.reason or self.away:
            return False
        ends = {replica.any_store.log.end_offset for replica in self.replicas.values()}
        return record.sync_state_set.members == self.names == self.replicas.keys() and len(ends) == 1


@dataclass
class Clients:
    """A producer and a consumer of a group. `sent`: all bodies. `acknowledged` and `read`: bodies by queue and offset.
    `ends`: for each body, the end of the log after its batch. `faults`: a sentence for each broken promise."""

    group: PoweredReplicas
    dice: random.Random
    sent: list[bytes] = field(default_factory=list)
    acknowledged: dict[Place, bytes] = field(default_factory=dict)
    read: dict[Place, bytes] = field(default_factory=dict)
    ends: dict[bytes, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    _unanswered: list[tuple[int, list[bytes], StartedAppend]] = field(default_factory=list)

    def send(self) -> None:
        """Send a batch to a replica that leads in its own view, and let some of the Replicators copy it."""
        leaders = self.group.leaders()
        if not leaders:
            return
        length = self.dice.choice((0, 10, 100, 700, 2500))
        bodies = [b"%d." % (len(self.sent) + index) + b"x" * length for index in range(self.dice.choice((1, 1, 3)))]
        queue = self.dice.choice(QUEUES)
        self.sent += bodies
        leader = self.dice.choice(leaders)
        try:
            started = leader.start_append([make_batch(bodies, topic=TOPIC, queue_id=queue)])
        except RaymqError:
            return  # refused: this replica does not lead any more, or too few replicas are in sync
        self._unanswered.append((queue, bodies, started))
        self.ends |= dict.fromkeys(bodies, leader.any_store.log.end_offset)
        names = sorted(self.group.replicas)
        for name in self.dice.sample(names, self.dice.choice((len(names), len(names), 1))):
            self.group.try_copy(name)
        if leader.any_store.gate.is_sync:
            self.group.try_flush(leader)
        self.take_answers()

    def take_answers(self) -> None:
        """Record the acknowledgements of earlier appends that have arrived."""
        waiting = []
        for queue, bodies, started in self._unanswered:
            try:
                results = started.settle(time.monotonic())
            except RaymqError:
                continue  # the outcome is unknown
            if results is None:
                waiting.append((queue, bodies, started))
            elif results[0].status is SendStatus.SEND_OK:
                first = results[0].queue_offset
                self.acknowledged |= {(queue, first + index): body for index, body in enumerate(bodies)}
        self._unanswered = waiting

    def consume(self) -> None:
        """Read all visible messages of a running replica. Records a fault if an earlier read found another message."""
        names = sorted(set(self.group.replicas) - self.group.away)
        if not names:
            return
        replica = self.group.replicas[self.dice.choice(names)]
        try:
            found = visible(replica)
        except RaymqError:
            return  # this replica has no master yet
        for place, body in found.items():
            if self.read.setdefault(place, body) != body:
                self.faults.append(f"a consumer read {self.read[place][:9]!r} at {place}, now {body[:9]!r} is there")

    def lost(self) -> set[bytes]:
        """Return the bodies that were acknowledged or read and that a replica lacks now, at their offsets."""
        wanted = self.acknowledged | self.read
        places = [visible(replica) for replica in self.group.replicas.values()]
        return {body for place, body in wanted.items() if any(one.get(place) != body for one in places)}


def visible(replica: Replica) -> dict[Place, bytes]:
    """Return each message that consumers can read from a replica, by its queue and offset. Damaged messages are left
    out. Raises RaymqError if the replica serves no consumers."""
    store = replica.store
    found: dict[Place, bytes] = {}
    for queue in QUEUES:
        first = store.queues.bounds(TOPIC, queue).min_offset
        bodies = intact_bodies(store, TOPIC, queue)
        found |= {(queue, first + index): body for index, body in enumerate(bodies) if body is not None}
    return found
