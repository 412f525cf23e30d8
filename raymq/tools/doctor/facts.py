"""The snapshot for the doctor's checks: plain values, which tests can write by hand.

If a collector cannot find out a fact, it sets an `error` or leaves the value None. The checks then report the fact as
unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from raymq.common.protocol.status import ClusterStatus


@dataclass(frozen=True, slots=True)
class DirectoryFacts:
    """A directory that has stores, or will have stores.

    `existing_path`: the directory, or its nearest existing parent. Disk, file system and flush times are facts about
    this path. `used_ratio`: the used part of the disk, 0 to 1, as the store computes it. `max_used_ratio`: the setting
    above which the store deletes old messages at any hour. `refuse_ratio`: the setting above which the store refuses
    messages. `readable`: a few files that other users may read, or directories that they may enter; `readable_count`:
    the number of all these files and directories. `locks`: store directory to the pid that holds its lock. `fiemap`:
    True if the file system reports written blocks. `fdatasync_ms`: the times of small flushes, ascending.
    """

    path: str
    existing_path: str
    exists: bool = True
    file_system: str = ""
    owner_uid: int = 0
    uid: int = 0
    writable: bool = True
    used_ratio: float = 0.0
    free_bytes: int = 0
    max_used_ratio: float = 0.75
    refuse_ratio: float = 0.9
    readable: tuple[str, ...] = ()
    readable_count: int = 0
    locks: Mapping[str, int] = field(default_factory=dict)
    fiemap: bool | None = None
    fdatasync_ms: tuple[float, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """Facts about a machine from one process on it: the process of the command, or a Ray task on a node.

    `copies`: package to its folders on the import path, in the order of the import path. `floors_missing`: packages of
    the servers that this installation lacks. `token_digest`: a digest to compare tokens, which does not reveal a token.
    `token_mode`: None without a token file. `socket_path_bytes`: the length of the longest path of Ray's sockets.
    """

    host: str
    python: str
    ray: str
    raymq: str
    copies: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    floors_missing: tuple[str, ...] = ()
    auth_mode: str = ""
    token_path: str = ""
    token_mode: int | None = None
    token_digest: str = ""
    port_error: str = ""
    files_soft: int = 1 << 20
    files_hard: int = 1 << 20
    shm_bytes: int | None = None
    socket_path: str = ""
    socket_path_bytes: int = 0
    directories: tuple[DirectoryFacts, ...] = ()


@dataclass(frozen=True, slots=True)
class LaneFacts:
    """An attempt to open a lane from a node to a server.

    `error`: empty if the lane opened. `has_tcp`: False if the server has no lane for other nodes.
    """

    server: str
    server_node: str
    error: str = ""
    has_tcp: bool = True


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Facts about a Ray node.

    `machine`: the result of a task on the node; None, with an `error`, if the task returned no result. `skew_ms`: the
    node's clock minus the head's clock, with an error of up to `skew_error_ms`. `board`: True if this Ray session has
    the Grafana dashboard; None if unknown, and on all nodes but the head.
    """

    node_id: str
    ip: str
    is_head: bool = False
    machine: MachineFacts | None = None
    error: str = ""
    skew_ms: float | None = None
    skew_error_ms: float = 0.0
    lanes: tuple[LaneFacts, ...] = ()
    board: bool | None = None


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """Facts about a consumer group.

    `members`: the number of connected consumers. `slowest_topic`: the topic with the group's oldest unread message;
    `lag_ms` is this message's age, and `retention_ms` the time for which the topic keeps messages (None: without
    limit). `lost`: the number of messages that were deleted before the group read them.
    """

    group: str
    lag: int = 0
    lag_ms: int = 0
    members: int = 0
    dead_letters: int = 0
    lost: int = 0
    slowest_topic: str = ""
    retention_ms: int | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class HealthChecks:
    """Ray's settings for the nodes' health checks."""

    period_ms: int
    timeout_ms: int
    failure_threshold: int


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """Facts about a running raymq.

    `status`: the report of `raymq status`. `groups_left_out`: the number of consumer groups without facts, because
    there were too many groups or no time was left.
    """

    status: ClusterStatus
    nodes: int = 1
    groups: tuple[GroupFacts, ...] = ()
    groups_left_out: int = 0
    groups_error: str = ""
    health: HealthChecks | None = None


@dataclass(frozen=True, slots=True)
class MetricsPort:
    """A node's metrics port. `servers`: the raymq actors with a fresh `raymq_up` at this port.

    Ray's agent drops a gauge that was not set for 20 s.
    """

    ip: str
    port: int
    error: str = ""
    servers: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class PrometheusFacts:
    """The Prometheus that --prometheus names. `rules`: the names of its alert rules."""

    url: str
    error: str = ""
    rules: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class DoctorSnapshot:
    """All facts for the checks.

    `ray_error`: the reason why there are no nodes. `cluster_error`: the reason why there is no cluster. `named`: True
    if an address names the Ray cluster, so that a missing Ray cluster is a fault. `metrics_enable`: the setting.
    """

    machine: MachineFacts
    nodes: tuple[NodeFacts, ...] = ()
    ray_error: str = ""
    named: bool = False
    cluster: ClusterFacts | None = None
    cluster_error: str = ""
    ports: tuple[MetricsPort, ...] = ()
    prometheus: PrometheusFacts | None = None
    metrics_enable: bool = True
