"""The snapshot that a doctor's checks judge: plain values, which tests make by hand.

A collector that could not look says so in an `error`, or leaves a value None; a check says then that it does not know.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class DirectoryFacts:
    """A directory in which stores are, or will be.

    `looked_at` is the directory itself or, while it does not exist, the nearest one above it that does: the disk, the
    file system and the times are those of there. `used_ratio` goes from 0 to 1, as the store counts it;
    `max_used_ratio` and `refuse_ratio` are the settings from which on old messages go at any hour, and appends are
    refused. `readable` are a few of the files that other users may read, or whose directories they may enter,
    `readable_count` all of them. `locks`: store directory to the pid that has its lock. `fiemap`: the file system tells
    which blocks were written. `fdatasync_ms` are the times of small flushes, ascending.
    """

    path: str
    looked_at: str
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
    """A machine as one process on it sees it: the process of the command, or a Ray task on a node.

    `copies`: package to the folders in which the import path has it, the one that wins first. `floors_missing` are
    packages of the servers that this raymq lacks. `token_digest` tells tokens apart and gives none away; `token_mode`
    is None without a token file. `socket_path_bytes`: the length of the longest socket path that Ray makes.
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
    """An attempt to open a lane from a node to a server; `error` is empty if it opened. `has_tcp` is False for a server
    that offers none to other nodes."""

    server: str
    server_node: str
    error: str = ""
    has_tcp: bool = True


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """A Ray node: `machine` by a task on it, None with an `error` if that gave no answer. `skew_ms`: how far its clock
    is ahead of the head's, give or take `skew_error_ms`. `board`: the Grafana board of this Ray session, on the head
    only; None where nobody looked."""

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
    """A consumer group. `members` are connected consumers. `slowest_topic` holds its oldest unread message, which is
    `lag_ms` old and is kept for `retention_ms` (None: for ever). `lost` messages were deleted before it read them."""

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
    """A running raymq. `status` is the report of `raymq status`. `groups_left_out`: consumer groups that were not
    looked at, because there are too many or the time was over."""

    status: Mapping[str, Any]
    nodes: int = 1
    groups: tuple[GroupFacts, ...] = ()
    groups_left_out: int = 0
    groups_error: str = ""
    health: HealthChecks | None = None


@dataclass(frozen=True, slots=True)
class MetricsPort:
    """A node's metrics port. `servers` are the raymq actors that have a fresh `raymq_up` there: Ray's agent drops a
    gauge that was not set for 20 s."""

    ip: str
    port: int
    error: str = ""
    servers: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class PrometheusFacts:
    """A Prometheus that was named. `rules` are the names of its alert rules."""

    url: str
    error: str = ""
    rules: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class DoctorSnapshot:
    """Everything that the checks judge. `ray_error` says why there are no nodes, `cluster_error` why no cluster.
    `named`: the Ray cluster was named by its address, so it is expected to be there. `metrics_enable`: the settings
    want metrics."""

    machine: MachineFacts
    nodes: tuple[NodeFacts, ...] = ()
    ray_error: str = ""
    named: bool = False
    cluster: ClusterFacts | None = None
    cluster_error: str = ""
    ports: tuple[MetricsPort, ...] = ()
    prometheus: PrometheusFacts | None = None
    metrics_enable: bool = True
