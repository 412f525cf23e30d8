"""ConsoleCluster: the cluster that the console shows and changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from raymq.client.admin.admin import Admin
from raymq.client.producer.producer import Producer


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """One replica of a broker group. `role` is "master", "slave" or "" while unknown; `lag_bytes` and `lag_s` tell how
    far it is behind its master, None where that is not known. `error` is empty if its actor answers."""

    actor: str
    node: str
    role: str
    in_sync: bool
    lag_bytes: int | None = None
    lag_s: float | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class BrokerGroupView:
    """A broker group. `master` is the storage actor that leads, None if nobody does; `epoch` of its lead. `reason`
    says in words what is wrong, and is empty if nothing is. `writable`: its topics may be written to."""

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
class StoreView:
    """One store. Bytes: `log_bytes` it holds, `unflushed_bytes` not on disk yet, `index_behind_bytes` not indexed yet.
    `disk_used` is from 0 to 1, None where unknown. `problem`: why it takes no appends, or its actor's error; else
    empty. `recovered` says how it was opened."""

    actor: str
    broker_name: str
    node: str
    root: str
    queues: int = 0
    log_bytes: int = 0
    unflushed_bytes: int = 0
    index_behind_bytes: int = 0
    disk_used: float | None = None
    disk_free_bytes: int | None = None
    recovered: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class ServerView:
    """Another server: a NameServer, the Controller, a Rebalance or a Pull actor. `state` in words; `error` is empty if
    it answers."""

    actor: str
    kind: str
    state: str
    node: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class ClusterView:
    """The cluster. `problems`: what `raymq status` calls broken, a sentence each; empty if all is well. `nodes`: that
    can be drained, with True for those that are. `report`: the same as `raymq status --json`."""

    name: str
    brokers: tuple[BrokerGroupView, ...]
    stores: tuple[StoreView, ...]
    servers: tuple[ServerView, ...]
    problems: tuple[str, ...] = ()
    nodes: Mapping[str, bool] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    report: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PushInstanceView:
    """A push-consumer instance, by its Pull actor. `node`: the address of the instance's node. `queues`: the number of
    queues that the instance holds. `stuck_threads`: calls of the listener that have run for more than its timeout."""

    instance: str
    node: str
    queues: int
    buffered: int
    consumed: int
    failures: int
    last_error: str = ""
    stuck_threads: int = 0


@dataclass(frozen=True, slots=True)
class PushInstances:
    """The push-consumer instances of one group. `owners`: the instance that holds a queue, by the queue's name.
    `missing`: the Pull actors that did not answer, a sentence each."""

    instances: tuple[PushInstanceView, ...] = ()
    owners: Mapping[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()


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
