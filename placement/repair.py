"""Which replica lives elsewhere from now on: the decisions of repair and of draining, without anything being done.

A storage actor is pinned to its node, and is gone for good when Ray gives the node up. Then, in this order:

1. Where a node has its directory, the actor is made there again: also after the node came back under another id.
2. While its directory is in the sync-state set, or nobody leads the group, it is waited for: only there may be what
   was acknowledged. A master that leads drops a member that is gone within moments.
3. After `replace_after_s` it begins anew on another node (placement.replica_nodes), and is filled from the master.

A node that is drained gives up its replicas one by one, each when all replicas of its group are in sync and enough are
left; a master first hands over. Nothing here survives the process: waiting begins again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from placement.replica_nodes import Node, choose_nodes, store_directory
from raymq.errors import ConfigError
from raymq.names import StorageName

_ONLY_COPY: Final = "its node is away, and its directory may be the only one with everything: bring the node back"


@dataclass(frozen=True, slots=True)
class ReplicaGroupView:
    """A broker group now: who leads (None: nobody) and who is in sync."""

    master: int | None
    in_sync: frozenset[int]


@dataclass(frozen=True, slots=True)
class Moves:
    """What to do: start `place` there; `hand_over`: have another replica lead; `vacate`: end its actor. `notes` say of
    replicas what is waited for."""

    place: Mapping[StorageName, Node] = field(default_factory=dict)
    hand_over: Mapping[StorageName, int] = field(default_factory=dict)
    vacate: StorageName | None = None
    notes: Mapping[StorageName, str] = field(default_factory=dict)


class Repair:
    """Decides for all replicas of a cluster. `min_in_sync`: how many must stay in sync while a node is drained."""

    def __init__(
        self, replicas: Sequence[StorageName], *, spread: bool, replace_after_s: float, min_in_sync: int
    ) -> None:
        self._replicas = sorted(replicas)
        self._spread, self._replace_after_s, self._min_in_sync = spread, replace_after_s, min_in_sync
        self._away_since: dict[StorageName, float] = {}

    def decide(
        self,
        nodes: Sequence[Node],
        present: Mapping[StorageName, str],
        groups: Mapping[str, ReplicaGroupView],
        now_s: float,
    ) -> Moves:
        """`present`: replicas that have an actor, with its node's id as far as it is known. Times in s."""
        place: dict[StorageName, Node] = {}
        notes: dict[StorageName, str] = {}
        for name in self._replicas:
            if name in present:
                self._away_since.pop(name, None)
                continue
            since_s = self._away_since.setdefault(name, now_s)
            home = self._home(name, nodes, {**present, **{other: node.node_id for other, node in place.items()}})
            waits = self._waits(name, nodes, groups[name.broker_name], now_s - since_s)
            if isinstance(home, Node) and not waits:
                place[name] = home
            else:
                notes[name] = waits or str(home)
        if place or notes:
            return Moves(place, notes=notes)
        return self._drain(nodes, present, groups)

    def _waits(self, name: StorageName, nodes: Sequence[Node], group: ReplicaGroupView, away_s: float) -> str:
        """Why a replica without an actor gets none now; empty when it gets one."""
        holders = [node for node in nodes if store_directory(name) in node.stores]
        if any(not node.draining for node in holders):
            return ""
        if group.master is None or name.replica in group.in_sync:
            return _ONLY_COPY
        left_s = self._replace_after_s - away_s
        if not holders and left_s > 0:
            return f"its node is away; it begins anew on another in {left_s:.0f} s"
        return ""

    def _home(self, name: StorageName, nodes: Sequence[Node], present: Mapping[StorageName, str]) -> Node | str:
        """Where the replica is to live, or why nowhere."""
        siblings = [other for other in present if other.broker_name == name.broker_name and other != name]
        try:
            return choose_nodes([*siblings, name], nodes, spread=self._spread, known=present)[name]
        except ConfigError as error:
            return str(error)

    def _drain(
        self, nodes: Sequence[Node], present: Mapping[StorageName, str], groups: Mapping[str, ReplicaGroupView]
    ) -> Moves:
        draining = {node.node_id for node in nodes if node.draining}
        notes: dict[StorageName, str] = {}
        for name in self._replicas:
            if present[name] not in draining:
                continue
            group, home = groups[name.broker_name], self._home(name, nodes, present)
            replicas = {other.replica for other in self._replicas if other.broker_name == name.broker_name}
            others = sorted(group.in_sync - {name.replica})
            if isinstance(home, str):
                notes[name] = home
            elif group.master is None or not (group.in_sync >= replicas or name.replica not in group.in_sync):
                notes[name] = "its node is drained; it moves when all replicas of its group are in sync"
            elif len(others) < max(self._min_in_sync, 1):
                notes[name] = f"its node is drained, but without it fewer than {self._min_in_sync} would be in sync"
            elif group.master == name.replica:
                away = [other for other in others if present.get(StorageName(name.broker_name, other)) not in draining]
                return Moves(hand_over={name: (away or others)[0]}, notes=notes)
            else:
                return Moves(vacate=name, notes=notes)
        return Moves(notes=notes)
