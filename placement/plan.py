"""The plan: the actors of a cluster and their nodes. This module starts nothing.

The module turns settings and an inventory of nodes into a `Plan`, which `placement.launch` executes.
`placement.replica_nodes` chooses the node of each replica.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from placement.election import FIXED_MASTER, ControlRules
from placement.replica_nodes import STORE_NAME, Node, changed_members, choose_nodes, store_directory
from placement.specs import ControllerSettings, StoragePlan
from raymq.common.config.cluster import BrokerSettings, ClusterSettings, data_dir_here
from raymq.common.config.metrics import MetricsSettings
from raymq.common.config.store import StoreOptions, StoreSettings
from raymq.common.errors import ConfigError
from raymq.common.names import CONTROLLER, NameServerName, StorageName
from storage.replication.epochs import ReplicaMembers

FIRST_PORT = 10911
"""RocketMQ's listen port. The first store writes this port into its message ids. No process listens on the port:
together with the node's address it only identifies a store."""

KV_FILE: Final = "kvConfig.json"
JOURNAL_FILE: Final = "journal"


@dataclass(frozen=True, slots=True)
class NameServerPlan:
    """The plan of one NameServer: its actor's name, and the file with its KV configuration."""

    name: NameServerName
    kv_path: Path


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a cluster: all actors that must run."""

    nameservers: tuple[NameServerPlan, ...]
    storages: tuple[StoragePlan, ...]
    brokers: tuple[BrokerSettings, ...]
    controller: ControllerSettings | None
    rebalance_servers: int
    metrics: MetricsSettings


def make_plan(settings: ClusterSettings, nodes: Sequence[Node], known: Mapping[StorageName, str] | None = None) -> Plan:
    """Make the plan for a cluster. Raises ConfigError if the nodes do not satisfy the placement rules
    (placement.replica_nodes).

    `known`: the node id of each replica's running storage actor.
    """
    servers = tuple(NameServerName(index) for index in range(settings.name_servers))
    nameservers = tuple(NameServerPlan(name, settings.data_dir / str(name) / KV_FILE) for name in servers)
    replication, metrics = settings.replication, _metrics(settings)
    replicas = _replicas_of(settings, nodes)
    names = [StorageName(group, replica) for group in settings.broker_names for replica in replicas[group]]
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
            replicas[name],
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
        _controller(settings, storages, replicas) if replication.has_controller else None,
        settings.rebalance_servers,
        metrics,
    )


def _replicas_of(settings: ClusterSettings, nodes: Sequence[Node]) -> dict[str, tuple[int, ...]]:
    """Return the replicas of each broker group: the group's members if they were changed while the group ran
    (placement.membership), else as many as `replication.replicas`."""
    changed = changed_members(nodes)
    plain = range(settings.replication.replicas)
    return {
        group: tuple(sorted(changed[group].replicas if group in changed else plain)) for group in settings.broker_names
    }


def store_options(settings: ClusterSettings) -> StoreOptions:
    """Return the options of all stores. If `check_compressed_body` is not set, stores check compressed bodies if and
    only if access control is on, because untrusted users may then send messages."""
    store = settings.store
    if store.check_compressed_body is not None:
        return store
    return store.model_copy(update={"check_compressed_body": settings.access.enable})


def with_found_stores(
    settings: ClusterSettings, given: Collection[str], nodes: Sequence[Node]
) -> tuple[ClusterSettings, list[str]]:
    """Return settings that start every store found on the nodes' disks. Also returns sentences that describe the
    changes to `settings` and the omitted stores.

    `given`: names of the settings that a user has set. If `broker_groups` is not among them, it is raised to the number
    of broker groups found. Raises ConfigError if `settings` would not start a store that `leave_out` does not name,
    because the store's messages would be missing without any error. Only nodes that have joined the Ray cluster count:
    `raymq up --wait-nodes` waits for further nodes.
    """
    found, left_out = _found_stores(nodes), set(settings.leave_out)
    kept = {name for name in found if not {name.broker_name, store_directory(name)} & left_out}
    notes = []
    groups = max([settings.broker_groups, *(ord(name.broker_name[-1]) - ord("a") + 1 for name in kept)])
    if groups > settings.broker_groups and "broker_groups" not in given:
        settings = settings.model_copy(update={"broker_groups": groups})
        notes.append(f"starting {groups} broker groups: the data directory holds their stores")
    changed = changed_members(nodes)
    if changed and not settings.replication.has_controller:
        # The replicas of these groups were changed, so they have several replicas, or had. Without a Controller each
        # of their replicas would lead.
        replication = settings.replication.model_copy(update={"enable_controller_mode": True})
        settings = settings.model_copy(update={"replication": replication})
    notes += [
        f"{group} has the replicas {', '.join(map(str, sorted(members.replicas)))}, as `raymq broker replicas` has "
        "changed them; `replication.replicas` does not count for this broker group"
        for group, members in sorted(changed.items())
    ]
    both = sorted(left_out & set(settings.broker_names))
    if both:
        raise ConfigError(
            f"leave_out names {both[0]}, but broker_groups ({settings.broker_groups}) includes this broker group"
        )
    removed = {name for name in kept if name.replica in _removed(changed, name.broker_name)}
    _refuse_missed(settings, groups, kept - removed, found, changed)
    left = sorted(set(found) - kept)
    if left:
        notes.append(f"leaving out {_listed(left, found)}: leave_out names it")
    if removed:
        notes.append(f"leaving out {_listed(sorted(removed), found)}: removed with `raymq broker replicas`")
    return settings, notes


def _removed(changed: Mapping[str, ReplicaMembers], group: str) -> frozenset[int]:
    """Return the replicas that have left a broker group."""
    return changed[group].removed if group in changed else frozenset()


def _refuse_missed(
    settings: ClusterSettings,
    groups: int,
    kept: Collection[StorageName],
    found: Mapping[StorageName, Node],
    changed: Mapping[str, ReplicaMembers],
) -> None:
    """Raise ConfigError if `settings` would not start a store that must be kept. `kept`: the found stores that the
    setting `leave_out` does not name. `groups`: the number of broker groups that these stores need. `changed`: the
    members of the broker groups whose replicas were changed."""
    missed = [name for name in sorted(kept) if name.broker_name not in settings.broker_names]
    if missed:
        group = missed[0].broker_name
        raise ConfigError(
            f"broker_groups: {settings.broker_groups} leaves out {_listed(missed, found)}, whose messages could "
            f"then not be read. Include them with --broker-groups {groups} (in raymq.yaml: `broker_groups: "
            f"{groups}`), or leave one out on purpose with --leave-out {group} (in raymq.yaml: `leave_out: "
            f"[{group}]`)"
        )
    unknown = [
        name
        for name in sorted(kept)
        if name.broker_name in changed and name.replica not in changed[name.broker_name].replicas
    ]
    if unknown:
        directory = store_directory(unknown[0])
        raise ConfigError(
            f"{_listed(unknown, found)}: the other replicas on disk do not name this replica, which may have messages "
            f"that they lack. Start the nodes of all replicas (--wait-nodes), or leave it out on purpose with "
            f"--leave-out {directory} (in raymq.yaml: `leave_out: [{directory}]`)"
        )
    plain = [name for name in sorted(kept) if name.broker_name not in changed]
    extra = [name for name in plain if name.replica >= settings.replication.replicas]
    if extra:
        replicas, directory = max(name.replica for name in extra) + 1, store_directory(extra[0])
        raise ConfigError(
            f"replication.replicas: {settings.replication.replicas} leaves out {_listed(extra, found)}, which may "
            f"have messages that other replicas lack. Include them with `replication: {{replicas: {replicas}}}` "
            f"in raymq.yaml, or leave one out on purpose with --leave-out {directory} (in raymq.yaml: `leave_out: "
            f"[{directory}]`)"
        )


def _found_stores(nodes: Sequence[Node]) -> dict[StorageName, Node]:
    """Return the stores in the nodes' data directories, each with a node that has the store's directory."""
    found = {}
    for node in nodes:
        for directory in node.stores:
            match = STORE_NAME.fullmatch(directory)
            if match is not None:
                found[StorageName(match[1], int(match[2]))] = node
    return found


def _listed(names: Sequence[StorageName], found: Mapping[StorageName, Node]) -> str:
    """Return the names of stores, with the addresses of their nodes, as text for a message."""
    return ", ".join(f"{store_directory(name)} (on {found[name].ip})" for name in names)


def differences(plan: Plan, running: Collection[str], roots: Mapping[str, str]) -> list[str]:
    """Return sentences that describe how a running raymq differs from the plan. Starting the plan does not remove these
    differences.

    `running`: names of running actors. `roots`: the directories of the running stores on this node, by storage actor.
    """
    notes = []
    planned = {str(storage.name): storage for storage in plan.storages}
    for name in sorted(name for name in running if name.startswith("storage-") and name not in planned):
        notes.append(f"{name} is also running and keeps running")
    for kind, count in (("nameserver-", len(plan.nameservers)), ("rebalance-", plan.rebalance_servers)):
        there = sum(name.startswith(kind) for name in running)
        if there > count:
            notes.append(f"{there} actors {kind}N are running instead of {count}, and keep running")
    for name, root in sorted(roots.items()):
        asked = planned[name].settings.store_path_root_dir if name in planned else None
        if asked is not None and data_dir_here(asked.parent) / asked.name != Path(root):
            notes.append(f"{name} keeps its store in {root}, not in {asked}")
    return notes


def _metrics(settings: ClusterSettings) -> MetricsSettings:
    return MetricsSettings(settings.cluster_name, settings.metrics)


def _settings_of(options: StoreOptions, root: Path) -> StoreSettings:
    """Return the store settings of one replica. Log directories outside the store directory `root` get a subdirectory
    for this replica, with the name of `root`."""
    values = options.model_dump()
    for name in ("store_path_commit_log", "read_only_commit_log_store_paths"):
        values[name] = [path / root.name for path in values[name]]
    return StoreSettings(**values, store_path_root_dir=root)


def _controller(
    settings: ClusterSettings, storages: Sequence[StoragePlan], replicas: Mapping[str, Sequence[int]]
) -> ControllerSettings:
    replication = settings.replication
    return ControllerSettings(
        settings.data_dir / CONTROLLER / JOURNAL_FILE,
        {group: frozenset(own) for group, own in replicas.items()},
        # Successive broker groups prefer replicas with different numbers as masters, so that the masters are spread
        # over the nodes.
        {
            group: {replica: (place - index) % len(replicas[group]) for place, replica in enumerate(replicas[group])}
            for index, group in enumerate(settings.broker_names)
        },
        dict.fromkeys(settings.broker_names, replication.learner_numbers),
        ControlRules(
            unclean=replication.enable_elect_unclean_master,
            fixed_master=None if replication.broker_role is None else FIXED_MASTER,
        ),
        settings.data_dir,
        tuple(storages),
        settings.placement.node_label,
        _metrics(settings),
    )
