"""ConsoleCluster: the cluster that the console shows and changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from raymq.client.admin.admin import Admin
from raymq.client.producer.producer import Producer
from raymq.common.message import MessageQueue
from raymq.tools.console.backend.cluster import AuditEntry, AuditPage, ClusterFigures, ClusterView, Listing
from raymq.tools.console.backend.groups import GroupRow, GroupView, OffsetMove
from raymq.tools.console.backend.topics import TopicRow, TopicView


class ClusterCalls(Protocol):
    """The cluster: who leads, what is stored, what is wrong."""

    def cluster(self) -> ClusterView:
        """The servers and stores; those that do not answer appear with their error."""
        ...

    def figures(self) -> ClusterFigures:
        """The counters of the whole cluster, now. Asked for every 10 s."""
        ...

    def drain(self, node: str, *, drained: bool) -> None:
        """Move all replicas off a node and keep them off, or, with `drained` False, let replicas be there again. On
        return it is ordered, not finished: `cluster` tells how far it is."""
        ...

    def balance(self) -> None:
        """Spread the leads of the broker groups over the nodes. On return it is ordered, not finished."""
        ...

    def clean_store(self, broker_name: str) -> None:
        """Have a broker group's store delete expired messages now."""
        ...

    def set_write_permission(self, broker_name: str, *, writable: bool) -> int:
        """Take writes off a broker group, or give them back; returns how many topics that concerns."""
        ...


class TopicCalls(Protocol):
    """Topics."""

    def topics(self) -> Listing[TopicRow]:
        """All topics but internal ones, sorted, in few calls."""
        ...

    def topic(self, topic: str) -> TopicView:
        """One topic. TopicNotExistError."""
        ...

    def create_topic(
        self,
        topic: str,
        queues: int,
        *,
        message_type: str | None = None,
        reserve_time_s: float | None = None,
        cleanup_policy: str | None = None,
    ) -> None:
        """As Admin.create_topic."""
        ...

    def update_topic(
        self,
        topic: str,
        *,
        queues: int | None = None,
        perm: int | None = None,
        message_type: str | None = None,
        reserve_time_s: float | None = None,
    ) -> None:
        """As Admin.update_topic; None leaves as it is."""
        ...

    def set_order_config(self, topic: str, config: str | None) -> None:
        """As Admin.set_order_config."""
        ...

    def delete_topic(self, topic: str) -> None:
        """As Admin.delete_topic."""
        ...


class GroupCalls(Protocol):
    """Consumer groups."""

    def groups(self) -> Listing[GroupRow]:
        """All groups, sorted, in few calls."""
        ...

    def group(self, group: str) -> GroupView:
        """One group. GroupNotExistError."""
        ...

    def reset_offsets(
        self,
        group: str,
        topic: str,
        to: str | None = None,
        *,
        timestamp_ms: int | None = None,
        offset: int | None = None,
        queue: MessageQueue | None = None,
        dry_run: bool = False,
    ) -> Sequence[OffsetMove]:
        """As Admin.reset_offsets, with the offsets before and after; `dry_run` changes nothing. `to` is "earliest" or
        "latest"."""
        ...

    def clone_offsets(self, source: str, target: str, topic: str, *, dry_run: bool = False) -> Sequence[OffsetMove]:
        """As Admin.clone_offsets: `target` goes on from the offsets of `source`; `dry_run` changes nothing."""
        ...

    def update_group(
        self, group: str, *, consume_enable: bool | None = None, retry_max_times: int | None = None
    ) -> None:
        """As Admin.update_group; None leaves as it is."""
        ...

    def delete_group(self, group: str, *, dead_letters: bool = False) -> None:
        """As Admin.delete_group."""
        ...


class AuditCalls(Protocol):
    """The log of changes."""

    def record_audit(self, entry: AuditEntry) -> None:
        """Keep an entry for good."""
        ...

    def audit(self, *, limit: int = 100, cursor: str | None = None) -> AuditPage:
        """Entries, newest first."""
        ...


class ClusterControl(ClusterCalls, TopicCalls, GroupCalls, AuditCalls, Protocol):
    """The questions and orders of the console that Admin does not have. Calls block, and several threads make them at
    once. They raise RaymqError, whose text the page shows."""


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
