"""Looks at the running raymq: the report of its servers, and its consumer groups, bounded in number and in time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import ray

from raymq.common.errors import RaymqError
from raymq.tools.doctor.facts import ClusterFacts, GroupFacts, HealthChecks

if TYPE_CHECKING:
    from raymq.client.client import Client
    from raymq.common.protocol.attributes import TopicAttributes
    from raymq.common.protocol.group import GroupSummary

GROUPS_MAX: Final = 200
GROUPS_TIMEOUT_S: Final = 20.0


def look_at_cluster(client: Client, status: Mapping[str, Any], reserved_ms: int) -> ClusterFacts:
    """The facts about the cluster of `client`. `status` is the report of `raymq status`; `reserved_ms` is how long
    messages of topics without a time of their own are kept."""
    about = ClusterFacts(status, sum(node["Alive"] for node in ray.nodes()), health=health_checks())
    try:
        return _with_groups(client, about, reserved_ms)
    except RaymqError as error:
        return ClusterFacts(about.status, about.nodes, groups_error=str(error), health=about.health)


def _with_groups(client: Client, about: ClusterFacts, reserved_ms: int) -> ClusterFacts:
    names = client.admin.list_groups()
    members = Counter(connection.consumer.group for connection in client.admin.consumer_connections())
    deadline_s, groups = time.monotonic() + GROUPS_TIMEOUT_S, []
    for name in names[:GROUPS_MAX]:
        if time.monotonic() > deadline_s:
            break
        groups.append(_look_at_group(client, name, members[name], reserved_ms))
    left_out = len(names) - len(groups)
    return ClusterFacts(about.status, about.nodes, tuple(groups), left_out, health=about.health)


def _look_at_group(client: Client, name: str, members: int, reserved_ms: int) -> GroupFacts:
    try:
        summary = client.admin.group_summary(name)
        attributes = client.admin.topic_attributes({entry.queue.topic for entry in summary.queues})
    except RaymqError as error:
        return GroupFacts(name, error=str(error))
    return group_facts(summary, attributes, members, reserved_ms)


def group_facts(
    summary: GroupSummary, attributes: Mapping[str, TopicAttributes], members: int, reserved_ms: int
) -> GroupFacts:
    """The facts about a group. Of a compaction topic only messages go that a newer one supersedes."""
    kept = [entry for entry in summary.queues if not _is_compacted(attributes, entry.queue.topic)]
    slowest = max(
        kept, key=lambda entry: entry.lag_ms / _reserved_ms(attributes, entry.queue.topic, reserved_ms), default=None
    )
    lost = sum(max(entry.min_offset - entry.committed, 0) for entry in kept if entry.committed is not None)
    return GroupFacts(
        summary.group,
        summary.lag,
        slowest.lag_ms if slowest else 0,
        members,
        summary.dead_letters,
        lost,
        slowest.queue.topic if slowest else "",
        _reserved_ms(attributes, slowest.queue.topic, reserved_ms) if slowest else None,
    )


def _is_compacted(attributes: Mapping[str, TopicAttributes], topic: str) -> bool:
    return topic in attributes and attributes[topic].is_compacted


def _reserved_ms(attributes: Mapping[str, TopicAttributes], topic: str, otherwise_ms: int) -> int:
    own_ms = attributes[topic].reserve_time_ms if topic in attributes else None
    return own_ms or otherwise_ms


def health_checks() -> HealthChecks | None:
    """Ray's settings as the cluster of this process has them; None if this Ray does not tell."""
    config: Any = getattr(import_module("ray._raylet"), "Config", None)  # private; a test says when it moves
    names = ("health_check_period_ms", "health_check_timeout_ms", "health_check_failure_threshold")
    if any(not hasattr(config, name) for name in names):
        return None
    return HealthChecks(*(getattr(config, name)() for name in names))
