"""The page of the cluster, from the report that `raymq status` makes, and the lists of topics and of groups, from the
brokers' readings. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from raymq.common.protocol.route import PERM_WRITE, TopicRoute
from raymq.remoting.storage_client import StorageDescription
from raymq.tools.console.cluster import BrokerGroupView, ClusterView, ReplicaView, ServerView, StoreView
from raymq.tools.doctor.checks.status_checks import problems_of
from raymq.tools.doctor.findings import State

TOPICS_LOOKED_AT: Final = 50
"""The most topics of a broker group whose permission is looked at."""

Report = Mapping[str, Any]


def view_of(
    report: Report,
    name: str,
    nodes: Mapping[str, bool],
    writable: Mapping[str, bool],
    settings: Mapping[str, str],
) -> ClusterView:
    """The view of a cluster. `nodes`: addresses of its nodes, True for those that are drained. `writable`: by broker
    group, False where topics take no writes. `settings`: values by name."""
    stores = tuple(_store(entry) for entry in report["stores"])
    groups = {group["broker"]: group for entry in report["replication"] for group in entry["groups"]}
    brokers = tuple(
        _broker(entry, groups.get(_broker_name(entry)), stores, writable.get(_broker_name(entry), True))
        for entry in report["brokers"]
    )
    return ClusterView(
        name,
        brokers,
        stores,
        tuple(_servers(report)),
        tuple(_failures(report)),
        dict(nodes),
        dict(settings),
        dict(report),
    )


def topics_to_look_at(report: Report) -> list[str]:
    """Topics whose routes tell whether each broker group takes writes."""
    return sorted({topic for entry in report["brokers"] for topic in entry.get("topics", ())[:TOPICS_LOOKED_AT]})


def writable_of(report: Report, routes: Iterable[TopicRoute]) -> dict[str, bool]:
    """By broker group, False where none of its topics may be written to, by their routes. A group without topics, or of
    whose topics no route is known, takes writes."""
    perms: dict[str, int] = {}
    for route in routes:
        for part in route.queues:
            perms[part.broker_name] = perms.get(part.broker_name, 0) | part.perm
    return {
        _broker_name(entry): bool(perms.get(_broker_name(entry), PERM_WRITE) & PERM_WRITE)
        for entry in report["brokers"]
    }


def settings_of(report: Report, store: StorageDescription | None) -> dict[str, str]:
    """The settings that servers tell, by their names in the cluster's file: numbers of broker groups and of their
    replicas, and those of a store, unless none has answered."""
    groups = [group for entry in report["replication"] for group in entry["groups"]]
    replicas = max((len(group["replicas"]) for group in groups), default=1)
    known = {"broker_groups": len(report["brokers"]), "replication.replicas": replicas}
    if store is not None:
        known["store.max_message_size_bytes"] = store.max_message_size_bytes
        known["store.mapped_file_size_commit_log_bytes"] = store.commit_log_file_size
        known["store.mapped_file_size_consume_queue_bytes"] = store.consume_queue_file_size
    return {name: str(value) for name, value in known.items()}


def _failures(report: Report) -> Iterable[str]:
    """The failures that `raymq status` shows, a sentence each: where, what, and what to do."""
    for one in problems_of(report):
        if one.state is State.FAIL:
            yield f"{one.where}: {one.seen}; {one.do}" if one.where else f"{one.seen}; {one.do}"


def _broker_name(entry: Report) -> str:
    return str(entry.get("broker") or entry["actor"])


def _broker(entry: Report, group: Report | None, stores: Iterable[StoreView], writable: bool) -> BrokerGroupView:
    name, error = _broker_name(entry), entry["error"]
    replicas: tuple[ReplicaView, ...]
    master: str | None
    if group is None:
        own = [store for store in stores if store.broker_name == name][:1]
        replicas = tuple(ReplicaView(one.actor, one.node, "master", True, 0, 0.0, one.problem) for one in own)
        master, epoch, reason = replicas[0].actor if replicas else None, None, error
    else:
        master = None if group["master"] is None else f"storage-{name}-{group['master']}"
        replicas = tuple(
            ReplicaView(
                f"storage-{name}-{one['replica']}",
                one.get("node") or "",
                one["role"] or "",
                one["replica"] in group["in_sync"],
                one["lag_bytes"],
                one["lag_s"],
                one["error"] or "",
            )
            for one in group["replicas"]
        )
        epoch, reason = group["epoch"], error or group["reason"]
    if not error and not entry["ready"]:
        reason = reason or entry.get("waiting_for", "")
    return BrokerGroupView(
        name,
        not error and bool(entry["ready"]),
        master,
        epoch,
        replicas,
        len(entry.get("topics", ())),
        len(entry.get("groups", ())),
        writable,
        reason,
    )


def _store(entry: Report) -> StoreView:
    actor = str(entry["actor"])
    broker_name = actor.removeprefix("storage-").rpartition("-")[0]
    if entry["error"]:
        return StoreView(actor, broker_name, "", "", problem=entry["error"])
    retention = entry.get("retention") or {}
    ratio, free = retention.get("disk_ratio", -1), retention.get("disk_free_bytes", -1)
    return StoreView(
        actor,
        broker_name,
        str(entry.get("node", "")),
        entry["root"],
        entry["queues"],
        entry["max_physical_offset"] - entry["min_physical_offset"],
        entry["max_physical_offset"] - entry["flushed_physical_offset"],
        entry["index_behind_bytes"],
        None if ratio < 0 else ratio,
        None if free < 0 else free,
        entry["recovered"],
        "" if entry["writable"] else entry["not_writable_reason"],
    )


def _servers(report: Report) -> Iterable[ServerView]:
    for name in report["actors"]:
        if name.startswith("nameserver-"):
            yield ServerView(name, "NameServer", "runs")
    for entry in report["replication"]:
        yield ServerView(entry["actor"], "Controller", "runs", "", entry["error"])
    for entry in report["rebalances"]:
        served = sum(group["actor"] == entry["actor"] for group in report["groups"])
        yield ServerView(entry["actor"], "Rebalance", f"serves {served} groups", "", entry["error"])
    for entry in report["pulls"]:
        served = sum(one["actor"] == entry["actor"] for one in report["instances"])
        yield ServerView(entry["actor"], "Pull", f"{served} instances", str(entry.get("node", "")), entry["error"])
    for entry in report["consoles"]:
        yield ServerView(entry["actor"], "Console", "runs", "", entry["error"])
