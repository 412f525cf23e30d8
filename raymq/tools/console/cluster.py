"""ConsoleCluster: the cluster that the web console shows and changes. Also the data classes of the console's
pages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from raymq.client.admin.admin import Admin
from raymq.client.producer.producer import Producer
from raymq.common.protocol.status import ClusterStatus, PushInstanceReport


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """One replica of a broker group. `role`: "master", "slave", or "" while unknown. `lag_bytes`, `lag_s`: the
    replica's lag relative to the master, None if unknown. `error`: empty if the replica's actor answers."""

    actor: str
    node: str
    role: str
    in_sync: bool
    lag_bytes: int | None = None
    lag_s: float | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class BrokerGroupView:
    """The state of a broker group. `master`: the storage actor that is the master, None without a master. `reason`: a
    description of the fault; empty if there is no fault. `writable`: True if messages may be sent to the group's
    topics."""

    name: str
    ready: bool
    master: str | None
    epoch: int | None
    replicas: tuple[ReplicaView, ...]
    topics: int = 0
    groups: int = 0
    writable: bool = True
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ServerView:
    """The state of a server: a NameServer, the Controller, a Rebalance actor, a Pull actor, the console or a
    gateway. `state`: a text for people. `error`: the reason why the server does not answer; empty if it answers."""

    actor: str
    kind: str
    state: str
    node: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class ClusterView:
    """The state of the cluster: its `status`, and rows for its broker groups and its other servers.

    `nodes`: the addresses of the nodes that can be drained; the value is True for a drained node. `settings`: the
    settings that the servers report, by the setting's name.
    """

    name: str
    status: ClusterStatus
    brokers: tuple[BrokerGroupView, ...]
    servers: tuple[ServerView, ...]
    nodes: Mapping[str, bool] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def problems(self) -> list[str]:
        """The faults that `raymq status` shows. Each is one sentence with the server, the fault, and what to
        do."""
        failures = [one for one in self.status.problems if one.state == "fail"]
        return [": ".join(filter(None, (one.where, f"{one.seen}; {one.do}"))) for one in failures]


@dataclass(frozen=True, slots=True)
class PushInstances:
    """The push-consumer instances of one group. `nodes`: maps the name of each Pull actor to the address of its node.
    `missing`: a sentence for each Pull actor that did not answer."""

    instances: tuple[PushInstanceReport, ...] = ()
    nodes: Mapping[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()

    @property
    def owners(self) -> dict[str, str]:
        """Maps each queue's name to the push-consumer instance that consumes the queue."""
        return {queue: one.instance for one in self.instances for queue in one.holding}


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """A change that a user made or tried in the console. It has the time `at_ms` (ms since 1970), the user with role
    and address, the change, and its outcome ("done", or the error text). `arguments` never contain message bodies or
    tokens."""

    at_ms: int
    who: str
    role: str
    address: str
    action: str
    arguments: Mapping[str, str] = field(default_factory=dict)
    outcome: str = "done"


@dataclass(frozen=True, slots=True)
class AuditPage:
    """A page of audit log entries, newest first. `cursor` is the position of the next page with older entries; None if
    no older entries exist."""

    entries: tuple[AuditEntry, ...]
    cursor: str | None = None


class ClusterControl(Protocol):
    """Interface of the console's requests to the cluster that Admin does not offer. Calls block, and several threads
    may call at once. They raise RaymqError, whose text the page shows."""

    def cluster(self) -> ClusterView:
        """Return the state of all servers and stores. If a server does not answer, its row contains the error."""
        ...

    def push_instances(self, group: str) -> PushInstances:
        """Return the push-consumer instances of a group."""
        ...

    def drain(self, node: str, *, drained: bool) -> None:
        """Start moving all replicas off a node, and place no new replicas there. If `drained` is False, allow replicas
        on the node again. The call does not wait for the moves; `cluster` shows them."""
        ...

    def balance(self) -> None:
        """Start spreading the masters of the broker groups over the nodes. The call does not wait until the masters
        have changed."""
        ...

    def record_audit(self, entry: AuditEntry) -> None:
        """Store an entry in the audit log, as durably as a message."""
        ...

    def audit(self, *, limit: int = 100, cursor: str | None = None) -> AuditPage:
        """Return at most `limit` entries of the audit log, newest first. `cursor`: the cursor of the previous page;
        None for the first page."""
        ...


@dataclass(frozen=True, slots=True)
class ConsoleCluster:
    """The cluster that the web console shows. Its calls block, so the pages make them in a bounded pool of threads
    (raymq.tools.console.web.snapshots), each call with a timeout.

    `admin` answers the pages' queries and makes their changes; `producer` sends and recalls messages; `control` makes
    the requests that need the cluster's actors.
    """

    admin: Admin
    producer: Producer
    control: ClusterControl
