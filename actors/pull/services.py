"""The clients, threads and fetching that all push-consumer instances of one Pull actor share."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from typing import Final, Protocol

from actors.pull.listener_feed import FeedThread
from raymq.client.consumer.assignment.offset_committer import CommitThreads
from raymq.client.consumer.fetcher import Fetcher
from raymq.client.consumer.rebalance_client import RebalanceClient
from raymq.client.predicates.source import GroupPredicate
from raymq.client.scan.ranges import Creations
from raymq.common.errors import DataLossError, PredicateFailedError, RaymqError
from raymq.common.message import MessageQueue
from raymq.common.names import NameServerName
from raymq.common.protocol.store import FetchRequest, FetchResult
from raymq.remoting.actor_ref import ActorRef
from raymq.remoting.heartbeats import Heartbeats
from raymq.remoting.route_cache import RouteCache
from raymq.remoting.storage_clients import StorageClients

EPOCHS_OF_A_LIFE: Final = 1 << 40
"""Number of epochs reserved for one process incarnation of a Pull actor. Each start of a push-consumer instance at the
actor has a new epoch. One incarnation starts fewer instances than this number."""
PULL_CALL_THREADS: Final = 8
"""Number of threads, shared by all push-consumer instances, for calls that send messages back to brokers or leave
groups."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, order=True)
class InstanceQueue(MessageQueue):
    """A queue together with the push-consumer instance that reads it. Other instances of the same Pull actor may read
    the same queue."""

    instance: str


class Reader(Protocol):
    """The methods of a push-consumer instance that the SharedFetcher calls."""

    name: str

    def wanted(self, now_s: float) -> dict[InstanceQueue, int]:
        """Return the queues whose messages may be fetched now, each with its next offset."""

    def assigned(self) -> frozenset[InstanceQueue]:
        """Return all queues that the push-consumer instance holds."""

    def request(self, queue: MessageQueue, offset: int) -> FetchRequest:
        """Build the request that reads a queue from an offset."""

    def predicate(self, queue: MessageQueue) -> GroupPredicate | None:
        """Return the predicate that filters the messages of a queue; None if the queue's messages are not
        filtered."""

    def deliver(self, queue: MessageQueue, offset: int, result: FetchResult) -> None:
        """Process the result of a fetch of `queue` from `offset`: deliver the records to the push-consumer instance, or
        continue at another offset."""

    def lose(self, queue: MessageQueue, offset: int, error: DataLossError | PredicateFailedError) -> None:
        """Record that the message at the queue's next offset is lost."""


class SharedFetcher:
    """The fetcher for the queues of all push-consumer instances: one call to a storage actor reads messages for all of
    them.

    An instance's queues are checked again only after `changed`, so idle instances cost nothing while another instance
    is busy.
    """

    def __init__(self, routes: RouteCache, storages: StorageClients) -> None:
        self._lock = threading.Lock()
        """Lock that guards the mutable attributes of the fetcher."""
        self._readers: dict[str, Reader] = {}
        self._changed: set[str] = set()
        self._wanted: dict[str, dict[InstanceQueue, int]] = {}
        self._assigned: dict[str, frozenset[InstanceQueue]] = {}
        self._fetcher = Fetcher.by_routes(
            routes,
            storages,
            wanted=self._all_wanted,
            assigned=self._all_assigned,
            request=self._request,
            deliver=self._deliver,
            lost=self._lose,
            predicate=self._predicate,
            in_place=True,
        )

    def add(self, reader: Reader) -> None:
        """Start fetching for a push-consumer instance's queues."""
        with self._lock:
            self._readers[reader.name] = reader

    def remove(self, reader: Reader) -> None:
        """Stop fetching for a push-consumer instance's queues."""
        with self._lock:
            if self._readers.get(reader.name) is reader:
                del self._readers[reader.name]
                self._wanted.pop(reader.name, None)
                self._assigned.pop(reader.name, None)

    def changed(self, reader: Reader) -> None:
        """Request a check of a push-consumer instance's queues, because messages of a queue may now be fetched."""
        with self._lock:
            self._changed.add(reader.name)
        self._fetcher.wake_readers()

    def source_of(self, queue: InstanceQueue) -> str | None:
        """Return the name of the storage actor from which a queue is read; None if it is unknown now."""
        return self._fetcher.source_of(queue)

    def stop(self) -> None:
        """Stop the fetching threads."""
        self._fetcher.stop()

    def _look(self) -> None:
        """Find the queues to fetch, among the queues of the push-consumer instances that have changed. The caller holds
        the lock."""
        changed, self._changed = self._changed, set()
        now_s = time.monotonic()
        for name in changed:
            reader = self._readers.get(name)
            if reader is not None:
                self._wanted[name] = reader.wanted(now_s)
                self._assigned[name] = reader.assigned()

    def _all_wanted(self) -> dict[MessageQueue, int]:
        with self._lock:
            self._look()
            return {queue: offset for wanted in self._wanted.values() for queue, offset in wanted.items()}

    def _all_assigned(self) -> frozenset[MessageQueue]:
        with self._lock:
            self._look()
            return frozenset(queue for assigned in self._assigned.values() for queue in assigned)

    def _reader(self, queue: MessageQueue) -> Reader | None:
        """Return the push-consumer instance that reads a queue; None if the instance has ended."""
        with self._lock:
            return self._readers.get(queue.instance)  # type: ignore[attr-defined]  # all here are InstanceQueues

    def _request(self, queue: MessageQueue, offset: int) -> FetchRequest:
        reader = self._reader(queue)
        return reader.request(queue, offset) if reader else FetchRequest(queue.topic, queue.queue_id, offset, 1)

    def _predicate(self, queue: MessageQueue) -> GroupPredicate | None:
        reader = self._reader(queue)
        return reader.predicate(queue) if reader else None

    def _deliver(self, queue: MessageQueue, offset: int, result: FetchResult) -> None:
        reader = self._reader(queue)
        if reader is not None:
            reader.deliver(_plain(queue), offset, result)
            with self._lock:
                self._changed.add(reader.name)

    def _lose(self, queue: MessageQueue, offset: int, error: DataLossError | PredicateFailedError) -> None:
        reader = self._reader(queue)
        if reader is not None:
            reader.lose(_plain(queue), offset, error)


def _plain(queue: MessageQueue) -> MessageQueue:
    return MessageQueue(queue.topic, queue.broker_name, queue.queue_id)


class PullServices:
    """The clients, threads and fetching that the instances of one Pull actor share.

    `node_id`: the Ray node of this process. `host`: the IP address of this process. `life`: the number of the actor's
    process incarnation (actors.register.next_life).
    """

    def __init__(self, nameservers: Sequence[NameServerName], node_id: str, host: str, life: int) -> None:
        self.node_id = node_id
        self._epochs = count(life * EPOCHS_OF_A_LIFE)
        self.routes = RouteCache(nameservers)
        self.storages = StorageClients(node_id)
        self.rebalance = RebalanceClient(self.routes)
        self.heartbeats = Heartbeats(self.routes, host, node_id)
        self.fetcher = SharedFetcher(self.routes, self.storages)
        self.commits = CommitThreads()
        self.feeds = FeedThread(host)
        self.calls = ThreadPoolExecutor(PULL_CALL_THREADS, "calls")
        self._brokers: dict[str, ActorRef] = {}
        self.wake_members: Callable[[], None] = lambda: None
        """Function that wakes the thread that calls `turn` of each push-consumer instance, to release its queues or to
        end it."""

    def next_epoch(self) -> int:
        """Return a number (epoch) for a new hosting of a push-consumer instance. It is larger than all earlier numbers,
        including numbers of earlier incarnations of the actor."""
        return next(self._epochs)

    def broker(self, name: str) -> ActorRef:
        """Return the Broker actor of a broker group."""
        return self._brokers.setdefault(name, ActorRef(name))

    def creations(self, topics: Iterable[str]) -> Creations:
        """Return the creation ids of the given topics, from the known routes. A topic that is deleted and created again
        gets a new creation id. Topics without a route are left out."""
        found = {}
        for topic in topics:
            try:
                queues = self.routes.get(topic).queues
            except RaymqError as error:
                logger.info("cannot check whether topic %r was deleted and created again: %s", topic, error)
            else:
                found[topic] = {data.broker_name: data.creation_id for data in queues}
        return found

    def close(self) -> None:
        """Stop all threads that the instances of this Pull actor share."""
        self.feeds.close()
        self.fetcher.stop()
        self.commits.close()
        self.rebalance.close()
        self.heartbeats.close()
        self.storages.close()
        self.calls.shutdown(wait=False)
