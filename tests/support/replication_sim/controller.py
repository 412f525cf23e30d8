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
        self.start()

    def start(self) -> None:
        if self.alive:
            return
        self.alive = True
        self._life += 1
        control = GroupControl
        if self.world.bugs.lead_anew:
            control = LeadsWithAnyDirectory
        elif self.world.bugs.ignore_floor:
            control = IgnoresFloors
        self.control = control(GROUP, frozenset(self.world.nodes), self.world.rules)
        if self.records:
            self.control.resume(self.records[-1], self.world.now)
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
        asked_s = self.world.now

        def answer() -> None:
            node.note(newest)
            state = node.state()
            late_s = self.world.account_delay_s(node.name)
            self.world.send(node.name, CONTROLLER, lambda: self._heard(state, life, asked_s), late_s=late_s)

        self.world.send(CONTROLLER, node.name, lambda: node.deliver(answer))

    def _heard(self, state: ReplicaState, life: int, asked_s: float) -> None:
        if self.alive and self._life == life:
            self.control.note_account(state, self.world.now, asked_s)
            self._carry_out(self.control.tick(self.world.now))

    def _keep(self, record: Record) -> None:
        self.records.append(record)
        self.world.say(f"journal {record.epoch} {record.master} {sorted(record.sync_state_set.members)}")

    def _carry_out(self, actions: list[Any]) -> None:
        for action in actions:
            if isinstance(action, Record):
                self._keep(action)
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
    """A planted bug: with fixed roles, replica 0 becomes the master even if its directory was replaced."""

    def _elect(self, alive: dict[int, ReplicaState], now_s: float) -> list[Any]:
        assert self.record is not None
        return self._begin(alive[FIXED_MASTER], self.record) if FIXED_MASTER in alive else []


class IgnoresFloors(GroupControl):
    """A planted bug: a log counts as complete even if it ends before its confirm floor, the highest confirm offset on
    its disk."""

    def note_account(self, state: ReplicaState, now_s: float, asked_s: float | None = None) -> None:
        super().note_account(replace(state, confirm_floor=0), now_s, asked_s)
