"""The plan: the actors of a cluster and their nodes. Pure; nothing is started here.

Settings and an inventory of nodes become a `Plan`, which `placement.launch` carries out. The node of each replica is
chosen in `placement.replica_nodes`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from placement.election import FIXED_MASTER, ControlRules
from placement.replica_nodes import Node, choose_nodes, store_directory
from placement.specs import ControllerSettings, StoragePlan
from raymq.config.cluster import BrokerSettings, ClusterSettings
from raymq.config.metrics import MetricsSettings
from raymq.config.store import StoreOptions, StoreSettings
from raymq.names import CONTROLLER, NameServerName, StorageName

FIRST_PORT = 10911
"""RocketMQ's listen port. Nothing listens there: with the node's address it names a store in message ids."""

KV_FILE: Final = "kvConfig.json"
JOURNAL_FILE: Final = "journal"


@dataclass(frozen=True, slots=True)
class NameServerPlan:
    """One NameServer: its actor's name, and the file it keeps its KV configuration in."""

    name: NameServerName
    kv_path: Path


@dataclass(frozen=True, slots=True)
class Plan:
    """All actors that have to run."""

    nameservers: tuple[NameServerPlan, ...]
    storages: tuple[StoragePlan, ...]
    brokers: tuple[BrokerSettings, ...]
    controller: ControllerSettings | None
    rebalance_servers: int
    metrics: MetricsSettings


def make_plan(settings: ClusterSettings, nodes: Sequence[Node], known: Mapping[StorageName, str] | None = None) -> Plan:
    """The plan for a cluster. ConfigError if the rules of placement cannot be kept (placement.replica_nodes).

    `known`: replica to the id of the node its storage actor runs on now.
    """
    servers = tuple(NameServerName(index) for index in range(settings.name_servers))
    nameservers = tuple(NameServerPlan(name, settings.data_dir / str(name) / KV_FILE) for name in servers)
    replication, metrics = settings.replication, _metrics(settings)
    names = [StorageName(group, replica) for group in settings.broker_names for replica in range(replication.replicas)]
    replica_nodes = choose_nodes(names, nodes, spread=replication.spread, known=known)
    storages = []
    for index, name in enumerate(names):
        node = replica_nodes[name]
        root = Path(settings.data_dir) / store_directory(name)
        store = _settings_of(store_options(settings), root)
        storages.append(StoragePlan(name, node.node_id, store, (node.ip, FIRST_PORT + index), replication, metrics))
    brokers = tuple(
        BrokerSettings(
            settings.cluster_name,
            name,
            servers,
            settings.broker,
            replication.replicas,
            replication.slave_read_enable,
            settings.rebalance_servers,
            metrics,
            store_options(settings),
            replication,
        )
        for name in settings.broker_names
    )
    return Plan(
        nameservers,
        tuple(storages),
        brokers,
        _controller(settings, storages) if replication.replicas > 1 else None,
        settings.rebalance_servers,
        metrics,
    )


def store_options(settings: ClusterSettings) -> StoreOptions:
    """The options of all stores. Unset `check_compressed_body` follows access: with access on, strangers may send."""
    store = settings.store
    if store.check_compressed_body is not None:
        return store
    return store.model_copy(update={"check_compressed_body": settings.access.enable})


def _metrics(settings: ClusterSettings) -> MetricsSettings:
    return MetricsSettings(settings.cluster_name, settings.metrics)


def _settings_of(options: StoreOptions, root: Path) -> StoreSettings:
    """The store settings of one replica. Directories of its log outside its root get the root's name below them."""
    values = options.model_dump()
    for name in ("store_path_commit_log", "read_only_commit_log_store_paths"):
        values[name] = [path / root.name for path in values[name]]
    return StoreSettings(**values, store_path_root_dir=root)


def _controller(settings: ClusterSettings, storages: Sequence[StoragePlan]) -> ControllerSettings:
    replication = settings.replication
    replicas = frozenset(range(replication.replicas))
    learners = frozenset(range(replication.replicas - replication.learners, replication.replicas))
    return ControllerSettings(
        settings.data_dir / CONTROLLER / JOURNAL_FILE,
        dict.fromkeys(settings.broker_names, replicas),
        # The first replica by priority differs from group to group, so that masters are spread over the nodes.
        {
            group: {replica: (replica - index) % replication.replicas for replica in replicas}
            for index, group in enumerate(settings.broker_names)
        },
        dict.fromkeys(settings.broker_names, learners),
        ControlRules(
            unclean=replication.enable_elect_unclean_master,
            fixed_master=None if replication.broker_role is None else FIXED_MASTER,
        ),
        settings.data_dir,
        tuple(storages),
        settings.placement.node_label,
        _metrics(settings),
    )
