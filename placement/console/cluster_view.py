"""Builds the console's cluster page from the cluster's status. The functions do no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from raymq.common.protocol.route import PERM_WRITE, TopicRoute
from raymq.common.protocol.status import BrokerReport, ClusterStatus, ReplicaGroupReport
from raymq.remoting.storage_client import StorageDescription
from raymq.tools.console.cluster import BrokerGroupView, ClusterView, ReplicaView, ServerView

TOPICS_LOOKED_AT: Final = 50
"""Maximum number of topics per broker group for which the console reads whether they are writable."""


def view_of(
    status: ClusterStatus,
    name: str,
    nodes: Mapping[str, bool],
    writable: Mapping[str, bool],
    settings: Mapping[str, str],
) -> ClusterView:
    """Return the console's view of a cluster. `nodes`: maps the address of each cluster node to True if the node is
    drained. `writable`: maps each broker group to False if no topic of the group is writable. `settings`: values by
    setting name."""
    groups = {group.broker: group for group in status.replica_groups}
    brokers = tuple(
        _broker(status, broker, groups.get(broker.name), writable.get(broker.name, True)) for broker in status.brokers
    )
    return ClusterView(name, status, brokers, tuple(_servers(status)), dict(nodes), dict(settings))


def topics_to_look_at(status: ClusterStatus) -> list[str]:
    """Return the topics whose routes the console reads to find out whether each broker group accepts writes."""
    return sorted({topic for broker in status.brokers for topic in broker.topics[:TOPICS_LOOKED_AT]})


def writable_of(status: ClusterStatus, routes: Iterable[TopicRoute]) -> dict[str, bool]:
    """Return a dict from each broker group's name to True if at least one of its topics is writable, according to the
    topics' routes. Also True for a group without topics or without known routes."""
    perms: dict[str, int] = {}
    for route in routes:
        for part in route.queues:
            perms[part.broker_name] = perms.get(part.broker_name, 0) | part.perm
    return {broker.name: bool(perms.get(broker.name, PERM_WRITE) & PERM_WRITE) for broker in status.brokers}


def settings_of(status: ClusterStatus, store: StorageDescription | None) -> dict[str, str]:
    """Return the settings that the console shows, by their names in raymq.yaml: the numbers of broker groups and
    replicas, and some settings of `store` if a store has answered."""
    replicas = max((len(group.replicas) for group in status.replica_groups), default=1)
    known = {"broker_groups": len(status.brokers), "replication.replicas": replicas}
    if store is not None:
        known["store.max_message_size_bytes"] = store.max_message_size_bytes
        known["store.mapped_file_size_commit_log_bytes"] = store.commit_log_file_size
        known["store.mapped_file_size_consume_queue_bytes"] = store.consume_queue_file_size
    return {name: str(value) for name, value in known.items()}


def _broker(
    status: ClusterStatus, broker: BrokerReport, group: ReplicaGroupReport | None, writable: bool
) -> BrokerGroupView:
    replicas: tuple[ReplicaView, ...]
    master: str | None
    if group is None:
        own = [store for store in status.stores if store.broker_name == broker.name][:1]
        replicas = tuple(ReplicaView(one.actor, "", "master", True, 0, 0.0, one.problem) for one in own)
        master, epoch, reason = own[0].actor if own else None, None, broker.error
    else:
        master = None if group.master is None else f"storage-{broker.name}-{group.master}"
        replicas = tuple(
            ReplicaView(
                f"storage-{broker.name}-{one.replica}",
                one.node or "",
                one.role,
                one.replica in group.in_sync,
                one.lag_bytes,
                one.lag_s,
                one.error,
            )
            for one in group.replicas
        )
        epoch, reason = group.epoch, broker.error or group.reason
    if not broker.error and not broker.ready:
        reason = reason or broker.waiting_for
    return BrokerGroupView(
        broker.name,
        not broker.error and broker.ready,
        master,
        epoch,
        replicas,
        len(broker.topics),
        len(broker.groups),
        writable,
        reason,
    )


def _servers(status: ClusterStatus) -> Iterator[ServerView]:
    for name in status.actors:
        if name.startswith("nameserver-"):
            yield ServerView(name, "NameServer", "runs")
    for controller in status.replication:
        yield ServerView(controller.actor, "Controller", "runs", "", controller.error)
    for rebalance in status.rebalances:
        served = sum(group.actor == rebalance.actor for group in status.groups)
        yield ServerView(rebalance.actor, "Rebalance", f"serves {served} groups", "", rebalance.error)
    for pull in status.pulls:
        served = sum(one.actor == pull.actor for one in status.instances)
        yield ServerView(pull.actor, "Pull", f"{served} instances", pull.node, pull.error)
    for console in status.consoles:
        yield ServerView(console.actor, "Console", "runs", "", console.error)
    for gateway in status.gateways:
        clients = sum(gateway.clients.values())
        yield ServerView(gateway.actor, "Gateway", f"{clients} clients", gateway.node, gateway.error)
