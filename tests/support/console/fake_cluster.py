"""FakeCluster: a small cluster in memory, with the calls of Admin, Producer and ClusterControl that the console makes.

Tests may change the fields of a FakeCluster. `errors` maps the name of a call to an error that the call raises. `gates`
maps the name of a call to an event that the call waits for. `calls` lists the calls that changed the cluster, as (name,
arguments).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from inspect import signature
from types import SimpleNamespace
from typing import Any, Unpack, cast

from raymq.client.admin.admin import Admin
from raymq.client.admin.browse import Page
from raymq.client.admin.dead_letters import DeadLetter, DeadLetters, LetterPlace, Replayed
from raymq.client.admin.delayed import END_OF_TIME_MS, Delayed, DelayedMessage
from raymq.client.admin.groups import NewOffsets
from raymq.client.admin.messages import Arrived
from raymq.client.admin.replay import Replay
from raymq.client.admin.topics import QueueDescription
from raymq.client.admin.track import MessageTrack, TrackState
from raymq.client.consumer.pull_once import has_text
from raymq.client.producer.producer import Producer
from raymq.common.errors import GroupNotExistError, OffsetOutOfRangeError, TopicExistsError, TopicNotExistError
from raymq.common.message import (
    MessageExt,
    MessageModel,
    MessageQueue,
    PullResult,
    PullStatus,
    SendResult,
    SendStatus,
)
from raymq.common.names import check_user_topic
from raymq.common.protocol.attributes import TopicAttributes, TopicMessageType
from raymq.common.protocol.clients import ConsumerConnection, ConsumerData, ConsumeType, ProducerConnection
from raymq.common.protocol.group import GroupChanges, GroupConfig, GroupQueueProgress, GroupSummary
from raymq.common.protocol.recall import RecallHandle
from raymq.common.protocol.route import PERM_READ, PERM_WRITE, BrokerData, QueueData, TopicRoute
from raymq.common.protocol.stats import BrokerReadings, GroupReading, GroupTotals, TopicReading
from raymq.common.protocol.status import ClusterStatus, Problem, PushInstanceReport, RetentionReport, StoreReport
from raymq.tools.console.cluster import (
    AuditEntry,
    AuditPage,
    BrokerGroupView,
    ClusterView,
    ConsoleCluster,
    PushInstances,
    ReplicaView,
    ServerView,
)

NOW_MS = 1_795_400_000_000
"""Time of every event in a FakeCluster, in ms since 1970."""
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
    system_properties: Mapping[str, str] | None = None,
) -> MessageExt:
    """Return a message with all the fields that a store sets."""
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
        "system_properties": {"UNIQ_KEY": f"{place:032X}", **(system_properties or {})},
    }
    names = MessageExt.__match_args__
    return MessageExt(**{name: values[name] for name in names if name in values})


def topic_reading(queues: int, held: int, rate: float, perm: int = PERM_READ | PERM_WRITE) -> TopicReading:
    """Return the metrics of a topic that holds `held` messages of 512 bytes. All of them were appended since the
    broker's start."""
    return TopicReading(held, 512 * held, queues, perm, held, rate, 512 * rate)


def members_of(
    group: str, consume_type: ConsumeType, count: int, model: MessageModel = MessageModel.CLUSTERING
) -> list[ConsumerConnection]:
    """Return `count` consumer connections of a group. All consumers subscribe to the topic `orders`."""
    data = ConsumerData(group, consume_type, {"orders": "*"}, model)
    return [ConsumerConnection(f"10.0.0.1@{n}", "10.0.0.1", 4_000 + n, data, 2.5) for n in range(count)]


def as_in(real: Callable[..., Any]) -> Callable[[Callable[[Any, Any], Any]], Callable[..., Any]]:
    """Return a decorator for a fake method that replaces the method `real`. The decorator binds the arguments by the
    signature of `real`, and passes them in one object with an attribute per argument, defaults included."""
    known = signature(real)

    def decorate(call: Callable[[Any, Any], Any]) -> Callable[..., Any]:
        def bound(self: Any, *args: Any, **kwargs: Any) -> Any:
            given = known.bind(self, *args, **kwargs)
            given.apply_defaults()
            return call(self, SimpleNamespace(**given.arguments))

        return bound

    return decorate


class FakeCluster:
    """A fake cluster in memory with two broker groups, a few topics and consumer groups."""

    def __init__(self) -> None:
        self.errors: dict[str, Exception] = {}
        self.gates: dict[str, threading.Event] = {}
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.asked: list[str] = []
        self.audit_entries: list[AuditEntry] = []
        self.silent: set[str] = set()
        """Names of the brokers that do not answer queries for metrics."""
        self.problems: tuple[Problem, ...] = ()
        self.writable = dict.fromkeys(BROKERS, True)
        self.drained = dict.fromkeys(NODES, False)
        self.topics = {
            "orders": topic_reading(8, 1_204_554, 812.4),
            "payments": topic_reading(4, 88_120, 12.0),
            "audit-log": topic_reading(4, 0, 0.0, PERM_READ),
        }
        self.attributes = {
            "orders": TopicAttributes(TopicMessageType.NORMAL),
            "payments": TopicAttributes(TopicMessageType.FIFO),
        }
        self.groups = {
            "billing": GroupTotals(lag=1_520, lag_ms=95_000, retries=4, dead_letters=2),
            "reports": GroupTotals(),
            "search": GroupTotals(lag=18, lag_ms=3_000, consume_enable=False),
        }
        self.readers: dict[str, tuple[str, ...]] = {"orders": ("billing", "reports"), "payments": ("search",)}
        """Names of the groups that consume each topic, by topic."""
        self.members = {
            "billing": members_of("billing", "PUSH", 3),
            "reports": members_of("reports", "PULL", 1),
        }
        self.last_error = "ValueError: no such order"
        self.configs = {
            name: GroupConfig(name, consume_enable=totals.consume_enable) for name, totals in self.groups.items()
        }
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
        """Return the fake cluster as a ConsoleCluster, the interface that the console uses."""
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

    def _row(self, topic: str) -> TopicReading:
        if topic not in self.topics:
            raise TopicNotExistError(topic)
        return self.topics[topic]

    def _group(self, group: str) -> GroupTotals:
        if group not in self.groups:
            raise GroupNotExistError(group)
        return self.groups[group]

    def _queues(self, topic: str) -> list[MessageQueue]:
        count = self._row(topic).queues
        return sorted(MessageQueue(topic, BROKERS[n % 2], n // 2) for n in range(count))

    # Fake calls about the cluster

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
                len(self.topics),
                len(self.groups),
                self.writable[name],
            )
            for name in BROKERS
        )
        stores = tuple(
            StoreReport(
                replica.actor, root=f"/var/raymq/{broker.name}", queues=16, max_physical_offset=5 << 30,
                flushed_physical_offset=(5 << 30) - 4_096, recovered="clean shutdown", writable=True,
                retention=RetentionReport(0.41, 120 << 30),
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
        status = ClusterStatus(stores=stores, problems=self.problems)
        return ClusterView("raymq", status, brokers, servers, dict(self.drained), {"broker_groups": "2"})

    def push_instances(self, group: str) -> PushInstances:
        self._begin("push_instances")
        members = [one for one in self.members.get(group, ()) if one.consumer.consume_type == "PUSH"]
        held = [[str(queue) for queue in self._queues("orders")][n :: len(members)] for n in range(len(members))]
        instances = (
            PushInstanceReport("pull-0", "", f"{group}@{one.pid}", tuple(queues), 120, 55_000, 7, self.last_error)
            for one, queues in zip(members, held, strict=True)
        )
        return PushInstances(tuple(instances), {"pull-0": NODES[0]})

    def drain(self, node: str, *, drained: bool) -> None:
        self._change("drain", node=node, drained=drained)
        self.drained[node] = drained

    def balance(self) -> None:
        self._change("balance")

    def clean_store(self, broker_name: str) -> None:
        self._change("clean_store", broker_name=broker_name)

    def wipe_write_perm(self, broker_name: str) -> int:
        self._change("wipe_write_perm", broker_name=broker_name)
        self.writable[broker_name] = False
        return len(self.topics)

    def add_write_perm(self, broker_name: str) -> int:
        self._change("add_write_perm", broker_name=broker_name)
        self.writable[broker_name] = True
        return len(self.topics)

    @as_in(Admin.readings)
    def readings(self, a: Any) -> dict[str, BrokerReadings | None]:
        """Return the metrics of each broker. The first broker reports the metrics of all topics and groups; the second
        reports none.

        For its charts the console calls this method without group-topic pairs. An error in `errors["figures"]` makes
        only these calls fail.
        """
        self._begin("readings" if a.with_pairs else "figures")
        pairs = {
            (group, topic): GroupReading(0, self.groups[group].lag, self.groups[group].lag_ms)
            for topic in self.topics
            for group in self.readers.get(topic, ())
            if group in self.groups
        }
        return {
            BROKERS[0]: BrokerReadings(dict(self.topics), pairs if a.with_pairs else {}, 0, dict(self.groups)),
            BROKERS[1]: BrokerReadings({}, {}),
            **dict.fromkeys(self.silent),
        }

    # Fake calls about topics

    def topic_attributes(self, topics: Iterable[str]) -> dict[str, TopicAttributes]:
        self._begin("topic_attributes")
        return {topic: self.attributes[topic] for topic in topics if topic in self.attributes}

    def topic_route(self, topic: str) -> TopicRoute:
        self._begin("topic_route")
        counts = Counter(queue.broker_name for queue in self._queues(topic))
        return TopicRoute(
            topic,
            {name: BrokerData("raymq", name, {0: f"storage-{name}-0"}) for name in counts},
            tuple(QueueData(name, count, count, self._row(topic).perm) for name, count in counts.items()),
            attributes=self.attributes.get(topic, TopicAttributes()),
        )

    def describe_topic(self, topic: str) -> list[QueueDescription]:
        self._begin("describe_topic")
        queues = self._queues(topic)
        each = self._row(topic).held // len(queues)
        return [QueueDescription(queue, 100, 100 + each) for queue in queues]

    def kept_since(self, topic: str) -> dict[MessageQueue, int | None]:
        self._begin("kept_since")
        return dict.fromkeys(self._queues(topic), NOW_MS - 3_600_000)

    @as_in(Admin.create_topic)
    def create_topic(self, a: Any) -> None:
        check_user_topic(a.topic)
        if a.topic in self.topics:
            raise TopicExistsError(a.topic, "it has other queues")
        self._change("create_topic", topic=a.topic, queues=a.queues, message_type=a.message_type,
                     reserve_time_s=a.reserve_time_s, cleanup_policy=a.cleanup_policy)  # fmt: skip
        self.topics[a.topic] = topic_reading(a.queues or 4, 0, 0.0)

    @as_in(Admin.update_topic)
    def update_topic(self, a: Any) -> None:
        row = self._row(a.topic)
        self._change("update_topic", topic=a.topic, queues=a.queues, perm=a.perm, message_type=a.message_type,
                     reserve_time_s=a.reserve_time_s)  # fmt: skip
        changes = {"queues": a.queues, "perm": a.perm}
        self.topics[a.topic] = replace(row, **{name: one for name, one in changes.items() if one is not None})

    def set_order_config(self, topic: str, config: str | None) -> None:
        self._row(topic)
        self._change("set_order_config", topic=topic, config=config)

    def delete_topic(self, topic: str) -> None:
        self._row(topic)
        self._change("delete_topic", topic=topic)
        del self.topics[topic]

    # Fake calls about groups

    def consumer_connections(self, group: str | None = None) -> list[ConsumerConnection]:
        self._begin("consumer_connections")
        return [one for name, members in self.members.items() if group in (None, name) for one in members]

    def group_config(self, group: str) -> GroupConfig:
        self._begin("group_config")
        self._group(group)
        return self.configs[group]

    def group_summary(self, group: str) -> GroupSummary:
        self._begin("group_summary")
        totals = self._group(group)
        lag, age_ms = totals.lag // 8, 95_000 if totals.lag // 8 else 0
        queues = tuple(
            GroupQueueProgress(group, queue, 100 + n, 0, 100 + n + lag, age_ms)
            for n, queue in enumerate(self._queues("orders"))
        )
        return GroupSummary(group, queues, totals.lag, totals.lag_ms or 0, totals.retries, totals.dead_letters)

    @as_in(Admin.reset_offsets)
    def reset_offsets(self, a: Any) -> NewOffsets:
        self._group(a.group)
        queues = self._queues(a.topic) if a.queue is None else [a.queue]
        if a.dry_run:
            self._begin("reset_offsets")
        else:
            arguments = {name: one for name, one in vars(a).items() if name not in ("self", "dry_run")}
            self._change("reset_offsets", **arguments)
        new = a.offset if a.offset is not None else 100 if a.to == "earliest" else 250
        return NewOffsets(dict.fromkeys(queues, new), {one: 120 if one.queue_id else None for one in queues})

    def clone_offsets(self, source: str, target: str, topic: str, *, dry_run: bool = False) -> NewOffsets:
        self._group(source)
        if dry_run:
            self._begin("clone_offsets")
        else:
            self._change("clone_offsets", source=source, target=target, topic=topic)
        queues = self._queues(topic)
        return NewOffsets(dict.fromkeys(queues, 180), dict.fromkeys(queues, 120))

    def update_group(self, group: str, **changes: Unpack[GroupChanges]) -> GroupConfig:
        totals = self._group(group)
        self._change("update_group", group=group, **changes)
        config = self.configs[group] = replace(self.configs[group], **changes)
        self.groups[group] = replace(totals, consume_enable=config.consume_enable)
        return config

    def delete_group(self, group: str, *, dead_letters: bool = False) -> None:
        self._group(group)
        self._change("delete_group", group=group, dead_letters=dead_letters)
        del self.groups[group]

    # Fake calls about messages

    @as_in(Admin.browse)
    def browse(self, a: Any) -> Page:
        self._begin("browse")
        self._row(a.topic)
        found = [
            message
            for message in self.messages.get(a.topic, [])
            if has_text(message, a.contains.encode())
            and (a.queue is None or message.queue == a.queue)
            and a.tags in ("*", "", message.tags)
            and (a.begin_offset is None or message.queue_offset >= a.begin_offset)
            and (a.begin_ms is None or message.store_timestamp_ms >= a.begin_ms)
            and (a.end_ms is None or message.store_timestamp_ms < a.end_ms)
        ]
        if a.newest_first:
            found.reverse()
        start = int(a.cursor or 0)
        part = found[start : start + a.limit]
        more = start + len(part) < len(found)
        return Page(tuple(part), str(start + len(part)) if more else None, len(part), more)

    @as_in(Admin.query_by_key)
    def query_by_key(self, a: Any) -> list[MessageExt]:
        self._begin("query_by_key")
        self._row(a.topic)
        return [message for message in self.messages.get(a.topic, []) if a.key in message.keys][-a.max_messages :]

    def query_by_id(self, topic: str, message_id: str) -> list[MessageExt]:
        self._begin("query_by_id")
        self._row(topic)
        return [
            message
            for message in self.messages.get(topic, [])
            if message_id in (message.message_id, message.offset_message_id)
        ]

    @as_in(Admin.pull)
    def pull(self, a: Any) -> PullResult:
        """Return a queue's messages from an offset on. A queue's offsets may have gaps, as after a deletion. The first
        message after a gap then has a larger offset than requested."""
        self._begin("pull")
        self._row(a.queue.topic)
        found = [
            one for one in self.messages.get(a.queue.topic, []) if one.queue == a.queue and one.queue_offset >= a.offset
        ]
        if not found:
            raise OffsetOutOfRangeError(str(a.queue), a.offset, 0, a.offset)
        return PullResult(PullStatus.FOUND, tuple(found[: a.max_messages]), a.offset + 1, 0, a.offset + len(found))

    def message_track(self, message: MessageExt) -> list[MessageTrack]:
        self._begin("message_track")
        return [
            MessageTrack("billing", TrackState.RETRYING, 2, "waits for its third attempt"),
            MessageTrack("reports", TrackState.CONSUMED),
        ]

    @as_in(Producer.send)
    def send(self, a: Any) -> SendResult:
        self._row(a.message.topic)
        self._change("send", message=a.message)
        queue = self._queues(a.message.topic)[0]
        stored = self.messages.setdefault(a.message.topic, [])
        sent = fake_message(
            a.message.topic, a.message.body, queue_offset=1_000 + len(stored), broker_name=queue.broker_name,
            tags=a.message.tags, keys=tuple(a.message.keys), properties=a.message.properties,
        )  # fmt: skip
        stored.append(sent)
        return SendResult(SendStatus.SEND_OK, sent.message_id, sent.offset_message_id, queue, sent.queue_offset)

    @as_in(Admin.replay)
    def replay(self, a: Any) -> Replay:
        assert a.to_group is not None
        self._group(a.to_group)
        self._change("replay", topic=a.topic, ids=a.ids, to_group=a.to_group)
        return Replay(f"%RETRY%{a.to_group}", 1, 1, 0, True)

    def tail(
        self, topic: str, positions: Mapping[MessageQueue, int] | None = None, *, max_messages: int = 100
    ) -> Arrived:
        """Return the newest messages of a topic, and the position after them.

        A position maps the topic's first queue to an index into the topic's list of messages.
        """
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

    # Methods for the console's audit log, which keep the entries in memory

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
    """The dead letters of one group of a FakeCluster, with the methods of DeadLetters that the console calls."""

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
