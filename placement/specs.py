"""The constructor arguments of two server actors: a replica's Storage actor, and the Controller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from placement.election import ControlRules
from placement.replica_nodes import Node, store_directory
from raymq.common.config.cluster import ReplicationOptions
from raymq.common.config.metrics import MetricsSettings
from raymq.common.config.store import StoreSettings
from raymq.common.names import BROKER_GROUPS_MAX, StorageName

ADDED_PORTS: Final = 11911
"""The first port of the stores of replicas that were added to a running broker group."""


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

    def for_replica(self, replica: int) -> StoragePlan:
        """Return the plan of another replica of the same broker group. Its node is not chosen yet."""
        name = StorageName(self.name.broker_name, replica)
        root = self.settings.store_path_root_dir.with_name(store_directory(name))
        logs = {
            key: [path.with_name(root.name) for path in getattr(self.settings, key)]
            for key in ("store_path_commit_log", "read_only_commit_log_store_paths")
        }
        settings = self.settings.model_copy(update={"store_path_root_dir": root, **logs})
        # Each store has its own port, because the port identifies the store in message ids. The plan counts ports from
        # FIRST_PORT up, so ports from ADDED_PORTS on are free.
        port = ADDED_PORTS + replica * BROKER_GROUPS_MAX + ord(name.broker_name[-1]) - ord("a")
        return replace(self, name=name, node_id="", settings=settings, store_host=("", port))


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """The Controller's settings.

    `journal`: the Controller's journal file, on the disk of its node. `groups`: broker group to its replicas, before
    changes of its replicas (placement.membership).
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
