"""Checks of a running raymq: its servers, its copies, its consumer groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

from raymq.tools.doctor.facts import ClusterFacts, GroupFacts, HealthChecks, Snapshot
from raymq.tools.doctor.findings import Check, Finding, fail, ok, warn

SERVER_KINDS: Final = ("brokers", "stores", "rebalances", "pulls", "replication")
RAY_DEFAULTS: Final = HealthChecks(3000, 10_000, 5)
"""Ray's own health checks: a node that is gone counts as alive for half a minute and more."""
DELAY_LATE_MS: Final = 5000
MAKE_ROOM: Final = "make room on the disk, or see the store's log"
RETENTION_NEAR: Final = 0.8
"""The part of its time after which an unread message is in danger."""


def _cluster(snapshot: Snapshot) -> ClusterFacts:
    assert snapshot.cluster is not None, "the runner skips these checks without a cluster"
    return snapshot.cluster


def servers(snapshot: Snapshot) -> list[Finding]:
    """Every server answers."""
    entries = [entry for kind in SERVER_KINDS for entry in _cluster(snapshot).status.get(kind, [])]
    silent = [
        fail(entry["error"], f"see the log of {entry['actor']} in Ray's session; Ray restarts it", entry["actor"])
        for entry in entries
        if entry["error"]
    ]
    hidden = _cluster(snapshot).status.get("refused", ())
    if hidden:
        silent.append(warn(f"not shown to this user: {', '.join(hidden)}", "run it as a super user (RAYMQ_USER)"))
    return silent or [ok(f"{len(entries)} servers answer")]


def brokers_ready(snapshot: Snapshot) -> list[Finding]:
    """Every broker has read its state."""
    entries = [entry for entry in _cluster(snapshot).status.get("brokers", []) if not entry["error"]]
    waiting = [
        fail(entry["waiting_for"], "see its store: a broker reads its state from there", entry["actor"])
        for entry in entries
        if not entry["ready"]
    ]
    return waiting or [ok(f"{len(entries)} brokers are ready")]


def stores_on_disk(snapshot: Snapshot) -> list[Finding]:
    """Every store on the disks of the running stores' nodes runs."""
    do = "`raymq down` and `raymq up` without broker_groups start it; move its directory away if it is not needed"
    stopped = [
        warn(f"{one['directory']} holds a store that does not run", do, one["broker"])
        for one in _cluster(snapshot).status.get("stopped_stores", ())
    ]
    return stopped or [ok("every store on disk runs")]


def _groups(snapshot: Snapshot) -> Iterator[dict[str, Any]]:
    """The broker groups that have several replicas."""
    for controller in _cluster(snapshot).status.get("replication", []):
        yield from controller["groups"]


def _replicas_ok(snapshot: Snapshot, seen: str) -> list[Finding]:
    """All is well with the replicas, if there are any."""
    return [ok(seen if any(True for _ in _groups(snapshot)) else "nothing is replicated")]


def masters(snapshot: Snapshot) -> list[Finding]:
    """Every broker group of several replicas is led."""
    groups = list(_groups(snapshot))
    do = "start the nodes with its replicas; `raymq status` shows them"
    leaderless = [fail(group["reason"], do, group["broker"]) for group in groups if group["reason"]]
    return leaderless or _replicas_ok(snapshot, f"replicated broker groups that are led: {len(groups)}")


def stores_writable(snapshot: Snapshot) -> list[Finding]:
    """Every store that leads takes messages, and no disk has failed."""
    stores = [store for store in _cluster(snapshot).status.get("stores", []) if not store["error"]]
    following = {"SLAVE", "LEARNER"}
    refusing = [
        fail(
            store["not_writable_reason"],
            "replace the disk: the store is opened again by itself" if store.get("disk_failure") else MAKE_ROOM,
            store["actor"],
        )
        for store in stores
        if store.get("disk_failure") or (not store["writable"] and store.get("role") not in following)
    ]
    return refusing or [ok(f"{len(stores)} stores")]


def places(snapshot: Snapshot) -> list[Finding]:
    """The replicas of a group are on different machines."""
    found = []
    for group in _groups(snapshot):
        nodes = Counter(replica["node"] for replica in group["replicas"] if replica["node"])
        shared = [node for node, count in nodes.items() if count > 1]
        if shared:
            found.append(
                warn(
                    f"several replicas are on {', '.join(shared)}",
                    "add nodes and let `spread` be on: one broken machine takes them all",
                    group["broker"],
                )
            )
    return found or _replicas_ok(snapshot, "replicas are on machines of their own")


def undamaged(snapshot: Snapshot) -> list[Finding]:
    """No log has damaged records, and no file of a store was found damaged when it was opened."""
    do = "check the disk; a replica with good bytes mends the log; consumers can skip the damaged offsets"
    found = []
    for store in _cluster(snapshot).status.get("stores", []):
        for hole in store.get("holes", ()):
            seen = f"{hole['size']} damaged bytes at {hole['offset']} of its log: {hole['reason']}"
            found.append(fail(seen, do, store["actor"]))
        for text in store.get("damaged_files", ()):
            found.append(warn(text, "check the disk: it has changed bytes of a file", store["actor"]))
    return found or [ok("no damage was found")]


def nothing_lost(snapshot: Snapshot) -> list[Finding]:
    """No master was elected without acknowledged messages, and no recovery has cut bytes off a log."""
    do_elected = (
        "messages are gone from the group: docs/cluster.md, 'When a replica has lost messages', says what is left"
    )
    found = [
        fail(f"elected although {one['loss']}", do_elected, one["broker"])
        for one in _groups(snapshot)
        if one.get("loss")
    ]
    for store in _cluster(snapshot).status.get("stores", []):
        if store.get("cut_bytes"):
            seen = f"{store['cut_bytes']:,} bytes were cut off the end of its log when it was opened"
            do = (
                "usual after a crash: nobody had an acknowledgement. Else check the disk; lost+cut/ there has the bytes"
            )
            found.append(warn(seen, do, store["actor"]))
    return found or [ok("no message was lost")]


def followers(snapshot: Snapshot) -> list[Finding]:
    """No replica refuses to follow its master."""
    do = (
        "only it has these messages: docs/cluster.md, 'Messages that only one replica has', says how to keep them or "
        "give them up"
    )
    refusing = [
        fail(store["refusal"], do, store["actor"])
        for store in _cluster(snapshot).status.get("stores", [])
        if store.get("refusal")
    ]
    return refusing or _replicas_ok(snapshot, "no replica refuses to follow")


def copies(snapshot: Snapshot) -> list[Finding]:
    """Messages are on more than one disk."""
    replicated = {group["broker"] for group in _groups(snapshot) if len(group["replicas"]) > 1}
    brokers = {entry["actor"] for entry in _cluster(snapshot).status.get("brokers", [])}
    single = sorted(brokers - replicated)
    if single:
        return [
            warn(
                f"one copy only: {', '.join(single)}",
                "`replication: {replicas: 3, min_in_sync_replicas: 2}` on three machines: a lost disk loses messages",
            )
        ]
    return [ok(f"{len(replicated)} broker groups have several copies")]


def spare_replicas(snapshot: Snapshot) -> list[Finding]:
    """A group goes on without one of its replicas."""
    found = []
    for group in _groups(snapshot):
        able = len(group["replicas"]) - len(group.get("learners", ()))
        if able > 1 and group.get("min_in_sync_replicas", 1) >= able:
            seen = f"min_in_sync_replicas is {able}, as many as there are"
            found.append(warn(seen, "one less: now a single replica that is away stops all sends", group["broker"]))
    return found or _replicas_ok(snapshot, "one replica less stops nothing")


def in_sync(snapshot: Snapshot) -> list[Finding]:
    """Every replica follows its master closely."""
    found = []
    for group in _groups(snapshot):
        able = [one["replica"] for one in group["replicas"] if one["replica"] not in group.get("learners", ())]
        behind = sorted(set(able) - set(group["in_sync"]))
        if not behind:
            continue
        seen = f"{len(group['in_sync'])} of {len(able)} in sync; behind: {', '.join(map(str, behind))}"
        do = "see `raymq status`: it fills by itself; a node that is gone is replaced after `replace_after_s`"
        is_short = len(group["in_sync"]) < group.get("min_in_sync_replicas", 1)
        found.append((fail if is_short else warn)(seen, do, group["broker"]))
    return found or _replicas_ok(snapshot, "all replicas are in sync")


def health_checks(snapshot: Snapshot) -> list[Finding]:
    """Ray notices soon that a node is gone."""
    cluster = _cluster(snapshot)
    if cluster.nodes < 2 or cluster.health is None:
        return [ok("one node: nobody has to notice" if cluster.nodes < 2 else "Ray does not tell")]
    seen = (
        f"every {cluster.health.period_ms} ms, {cluster.health.timeout_ms} ms to answer, "
        f"dead after {cluster.health.failure_threshold} failures"
    )
    if cluster.health == RAY_DEFAULTS:
        return [warn(f"{seen}: Ray's defaults", "--system-config at the head as in cluster.yaml: else 30 s of waiting")]
    return [ok(seen)]


def name_servers(snapshot: Snapshot) -> list[Finding]:
    """Routes are known when one node is gone."""
    cluster = _cluster(snapshot)
    count = sum(name.startswith("nameserver-") for name in cluster.status.get("actors", []))
    if count < 2 <= cluster.nodes:
        return [warn(f"one NameServer on {cluster.nodes} nodes", "`name_servers: 3`: new clients need one")]
    return [ok(f"NameServers: {count}, nodes: {cluster.nodes}")]


def delayed(snapshot: Snapshot) -> list[Finding]:
    """Delayed messages are delivered in time."""
    found = []
    for store in _cluster(snapshot).status.get("stores", []):
        schedule = store.get("schedule")
        if schedule and schedule["late_ms"] > DELAY_LATE_MS:
            seen = f"delivered {schedule['late_ms'] / 1000:,.0f} s late, {sum(schedule['pending'].values()):,} wait"
            found.append(
                warn(seen, "the disk or the machine cannot keep up: see its load and flush time", store["actor"])
            )
    return found or [ok("delayed messages are delivered in time")]


def deleted_unread(snapshot: Snapshot) -> list[Finding]:
    """No full disk has taken messages before a group read them."""
    found = [
        fail(
            f"{entry['messages']:,} messages of {entry['topic']} were deleted unread",
            "a larger disk, or `clean_file_forcibly_enable: false`",
            entry["group"],
        )
        for broker in _cluster(snapshot).status.get("brokers", [])
        for entry in broker.get("deleted_unread", ())
    ]
    return found or [ok("nothing was deleted before its time")]


def _known_groups(snapshot: Snapshot) -> list[GroupFacts]:
    return [group for group in _cluster(snapshot).groups if not group.error]


def groups_seen(snapshot: Snapshot) -> list[Finding]:
    """Every consumer group could be looked at."""
    cluster = _cluster(snapshot)
    found = [warn(group.error, "`raymq group describe` it", group.group) for group in cluster.groups if group.error]
    if cluster.groups_error:
        found.append(warn(cluster.groups_error, "see `raymq status`"))
    if cluster.groups_left_out:
        found.append(warn(f"groups that were not looked at: {cluster.groups_left_out}", "`raymq top`, or the metrics"))
    return found or [ok(f"consumer groups: {len(cluster.groups)}")]


def members(snapshot: Snapshot) -> list[Finding]:
    """A group that has something to read has somebody to read it."""
    found = [
        warn(
            f"nobody is connected, unread messages: {group.lag:,}",
            "start its consumers, or delete the group",
            group.group,
        )
        for group in _known_groups(snapshot)
        if group.lag and not group.members
    ]
    return found or [ok("no group waits for consumers")]


def dead_letters(snapshot: Snapshot) -> list[Finding]:
    """No group has dead letters."""
    found = [
        warn(f"dead letters: {group.dead_letters:,}", f"`raymq dlq list {group.group}`, then replay them", group.group)
        for group in _known_groups(snapshot)
        if group.dead_letters
    ]
    return found or [ok("no dead letters")]


def retention(snapshot: Snapshot) -> list[Finding]:
    """Messages are kept longer than the slowest group needs."""
    found = []
    for group in _known_groups(snapshot):
        if group.lost:
            seen = f"{group.lost:,} messages were deleted before it read them"
            found.append(warn(seen, "keep them longer (`--retention`, file_reserved_time_hours)", group.group))
        elif group.retention_ms is not None and group.lag_ms > RETENTION_NEAR * group.retention_ms:
            hours = (group.lag_ms / 3_600_000, group.retention_ms / 3_600_000)
            seen = (
                f"its oldest unread message in {group.slowest_topic} is {hours[0]:.1f} h old, of {hours[1]:.1f} h kept"
            )
            found.append(warn(seen, "more consumers, or a longer retention", group.group))
    return found or [ok("messages are kept longer than groups need")]


CLUSTER_CHECKS: Final = (
    Check("servers answer", "cluster", servers),
    Check("brokers ready", "cluster", brokers_ready),
    Check("masters", "cluster", masters),
    Check("stores take messages", "cluster", stores_writable),
    Check("stores on disk", "cluster", stores_on_disk),
    Check("stores undamaged", "cluster", undamaged),
    Check("nothing lost", "cluster", nothing_lost),
    Check("replicas follow", "cluster", followers),
    Check("replicas apart", "cluster", places),
    Check("copies", "cluster", copies),
    Check("a replica to spare", "cluster", spare_replicas),
    Check("in sync", "cluster", in_sync),
    Check("health checks", "cluster", health_checks),
    Check("NameServers", "cluster", name_servers),
    Check("delayed messages", "cluster", delayed),
    Check("deleted unread", "cluster", deleted_unread),
    Check("groups answer", "cluster", groups_seen),
    Check("groups have members", "cluster", members),
    Check("dead letters", "cluster", dead_letters),
    Check("retention", "cluster", retention),
)
