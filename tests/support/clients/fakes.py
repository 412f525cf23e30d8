"""Stand-ins for a storage actor and for routes, for tests of clients without Ray."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import thread as pool_threads
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest

from raymq.common import parallel
from raymq.common.errors import TopicNotExistError
from raymq.common.message import MAX_MESSAGE_SIZE_BYTES, MessageExt, MessageQueue, SendStatus
from raymq.common.protocol.route import BrokerData, QueueData, TopicRoute
from raymq.common.protocol.store import AppendResult
from raymq.records.format.decode import decode_records
from raymq.records.format.encode import EncodedBatch, LoneRecord
from raymq.records.format.message_id import IdRange
from raymq.remoting.lane.address import LaneAddress
from raymq.remoting.storage_client import StorageDescription

WAIT_S = 60.0
"""Timeout of every wait in a test, in seconds. A successful wait takes far less time."""

AT_SHUTDOWN = "can't create new thread at interpreter shutdown"
"""The text of the RuntimeError with which Python 3.12 refuses to start a thread at the interpreter's exit."""


@contextmanager
def no_thread_starts() -> Iterator[None]:
    """Let no thread start within the block, as at the exit of Python 3.12. Threads that run already go on."""

    def refuse(*arguments: object) -> None:
        raise RuntimeError(AT_SHUTDOWN)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        patch.setattr(parallel, "start_new_thread", refuse)
        yield


@contextmanager
def main_thread_has_finished() -> Iterator[None]:
    """Let each ThreadPoolExecutor refuse calls within the block, as after the end of the program's main thread."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool_threads, "_shutdown", True)
        yield


def topic_route(topic: str = "orders", **queues: int) -> TopicRoute:
    """Return a route with the given number of queues per broker group, for example `topic_route(a=2, b=1)`."""
    brokers = {name: BrokerData("raymq", name, {0: f"storage-{name}-0"}) for name in queues}
    return TopicRoute(topic, brokers, tuple(QueueData(name, count, count, 6) for name, count in queues.items()))


def description(
    lane: LaneAddress | None = None, *, node_id: str = "here", root: str = "/nowhere", logs: tuple[str, ...] = ()
) -> StorageDescription:
    return StorageDescription(
        name="storage-a-0",
        broker_name="a",
        node_id=node_id,
        pid=1,
        root=root,
        commit_log_file_size=65536,
        consume_queue_file_size=2000,
        store_host=("127.0.0.1", 10911),
        lane=lane or LaneAddress("\0raymq-nobody-listens-here", b"x" * 32),
        commit_log_directories=logs,
    )


class FakeRoutes:
    """A RouteSource with fixed routes. It records the topics whose routes a client invalidates."""

    def __init__(self, *routes: TopicRoute) -> None:
        self.routes = {route.topic: route for route in routes}
        self.invalidated: list[str] = []
        self.asked_to_create: list[tuple[str, int]] = []

    def get(self, topic: str) -> TopicRoute:
        if topic not in self.routes:
            raise TopicNotExistError(topic)
        return self.routes[topic]

    def wait(self, topic: str, timeout_s: float) -> TopicRoute:
        return self.get(topic)

    def get_or_create(self, topic: str, default_topic_queue_nums: int) -> TopicRoute:
        self.asked_to_create.append((topic, default_topic_queue_nums))
        return self.get(topic)

    def invalidate(self, topic: str) -> None:
        self.invalidated.append(topic)


class FakeStore:
    """A producer's StorageClient that stores each sequence number once, like a real store, and fails as its script
    demands.

    `connects` holds one step per connection: an error that the connection raises, or None. `script` holds one step per
    append attempt. For None, the attempt stores the message and succeeds. For an error, the attempt raises the error
    and stores nothing. For ("lost", error), the attempt stores the message and raises the error. A callable in either
    list is called first and returns one of these steps. Every call after the last step succeeds.
    """

    def __init__(self, name: str = "storage-a-0", script: Sequence[Any] = ()) -> None:
        self.name = name
        self.script = list(script)
        self.connects: list[Any] = []
        self.max_message_size_bytes = MAX_MESSAGE_SIZE_BYTES
        self.status = SendStatus.SEND_OK
        self.attempts: list[list[EncodedBatch]] = []
        self.queues: dict[tuple[str, int], list[bytes]] = {}
        self._seen: dict[tuple[str, int, str], tuple[int, int]] = {}
        self._lock = threading.Lock()

    def replica(self, name: str) -> FakeStore:
        """Return another fake store with this store's messages, which a client uses after a failover."""
        other = FakeStore(name)
        other.queues, other._seen, other._lock = self.queues, self._seen, self._lock
        return other

    def describe(self, timeout_s: float = 5.0) -> StorageDescription:
        with self._lock:
            step = self.connects.pop(0) if self.connects else None
        if callable(step):
            step = step()
        if step is not None:
            raise step
        return replace(description(), max_message_size_bytes=self.max_message_size_bytes)

    def append(self, batches: Sequence[EncodedBatch], timeout_s: float) -> list[AppendResult]:
        with self._lock:
            self.attempts.append(list(batches))
            step = self.script.pop(0) if self.script else None
        if isinstance(step, Callable):
            step = step(batches)
        if isinstance(step, Exception):
            raise step
        with self._lock:
            results = [self._store(batch) for batch in batches]
        if isinstance(step, tuple):
            raise step[1]
        return results

    def append_one(self, record: LoneRecord, timeout_s: float) -> AppendResult:
        """Append a single message."""
        [result] = self.append([record.batch()], timeout_s)
        return result

    def bodies(self, queue: MessageQueue) -> list[bytes]:
        return self.queues.get((queue.topic, queue.queue_id), [])

    def everything(self) -> list[bytes]:
        return [body for bodies in self.queues.values() for body in bodies]

    def messages(self) -> list[MessageExt]:
        """Return the messages of all append attempts, in the order of the attempts."""
        batches = [batch for attempt in self.attempts for batch in attempt]
        return [message for batch in batches for message in decode_records(batch.records, broker_name="a")]

    def _store(self, batch: EncodedBatch) -> AppendResult:
        assert batch.producer is not None
        assert batch.message_ids == () or isinstance(batch.message_ids, IdRange)
        bodies = self.queues.setdefault((batch.topic, batch.queue_id), [])
        key = (batch.topic, batch.queue_id, batch.producer.producer_id)
        last, offset = self._seen.get(key, (-1, -1))
        duplicate = batch.producer.first_sequence == last
        assert duplicate or batch.producer.first_sequence > last, "a sequence went back"
        if not duplicate:
            offset = len(bodies)
            bodies += [message.body for message in decode_records(batch.records, broker_name="a")]
            self._seen[key] = (batch.producer.first_sequence, offset)
        return AppendResult(self.status, offset, offset * 1000, 1_700_000_000_000, duplicate)


class FakeActor:
    """A stand-in for ActorRef. It calls the functions in `methods` instead of an actor's methods, in the caller's
    thread, and counts the calls."""

    def __init__(self, methods) -> None:
        self.methods = methods
        self.calls: list[str] = []

    def call(self, method, *args, timeout_s):
        self.calls.append(method)
        return self.methods[method](*args)


def connect_commands(monkeypatch: pytest.MonkeyPatch, client: Any) -> None:
    """Patch every `raymq` command that connects to a cluster, so that the command uses `client`."""
    # imported inside this function, because most users of this module test no command
    from raymq.tools.cli.terminal import command

    monkeypatch.setattr(command, "client_of", lambda address: nullcontext(client))
