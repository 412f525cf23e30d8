"""The simulated Controller: the real election decisions, over a network that loses and delays the Controller's orders.

This module contains all other steps of the Controller: it requests the replicas' states, carries out the decisions, and
restarts after a crash. Add new steps here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from actors.core.replica.orders import Drain, Follow, Lead, Renew, ReplicaState
from placement.election import FIXED_MASTER, GroupControl, Record
from storage.replication.epochs import ReplicaMembers, SyncStateSet
from tests.support.replication_sim.clock import Clock
from tests.support.replication_sim.node import GROUP, Node

if TYPE_CHECKING:
    from tests.support.replication_sim.world import World

CONTROLLER = -1
"""The Controller's address in the simulated network. The replicas have the addresses 0, 1, 2, and so on."""

PING_S = 0.3


class Controller:
    """The Controller's simulated process: it pings the replicas, and carries out the actions of GroupControl in order.

    `records`: the content of the real Controller's log, which survives the process. `_life` counts the incarnations of
    the process.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.records: list[Record] = []
        self.alive = False
        self._life = 0
        self.clock = Clock(world)
        self.start()

    def start(self) -> None:
        if self.alive:
            return
        self.alive = True
        self._life += 1
        self.clock.restart()
        control = GroupControl
        if self.world.bugs.lead_anew:
            control = LeadsWithAnyDirectory
        elif self.world.bugs.ignore_floor:
            control = IgnoresFloors
        elif self.world.bugs.prefer_undamaged:
            control = PrefersUndamaged
        elif self.world.bugs.count_early:
            control = CountsEarly
        elif self.world.bugs.remove_at_once:
            control = RemovesAtOnce
        elif self.world.bugs.elect_removed:
            control = ElectsRemoved
        elif self.world.bugs.forget_members:
            control = ForgetsMembers
        self.control = control(
            GROUP,
            self.world.planned,
            self.world.rules,
            planned_min_in_sync=self.world.min_in_sync,
            running=frozenset(name for name, node in self.world.nodes.items() if not node.is_removed),
        )
        self._members = self.control.members
        if self.records:
            self.control.resume(self.records[-1], self.clock.read_s())
        self._loop(self._life)

    def kill(self) -> None:
        self.world.say("the controller dies")
        self.alive = False

    def _loop(self, life: int) -> None:
        if not self.alive or self._life != life:
            return
        # Without a decision in the journal, the Controller also asks the replicas that the plan does not name. It finds
        # them by their running actors.
        names = self.control.replicas
        if self.control.record is None:
            names |= self.control.running
        self.world.restart_members(self.control.replicas)
        for name in sorted(names):
            self._ping(self.world.nodes[name], life)
        self._carry_out(self.control.tick(self.clock.read_s()))
        self.world.at(PING_S, self._loop, life)

    def _ping(self, node: Node, life: int) -> None:
        record = self.control.record
        newest, members = self.control.set_in_force, None if record is None else record.members
        if self.world.bugs.share_elected_set and record is not None:
            newest = record.sync_state_set
        asked_s = self.clock.read_s()

        def answer() -> None:
            node.note(newest, members)
            state = node.state()
            late_s = self.world.account_delay_s(node.name)
            self.world.send((node.name, CONTROLLER), None, self._heard, (state, life, asked_s), late_s=late_s)

        self.world.send((CONTROLLER, node.name), node.deliver, answer, ())

    def _heard(self, state: ReplicaState, life: int, asked_s: float) -> None:
        if self.alive and self._life == life:
            self.control.note_account(state, self.clock.read_s(), asked_s)
            self._carry_out(self.control.tick(self.clock.read_s()))

    def keep(self, record: Record) -> None:
        """Write a decision to the journal. If the decision changes the group's replicas, their processes follow."""
        self.records.append(record)
        if record.members is not None and record.members != self._members:
            self._members = record.members
            self.world.say(f"members {record.members.to_plain()}")
            self.world.follow_members(record.members)
        self.world.say(f"journal {record.epoch} {record.master} {sorted(record.sync_state_set.members)}")

    def _carry_out(self, actions: list[Any]) -> None:
        for action in actions:
            if isinstance(action, Record):
                self.keep(action)
                continue
            node = self.world.nodes[action.replica]
            method: Callable[[Any], None] = {
                Lead: node.lead,
                Renew: node.renew,
                Follow: node.follow,
                Drain: node.drain,
            }[type(action)]
            self.world.send((CONTROLLER, node.name), node.deliver, method, (action,))


class LeadsWithAnyDirectory(GroupControl):
    """A planted bug: with fixed roles, replica 0 becomes the master even if its directory was replaced."""

    def _elect(self, alive: dict[int, ReplicaState], now_s: float) -> list[Any]:
        assert self.record is not None
        return self._begin(alive[FIXED_MASTER], self.record) if FIXED_MASTER in alive else []


class IgnoresFloors(GroupControl):
    """A planted bug: a log counts as complete even if it ends before its confirm floor, the highest confirm offset on
    its disk."""

    def note_account(self, state: ReplicaState, now_s: float, asked_s: float | None = None) -> None:
        super().note_account(replace(state, confirm_floor=0), now_s, asked_s)


class PrefersUndamaged(GroupControl):
    """A planted bug: a log without damage leads before a longer log with damage, whose end is then cut off."""

    def _elect(self, alive: dict[int, ReplicaState], now_s: float) -> list[Any]:
        if any(state.complete for state in alive.values()):
            alive = {name: replace(one, log_epoch=0) if one.hole_bytes else one for name, one in alive.items()}
        return super()._elect(alive, now_s)


class CountsEarly(GroupControl):
    """A planted bug: a new replica counts as in sync as soon as it answers, before it has the confirm offset."""

    def _change_members(self, record: Record, alive: dict[int, ReplicaState], now_s: float) -> list[Record]:
        stores = {name: alive[name].store_id for name in self.members.joining & alive.keys()}
        both = replace(record.sync_state_set, stores={**record.sync_state_set.stores, **stores})
        return super()._change_members(replace(record, sync_state_set=both), alive, now_s)


class RemovesAtOnce(GroupControl):
    """A planted bug: a replica leaves the group at once, whether it leads or not, before others have its messages."""

    def _change_members(self, record: Record, alive: dict[int, ReplicaState], now_s: float) -> list[Record]:
        members = self.members
        if not members.is_changing:
            return []
        stores = {name: alive[name].store_id for name in members.staying & alive.keys() | {record.master}}
        after = replace(
            members,
            version=members.version + 1,
            replicas=members.staying,
            joining=frozenset(),
            leaving=frozenset(),
            removed=members.removed | members.leaving,
        )
        now = record.sync_state_set
        self.record = replace(record, sync_state_set=SyncStateSet(now.epoch, now.version + 1, stores), members=after)
        return [self.record]


class ElectsRemoved(GroupControl):
    """A planted bug: replicas that have left the group may still be elected, and count as in sync."""

    @property
    def replicas(self) -> frozenset[int]:
        return self.members.replicas | self.members.removed

    def _elect(self, alive: dict[int, ReplicaState], now_s: float) -> list[Any]:
        assert self.record is not None
        left = {name: alive[name].store_id for name in self.members.removed & alive.keys()}
        now = self.record.sync_state_set
        self.record = replace(self.record, sync_state_set=replace(now, stores={**now.stores, **left}))
        return super()._elect(alive, now_s)


class ForgetsMembers(GroupControl):
    """A planted bug: after the loss of the journal, the group has the replicas of the plan again."""

    @property
    def members(self) -> ReplicaMembers:
        return super().members if self.record is not None else ReplicaMembers(0, self.planned)
