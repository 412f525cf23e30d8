"""The snapshot of facts that the doctor's checks examine. It has plain values, so that tests can write a snapshot by
hand.

If a collector cannot determine a fact, it sets an `error` or leaves the value None. The checks then report the fact as
unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from raymq.common.protocol.status import ClusterStatus


@dataclass(frozen=True, slots=True)
class DirectoryFacts:
    """Facts about a directory that contains stores, or will contain stores.

    `existing_path`: the directory, or its nearest existing parent. The facts about disk, file system and flush times
    describe this path. `used_ratio`: the used share of the disk, 0 to 1, as the store computes it. `max_used_ratio`:
    the used share above which the store deletes old messages at any hour. `refuse_ratio`: the used share above which
    the store refuses messages. `readable`: some of the files that other users may read and the directories that they
    may enter; `readable_count`: the number of all such files and directories. `locks`: the pid of the process that
    holds the lock of each store directory. `fiemap`: True if the file system reports which blocks were written.
    `fdatasync_ms`: the durations of small flushes, ascending.
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
    """Facts about a machine. A process on this machine has collected them: the process of the command, or a Ray task on
    a node.

    `copies`: for each package, the folders of the import path that contain it, in the order of the import path.
    `floors_missing`: server packages that this installation lacks. `token_digest`: a digest for comparing tokens; it
    does not reveal the token. `token_mode`: the mode of the token file; None without a token file. `socket_path_bytes`:
    the length of the longest path of Ray's sockets. `spark`: True if the packages of the extra `spark` are installed.
    `java_home`, `java_version`: the Java that Spark uses on this machine; empty without a usable Java. `java_released`:
    its release date in ISO form, and `java_age_days` the time since then; None if unknown. `java_need`: the Java that
    the installed Spark needs. `java_problem`: why the Java of this machine does not fit; empty if it fits.
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
    spark: bool = False
    java_home: str = ""
    java_version: str = ""
    java_need: str = ""
    java_problem: str = ""
    java_released: str = ""
    java_age_days: int | None = None


@dataclass(frozen=True, slots=True)
class LaneFacts:
    """The result of an attempt to open a lane (direct socket connection) from a node to a server.

    `error`: empty if the lane was opened. `has_tcp`: False if the server has no lane for other nodes.
    """

    server: str
    server_node: str
    error: str = ""
    has_tcp: bool = True


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Facts about a Ray node.

    `machine`: the facts that a task on the node collected; None if the task returned no result, which `error` explains.
    `skew_ms`: the node's clock minus the head node's clock, with an error of up to `skew_error_ms`. `board`: True if
    this Ray session has the Grafana dashboard; None if unknown, and on all nodes except the head node.
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

    `members`: the number of connected consumers. `slowest_topic`: the topic whose oldest unread message is nearest to
    deletion by retention. `lag_ms`: the age of this message in ms. `retention_ms`: how long this topic keeps messages
    (None if the group has no such topic). `lost`: the number of messages that were deleted before the group read them.
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
    """Ray's health-check settings. Ray uses these settings to detect lost nodes."""

    period_ms: int
    timeout_ms: int
    failure_threshold: int


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """Facts about a running raymq cluster.

    `status`: the report of `raymq status`. `groups_left_out`: the number of consumer groups that the doctor did not
    examine, because there were too many groups or the time limit was reached.
    """

    status: ClusterStatus
    nodes: int = 1
    groups: tuple[GroupFacts, ...] = ()
    groups_left_out: int = 0
    groups_error: str = ""
    health: HealthChecks | None = None


@dataclass(frozen=True, slots=True)
class MetricsPort:
    """A node's metrics port. `servers`: the raymq actors for which this port reports a fresh `raymq_up`.

    Ray's agent drops a gauge that was not set for 20 s.
    """

    ip: str
    port: int
    error: str = ""
    servers: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class PrometheusFacts:
    """The Prometheus server that the option --prometheus names. `rules`: the names of the alert rules that it has
    loaded."""

    url: str
    error: str = ""
    rules: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class GatewayFacts:
    """A gateway process, as this machine reaches it at `address`.

    `asked`: False if only programs of the gateway's own node can connect, so the doctor did not ask. `error`: the
    reason why a question was not answered. `certificate_ends_s`: the end of its certificate, in s since 1970; None
    without TLS, or if unknown. `webhook_error`: why the gateway can sign no call of a web hook.
    """

    actor: str
    address: str
    asked: bool = True
    error: str = ""
    certificate_ends_s: float | None = None
    webhook_error: str = ""


@dataclass(frozen=True, slots=True)
class DoctorSnapshot:
    """All facts that the doctor's checks examine.

    `ray_error`: the reason why the facts about the nodes are missing. `cluster_error`: the reason why the facts about
    the raymq cluster are missing. `named`: True if the user gave the address of a Ray cluster, so that a missing Ray
    cluster is a fault. `metrics_enable`: the setting metrics.enable. `gateway_port_error`: the reason why a gateway
    that `raymq up` starts could not listen on this machine.
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
    gateways: tuple[GatewayFacts, ...] = ()
    gateway_port_error: str = ""
