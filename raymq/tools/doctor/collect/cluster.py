"""Collects facts about the running raymq and about its metrics.

The number of examined consumer groups is bounded, and so is the time for them. Facts about metrics are read from the
nodes' metrics ports, and from the rules of a Prometheus server.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import ray

from raymq.common.errors import RaymqError
from raymq.tools.doctor.facts import ClusterFacts, GroupFacts, HealthChecks, MetricsPort, PrometheusFacts

if TYPE_CHECKING:
    from raymq.client.client import Client
    from raymq.common.protocol.attributes import TopicAttributes
    from raymq.common.protocol.group import GroupSummary
    from raymq.common.protocol.status import ClusterStatus

GROUPS_MAX: Final = 200
GROUPS_TIMEOUT_S: Final = 20.0


def collect_cluster(client: Client, status: ClusterStatus, reserved_ms: int) -> ClusterFacts:
    """Collect the facts about the cluster to which `client` is connected.

    `status`: the state of the cluster's servers. `reserved_ms`: the retention in ms of topics without a retention
    attribute.
    """
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
        groups.append(_collect_group(client, name, members[name], reserved_ms))
    left_out = len(names) - len(groups)
    return ClusterFacts(about.status, about.nodes, tuple(groups), left_out, health=about.health)


def _collect_group(client: Client, name: str, members: int, reserved_ms: int) -> GroupFacts:
    try:
        summary = client.admin.group_summary(name)
        attributes = client.admin.topic_attributes({entry.queue.topic for entry in summary.queues})
    except RaymqError as error:
        return GroupFacts(name, error=str(error))
    return group_facts(summary, attributes, members, reserved_ms)


def group_facts(
    summary: GroupSummary, attributes: Mapping[str, TopicAttributes], members: int, reserved_ms: int
) -> GroupFacts:
    """Return the facts about a consumer group. The longest lag in time and the number of lost messages are computed
    without topics with compaction. In such a topic, unread messages that were deleted are no loss, because compaction
    deletes only superseded messages."""
    compacted = {topic for topic, values in attributes.items() if values.is_compacted}
    kept = [entry for entry in summary.queues if entry.queue.topic not in compacted]
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


def _reserved_ms(attributes: Mapping[str, TopicAttributes], topic: str, otherwise_ms: int) -> int:
    own_ms = attributes[topic].reserve_time_ms if topic in attributes else None
    return own_ms or otherwise_ms


def health_checks() -> HealthChecks | None:
    """Return the health-check settings of this process's Ray cluster; None if this version of Ray does not have these
    settings."""
    config: Any = getattr(
        import_module("ray._raylet"), "Config", None
    )  # a private name of Ray; a test fails if Ray removes it
    names = ("health_check_period_ms", "health_check_timeout_ms", "health_check_failure_threshold")
    if any(not hasattr(config, name) for name in names):
        return None
    return HealthChecks(*(getattr(config, name)() for name in names))


HTTP_TIMEOUT_S: Final = 5.0
METRICS_MAX_BYTES: Final = 64 << 20
PORTS_AT_ONCE: Final = 8
_UP: Final = re.compile(r'^ray_raymq_up\{[^}]*\bname="([^"]+)"', re.MULTILINE)


def collect_ports(nodes: Iterable[Mapping[str, Any]]) -> list[MetricsPort]:
    """Collect the facts about the metrics ports of Ray's living nodes. `nodes`: the result of `ray.nodes()`."""
    wanted = [(node["NodeManagerAddress"], int(node["MetricsExportPort"])) for node in nodes if node["Alive"]]
    with ThreadPoolExecutor(PORTS_AT_ONCE) as pool:
        return list(pool.map(lambda place: collect_port(*place), wanted))


def collect_port(ip: str, port: int) -> MetricsPort:
    """Read a node's metrics port, and return the servers that it reports, or the error."""
    try:
        text = _read(f"http://{ip}:{port}/metrics").decode(errors="replace")
    except (OSError, ValueError) as error:
        return MetricsPort(ip, port, str(error))
    return MetricsPort(ip, port, servers=servers_that_are_up(text))


def servers_that_are_up(text: str) -> frozenset[str]:
    """Return the names of the servers that report the gauge `raymq_up` in `text`, which is in Prometheus'
    format."""
    return frozenset(_UP.findall(text))


def collect_prometheus(url: str) -> PrometheusFacts:
    """Return the alert rules of the Prometheus server at `url`, or the error of the request."""
    try:
        answer = json.loads(_read(f"{url.rstrip('/')}/api/v1/rules"))
        groups = answer["data"]["groups"]
        return PrometheusFacts(url, rules=frozenset(rule["name"] for group in groups for rule in group["rules"]))
    except HTTPError as error:
        return PrometheusFacts(url, f"the request for its rules failed: {error}")
    except URLError as error:
        return PrometheusFacts(
            url, f"Prometheus does not answer: {getattr(error.reason, 'strerror', None) or error.reason}"
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        return PrometheusFacts(url, str(error))


def _read(url: str) -> bytes:
    if not url.startswith(("http://", "https://")):
        raise ValueError("the URL does not begin with http:// or https://")
    with urlopen(url, timeout=HTTP_TIMEOUT_S) as answer:
        body: bytes = answer.read(METRICS_MAX_BYTES)
        return body
