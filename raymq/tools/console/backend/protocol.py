"""Backend: every question and every order of the console.

Calls block, and come from several threads at once. The console bounds each with a timeout, 5 s for lists and 10 s for
the rest, and does not wait longer; the backend bounds its own calls, too. All raise RaymqError, whose text the page
shows. A server that does not answer is no error where others did: it is named among the `missing`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from raymq.client.admin.dead_letters import LetterPlace
from raymq.client.admin.track import MessageTrack
from raymq.common.message import MessageExt, MessageQueue
from raymq.tools.console.backend.cluster import AuditEntry, AuditPage, ClusterFigures, ClusterView, Listing
from raymq.tools.console.backend.groups import GroupRow, GroupView, OffsetMove
from raymq.tools.console.backend.messages import (
    BrowseQuery,
    DeadLetterPage,
    DelayedView,
    LetterReplayed,
    MessagePage,
    NewMessage,
    ProducerClient,
    SentMessage,
    TailBatch,
)
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


class MessageCalls(Protocol):
    """Messages, read without a group."""

    def browse(self, query: BrowseQuery) -> MessagePage:
        """Messages of a topic, bounded. TopicNotExistError, InvalidArgumentError."""
        ...

    def query_by_key(self, topic: str, key: str, *, max_messages: int = 32) -> Sequence[MessageExt]:
        """The newest messages with a key, oldest first."""
        ...

    def query_by_id(self, topic: str, message_id: str) -> Sequence[MessageExt]:
        """The messages that a unique id or an offset message id names; empty if there is none."""
        ...

    def message_at(self, queue: MessageQueue, queue_offset: int) -> MessageExt | None:
        """The message at an offset, None if there is none."""
        ...

    def message_track(self, message: MessageExt) -> Sequence[MessageTrack]:
        """Per group of the message's topic, how far it is with the message."""
        ...

    def send(self, message: NewMessage) -> SentMessage:
        """Send a message, once: it is not repeated when the outcome is unknown."""
        ...

    def deliver_to_group(self, topic: str, message_id: str, group: str) -> int:
        """Have one group get a message again, and no other group; returns how many were sent. It is safe to repeat."""
        ...

    def tail(self, topic: str, positions: Mapping[MessageQueue, int] | None, *, max_messages: int = 100) -> TailBatch:
        """Messages behind `positions`, without waiting for more; None begins at the ends of the queues."""
        ...

    def dead_letters(
        self, group: str, *, replayed: bool = False, limit: int = 50, cursor: str | None = None
    ) -> DeadLetterPage:
        """Dead letters of a group, oldest first; with `replayed` also those that were brought back."""
        ...

    def replay_dead_letters(
        self, group: str, letters: Sequence[LetterPlace] | None, *, rate: float | None = None
    ) -> Iterator[LetterReplayed]:
        """Bring chosen dead letters back, or all with None, at most `rate` a second; gives the result of each as it
        comes. Runs in a thread of its own, without the timeout of the other calls."""
        ...

    def delayed(self, begin_ms: int, end_ms: int, *, limit: int = 100) -> DelayedView:
        """Messages that wait for a time in [`begin_ms`, `end_ms`), ms since 1970."""
        ...

    def recall(self, topic: str, handle: str) -> str:
        """As Producer.recall: have a message that waits for a time of its own never be delivered; returns its unique
        id. RecallError if it is too late."""
        ...

    def producers(self) -> Listing[ProducerClient]:
        """The clients that produce."""
        ...


class AuditCalls(Protocol):
    """The log of changes."""

    def record_audit(self, entry: AuditEntry) -> None:
        """Keep an entry for good."""
        ...

    def audit(self, *, limit: int = 100, cursor: str | None = None) -> AuditPage:
        """Entries, newest first."""
        ...


class Backend(ClusterCalls, TopicCalls, GroupCalls, MessageCalls, AuditCalls, Protocol):
    """All that the console asks for."""
