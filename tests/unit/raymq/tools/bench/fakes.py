"""A cluster in memory for `raymq bench`: topics, groups, producers and consumers, with planted failures."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from raymq.client.admin.topics import QueueDescription
from raymq.common.errors import GroupNotExistError, RaymqError, TopicNotExistError
from raymq.common.message import Message, MessageQueue


class FakeCluster:
    """A client of a cluster in memory, with its `admin`. `on_send`: called before each send; it may raise.
    `drops`: number of messages that consumers never get. `undeletable`: names that cannot be deleted."""

    node_id = "node-1"

    def __init__(self) -> None:
        self.topics: dict[str, list[bytes]] = {}
        self.groups: set[str] = set()
        self.deleted: list[str] = []
        self.on_send: Any = lambda message: None
        self.drops = 0
        self.undeletable: set[str] = set()
        self.open = 0
        self.leased: dict[str, int] = {}
        """The position of each group of simple consumers, which its members share."""
        self.lock = threading.Lock()
        self.admin = self
        self.storages = SimpleNamespace(get=self._storage)
        self.root = ""
        self.logs: tuple[str, ...] = ()
        self.names = SimpleNamespace(name="")
        self.settings: Any = {"store.flush_disk_type": "ASYNC_FLUSH", "replication.min_in_sync_replicas": 2}

    # The methods of Admin

    def create_topic(self, name: str, queues: int) -> None:
        self.topics[name] = []

    def describe_topic(self, topic: str) -> list[QueueDescription]:
        if topic not in self.topics:
            raise TopicNotExistError(topic)
        return [
            QueueDescription(MessageQueue(topic, "broker-a", 0), 0, len(self.topics[topic])),
            QueueDescription(MessageQueue(topic, "broker-a", 1), 0, 0),
        ]

    def delete_topic(self, topic: str) -> None:
        self._check_deletable(topic)
        if topic not in self.topics:
            raise TopicNotExistError(topic)
        del self.topics[topic]
        self.deleted.append(topic)

    def delete_group(self, group: str) -> None:
        self._check_deletable(group)
        if group not in self.groups:
            raise GroupNotExistError(group)
        self.groups.remove(group)
        self.deleted.append(group)

    def _check_deletable(self, name: str) -> None:
        if any(name.endswith(ending) for ending in self.undeletable):
            raise RaymqError("broker-a does not answer")

    def brokers(self) -> dict[str, Any]:
        data = {"broker-a": {0: "node-1", 1: "node-2"}, "broker-b": {0: "node-2"}}
        return {
            name: SimpleNamespace(storages={one: f"storage-{name}-{one}" for one in nodes}, nodes=nodes)
            for name, nodes in data.items()
        }

    def config(self, broker_name: str) -> dict[str, Any]:
        if broker_name == "broker-b":
            raise RaymqError("only super users may read settings")
        return {broker_name: SimpleNamespace(effective=self.settings)}

    def _storage(self, actor: str) -> Any:
        if actor != "storage-broker-a-0":
            raise AssertionError(f"{actor} is on another node")
        described = SimpleNamespace(commit_log_directories=self.logs, root=f"{self.root}/storage-a-0")
        return SimpleNamespace(describe=lambda: described)

    # The methods of Client

    def producer(self, group: str, *, send_timeout_s: float) -> Any:
        return FakeProducer(self)

    def pull_consumer(self, group: str, *, auto_commit: bool) -> Any:
        assert not auto_commit
        return FakeConsumer(self, group)

    def simple_consumer(self, group: str, *, consume_from: Any) -> Any:
        return FakeConsumer(self, group)


class _Opened:
    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster

    def __enter__(self) -> Any:
        self.cluster.open += 1
        return self

    def __exit__(self, *_: object) -> None:
        self.cluster.open -= 1


class FakeProducer(_Opened):
    def send(self, message: Message) -> None:
        self.cluster.on_send(message)
        with self.cluster.lock:
            self.cluster.topics[message.topic].append(message.body)

    def send_batch(self, messages: Sequence[Message]) -> None:
        for message in messages:
            self.send(message)


class FakeConsumer(_Opened):
    """A pull consumer and a simple consumer. Queue 0 has all messages."""

    def __init__(self, cluster: FakeCluster, group: str) -> None:
        super().__init__(cluster)
        self.group = group
        self.queues: list[MessageQueue] = []
        self.position = 0

    def assign(self, queues: Sequence[MessageQueue]) -> None:
        assert queues
        self.queues = list(queues)

    def subscribe(self, topic: str) -> None:
        self.cluster.groups.add(self.group)
        self.queues = [MessageQueue(topic, "broker-a", 0)]

    def assignment(self) -> list[MessageQueue]:
        return self.queues

    def seek(self, queue: MessageQueue, offset: int) -> None:
        self.position = offset if queue.queue_id == 0 else self.position

    def seek_to_end(self, queue: MessageQueue) -> None:
        self.seek(queue, len(self.cluster.topics[queue.topic]))

    def poll(self, max_messages: int, timeout_s: float) -> list[Any]:
        if self.queues[0].queue_id != 0:
            return []
        stored = self.cluster.topics[self.queues[0].topic]
        found = stored[self.position : min(self.position + max_messages, len(stored) - self.cluster.drops)]
        self.position += len(found)
        if not found:
            threading.Event().wait(0.001)
        return [SimpleNamespace(body=body) for body in found]

    def commit(self) -> None:
        self.cluster.groups.add(self.group)

    def receive(self, max_messages: int, *, wait_s: float) -> list[Any]:
        with self.cluster.lock:
            self.position = self.cluster.leased.get(self.group, 0)
            found = self.poll(max_messages, wait_s)
            self.cluster.leased[self.group] = self.position
        return found

    def ack(self, messages: Sequence[Any]) -> None: ...
