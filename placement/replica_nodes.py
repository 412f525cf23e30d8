"""Chooses the Ray node of each replica by the placement rules. This module starts nothing.

If `placement.node_label` is set, only nodes with this label may hold replicas (`carrying`). The rules, in this order:

1. Data stays where it is: a replica whose directory is on a node runs on that node, unless the node is being drained.
2. Replicas of one broker group are on different nodes.
3. If every node has a zone label, no zone has more replicas of a group than necessary.
4. A new replica goes to the node with the fewest bytes of stores, then with the fewest replicas, then by name.

A plan that breaks rule 2 or 3 on the alive nodes is refused, with the rule and the nodes. A replica with a directory is
never moved for balance, even if the placement rules have changed since it was placed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from raymq.common.errors import ConfigError
from raymq.common.names import StorageName
from storage.replication.epochs import ReplicaMembers

STORE_NAME: Final = re.compile(r"(broker-[a-z])-([0-9]+)")
"""Pattern of a store directory's name: the broker group and the replica number."""


@dataclass(frozen=True, slots=True)
class Node:
    """A Ray node that can hold stores.

    `stores`: the store directories below the node's data directory, by name, with their log sizes in bytes. `zone`: the
    node's label ray.io/availability-zone; empty if the node has no such label. `draining`: True if all replicas that
    can run on another node must leave this node. `members`: the members of a broker group that each store knows, by the
    name of the store directory; stores of groups whose replicas were never changed are missing.
    """

    node_id: str
    ip: str
    stores: Mapping[str, int] = field(default_factory=dict)
    zone: str = ""
    draining: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    members: Mapping[str, ReplicaMembers] = field(default_factory=dict)


def carrying(label: str | None, labels: Mapping[str, Mapping[str, str]]) -> set[str]:
    """Return the ids of the nodes that may hold stores: the nodes with the label `label`, or all nodes if `label` is
    None.

    `labels`: the labels of each node, by node id. Raises ConfigError, which names the existing labels, if there are
    nodes but none has the label.
    """
    able = {node_id for node_id, own in labels.items() if label is None or label in own}
    if labels and not able:
        there = sorted({key for own in labels.values() for key in own})
        raise ConfigError(
            f"none of the {len(labels)} nodes of the Ray cluster has the label {label!r} (placement.node_label): "
            f"start Ray on the wanted nodes with --labels {label}=…, or leave the setting out; the existing "
            f"labels are: {', '.join(there) or 'none'}"
        )
    return able


def changed_members(nodes: Iterable[Node]) -> dict[str, ReplicaMembers]:
    """Return the newest known members of each broker group whose replicas were changed, by the name of the group."""
    newest: dict[str, ReplicaMembers] = {}
    for node in nodes:
        for directory, members in node.members.items():
            match = STORE_NAME.fullmatch(directory)
            if match is not None and (match[1] not in newest or members.version > newest[match[1]].version):
                newest[match[1]] = members
    return newest


def store_directory(name: StorageName) -> str:
    """Return the name of a replica's store directory, below the data directory."""
    return f"{name.broker_name}-{name.replica}"


def choose_nodes(
    replicas: Sequence[StorageName],
    nodes: Sequence[Node],
    *,
    spread: bool = True,
    known: Mapping[StorageName, str] | None = None,
) -> dict[StorageName, Node]:
    """Return the node of each replica. Raises ConfigError if the nodes do not satisfy the placement rules.

    `spread` False drops the rules that replicas of a group are on different nodes and in different zones, so that
    several replicas may be on one machine. `known`: the node id of each running replica. If several nodes have the
    replica's directory, this node is chosen.
    """
    if not nodes:
        raise ConfigError("the Ray cluster has no live node, so no server can be placed")
    plan = _Plan(nodes, spread=spread, zones=_zones(nodes) if spread else 0)
    for name in sorted(replicas):
        present = _present_node(name, nodes, (known or {}).get(name))
        if present is not None:
            plan.put(name, present)
    for name in sorted(replicas):
        if name not in plan.chosen:
            plan.put(name, plan.choose(name, sum(other.broker_name == name.broker_name for other in replicas)))
    return plan.chosen


def _present_node(name: StorageName, nodes: Sequence[Node], known: str | None) -> Node | None:
    """Return the node that has the replica's store directory and is not being drained; None if there is no such
    node."""
    directory = store_directory(name)
    holders = [node for node in nodes if directory in node.stores and not node.draining]
    return min(holders, key=lambda node: (node.node_id != known, -node.stores[directory], node.node_id), default=None)


def _zones(nodes: Iterable[Node]) -> int:
    """Return the number of different zones of the nodes; 0 if any node has no zone label."""
    zones = {node.zone for node in nodes}
    return 0 if "" in zones else len(zones)


class _Plan:
    """Remembers the nodes chosen for replicas so far, and chooses the node of the next replica by the placement
    rules."""

    def __init__(self, nodes: Sequence[Node], *, spread: bool, zones: int) -> None:
        self._nodes = nodes
        self._spread, self._zones = spread, zones
        self.chosen: dict[StorageName, Node] = {}
        self._load: Counter[str] = Counter()

    def put(self, name: StorageName, node: Node) -> None:
        self.chosen[name] = node
        self._load[node.node_id] += 1

    def choose(self, name: StorageName, replicas: int) -> Node:
        """Return the best node for a replica that has no data on any node."""
        able = [node for node in self._nodes if not node.draining]
        siblings = [node for other, node in self.chosen.items() if other.broker_name == name.broker_name]
        if self._spread:
            taken = {node.node_id for node in siblings}
            able = [node for node in able if node.node_id not in taken]
            if not able:
                raise ConfigError(
                    self._refusal(name, replicas, "the replicas of one broker group must be on different nodes")
                )
        if self._zones:
            most = -(-replicas // self._zones)
            in_zone = Counter(node.zone for node in siblings)
            able = [node for node in able if in_zone[node.zone] < most]
            if not able:
                rule = f"a zone may have at most {most} of {replicas} replicas of a broker group"
                raise ConfigError(self._refusal(name, replicas, rule))
        return min(able, key=lambda node: (sum(node.stores.values()), self._load[node.node_id], node.node_id))

    def _refusal(self, name: StorageName, replicas: int, rule: str) -> str:
        listed = ", ".join(
            node.ip + (f" in zone {node.zone}" if node.zone else "") + (" (draining)" if node.draining else "")
            for node in self._nodes
        )
        return (
            f"{name} cannot be placed: {rule}, and none of the nodes ({listed}) is left for this replica. Add a "
            f"node, or configure fewer replicas than {replicas}"
        )
