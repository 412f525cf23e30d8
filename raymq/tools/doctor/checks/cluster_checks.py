"""Checks of a running raymq cluster: the status reports of its servers (status_checks), Ray's health checks, and
consumer groups."""

from __future__ import annotations

from typing import Final

from raymq.common.names import WEBHOOK_GROUP
from raymq.tools.doctor.checks.status_checks import ADVICE_CHECKS, PROBLEM_CHECKS, Judge
from raymq.tools.doctor.facts import ClusterFacts, DoctorSnapshot, GroupFacts, HealthChecks
from raymq.tools.doctor.findings import Check, Finding, ok, warn

RAY_DEFAULTS: Final = HealthChecks(3000, 10_000, 5)
"""Ray's default health-check settings. With them, a lost node counts as alive for half a minute or longer."""

RETENTION_NEAR: Final = 0.8
"""Fraction of the retention time after which an unread message counts as close to its deletion."""


def _cluster(snapshot: DoctorSnapshot) -> ClusterFacts:
    assert snapshot.cluster is not None, "the runner skips these checks without a cluster"
    return snapshot.cluster


def health_checks(snapshot: DoctorSnapshot) -> list[Finding]:
    """Check that Ray's health checks detect a lost node quickly."""
    cluster = _cluster(snapshot)
    if cluster.nodes < 2 or cluster.health is None:
        return [ok("one node: no other node to check" if cluster.nodes < 2 else "Ray does not report them")]
    seen = (
        f"every {cluster.health.period_ms} ms, {cluster.health.timeout_ms} ms to answer, "
        f"dead after {cluster.health.failure_threshold} failures"
    )
    if cluster.health == RAY_DEFAULTS:
        return [
            warn(
                f"{seen}: Ray's defaults",
                "set --system-config on the head as in cluster.yaml: else a lost node stops clients for 30 s",
            )
        ]
    return [ok(seen)]


def name_servers(snapshot: DoctorSnapshot) -> list[Finding]:
    """Check that a cluster of several nodes runs at least two NameServers."""
    cluster = _cluster(snapshot)
    count = sum(name.startswith("nameserver-") for name in cluster.status.actors)
    if count < 2 <= cluster.nodes:
        return [warn(f"one NameServer on {cluster.nodes} nodes", "`name_servers: 3`: new clients need one")]
    return [ok(f"NameServers: {count}, nodes: {cluster.nodes}")]


def _known_groups(snapshot: DoctorSnapshot) -> list[GroupFacts]:
    return [group for group in _cluster(snapshot).groups if not group.error]


def groups_seen(snapshot: DoctorSnapshot) -> list[Finding]:
    """Check that the doctor could examine every consumer group."""
    cluster = _cluster(snapshot)
    found = [warn(group.error, "`raymq group describe` it", group.group) for group in cluster.groups if group.error]
    if cluster.groups_error:
        found.append(warn(cluster.groups_error, "see `raymq status`"))
    if cluster.groups_left_out:
        found.append(
            warn(f"consumer groups without an answer: {cluster.groups_left_out}", "`raymq top`, or the metrics")
        )
    return found or [ok(f"consumer groups: {len(cluster.groups)}")]


def members(snapshot: DoctorSnapshot) -> list[Finding]:
    """Check that every group with unread messages has connected consumers. The group of web hooks never has any, and
    has a check of its own."""
    found = [
        warn(
            f"no consumer is connected, unread messages: {group.lag:,}",
            "start its consumers, or delete the group",
            group.group,
        )
        for group in _known_groups(snapshot)
        if group.lag and not group.members and group.group != WEBHOOK_GROUP
    ]
    return found or [ok("no group waits for consumers")]


def dead_letters(snapshot: DoctorSnapshot) -> list[Finding]:
    """Check that no group has dead letters."""
    found = [
        warn(f"dead letters: {group.dead_letters:,}", f"`raymq dlq list {group.group}`, then replay them", group.group)
        for group in _known_groups(snapshot)
        if group.dead_letters
    ]
    return found or [ok("no dead letters")]


def retention(snapshot: DoctorSnapshot) -> list[Finding]:
    """Check that topics keep messages for longer than the slowest consumer group needs to read them."""
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


def _of_status(name: str, judge: Judge) -> Check:
    """Return a check of the doctor named `name`. It applies the function `judge` to the report of `raymq
    status`."""
    return Check(name, "cluster", lambda snapshot: judge(_cluster(snapshot).status))


CLUSTER_CHECKS: Final = (
    *(_of_status(name, judge) for name, judge in {**PROBLEM_CHECKS, **ADVICE_CHECKS}.items()),
    Check("health checks", "cluster", health_checks),
    Check("NameServers", "cluster", name_servers),
    Check("groups answer", "cluster", groups_seen),
    Check("groups have members", "cluster", members),
    Check("dead letters", "cluster", dead_letters),
    Check("retention", "cluster", retention),
)
