"""The plan: which actors run, and on which nodes. Pure; nothing is started here.

From settings and an inventory of nodes to a `Plan` that `placement.launch` carries out. Data stays where it is: a
replica whose directory exists on a node is planned there; new ones go to the nodes with the fewest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from raymq.config import BrokerSettings, ClusterSettings, StoreSettings
from raymq.errors import ConfigError
from raymq.names import NameServerName, StorageName
from raymq.route import MASTER_ID

FIRST_PORT = 10911
"""RocketMQ's listen port. Nothing listens there: with the node's address it names a store in message ids."""

KV_FILE: Final = "kvConfig.json"


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the Ray cluster that can hold stores. `stores`: store directories found below its data directory."""

    node_id: str
    ip: str
    stores: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class StoragePlan:
    """One replica: its actor's name, the node it is pinned to, its store, and its address in message ids."""

    name: StorageName
    node_id: str
    settings: StoreSettings
    store_host: tuple[str, int]


@dataclass(frozen=True, slots=True)
class NameServerPlan:
    """One NameServer: its actor's name, and the file it keeps its KV configuration in."""

    name: NameServerName
    kv_path: Path


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that has to run."""

    nameservers: tuple[NameServerPlan, ...]
    storages: tuple[StoragePlan, ...]
    brokers: tuple[BrokerSettings, ...]


def make_plan(settings: ClusterSettings, nodes: Sequence[Node]) -> Plan:
    """Place every broker group's store. ConfigError when there is no node to place it on."""
    if not nodes:
        raise ConfigError("the Ray cluster has no node that is alive: nothing can be placed")
    servers = tuple(NameServerName(index) for index in range(settings.name_servers))
    nameservers = tuple(NameServerPlan(name, settings.data_dir / str(name) / KV_FILE) for name in servers)
    names = [StorageName(broker_name, MASTER_ID) for broker_name in settings.broker_names]
    homes = _homes(names, nodes)
    storages = []
    for index, name in enumerate(names):
        node = homes[name]
        root = Path(settings.data_dir) / store_directory(name)
        store = StoreSettings(**settings.store.model_dump(), store_path_root_dir=root)
        storages.append(StoragePlan(name, node.node_id, store, (node.ip, FIRST_PORT + index)))
    brokers = tuple(
        BrokerSettings(settings.cluster_name, name, servers, settings.broker) for name in settings.broker_names
    )
    return Plan(nameservers, tuple(storages), brokers)


def _homes(names: Sequence[StorageName], nodes: Sequence[Node]) -> dict[StorageName, Node]:
    """The node of each store: where its data is, then the new ones where there are fewest."""
    load: Counter[str] = Counter()
    homes: dict[StorageName, Node] = {}
    holders = {name: [node for node in nodes if store_directory(name) in node.stores] for name in names}
    for name in sorted(names, key=lambda name: not holders[name]):
        homes[name] = min(holders[name] or nodes, key=lambda node: (load[node.node_id], node.node_id))
        load[homes[name].node_id] += 1
    return homes


def store_directory(name: StorageName) -> str:
    """The directory of a replica's store, below the data directory."""
    return f"{name.broker_name}-{name.replica}"
