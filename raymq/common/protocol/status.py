"""ClusterStatus: the report of `raymq status`, as values.

The servers' answers are plain data: the launcher passes them to the command as JSON, and `raymq status --json` prints
them whole. The classes here have the fields that raymq reads; `ClusterStatus.report` keeps all others. A field that an
answer lacks, as in the entry of a server that did not answer, has its default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from raymq.common.errors import ServiceNotAvailableError
from raymq.common.protocol.store import Hole
from raymq.common.protocol.transactions import WaitingTransactions


@dataclass(frozen=True, slots=True)
class ServerReport:
    """One server, by its actor's name. `error`: the reason why the server did not answer, or what it reports as broken;
    empty if all is well."""

    actor: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class RequestsReport:
    """The requests of one `kind` that waited for a thread of a server: the highest number of waiting requests, the
    longest wait in ms, and the numbers of refused requests, since the server's start."""

    kind: str
    most: int = 0
    longest_ms: float = 0.0
    refused_full: int = 0
    refused_late: int = 0


@dataclass(frozen=True, slots=True)
class DeletedUnread:
    """The number of messages of a topic that a full disk deleted before a group read them."""

    group: str
    topic: str
    messages: int


@dataclass(frozen=True, slots=True)
class BrokerReport(ServerReport):
    """A broker. `ready`: the broker has read its state; else `waiting_for` says what it waits for. `storage`: the actor
    of its store. `settings`: the settings that differ from raymq.yaml."""

    broker: str = ""
    ready: bool = False
    waiting_for: str = ""
    topics: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    storage: str = ""
    deleted_unread: tuple[DeletedUnread, ...] = ()
    requests: tuple[RequestsReport, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of the broker group."""
        return self.broker or self.actor


@dataclass(frozen=True, slots=True)
class RetentionReport:
    """A store's disk: its use from 0 to 1 and its free bytes, -1 while unknown. `young_files_deleted`: the number of
    log files that a full disk took before their time."""

    disk_ratio: float = -1.0
    disk_free_bytes: int = -1
    young_files_deleted: int = 0


@dataclass(frozen=True, slots=True)
class ScheduleReport:
    """The delayed messages of a store: how many wait, by level, and how late the latest delivery is, in ms."""

    pending: Mapping[str, int] = field(default_factory=dict)
    late_ms: int = 0


@dataclass(frozen=True, slots=True)
class TransactionsReport:
    """The transactions of a store that have no outcome yet."""

    waiting: tuple[WaitingTransactions, ...] = ()


@dataclass(frozen=True, slots=True)
class StoreReport(ServerReport):
    """A store, as raymq.common.protocol.store.StoreStatus describes it. `closed`: the actor answers, and cannot open
    its store. `role`: of a replica. `refusal`: the reason why the replica does not follow its master. `beside`: names
    of directories in the same data directory."""

    closed: bool = False
    pid: int = 0
    root: str = ""
    queues: int = 0
    min_physical_offset: int = 0
    max_physical_offset: int = 0
    flushed_physical_offset: int = 0
    index_behind_bytes: int = 0
    recovered: str = ""
    cut_bytes: int = 0
    writable: bool = False
    not_writable_reason: str = ""
    disk_failure: str = ""
    role: str = ""
    refusal: str = ""
    retention: RetentionReport | None = None
    schedule: ScheduleReport | None = None
    transactions: TransactionsReport = TransactionsReport()
    holes: tuple[Hole, ...] = ()
    damaged_files: tuple[str, ...] = ()
    requests: tuple[RequestsReport, ...] = ()
    beside: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The store's name: its broker group and its replica."""
        return self.actor.removeprefix("storage-")

    @property
    def broker_name(self) -> str:
        """The store's broker group."""
        return self.name.rpartition("-")[0]

    @property
    def replica(self) -> str:
        """The store's replica."""
        return self.name.rpartition("-")[2]

    @property
    def log_bytes(self) -> int:
        """The size of the log."""
        return self.max_physical_offset - self.min_physical_offset

    @property
    def unflushed_bytes(self) -> int:
        """The end of the log that is not on disk yet, in bytes."""
        return self.max_physical_offset - self.flushed_physical_offset

    @property
    def problem(self) -> str:
        """The reason why the store takes no messages, or the actor's error; else empty."""
        return self.error or ("" if self.writable else self.not_writable_reason)

    @property
    def disk_used(self) -> float | None:
        """The use of the disk from 0 to 1, None if unknown."""
        return None if self.retention is None or self.retention.disk_ratio < 0 else self.retention.disk_ratio

    @property
    def disk_free_bytes(self) -> int | None:
        """The free bytes of the disk, None if unknown."""
        return None if self.retention is None or self.retention.disk_free_bytes < 0 else self.retention.disk_free_bytes


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """A replica of a broker group, as the Controller sees it. `node`: the address of its node. `lag_bytes`, `lag_s`:
    how far the replica is behind its master, None if unknown. `note`: what the Controller does with the replica."""

    replica: int
    role: str = ""
    node: str | None = None
    lag_bytes: int | None = None
    lag_s: float | None = None
    note: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class ReplicaGroupReport:
    """A broker group with several replicas. `reason`: why nobody leads; else empty. `loss`: what the master lacked when
    it was elected; else empty."""

    broker: str
    master: int | None = None
    epoch: int | None = None
    in_sync: tuple[int, ...] = ()
    learners: tuple[int, ...] = ()
    min_in_sync_replicas: int = 1
    reason: str = ""
    loss: str = ""
    replicas: tuple[ReplicaReport, ...] = ()


@dataclass(frozen=True, slots=True)
class ControllerReport(ServerReport):
    """The Controller, and the broker groups with several replicas."""

    groups: tuple[ReplicaGroupReport, ...] = ()


@dataclass(frozen=True, slots=True)
class RebalanceReport(ServerReport):
    """A Rebalance actor, and the slots that it holds."""

    slots: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PullReport(ServerReport):
    """A Pull actor, and the id of its node."""

    node: str = ""


@dataclass(frozen=True, slots=True)
class ConsoleReport(ServerReport):
    """The console, and its address."""

    url: str = "-"


@dataclass(frozen=True, slots=True)
class ConnectedGroup(ServerReport):
    """A consumer group with members, at the Rebalance actor `actor`. `holders`: the member that holds a queue, by
    queue."""

    group: str = ""
    generation: int = 0
    members: tuple[Mapping[str, Any], ...] = ()
    holders: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PushInstanceReport(ServerReport):
    """A push-consumer instance, at the Pull actor `actor`. `holding`: its queues. `stuck_threads`: calls of the
    listener that have run for more than its timeout."""

    instance: str = ""
    holding: tuple[str, ...] = ()
    buffered: int = 0
    consumed: int = 0
    failures: int = 0
    last_error: str = ""
    stuck_threads: int = 0


@dataclass(frozen=True, slots=True)
class StoppedStore:
    """A store on disk that does not run, with its broker group and its directory."""

    store: str
    broker: str
    directory: str


@dataclass(frozen=True, slots=True)
class Problem:
    """A finding about something broken or damaged. `check`: the check that found it; `state`: "fail" or "warn";
    `seen`: what is wrong; `do`: the remedy; `where`: the server or the broker group."""

    check: str
    state: str
    seen: str
    do: str = ""
    where: str = ""


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """The state of all servers, by their own answers. `actors`: the names of all running actors. `replication`: the
    Controller, if one runs. `refused`: servers that do not answer this user. `problems`: failures first.

    `report`: the plain data of `raymq status --json`.
    """

    actors: tuple[str, ...] = ()
    brokers: tuple[BrokerReport, ...] = ()
    stores: tuple[StoreReport, ...] = ()
    rebalances: tuple[RebalanceReport, ...] = ()
    pulls: tuple[PullReport, ...] = ()
    groups: tuple[ConnectedGroup, ...] = ()
    instances: tuple[PushInstanceReport, ...] = ()
    replication: tuple[ControllerReport, ...] = ()
    consoles: tuple[ConsoleReport, ...] = ()
    stopped_stores: tuple[StoppedStore, ...] = ()
    refused: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()
    report: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, report: Mapping[str, Any]) -> ClusterStatus:
        """Read a report, which stays as it is in `report`. ServiceNotAvailableError if a server's answer has a value of
        another type, as a server of another version may send."""
        try:
            return replace(msgspec.convert(report, cls), report=report)
        except msgspec.ValidationError as error:
            raise ServiceNotAvailableError(
                f"the servers' status cannot be read: {error}; run the same version of raymq on all nodes"
            ) from None

    @property
    def servers(self) -> tuple[ServerReport, ...]:
        """All servers that report their state, except the console."""
        return (*self.brokers, *self.stores, *self.rebalances, *self.pulls, *self.replication)

    @property
    def replica_groups(self) -> tuple[ReplicaGroupReport, ...]:
        """The broker groups with several replicas."""
        return tuple(group for controller in self.replication for group in controller.groups)
