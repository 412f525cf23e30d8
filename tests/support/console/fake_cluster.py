"""FakeCluster: a small cluster in memory, with the calls of Admin, Producer and ClusterControl that the console makes.

Tests change its fields as they like: `errors` by the name of a call make it raise, `gates` make it wait for an event.
`calls` are the changes that were made, as (name, arguments).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack, cast

from raymq.client.admin.admin import Admin
from raymq.client.admin.browse import Page
from raymq.client.admin.dead_letters import DeadLetter, DeadLetters, LetterPlace, Replayed
from raymq.client.admin.delayed import END_OF_TIME_MS, Delayed, DelayedMessage
from raymq.client.admin.messages import Arrived
from raymq.client.admin.replay import REPLAY_MAX_MESSAGES, Replay
from raymq.client.admin.track import MessageTrack, TrackState
from raymq.client.consumer.pull_once import has_text
from raymq.client.producer.producer import Producer
from raymq.client.producer.queue_selector import DestinationOptions
from raymq.common.errors import GroupNotExistError, OffsetOutOfRangeError, TopicExistsError, TopicNotExistError
from raymq.common.message import (
    Message,
    MessageExt,
    MessageQueue,
    PullResult,
    PullStatus,
    SendResult,
    SendStatus,
)
from raymq.common.names import check_user_topic
from raymq.common.protocol.clients import ProducerConnection
from raymq.common.protocol.group import GroupConfig
from raymq.common.protocol.recall import RecallHandle
from raymq.common.protocol.route import BrokerData, QueueData, TopicRoute
from raymq.tools.console.backend.cluster import (
    AuditEntry,
    AuditPage,
    BrokerGroupView,
    ClusterFigures,
    ClusterView,
    Listing,
    NoAnswer,
    ReplicaView,
    ServerView,
    StoreView,
)
from raymq.tools.console.backend.groups import GroupInstance, GroupQueue, GroupRow, GroupView, MemberRow, OffsetMove
from raymq.tools.console.backend.topics import RouteRow, TopicGroup, TopicQueue, TopicRow, TopicView
from raymq.tools.console.cluster import ConsoleCluster

NOW_MS = 1_795_400_000_000
"""The time at which everything in a FakeCluster happened."""
BROKERS = ("broker-a", "broker-b")
NODES = ("10.0.0.11", "10.0.0.12")


def fake_message(
    topic: str = "orders",
    body: bytes = b'{"order": 1}',
    *,
    queue_offset: int = 0,
    queue_id: int = 0,
    broker_name: str = "broker-a",
    tags: str | None = "paid",
    keys: tuple[str, ...] = ("k1",),
    properties: Mapping[str, str] | None = None,
    message_id: str = "",
    at_ms: int = NOW_MS,
) -> MessageExt:
    """A message as a store returns it."""
    place = queue_offset * 4 + queue_id
    values: dict[str, Any] = {
        "topic": topic,
        "body": body,
        "tags": tags,
        "keys": keys,
        "properties": dict(properties or {}),
        "flag": 0,
        "broker_name": broker_name,
        "queue_id": queue_id,
        "queue_offset": queue_offset,
        "physical_offset": place * 256,
        "born_timestamp_ms": at_ms - 3,
        "store_timestamp_ms": at_ms,
        "born_host": "10.0.0.1:50000",
        "store_host": "10.0.0.11:10911",
        "message_id": message_id or f"0A0000010000000000000000{place:08X}",
        "offset_message_id": f"0A00000B00002A9F{place * 256:016X}",
        "reconsume_times": 0,
        "sys_flag": 0,
        "system_properties": {"UNIQ_KEY": f"{place:032X}"},
    }
    names = MessageExt.__match_args__
    return MessageExt(**{name: values[name] for name in names if name in values})


class FakeCluster:
    """The cluster: two broker groups, a few topics and groups."""

    def __init__(self) -> None:
        self.errors: dict[str, Exception] = {}
        self.gates: dict[str, threading.Event] = {}
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.asked: list[str] = []
        self.audit_entries: list[AuditEntry] = []
        self.missing: tuple[NoAnswer, ...] = ()
        self.problems: tuple[str, ...] = ()
        self.writable = dict.fromkeys(BROKERS, True)
        self.drained = dict.fromkeys(NODES, False)
        self.figure_list: list[ClusterFigures] = []
        self.topic_rows = {
            row.topic: row
            for row in (
                TopicRow("orders", 8, "RW", 1_204_554, 812.4, 2, {"message.type": "NORMAL"}),
                TopicRow("payments", 4, "RW", 88_120, 12.0, 1, {"message.type": "FIFO"}),
                TopicRow("audit-log", 4, "R", 0, 0.0, 0, {}),
            )
        }
        self.group_rows = {
            row.group: row
            for row in (
                GroupRow("billing", "PUSH", "CLUSTERING", 3, 1_520, 95_000, 4, 2),
                GroupRow("reports", "PULL", "CLUSTERING", 1, 0, 0, 0, 0),
                GroupRow("search", "", "", 0, 18, 3_000, 0, 0, consume_enable=False),
            )
        }
        self.configs = {name: GroupConfig(name) for name in self.group_rows}
        self.messages = {
            "orders": [
                fake_message(queue_offset=n // 2, queue_id=n % 2, body=b'{"order": %d}' % n, keys=(f"k{n}",))
                for n in range(60)
            ]
        }
        self.letters = {
            "billing": [DeadLetter(fake_message("%DLQ%billing", queue_offset=n), "orders", False) for n in range(2)]
        }
        self.delayed_messages = [DelayedMessage("orders", NOW_MS + 60_000 * n, 0, fake_message()) for n in range(3)]
        self.producers = [ProducerConnection("10.0.0.1@4711", "10.0.0.1", 4711, "shop", 3.0)]

    def console_cluster(self) -> ConsoleCluster:
        """The cluster as the console is given it."""
        return ConsoleCluster(cast(Admin, self), cast(Producer, self), self)

    def _begin(self, call: str) -> None:
        self.asked.append(call)
        if call in self.gates:
            assert self.gates[call].wait(60), f"nobody opened the gate of {call}"
        if call in self.errors:
            raise self.errors[call]

    def _change(self, call: str, **arguments: Any) -> None:
        self._begin(call)
        self.calls.append((call, arguments))

    def _row(self, topic: str) -> TopicRow:
        if topic not in self.topic_rows:
            raise TopicNotExistError(topic)
        return self.topic_rows[topic]

    def _group(self, group: str) -> GroupRow:
        if group not in self.group_rows:
            raise GroupNotExistError(group)
        return self.group_rows[group]

    def _queues(self, topic: str) -> list[MessageQueue]:
        count = self._row(topic).queues
        return sorted(MessageQueue(topic, BROKERS[n % 2], n // 2) for n in range(count))

    # The cluster

    def cluster(self) -> ClusterView:
        self._begin("cluster")
        brokers = tuple(
            BrokerGroupView(
                name,
                True,
                f"storage-{name}-0",
                7,
                tuple(
                    ReplicaView(f"storage-{name}-{n}", node, "slave" if n else "master", True, 0, 0.0)
                    for n, node in enumerate(NODES)
                ),
                len(self.topic_rows),
                len(self.group_rows),
                self.writable[name],
            )
            for name in BROKERS
        )
        stores = tuple(
            StoreView(
                replica.actor, broker.name, replica.node, f"/var/raymq/{broker.name}", 16, 5 << 30, 4_096, 0, 0.41,
                120 << 30, "clean shutdown",
            )
            for broker in brokers
            for replica in broker.replicas
        )  # fmt: skip
        servers = (
            ServerView("nameserver-0", "NameServer", "ready", NODES[0]),
            ServerView("controller", "Controller", "ready", NODES[0]),
            ServerView("rebalance-0", "Rebalance", "serves 2 groups", NODES[0]),
            ServerView("pull-0", "Pull", "3 instances", NODES[1]),
        )
        return ClusterView("raymq", brokers, stores, servers, self.problems, dict(self.drained), {"broker_groups": "2"})

    def figures(self) -> ClusterFigures:
        self._begin("figures")
        if self.figure_list:
            return self.figure_list.pop(0)
        return ClusterFigures(NOW_MS, 1_000, 900, 100_000, 2, 3)

    def drain(self, node: str, *, drained: bool) -> None:
        self._change("drain", node=node, drained=drained)
        self.drained[node] = drained

    def balance(self) -> None:
        self._change("balance")

    def clean_store(self, broker_name: str) -> None:
        self._change("clean_store", broker_name=broker_name)

    def set_write_permission(self, broker_name: str, *, writable: bool) -> int:
        self._change("set_write_permission", broker_name=broker_name, writable=writable)
        self.writable[broker_name] = writable
        return len(self.topic_rows)

    # Topics

    def topics(self) -> Listing[TopicRow]:
        self._begin("topics")
        return Listing(tuple(self.topic_rows[name] for name in sorted(self.topic_rows)), self.missing)

    def topic(self, topic: str) -> TopicView:
        self._begin("topic")
        row = self._row(topic)
        queues = self._queues(topic)
        per_queue = (row.messages or 0) // len(queues)
        return TopicView(
            topic,
            row.perm,
            tuple(TopicQueue(queue, 100, 100 + per_queue, NOW_MS - 3_600_000) for queue in queues),
            tuple(TopicGroup(group.group, group.members or 0, group.lag or 0, group.lag_ms or 0)
                  for group in self.group_rows.values()),
            tuple(RouteRow(name, row.queues // 2, row.queues // 2, row.perm, f"storage-{name}-0", NODES[0])
                  for name in BROKERS),
            row.attributes,
            rate=row.rate,
            bytes_rate=(row.rate or 0) * 512,
        )  # fmt: skip

    def create_topic(
        self,
        topic: str,
        queues: int,
        *,
        message_type: str | None = None,
        reserve_time_s: float | None = None,
        cleanup_policy: str | None = None,
    ) -> None:
        check_user_topic(topic)
        if topic in self.topic_rows:
            raise TopicExistsError(topic, "it has other queues")
        self._change("create_topic", topic=topic, queues=queues, message_type=message_type,
                     reserve_time_s=reserve_time_s, cleanup_policy=cleanup_policy)  # fmt: skip
        self.topic_rows[topic] = TopicRow(topic, queues, messages=0, rate=0.0, groups=0)

    def update_topic(
        self,
        topic: str,
        *,
        queues: int | None = None,
        perm: int | None = None,
        message_type: str | None = None,
        reserve_time_s: float | None = None,
    ) -> None:
        row = self._row(topic)
        self._change("update_topic", topic=topic, queues=queues, perm=perm, message_type=message_type,
                     reserve_time_s=reserve_time_s)  # fmt: skip
        if queues is not None:
            row = replace(row, queues=queues)
        if perm is not None:
            row = replace(row, perm={2: "W", 4: "R", 6: "RW"}[perm])
        self.topic_rows[topic] = row

    def set_order_config(self, topic: str, config: str | None) -> None:
        self._row(topic)
        self._change("set_order_config", topic=topic, config=config)

    def delete_topic(self, topic: str) -> None:
        self._row(topic)
        self._change("delete_topic", topic=topic)
        del self.topic_rows[topic]

    # Groups

    def groups(self) -> Listing[GroupRow]:
        self._begin("groups")
        return Listing(tuple(self.group_rows[name] for name in sorted(self.group_rows)), self.missing)

    def group(self, group: str) -> GroupView:
        self._begin("group")
        row = self._group(group)
        members = tuple(
            MemberRow(f"10.0.0.1@{n}", "10.0.0.1", 4_000 + n, row.consume_type, row.message_model, ("orders: *",), 2.5)
            for n in range(row.members or 0)
        )
        queues = tuple(
            GroupQueue(queue, members[n % len(members)].client_id if members else "", 100 + n, 100 + n + lag, lag,
                       95_000 if lag else 0)
            for n, (queue, lag) in enumerate((queue, (row.lag or 0) // 8) for queue in self._queues("orders"))
        )  # fmt: skip
        instances = tuple(
            GroupInstance(f"{group}@{member.pid}", NODES[0], 3, 120, 55_000, 7, "ValueError: no such order", 0)
            for member in members
            if row.consume_type == "PUSH"
        )
        return GroupView(
            self.configs[group], members, queues, instances, row.lag or 0, row.lag_ms or 0, row.retries or 0,
            row.dead_letters or 0,
        )  # fmt: skip

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
        self._group(group)
        queues = self._queues(topic) if queue is None else [queue]
        if dry_run:
            self._begin("reset_offsets")
        else:
            self._change("reset_offsets", group=group, topic=topic, to=to, timestamp_ms=timestamp_ms, offset=offset,
                         queue=queue)  # fmt: skip
        new = offset if offset is not None else 100 if to == "earliest" else 250
        return [OffsetMove(one, 120 if one.queue_id else None, new) for one in queues]

    def clone_offsets(self, source: str, target: str, topic: str, *, dry_run: bool = False) -> Sequence[OffsetMove]:
        self._group(source)
        if dry_run:
            self._begin("clone_offsets")
        else:
            self._change("clone_offsets", source=source, target=target, topic=topic)
        return [OffsetMove(queue, 120, 180) for queue in self._queues(topic)]

    def update_group(
        self, group: str, *, consume_enable: bool | None = None, retry_max_times: int | None = None
    ) -> None:
        row = self._group(group)
        self._change("update_group", group=group, consume_enable=consume_enable, retry_max_times=retry_max_times)
        if consume_enable is not None:
            self.group_rows[group] = replace(row, consume_enable=consume_enable)
            self.configs[group] = replace(self.configs[group], consume_enable=consume_enable)
        if retry_max_times is not None:
            self.configs[group] = replace(self.configs[group], retry_max_times=retry_max_times)

    def delete_group(self, group: str, *, dead_letters: bool = False) -> None:
        self._group(group)
        self._change("delete_group", group=group, dead_letters=dead_letters)
        del self.group_rows[group]

    # Messages

    def topic_route(self, topic: str) -> TopicRoute:
        self._begin("topic_route")
        queues = Counter(queue.broker_name for queue in self._queues(topic))
        brokers = {name: BrokerData("raymq", name, {0: f"storage-{name}-0"}) for name in queues}
        return TopicRoute(topic, brokers, tuple(QueueData(name, count, count, 6) for name, count in queues.items()))

    def browse(
        self,
        topic: str,
        *,
        queue: MessageQueue | None = None,
        begin_ms: int | None = None,
        end_ms: int | None = None,
        begin_offset: int | None = None,
        newest_first: bool = True,
        tags: str = "*",
        contains: str = "",
        limit: int = 50,
        max_scanned: int = 10_000,
        max_ms: int = 5_000,
        cursor: str | None = None,
        whole_bodies: bool = True,
    ) -> Page:
        self._begin("browse")
        self._row(topic)
        found = [
            message
            for message in self.messages.get(topic, [])
            if has_text(message, contains.encode())
            and (queue is None or message.queue == queue)
            and tags in ("*", "", message.tags)
            and (begin_offset is None or message.queue_offset >= begin_offset)
            and (begin_ms is None or message.store_timestamp_ms >= begin_ms)
            and (end_ms is None or message.store_timestamp_ms < end_ms)
        ]
        if newest_first:
            found.reverse()
        start = int(cursor or 0)
        part = found[start : start + limit]
        more = start + len(part) < len(found)
        return Page(tuple(part), str(start + len(part)) if more else None, len(part), more)

    def query_by_key(
        self,
        topic: str,
        key: str,
        *,
        max_messages: int = 32,
        begin_ms: int = 0,
        end_ms: int = 2**63 - 1,
        broker_name: str | None = None,
    ) -> list[MessageExt]:
        self._begin("query_by_key")
        self._row(topic)
        return [message for message in self.messages.get(topic, []) if key in message.keys][-max_messages:]

    def query_by_id(self, topic: str, message_id: str) -> list[MessageExt]:
        self._begin("query_by_id")
        self._row(topic)
        return [
            message
            for message in self.messages.get(topic, [])
            if message_id in (message.message_id, message.offset_message_id)
        ]

    def pull(
        self, queue: MessageQueue, offset: int, *, max_messages: int = 32, tags: str = "*", wait_s: float = 0.0
    ) -> PullResult:
        """Offsets of a queue may have gaps, as after a deletion: the next message is at a later offset then."""
        self._begin("pull")
        self._row(queue.topic)
        found = [one for one in self.messages.get(queue.topic, []) if one.queue == queue and one.queue_offset >= offset]
        if not found:
            raise OffsetOutOfRangeError(str(queue), offset, 0, offset)
        return PullResult(PullStatus.FOUND, tuple(found[:max_messages]), offset + 1, 0, offset + len(found))

    def message_track(self, message: MessageExt) -> list[MessageTrack]:
        self._begin("message_track")
        return [
            MessageTrack("billing", TrackState.RETRYING, 2, "waits for its third attempt"),
            MessageTrack("reports", TrackState.CONSUMED),
        ]

    def send(
        self, message: Message, *, timeout_s: float | None = None, **where: Unpack[DestinationOptions]
    ) -> SendResult:
        self._row(message.topic)
        self._change("send", message=message)
        queue = self._queues(message.topic)[0]
        stored = self.messages.setdefault(message.topic, [])
        sent = fake_message(
            message.topic, message.body, queue_offset=1_000 + len(stored), broker_name=queue.broker_name,
            tags=message.tags, keys=tuple(message.keys), properties=message.properties,
        )  # fmt: skip
        stored.append(sent)
        return SendResult(SendStatus.SEND_OK, sent.message_id, sent.offset_message_id, queue, sent.queue_offset)

    def replay(
        self,
        topic: str,
        *,
        key: str | None = None,
        ids: Sequence[str] = (),
        begin_ms: int | None = None,
        end_ms: int | None = None,
        to_topic: str | None = None,
        to_group: str | None = None,
        name: str = "",
        max_messages: int = REPLAY_MAX_MESSAGES,
        rate: float | None = None,
        dry_run: bool = False,
        progress: Callable[[int], None] = lambda count: None,
    ) -> Replay:
        assert to_group is not None
        self._group(to_group)
        self._change("replay", topic=topic, ids=ids, to_group=to_group)
        return Replay(f"%RETRY%{to_group}", 1, 1, 0, True)

    def tail(
        self, topic: str, positions: Mapping[MessageQueue, int] | None = None, *, max_messages: int = 100
    ) -> Arrived:
        """Positions count the messages of the list; they are kept at the first queue."""
        self._begin("tail")
        queue = self._queues(topic)[0]
        stored = self.messages.get(topic, [])
        start = len(stored) if positions is None else positions[queue]
        new = stored[start:]
        skipped = max(len(new) - max_messages, 0)
        return Arrived(tuple(new[skipped:]), {queue: len(stored)}, skipped)

    def dead_letters(self, group: str) -> DeadLetters:
        self._begin("dead_letters")
        self._group(group)
        return cast(DeadLetters, FakeLetters(self, group))

    def delayed(self, begin_ms: int = 0, end_ms: int = END_OF_TIME_MS, *, limit: int = 100) -> Delayed:
        self._begin("delayed")
        found = sorted(self.delayed_messages, key=lambda one: one.due_ms)
        hours = [3, 5, 8, *[0] * 21]
        return Delayed({"3": 12, "deliver_at": 4}, tuple(hours), 0, tuple(found[:limit]), len(found) > limit)

    def recall(self, topic: str, handle: str, *, timeout_s: float | None = None) -> str:
        self._change("recall", topic=topic, handle=handle)
        wanted = RecallHandle.parse(handle).message_id
        self.delayed_messages = [one for one in self.delayed_messages if one.message.message_id != wanted]
        return wanted

    def producer_connections(self, group: str | None = None) -> list[ProducerConnection]:
        self._begin("producer_connections")
        return list(self.producers)

    # The audit

    def record_audit(self, entry: AuditEntry) -> None:
        self._begin("record_audit")
        self.audit_entries.append(entry)

    def audit(self, *, limit: int = 100, cursor: str | None = None) -> AuditPage:
        self._begin("audit")
        newest = self.audit_entries[::-1]
        start = int(cursor or 0)
        more = start + limit < len(newest)
        return AuditPage(tuple(newest[start : start + limit]), str(start + limit) if more else None)


class FakeLetters:
    """The dead letters of one group of a FakeCluster, with the calls of DeadLetters that the console makes."""

    def __init__(self, cluster: FakeCluster, group: str) -> None:
        self._cluster, self._group = cluster, group

    def behind(self, after: LetterPlace | None, *, replayed: bool = False) -> Iterator[DeadLetter]:
        letters = self._cluster.letters.get(self._group, [])
        return (one for one in letters if (after is None or one.place > after) and (replayed or not one.replayed))

    def replay(
        self,
        *,
        rate: float | None = None,
        max_messages: int | None = None,
        letters: Iterable[LetterPlace | DeadLetter] | None = None,
    ) -> Iterator[Replayed]:
        chosen = None if letters is None else list(letters)
        self._cluster._change("replay_dead_letters", group=self._group, letters=chosen, rate=rate)
        held = self._cluster.letters.get(self._group, [])
        for index, letter in enumerate(held):
            if letter.replayed or (chosen is not None and letter.place not in chosen):
                continue
            held[index] = replace(letter, replayed=True)
            yield Replayed(held[index])
