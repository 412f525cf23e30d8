"""ConsoleCluster: the cluster that the console shows and changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from raymq.client.admin.admin import Admin
from raymq.client.producer.producer import Producer
from raymq.common.protocol.status import ClusterStatus, PushInstanceReport


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """One replica of a broker group. `role`: "master", "slave", or "" while unknown. `lag_bytes`, `lag_s`: how far the
    replica is behind its master, None if unknown. `error`: empty if the replica's actor answers."""

    actor: str
    node: str
    role: str
    in_sync: bool
    lag_bytes: int | None = None
    lag_s: float | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class BrokerGroupView:
    """A broker group. `master`: the storage actor that leads, None without a master. `reason`: what is wrong, in words;
    else empty. `writable`: messages may be sent to the group's topics."""

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
    """A NameServer, the Controller, a Rebalance actor, a Pull actor or the console. `state`: in words. `error`: empty
    if the server answers."""

    actor: str
    kind: str
    state: str
    node: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class ClusterView:
    """The cluster: its `status`, and rows for its broker groups and its other servers.

    `nodes`: the addresses of the nodes that can be drained, True for a drained node. `settings`: the settings that the
    servers report, by name.
    """

    name: str
    status: ClusterStatus
    brokers: tuple[BrokerGroupView, ...]
    servers: tuple[ServerView, ...]
    nodes: Mapping[str, bool] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def problems(self) -> list[str]:
        """The failures that `raymq status` shows, a sentence each: where, what, and what to do."""
        failures = [one for one in self.status.problems if one.state == "fail"]
        return [": ".join(filter(None, (one.where, f"{one.seen}; {one.do}"))) for one in failures]


@dataclass(frozen=True, slots=True)
class PushInstances:
    """The push-consumer instances of one group. `nodes`: the address of a Pull actor's node, by the actor's name.
    `missing`: the Pull actors that did not answer, a sentence each."""

    instances: tuple[PushInstanceReport, ...] = ()
    nodes: Mapping[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()

    @property
    def owners(self) -> dict[str, str]:
        """The instance that holds a queue, by the queue's name."""
        return {queue: one.instance for one in self.instances for queue in one.holding}


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """A change that somebody made or tried: the time `at_ms` (ms since 1970), the user with role and address, the
    change, and its outcome: "done", or the error in words. `arguments` never hold bodies or tokens."""

    at_ms: int
    who: str
    role: str
    address: str
    action: str
    arguments: Mapping[str, str] = field(default_factory=dict)
    outcome: str = "done"


@dataclass(frozen=True, slots=True)
class AuditPage:
    """Entries of the audit log, newest first. `cursor` continues with older entries; None if there are none."""

    entries: tuple[AuditEntry, ...]
    cursor: str | None = None


class ClusterControl(Protocol):
    """The questions and orders of the console that Admin does not have. Calls block, and several threads make them at
    once. They raise RaymqError, whose text the page shows."""

    def cluster(self) -> ClusterView:
        """Return the servers and stores. A server that does not answer has its error in its row."""
        ...

    def push_instances(self, group: str) -> PushInstances:
        """Return the push-consumer instances of a group."""
        ...

    def drain(self, node: str, *, drained: bool) -> None:
        """Order that all replicas leave a node and stay away, or with `drained` False that the node may have replicas
        again. The call does not wait for the moves; `cluster` shows them."""
        ...

    def balance(self) -> None:
        """Order that the masters of the broker groups are spread over the nodes. The call does not wait for that."""
        ...

    def record_audit(self, entry: AuditEntry) -> None:
        """Store an entry in the audit log, as durably as a message."""
        ...

    def audit(self, *, limit: int = 100, cursor: str | None = None) -> AuditPage:
        """Return at most `limit` entries of the audit log, newest first. `cursor`: of the page before."""
        ...


@dataclass(frozen=True, slots=True)
class ConsoleCluster:
    """The cluster that the console shows. Its calls block: the pages make them in a bounded pool of threads
    (raymq.tools.console.web.snapshots), each with a timeout.

    `admin` answers the pages' questions and makes their changes; `producer` sends and recalls messages; `control` does
    what needs the cluster's actors.
    """

    admin: Admin
    producer: Producer
    control: ClusterControl
