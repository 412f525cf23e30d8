"""Values about the cluster as a whole: its servers, its stores, what is wrong with them, what was counted, and who
changed what in the console.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

Row_co = TypeVar("Row_co", covariant=True)


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """A server that gave no answer in time; `reason` is the error in words."""

    server: str
    reason: str


@dataclass(frozen=True, slots=True)
class Listing(Generic[Row_co]):
    """Rows that answered, and the servers that did not: a listing with `missing` ones is not complete."""

    rows: tuple[Row_co, ...]
    missing: tuple[NoAnswer, ...] = ()


@dataclass(frozen=True, slots=True)
class ClusterFigures:
    """Counters of the whole cluster, since its servers started: they only grow, until a server restarts.

    `messages_in`, `bytes_in`: put into topics; `messages_out`: committed by groups. `dead_letters` and `delayed` are
    those that are there now, not counters. `at_ms`: the time of the sample. `topic_messages`: put into each topic;
    `group_lags`: messages that each group has not committed now.
    """

    at_ms: int
    messages_in: int
    messages_out: int
    bytes_in: int
    dead_letters: int = 0
    delayed: int = 0
    topic_messages: Mapping[str, int] = field(default_factory=dict)
    group_lags: Mapping[str, int] = field(default_factory=dict)


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
class AuditEntry:
    """One change, tried: when (ms since 1970), who in which role from which address, what, and how it ended.

    `outcome` is "done", or the error in words. `arguments` never hold bodies or tokens.
    """

    at_ms: int
    who: str
    role: str
    address: str
    action: str
    arguments: Mapping[str, str] = field(default_factory=dict)
    outcome: str = "done"


@dataclass(frozen=True, slots=True)
class AuditPage:
    """Entries, newest first. `cursor` goes on with older ones, None at the end."""

    entries: tuple[AuditEntry, ...]
    cursor: str | None = None
