"""The inventory of a Ray cluster: its nodes with the stores on their disks, and the running raymq actors."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.actor_class import remote_function
from placement.replica_nodes import Node, carrying
from raymq.common.config.cluster import data_dir_here
from raymq.common.config.values import COMMIT_LOG_DIR
from raymq.common.errors import StoreCorruptError
from raymq.common.names import NAMESPACE
from raymq.remoting.actor_ref import resolve
from storage.files.config_files import ConfigFiles
from storage.files.lock import stores_below
from storage.replication.epochs import ReplicaMembers
from storage.replication.replica_files import MEMBERS_FILE, read_members

logger = logging.getLogger(__name__)

INVENTORY_TIMEOUT_S: Final = 60.0
ZONE_LABEL: Final = "ray.io/availability-zone"
HEAD_RESOURCE: Final = "node:__internal_head__"
"""Name of the Ray resource that only the head node has."""


def inventory(
    data_dir: Path,
    draining: Collection[str] = (),
    timeout_s: float = INVENTORY_TIMEOUT_S,
    node_label: str | None = None,
) -> list[Node]:
    """Return the alive Ray nodes with the label `node_label`, with their zones and the stores below `data_dir` on each
    node. Nodes without the label are not queried, because they may start and end at any time.

    `draining`: ids of nodes that are being drained. Raises RaymqError if a node does not answer in time, and
    ConfigError if no node has the label.
    """
    alive = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
    able = carrying(node_label, {node_id: node.get("Labels") or {} for node_id, node in alive.items()})
    # Do not start a remote task for the node of this process, because this process lists the stores of its own node
    # itself.
    here = ray.get_runtime_context().get_node_id()
    asked = {node_id: _start_listing(node_id, data_dir) for node_id in able if node_id != here}
    nodes = []
    for node_id, node in alive.items():
        if node_id not in able:
            continue
        ip, labels = node["NodeManagerAddress"], dict(node.get("Labels") or {})
        stores, members = (
            resolve(asked[node_id], f"the list of stores on node {ip}", timeout_s)
            if node_id in asked
            else _list_stores(str(data_dir))
        )
        nodes.append(Node(node_id, ip, stores, labels.get(ZONE_LABEL, ""), node_id in draining, labels, members))
    return nodes


def head_node_id() -> str:
    """Return the id of Ray's head node, without which the Ray cluster cannot run. Returns the id of this process's node
    if Ray reports no head node."""
    heads = [node["NodeID"] for node in ray.nodes() if node["Alive"] and HEAD_RESOURCE in node["Resources"]]
    return str(heads[0]) if heads else ray.get_runtime_context().get_node_id()


def _start_listing(node_id: str, data_dir: Path) -> Any:
    """Start `_list_stores` on a node as a remote task, and return the reference to its result."""
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return _remote_list_stores.options(scheduling_strategy=strategy).remote(str(data_dir))


def _list_stores(data_dir: str) -> tuple[dict[str, int], dict[str, ReplicaMembers]]:
    """Return the size in bytes of each store's log on this node, and the members of the store's broker group as far as
    the store knows them. Both are by the name of the store directory."""
    stores = list(stores_below(data_dir_here(Path(data_dir))))
    sizes = {
        store.name: sum(file.stat().st_blocks * 512 for file in (store / COMMIT_LOG_DIR).glob("*")) for store in stores
    }
    members = {store.name: _members_in(store) for store in stores}
    return sizes, {name: one for name, one in members.items() if one is not None}


def _members_in(store: Path) -> ReplicaMembers | None:
    """Return the members of a broker group from the directory of one of its stores; None if it has none. A file that
    cannot be read counts as missing: the other replicas have it, too."""
    if not (store / "config" / MEMBERS_FILE).exists():
        return None
    try:
        return read_members(ConfigFiles(store))
    except (StoreCorruptError, OSError) as error:
        logger.warning("the replicas of a broker group cannot be read: %s", error)
        return None


_remote_list_stores = ray.remote(num_cpus=0, max_retries=0)(remote_function(_list_stores))


def running() -> list[str]:
    """Return the names of all raymq actors, sorted, including actors that Ray is restarting."""
    return sorted(
        actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True) if actor["namespace"] == NAMESPACE
    )
