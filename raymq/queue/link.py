"""QueueLink is the connection of one process to one queue: it stores items, leases them, removes them and returns them.

    Queue "a" ──┬──▶ QueueLink "a": producer, engine of a simple consumer, kept items ──┬──▶ one client per namespace
    Queue "a" ──┘    QueueLink "b" ─────────────────────────────────────────────────────┘

All Queue objects of the same name in a process share a link, and all links of a namespace share a client. A link is
closed after the last of its Queue objects is gone, and the client after the last of its links. The process stays
connected to Ray.
"""

from __future__ import annotations

import logging
import pickle
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

import ray

from raymq.client.client import connect
from raymq.client.cluster.attach import attach_ray
from raymq.client.consumer.simple.engine import SimpleEngine
from raymq.client.consumer.simple.received_message import ReceivedMessage
from raymq.client.consumer.simple.settings import SimpleOptions
from raymq.client.producer.producer import Producer
from raymq.common.closing import shared_lock
from raymq.common.errors import GroupNotExistError, RaymqError, TopicNotExistError
from raymq.common.message import ConsumeFromWhere, Message
from raymq.common.parallel import aside, start_daemon

LEASE_S: Final = 30.0
"""Time in seconds after which an item is delivered again if its `get` died before it removed the item."""
ATTEMPTS_MAX: Final = 16
"""Number of deliveries after which an item that cannot be unpickled becomes a dead letter of the group."""
_OPTIONS: Final[SimpleOptions] = {"consume_from": ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET, "ordered": False}

logger = logging.getLogger(__name__)


class LeasedItems(NamedTuple):
    """Messages that came with one request, so the broker ends their lease as a whole. `until_s`: the monotonic time in
    seconds up to which the lease certainly lasts."""

    messages: list[ReceivedMessage]
    until_s: float


class _SharedClient:
    """The client that all links of a namespace share in a process."""

    def __init__(self, namespace: str) -> None:
        # The client would otherwise disconnect the process from Ray when it closes.
        attach_ray(None)
        self.client = connect(namespace=namespace)
        # The collector may end a connection in any thread, so a thread of its own closes the client.
        # At exit, the client closes itself.
        weakref.finalize(self, start_daemon, self.client.close, name="queue-client-close").atexit = False


class QueueLink:
    """The connection of this process to one queue. Thread-safe."""

    def __init__(self, connection: _SharedClient, name: str) -> None:
        client = connection.client
        self.admin = client.admin
        self._name = name
        self._producer: Producer = client.producer(name)
        self._engine: SimpleEngine = client._simple_engine(name, _OPTIONS, gives_up=False)
        self._kept: deque[Any] = deque()
        """Items that were removed from the queue, and that no caller has got: their `get` was interrupted or
        cancelled."""
        self._is_subscribed = False
        # The finalizer refers to the connection, so that its client is closed after the producer and the engine.
        parts = (connection, self._producer, self._engine)
        weakref.finalize(self, start_daemon, _close, *parts, name="queue-close").atexit = False

    def size(self) -> int:
        """Return the number of items that nobody has got. Raises RaymqError if the brokers do not answer."""
        own = [one for one in self.admin.describe_group(self._name) if one.queue.topic == self._name]
        if own:
            return max(0, sum(one.lag - one.in_flight for one in own)) + len(self._kept)
        return sum(one.messages for one in self.admin.describe_topic(self._name)) + len(self._kept)

    def delete(self, *, dead_letters: bool) -> None:
        """Delete the topic and the group, if they exist. `dead_letters`: also delete the items that could not be
        unpickled."""
        self._kept.clear()
        with suppress(TopicNotExistError):
            self.admin.delete_topic(self._name)
        with suppress(GroupNotExistError):
            self.admin.delete_group(self._name, dead_letters=dead_letters)

    # Methods that store items

    def send(self, messages: Sequence[Message], timeout_s: float) -> None:
        """Store messages in one request: all of them, or none. `timeout_s` is limited by the producer's timeout. Raises
        the errors of `Producer.send`."""
        timeout_s = min(timeout_s, self._producer.settings.send_timeout_s)
        if len(messages) == 1:
            self._producer.send(messages[0], timeout_s=timeout_s)
        else:
            self._producer.send_batch(messages, timeout_s=timeout_s)

    # Methods that remove items

    def take_kept(self, count: int) -> list[Any]:
        """Return up to `count` kept items, the oldest first. They are no longer kept."""
        items: list[Any] = []
        with suppress(IndexError):
            while len(items) < count:
                items.append(self._kept.popleft())
        return items

    def keep(self, items: Sequence[Any]) -> None:
        """Keep removed items for the next `get` of this process, before the items that are already kept."""
        self._kept.extendleft(reversed(items))

    def lease(self, count: int, wait_s: float) -> LeasedItems:
        """Lease up to `count` items. Waits up to `wait_s` for the first. Raises the errors of
        `SimpleConsumer.receive`."""
        if not self._is_subscribed:
            # Not in the constructor: the first Queue of a name connects before it creates the topic.
            aside(self._engine.subscribe, self._name, "*")
            self._is_subscribed = True
        until_s = time.monotonic() + LEASE_S
        return LeasedItems(aside(self._engine.receive, count, LEASE_S, wait_s), until_s)

    def load(self, leases: Sequence[LeasedItems]) -> list[list[Any]]:
        """Unpickle the items of leases. If an item cannot be unpickled, returns the other items to the queue and raises
        the error. The item is delivered again after its lease, or becomes a dead letter after ATTEMPTS_MAX
        deliveries."""
        loaded: list[list[Any]] = []
        for lease in leases:
            loaded.append([])
            for message in lease.messages:
                try:
                    loaded[-1].append(pickle.loads(message.body))
                except Exception as error:
                    self.give_back([one for each in leases for one in each.messages if one is not message])
                    if message.attempt >= ATTEMPTS_MAX:
                        self._bury(message, error)
                    raise
        return loaded

    def _bury(self, message: ReceivedMessage, error: Exception) -> None:
        try:
            aside(self._engine.dead_letter, message, message.attempt, f"the item cannot be unpickled: {error!r}")
        except RaymqError as failure:
            logger.warning("cannot move an item of queue %s to the dead letters: %s", self._name, failure)

    def remove(self, lease: LeasedItems) -> bool:
        """Remove leased items from the queue. Returns False if another call got the items, because the lease had ended.
        If the broker does not answer, returns True, and another call may get the items, too. Raises RaymqError for an
        error that a repeated call would raise again; no item is removed then."""
        is_leased = time.monotonic() < lease.until_s
        try:
            removed: int = aside(self._engine.ack, lease.messages)
        except RaymqError as error:
            if not error.retryable:
                raise
            logger.warning("it is unknown whether queue %s removed items: they may come again: %s", self._name, error)
            return True
        # The engine repeats a request whose answer was lost. The broker counts no item then, because the first request
        # has removed the items.
        return removed > 0 or is_leased

    def give_back(self, messages: Sequence[ReceivedMessage]) -> None:
        """Return leased items to the queue at once. Their attempt does not count."""
        if not messages:
            return
        try:
            aside(self._engine.change_invisible, messages, 0.0, counted=False)
        except RaymqError as error:
            logger.info("items of queue %s are delivered again after %g s: %s", self._name, LEASE_S, error)


_Key = tuple[str, ...]
_connections: Final[weakref.WeakValueDictionary[_Key, _SharedClient]] = weakref.WeakValueDictionary()
_links: Final[weakref.WeakValueDictionary[_Key, QueueLink]] = weakref.WeakValueDictionary()
_lock: Final[threading.Lock] = shared_lock()


def link_to(name: str, namespace: str) -> QueueLink:
    """Return this process's link to a queue. The first call for a namespace connects, and raises the errors of
    `raymq.connect`."""
    with _lock:
        session = _session()
        link = _links.get((*session, namespace, name))
        if link is None:
            connection = _connections.get((*session, namespace)) or _SharedClient(namespace)
            session = _session()  # the new client may have connected this process to Ray
            _connections[*session, namespace] = connection
            link = _links[*session, namespace, name] = QueueLink(connection, name)
        return link


def _session() -> _Key:
    """Return the identity of this process's connection to Ray. A later connection needs another client."""
    if not ray.is_initialized():
        return ()
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_job_id()


def _close(connection: _SharedClient, producer: Producer, engine: SimpleEngine) -> None:
    """Close the producer and the engine of a link. The last link of a connection also ends the connection."""
    for item in (producer, engine):
        try:
            item.close()
        except RaymqError as error:
            logger.warning("closing a queue's connection failed: %s", error)
