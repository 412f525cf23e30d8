"""A simulation of a whole consumer group in one thread, on a virtual clock, under random faults. Equal seeds give equal
traces.

    World     the clock, the network, the processes (.processes) and their ledger (.invariants)
    trouble   members join, leave, are killed, restarted and paused; heartbeats, commits and their answers are
              lost, late and repeated; Rebalance actors and brokers restart; Rebalance actors are also paused, cannot
              reach the register in Ray's GCS, and stay down so long that the other actor takes over; clocks are set;
              offsets are reset; listeners fail and take long. Producers send all the time.

After the faults the network is repaired. The group must then consume and commit every message.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from itertools import count
from typing import Any

from actors.core.rebalance.slot_lease import TAKE_OVER_AFTER_S
from raymq.common.message import MessageQueue
from raymq.common.protocol.membership import AllocateStrategy, Allocation
from tests.support.group_sim.invariants import LawBrokenError, Ledger
from tests.support.group_sim.processes import (
    CALL_TIMEOUT_S,
    SERVERS,
    SESSION_S,
    Broker,
    Member,
    Process,
    Rebalance,
    Register,
)

TOPICS = {"orders": 2, "audit": 1}
"""Number of queues of each topic on each broker."""
BROKERS = ("broker-a", "broker-b")
MEMBERS_MAX = 5
TROUBLE_S = 30.0
REST_WITHIN_S = 60.0
STRATEGIES = (
    AllocateStrategy.AVG,
    AllocateStrategy.AVG_BY_CIRCLE,
    AllocateStrategy.STICKY,
    AllocateStrategy.STICKY,
    AllocateStrategy.CONSISTENT_HASH,
)
PROFILES = (
    ((4, 2, 2, 3, 3, 1.5, 0.7, 0.7, 2, 1.5, 1), 0.03),  # a profile with every kind of fault
    # a profile with every kind of fault. Rebalance actors are rarely restarted, paused or disconnected, so one
    # Rebalance actor rarely takes over from another
    ((4, 2, 2, 3, 3, 0.3, 0.3, 0.3, 2, 1.5, 1), 0.03),
    ((4, 4, 0.2, 0.2, 0.2, 0.2, 0.1, 0.1, 0.5, 4, 0), 0.3),  # a profile with many joins and leaves, and slow listeners
    # a profile in which Rebalance actors often cannot reach the register that stores the leases
    ((4, 2, 1, 1, 3, 0.5, 1, 3, 0.5, 0.5, 0), 0.03),
)
"""Fault profiles of simulations. Each profile has the frequency of each kind of fault, in the order of `_make_trouble`,
and the share of listener calls that are slow."""


class World:
    """A simulation of one consumer group and its cluster. A test may replace a process class by a class with a planted
    bug."""

    def __init__(
        self,
        seed: int,
        *,
        member: type[Member] = Member,
        rebalance: type[Rebalance] = Rebalance,
        broker: type[Broker] = Broker,
    ) -> None:
        self.seed = seed
        self.chance = random.Random(seed)
        self.now_s = 0.0
        self.trace: list[tuple[Any, ...]] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._ticket = count()
        self._bad_network_until_s = 0.0
        self.troubled = True
        self.queues = [
            MessageQueue(topic, name, n) for topic, c in TOPICS.items() for name in BROKERS for n in range(c)
        ]
        self.ledger = Ledger(self.queues)
        self.allocation = Allocation(self.chance.choice(STRATEGIES))
        self._member_class = member
        self._weights, self._slow_listeners = self.chance.choice(PROFILES)
        self.brokers = {name: broker(self, name, TOPICS) for name in BROKERS}
        self.register = Register(self)
        self.rebalances = {f"rebalance-{index}": rebalance(self, index) for index in range(SERVERS)}
        self.rebalance_names = sorted(self.rebalances)
        self.members: dict[str, Member] = {}

    @property
    def take_overs(self) -> int:
        """Return how often one Rebalance actor has taken over the group from another."""
        holders = [line[2] for line in self.trace if line[1] == "holds"]
        return sum(holder != before for holder, before in zip(holders[1:], holders, strict=False))

    # Methods of the virtual clock

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + delay_s, next(self._ticket), action))

    def at(self, process: Process, delay_s: float, action: Callable[[], None]) -> None:
        """Run `action` in a process after a delay. If the process is paused, the action runs after the pause. If the
        process dies first, the action never runs."""
        life = process.life

        def act() -> None:
            if process.life != life or not process.up:
                return
            if process.frozen_until_s > self.now_s:
                self.later(process.frozen_until_s - self.now_s, act)
            else:
                action()

        self.later(delay_s, act)

    def run_until(self, end_s: float, done: Callable[[], bool] = lambda: False) -> None:
        while self._events and self._events[0][0] <= end_s and not done():
            self.now_s, _, action = heapq.heappop(self._events)
            action()

    def note(self, *what: Any) -> None:
        self.trace.append((round(self.now_s, 4), *map(str, what)))

    # Methods of the simulated network

    def call(
        self,
        caller: Process,
        server: Process,
        work: Callable[[], Any],
        answered: Callable[[Any], None],
        failed: Callable[[], None],
    ) -> None:
        """Call a remote process. Exactly one of `answered` and `failed` runs if the caller is still alive.

        The server may run a call late or twice, even if the call failed for the caller.
        """
        ended, life = False, caller.life

        def end(action: Callable[[], None]) -> None:
            nonlocal ended
            if not ended and caller.life == life:
                ended = True
                action()

        def arrive(*, reply: bool) -> None:
            result = work()
            if reply:
                self.at(caller, self._delay_s(), lambda: end(lambda: answered(result)))

        self.at(caller, CALL_TIMEOUT_S, lambda: end(failed))
        fate = self._fate() if caller.cut_off_until_s <= self.now_s or server is not self.register else "lost"
        if fate != "lost":
            self.at(
                server, self._late_s() if fate == "late" else self._delay_s(), lambda: arrive(reply=fate != "unheard")
            )
        if fate == "twice":
            self.at(server, self._late_s(), lambda: arrive(reply=False))

    def _fate(self) -> str:
        if self.now_s < self._bad_network_until_s:
            return self.chance.choice(["well", "well", "lost", "unheard", "late", "twice"])
        return "well" if not self.troubled or self.chance.random() < 0.97 else "twice"

    def _delay_s(self) -> float:
        return self.chance.random() * 0.02

    def _late_s(self) -> float:
        return self.chance.uniform(0.1, 1.5 * SESSION_S)

    # Methods of the simulated listeners

    def listener_pause_s(self) -> float:
        if self.troubled and self.chance.random() < self._slow_listeners:
            return self.chance.uniform(1.0, 1.5 * SESSION_S)
        return self.chance.uniform(0.001, 0.3)

    def listener_fails(self) -> bool:
        return self.troubled and self.chance.random() < 0.1

    # Methods that cause faults

    def run(self) -> None:
        """Run the simulation first with faults, and then without faults. If a law is broken, raises LawBrokenError with
        the seed and the last part of the trace."""
        try:
            self._join()
            self._make_trouble()
            self._produce()
            self.run_until(TROUBLE_S)
            self._heal()
            self.run_until(TROUBLE_S + REST_WITHIN_S, lambda: not self.ledger.unfinished())
            if unfinished := self.ledger.unfinished():
                raise LawBrokenError(f"the group does not come to rest: {unfinished}")
        except LawBrokenError as violation:
            raise LawBrokenError(f"seed {self.seed}, {self.now_s:.3f} s: {violation}\n{self.story()}") from violation

    def story(self, lines: int = 40) -> str:
        return "\n".join("  ".join(map(str, line)) for line in self.trace[-lines:])

    def _produce(self) -> None:
        self.ledger.produced(self.chance.choice(self.queues), self.chance.randint(1, 4))
        if self.now_s < TROUBLE_S:
            self.later(self.chance.uniform(0.05, 0.6), self._produce)

    def _make_trouble(self) -> None:
        if not self.troubled:
            return
        kinds = [self._join, self._leave, self._kill, self._freeze, self._spoil_network]
        kinds += [self._restart_rebalance, self._freeze_rebalance, self._cut_off]
        kinds += [self._restart_broker, self._reset, self._set_clock]
        self.chance.choices(kinds, self._weights)[0]()
        self.later(self.chance.expovariate(1 / 0.8), self._make_trouble)

    def _heal(self) -> None:
        self.troubled = False
        self._bad_network_until_s = 0.0
        for rebalance in self.rebalances.values():
            rebalance.cut_off_until_s = 0.0
        # The check at the end needs a member that does not leave and that subscribes to all topics. The existing
        # members may be leaving, or may subscribe only to the topic `orders`.
        self._start_member("last", frozenset(TOPICS))

    def _any_member(self) -> Member | None:
        return self.chance.choice(list(self.members.values())) if self.members else None

    def _join(self) -> None:
        # A new member may have the name of an earlier member. This also happens in raymq, because a Pull actor that
        # starts again uses the same member names.
        name = f"m{self.chance.randrange(MEMBERS_MAX)}"
        if name not in self.members:
            self._start_member(name, frozenset({"orders"} if self.chance.random() < 0.2 else TOPICS))

    def _start_member(self, name: str, topics: frozenset[str]) -> None:
        member = self._member_class(self, name, topics, self.allocation)
        self.members[name] = member
        self.note("joins", name)
        member.start()

    def _leave(self) -> None:
        member = self._any_member()
        if member is not None and not member.stopping:
            self.note("leaves", member.name)
            member.stop()

    def _kill(self) -> None:
        member = self._any_member()
        if member is None:
            return
        self.note("is killed", member.name)
        del self.members[member.name]
        member.kill()
        if self.chance.random() < 0.6:
            self.later(self.chance.uniform(0.3, 2.0), lambda: self._come_back(member))

    def _come_back(self, member: Member) -> None:
        if member.name not in self.members:
            self._start_member(member.name, member.topics)

    def _freeze(self) -> None:
        member = self._any_member()
        if member is not None:
            self._stand_still(member)

    def _freeze_rebalance(self) -> None:
        self._stand_still(self._any_rebalance())

    def _cut_off(self) -> None:
        """Disconnect one Rebalance actor for a while from the register, in which it renews its lease on the group.
        Members can still call the actor."""
        rebalance = self._any_rebalance()
        rebalance.cut_off_until_s = self.now_s + self.chance.uniform(2.0, 4 * TAKE_OVER_AFTER_S)
        self.note("is cut off", rebalance.name, f"until {rebalance.cut_off_until_s:.2f}")

    def _any_rebalance(self) -> Rebalance:
        """Return a random Rebalance actor. An actor that holds the group's lease is more likely."""
        holders = [rebalance for rebalance in self.rebalances.values() if rebalance.lease.held]
        return self.chance.choice(holders * 4 + list(self.rebalances.values()))

    def _stand_still(self, process: Process) -> None:
        process.frozen_until_s = self.now_s + self.chance.uniform(0.5, 2 * SESSION_S)
        self.note("stands still", process.name, f"until {process.frozen_until_s:.2f}")

    def _spoil_network(self) -> None:
        self._bad_network_until_s = self.now_s + self.chance.uniform(0.5, SESSION_S)
        self.note("network is bad", f"until {self._bad_network_until_s:.2f}")

    def _restart_rebalance(self) -> None:
        long_s = 2 * TAKE_OVER_AFTER_S if self.chance.random() < 0.3 else 0.0
        self._restart(self._any_rebalance(), long_s)

    def _restart_broker(self) -> None:
        self._restart(self.brokers[self.chance.choice(BROKERS)])

    def _restart(self, process: Broker | Rebalance, longer_s: float = 0.0) -> None:
        if process.up:
            self.note("is killed", process.name)
            process.kill()
            self.later(self.chance.uniform(0.3, 2.0) + longer_s, process.start_again)

    def _reset(self) -> None:
        queue = self.chance.choice(self.queues)
        broker = self.brokers[queue.broker_name]
        if broker.up:
            offset = self.chance.randint(0, self.ledger.end(queue))
            self.note("is reset", queue, offset)
            broker.reset(queue, offset)
            for rebalance in self.rebalances.values():
                self.at(rebalance, self._delay_s(), rebalance.offsets_reset)

    def _set_clock(self) -> None:
        """Set the wall clock of a Rebalance actor, or advance the monotonic clock of a member."""
        process = self.chance.choice([*self.members.values(), *self.rebalances.values()])
        if isinstance(process, Rebalance):
            process.wall_error_s += self.chance.uniform(0.0, 3600.0)
        else:
            process.ahead_s += self.chance.uniform(1.0, 2 * SESSION_S)
        self.note("clock is set", process.name)
