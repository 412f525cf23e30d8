"""ClusterStatus: the report of `raymq status`, as typed values.

The servers' answers are plain data. The launcher passes them to the command as JSON, and `raymq status --json` prints
all of it. The classes in this module have the fields that raymq reads; `ClusterStatus.report` keeps all other fields.
If an answer lacks a field, the field has its default value. The entry of a server that did not answer lacks most
fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from raymq.common.errors import ServiceNotAvailableError
from raymq.common.protocol.store import Hole, ScrubStatus
from raymq.common.protocol.transactions import WaitingTransactions


@dataclass(frozen=True, slots=True)
class ServerReport:
    """The status of one server, by its actor's name. `error`: the reason why the server did not answer, or the problem
    that the server reports; empty if there is no problem."""

    actor: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class RequestsReport:
    """Metrics of the requests of one `kind` that waited for a thread of a server, since the server's start. They are
    the highest number of waiting requests, the longest wait in ms, and the numbers of refused requests."""

    kind: str
    most: int = 0
    longest_ms: float = 0.0
    refused_full: int = 0
    refused_late: int = 0


@dataclass(frozen=True, slots=True)
class DeletedUnread:
    """Number of a topic's messages that were deleted, because the disk was full, before a group had read them."""

    group: str
    topic: str
    messages: int


@dataclass(frozen=True, slots=True)
class BrokerReport(ServerReport):
    """The status of a broker. `ready`: True if the broker has read its state. `waiting_for`: what the broker waits for
    if it is not ready. `storage`: the name of the storage actor with the broker's store. `settings`: the settings that
    differ from raymq.yaml."""

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
    """The status of a store's disk. `disk_ratio`: used part of the disk, from 0 to 1. `disk_free_bytes`: free bytes.
    Both are -1 while unknown. `young_files_deleted`: number of log files that were deleted before their retention time
    because the disk was full."""

    disk_ratio: float = -1.0
    disk_free_bytes: int = -1
    young_files_deleted: int = 0


@dataclass(frozen=True, slots=True)
class ScheduleReport:
    """The delayed messages of a store. `pending`: the number of waiting messages, by level. `late_ms`: the largest
    delay, in ms, between a message's delivery time and its delivery."""

    pending: Mapping[str, int] = field(default_factory=dict)
    late_ms: int = 0


@dataclass(frozen=True, slots=True)
class TransactionsReport:
    """The status of a store's open transactions, which have no outcome yet."""

    waiting: tuple[WaitingTransactions, ...] = ()


@dataclass(frozen=True, slots=True)
class StoreReport(ServerReport):
    """The status of a store; the fields are as in raymq.common.protocol.store.StoreStatus. `closed`: True if the actor
    answers, but cannot open its store. `role`: the role of the replica. `refusal`: the reason why the replica does not
    follow its master. `beside`: names of the other store directories in the same data directory."""

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
    scrub: ScrubStatus = field(default_factory=ScrubStatus)
    requests: tuple[RequestsReport, ...] = ()
    beside: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The store's name: its broker group and its replica number."""
        return self.actor.removeprefix("storage-")

    @property
    def broker_name(self) -> str:
        """The name of the store's broker group."""
        return self.name.rpartition("-")[0]

    @property
    def replica(self) -> str:
        """The store's replica number."""
        return self.name.rpartition("-")[2]

    @property
    def log_bytes(self) -> int:
        """The size of the store's log in bytes."""
        return self.max_physical_offset - self.min_physical_offset

    @property
    def unflushed_bytes(self) -> int:
        """Number of bytes at the log's end that are not on disk yet."""
        return self.max_physical_offset - self.flushed_physical_offset

    @property
    def problem(self) -> str:
        """The reason why the store accepts no messages, or the storage actor's error; empty if there is no
        problem."""
        return self.error or ("" if self.writable else self.not_writable_reason)

    @property
    def disk_used(self) -> float | None:
        """The used fraction of the store's disk, from 0 to 1; None if unknown."""
        return None if self.retention is None or self.retention.disk_ratio < 0 else self.retention.disk_ratio

    @property
    def disk_free_bytes(self) -> int | None:
        """The number of free bytes on the store's disk; None if unknown."""
        return None if self.retention is None or self.retention.disk_free_bytes < 0 else self.retention.disk_free_bytes


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """The status of a replica, as the Controller sees it. `node`: the address of the replica's node. `lag_bytes`,
    `lag_s`: how far the replica lags behind its master, None if unknown. `note`: the Controller's current action for
    the replica. `clock_skew_s`: by how many seconds the clock of the replica's node is ahead of the Controller's clock.
    Its error is at most `clock_error_s`; both are None if unknown."""

    replica: int
    role: str = ""
    node: str | None = None
    lag_bytes: int | None = None
    lag_s: float | None = None
    clock_skew_s: float | None = None
    clock_error_s: float | None = None
    note: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class ReplicaGroupReport:
    """The status of a broker group with several replicas. `reason`: why no replica leads, else empty. `loss`: the
    acknowledged messages that the master lacked when it was elected, else empty. `change`: the current change of the
    group's replicas and what it waits for, else empty."""

    broker: str
    master: int | None = None
    epoch: int | None = None
    in_sync: tuple[int, ...] = ()
    learners: tuple[int, ...] = ()
    min_in_sync_replicas: int = 1
    reason: str = ""
    loss: str = ""
    change: str = ""
    replicas: tuple[ReplicaReport, ...] = ()


@dataclass(frozen=True, slots=True)
class ControllerReport(ServerReport):
    """The status of the Controller, and of the broker groups with several replicas."""

    groups: tuple[ReplicaGroupReport, ...] = ()


@dataclass(frozen=True, slots=True)
class RebalanceReport(ServerReport):
    """The status of a Rebalance actor. `slots`: the slots that the actor holds. Each slot is a share of all consumer
    groups."""

    slots: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PullReport(ServerReport):
    """The status of a Pull actor, with the id of its node."""

    node: str = ""


@dataclass(frozen=True, slots=True)
class ConsoleReport(ServerReport):
    """The status of the web console, with its address."""

    url: str = "-"


@dataclass(frozen=True, slots=True)
class GatewayReport(ServerReport):
    """The status of a gateway process: the address of its node, the address at which it listens, and the number of its
    clients by language. `http`: the address at which it answers HTTP, empty for none. `streams`: number of clients that
    have a stream open. `webhook_error`: why no call of a web hook can be signed, empty if calls can."""

    node: str = ""
    listens: str = "-"
    http: str = ""
    tls: bool = False
    pid: int = 0
    clients: Mapping[str, int] = field(default_factory=dict)
    streams: int = 0
    webhook_error: str = ""


@dataclass(frozen=True, slots=True)
class ConnectedGroup(ServerReport):
    """A consumer group that has members. `actor`: the Rebalance actor that serves the group. `holders`: maps each queue
    to the member that holds it."""

    group: str = ""
    generation: int = 0
    members: tuple[Mapping[str, Any], ...] = ()
    holders: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PushInstanceReport(ServerReport):
    """The status of a push-consumer instance. `actor`: the Pull actor that serves the instance. `holding`: the
    instance's queues. `stuck_threads`: number of listener calls that have run longer than the listener's timeout."""

    instance: str = ""
    holding: tuple[str, ...] = ()
    buffered: int = 0
    consumed: int = 0
    failures: int = 0
    last_error: str = ""
    stuck_threads: int = 0


@dataclass(frozen=True, slots=True)
class StoppedStore:
    """A store whose directory exists on disk, but whose storage actor does not run. The fields name the store, its
    broker group and its directory."""

    store: str
    broker: str
    directory: str


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem that a check found. `check`: the name of the check; `state`: "fail" or "warn"; `seen`: what is wrong;
    `do`: the remedy; `where`: the server or the broker group."""

    check: str
    state: str
    seen: str
    do: str = ""
    where: str = ""


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """The status of all servers of a cluster, as the servers report it. `actors`: the names of all running actors.
    `replication`: the Controller's report, if a Controller runs. `refused`: servers that refuse this user's calls.
    `problems`: the problems that were found; failures come first, then warnings.

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
    gateways: tuple[GatewayReport, ...] = ()
    stopped_stores: tuple[StoppedStore, ...] = ()
    refused: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()
    report: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, report: Mapping[str, Any]) -> ClusterStatus:
        """Convert a report of plain data into a ClusterStatus, which keeps the unchanged report in `report`. Raises
        ServiceNotAvailableError if a value in a server's answer has another type than expected. Servers of another
        version may send such a value."""
        try:
            return replace(msgspec.convert(report, cls), report=report)
        except msgspec.ValidationError as error:
            raise ServiceNotAvailableError(
                f"the servers' status cannot be read: {error}; run the same version of raymq on all nodes"
            ) from None

    @property
    def servers(self) -> tuple[ServerReport, ...]:
        """The reports of all servers, except the console."""
        return (*self.brokers, *self.stores, *self.rebalances, *self.pulls, *self.replication, *self.gateways)

    @property
    def replica_groups(self) -> tuple[ReplicaGroupReport, ...]:
        """The reports of the broker groups with several replicas."""
        return tuple(group for controller in self.replication for group in controller.groups)
