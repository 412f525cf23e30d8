"""One replica's storage actor as planned: what it needs to be started, and where."""

from __future__ import annotations

from dataclasses import dataclass, replace

from placement.replica_nodes import Node
from raymq.config.cluster import ReplicationOptions
from raymq.config.store import StoreSettings
from raymq.names import StorageName


@dataclass(frozen=True, slots=True)
class StoragePlan:
    """One replica: its actor's name, the node it is pinned to, its store, and its address in message ids."""

    name: StorageName
    node_id: str
    settings: StoreSettings
    store_host: tuple[str, int]
    replication: ReplicationOptions

    def on(self, node: Node) -> StoragePlan:
        """The same replica on another node."""
        return replace(self, node_id=node.node_id, store_host=(node.ip, self.store_host[1]))
