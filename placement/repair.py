"""Decides which replicas start on another node, for repair and draining. This module starts nothing.

A storage actor is pinned to its Ray node, and ends permanently when Ray declares the node dead. After the actor has
ended, these rules apply in this order:

1. If a node has the replica's directory, the actor starts on that node again, even if the node has another id now.
2. If no node has the directory, the replica waits for its directory if it is in the sync-state set or the group has no
   master: it may be the only replica with all acknowledged messages. A master that leads removes a lost member from the
   set within moments.
3. After `replace_after_s` a new replica on another node (placement.replica_nodes) replaces the replica
   (placement.membership).

A new replica replaces each replica of a drained node, too, one after another in each broker group. Some groups do not
change their members, because of fixed roles or learners, and a group makes one change at a time. Then the replica
itself starts empty on another node. So a replica of a drained node moves only when all replicas of its group are in
sync and enough of them remain; a master first gives its role to another replica. No state is stored on disk: after a
restart the waiting times start again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from placement.replica_nodes import Node, choose_nodes, store_directory
from raymq.common.errors import ConfigError
from raymq.common.names import StorageName
from storage.replication.epochs import ReplicaMembers

_ONLY_COPY: Final = (
    "the replica's node is not available, and the replica's directory may be the only one with all messages: "
    "bring the node back"
)


@dataclass(frozen=True, slots=True)
class ReplicaGroupView:
    """The current state of a broker group: its master (None if the group has none), the in-sync replicas, and the
    members; None if the Controller does not change the members."""

    master: int | None
    in_sync: frozenset[int]
    members: ReplicaMembers | None = None

    @property
    def can_change(self) -> bool:
        """True if a change of the members can start now."""
        return self.members is not None and not self.members.is_changing

    def is_leaving(self, replica: int) -> bool:
        """Return True if the current change removes a replica."""
        return self.members is not None and replica in self.members.leaving

    def next_name(self, group: str) -> StorageName:
        """Return the name of the next replica that joins the broker group `group`, whose members can change."""
        assert self.members is not None
        return StorageName(group, self.members.next_number)

    def is_joining(self, replica: int) -> bool:
        """Return True if a replica was added and has never been in sync, so that it may start without a directory."""
        return self.members is not None and replica in self.members.joining


@dataclass(frozen=True, slots=True)
class Moves:
    """The moves of replicas to execute now.

    `start`: replicas whose actor must start, each with its node. `hand_over`: masters that must stop leading, each with
    the replica that should lead instead. `vacate`: the replica whose actor must end. `substitute`: the replica that a
    new replica must replace. `notes`: for each waiting replica, the reason.
    """

    start: Mapping[StorageName, Node] = field(default_factory=dict)
    hand_over: Mapping[StorageName, int] = field(default_factory=dict)
    vacate: StorageName | None = None
    substitute: StorageName | None = None
    notes: Mapping[StorageName, str] = field(default_factory=dict)


class Repair:
    """Decides which replicas of a cluster must start, end, or give up the master role. `min_in_sync`: number of
    replicas of a broker group that must stay in sync while a node is drained."""

    def __init__(
        self, replicas: Sequence[StorageName], *, spread: bool, replace_after_s: float, min_in_sync: int
    ) -> None:
        self.replicas = sorted(replicas)
        """All replicas of the cluster, which the Reconciler keeps up to date."""
        self._spread, self._replace_after_s, self._min_in_sync = spread, replace_after_s, min_in_sync
        self._away_since: dict[StorageName, float] = {}

    def decide(
        self,
        nodes: Sequence[Node],
        present: Mapping[StorageName, str],
        groups: Mapping[str, ReplicaGroupView],
        now_s: float,
    ) -> Moves:
        """Return the moves of replicas to execute now. `present`: maps each replica that has an actor to the id of the
        actor's node; the id is empty if unknown. `now_s`: the time in seconds."""
        start: dict[StorageName, Node] = {}
        notes: dict[StorageName, str] = {}
        for name in self.replicas:
            if name in present:
                self._away_since.pop(name, None)
                continue
            since_s = self._away_since.setdefault(name, now_s)
            group, placed = groups[name.broker_name], {other: node.node_id for other, node in start.items()}
            placed = {**present, **placed}
            waits = self._waits(name, nodes, group, now_s - since_s)
            if not waits and _is_lost(name, nodes) and group.is_leaving(name.replica):
                notes[name] = "the replica's node is not available, and a new replica replaces the replica"
                continue
            if not waits and _is_lost(name, nodes) and group.can_change:
                node = self._choose_node(group.next_name(name.broker_name), nodes, placed)
                if isinstance(node, Node):
                    return Moves(start, substitute=name, notes=notes)
            else:
                node = self._choose_node(name, nodes, placed)
            if isinstance(node, Node) and not waits:
                start[name] = node
            else:
                notes[name] = waits or str(node)
        if start or notes:
            return Moves(start, notes=notes)
        return self._drain(nodes, present, groups)

    def _substitute(
        self, name: StorageName, nodes: Sequence[Node], present: Mapping[StorageName, str], group: ReplicaGroupView
    ) -> Moves:
        """Return the move that lets a new replica replace a replica on a drained node, or the reason to wait."""
        if group.is_leaving(name.replica):
            reason = "a new replica replaces the replica, because the replica's node is drained"
        elif not group.can_change:
            reason = "the replica's node is drained; the replica leaves after the current change of its broker group"
        elif group.master is None:
            reason = "the replica's node is drained; the replica leaves when its broker group has a master"
        else:
            node = self._choose_node(group.next_name(name.broker_name), nodes, present)
            if isinstance(node, Node):
                return Moves(substitute=name)
            reason = node
        return Moves(notes={name: reason})

    def _waits(self, name: StorageName, nodes: Sequence[Node], group: ReplicaGroupView, away_s: float) -> str:
        """Return the reason why the Controller must not start a storage actor for a replica now; empty if it may start
        one."""
        holders = [node for node in nodes if store_directory(name) in node.stores]
        if any(not node.draining for node in holders) or group.is_joining(name.replica):
            return ""
        if group.master is None or name.replica in group.in_sync:
            return _ONLY_COPY
        left_s = self._replace_after_s - away_s
        if not holders and left_s > 0:
            return f"the replica's node is not available; the replica is rebuilt on another node in {left_s:.0f} s"
        return ""

    def _choose_node(self, name: StorageName, nodes: Sequence[Node], present: Mapping[StorageName, str]) -> Node | str:
        """Return the node on which the replica's actor should start, or the reason why no node is suitable."""
        # Replicas on drained nodes leave these nodes, and no other replica may start there.
        draining = {node.node_id for node in nodes if node.draining}
        siblings = [
            other
            for other, node_id in present.items()
            if other.broker_name == name.broker_name and other != name and node_id not in draining
        ]
        try:
            return choose_nodes([*siblings, name], nodes, spread=self._spread, known=present)[name]
        except ConfigError as error:
            return str(error)

    def _drain(
        self, nodes: Sequence[Node], present: Mapping[StorageName, str], groups: Mapping[str, ReplicaGroupView]
    ) -> Moves:
        draining = {node.node_id for node in nodes if node.draining}
        notes: dict[StorageName, str] = {}
        for name in self.replicas:
            if present[name] not in draining:
                continue
            members = groups[name.broker_name].members
            if members is not None:
                moves = self._substitute(name, nodes, present, groups[name.broker_name])
                if moves.substitute is not None:
                    return Moves(substitute=name, notes={**notes, **moves.notes})
                notes |= moves.notes
                continue
            group, node = groups[name.broker_name], self._choose_node(name, nodes, present)
            replicas = {other.replica for other in self.replicas if other.broker_name == name.broker_name}
            others = sorted(group.in_sync - {name.replica})
            if isinstance(node, str):
                notes[name] = node
            elif group.master is None or not (group.in_sync >= replicas or name.replica not in group.in_sync):
                notes[name] = (
                    "the replica's node is drained; the replica moves when all replicas of its broker group are in sync"
                )
            elif len(others) < max(self._min_in_sync, 1):
                notes[name] = (
                    f"the replica's node is drained, but without this replica fewer than {self._min_in_sync} "
                    "replicas would be in sync"
                )
            elif group.master == name.replica:
                away = [other for other in others if present.get(StorageName(name.broker_name, other)) not in draining]
                return Moves(hand_over={name: (away or others)[0]}, notes=notes)
            else:
                return Moves(vacate=name, notes=notes)
        return Moves(notes=notes)


def _is_lost(name: StorageName, nodes: Sequence[Node]) -> bool:
    """Return True if no node that may keep replicas has the directory of a replica."""
    return not any(store_directory(name) in node.stores and not node.draining for node in nodes)
