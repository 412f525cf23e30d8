"""The constructor arguments of two server actors: a replica's Storage actor, and the Controller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from placement.election import ControlRules
from placement.replica_nodes import Node
from raymq.common.config.cluster import ReplicationOptions
from raymq.common.config.metrics import MetricsSettings
from raymq.common.config.store import StoreSettings
from raymq.common.names import StorageName


@dataclass(frozen=True, slots=True)
class StoragePlan:
    """The plan of one replica: its actor's name, the node to which the actor is pinned, its store, and its address in
    message ids."""

    name: StorageName
    node_id: str
    settings: StoreSettings
    store_host: tuple[str, int]
    replication: ReplicationOptions
    metrics: MetricsSettings = field(default_factory=MetricsSettings)

    def on(self, node: Node) -> StoragePlan:
        """Return a copy of this replica's plan with another node for the replica."""
        return replace(self, node_id=node.node_id, store_host=(node.ip, self.store_host[1]))


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """The Controller's settings.

    `journal`: the Controller's journal file, on the disk of its node. `groups`: broker group to its replicas.
    `priorities`: by group and replica; the smallest number leads first. `learners`: by group, the replicas that never
    lead. `storages`: the initial plan of every replica, below `data_dir` of its node. Repair restarts replicas from
    these plans, on nodes with the label `node_label`.
    """

    journal: Path
    groups: Mapping[str, frozenset[int]]
    priorities: Mapping[str, Mapping[int, int]]
    learners: Mapping[str, frozenset[int]]
    rules: ControlRules
    data_dir: Path
    storages: tuple[StoragePlan, ...]
    node_label: str | None = None
    metrics: MetricsSettings = field(default_factory=MetricsSettings)
