"""QueueLookup looks up data of any queue, whether a consumer holds it or not: the queues of a topic, their offset
bounds, and offsets by time.

QueueWatch calls a program's listener when a topic's queues change (RocketMQ's TopicMessageQueueChangeListener).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from raymq.common.errors import InvalidArgumentError, RaymqError
from raymq.common.message import MessageQueue, checked_queue
from raymq.common.names import check_topic
from raymq.common.namespaces import NO_NAMESPACE, Namespace
from raymq.common.parallel import contained, start_daemon
from raymq.common.protocol.store import QueueBounds
from raymq.remoting.route_cache import RouteCache
from raymq.remoting.storage_client import StorageClient
from raymq.remoting.storage_clients import StorageClients, call_master

logger = logging.getLogger(__name__)

LOOKUP_TIMEOUT_S: Final = 10.0
"""Timeout in s of a lookup for one queue. It allows for a restart of the queue's storage actor."""
LOOKUP_ATTEMPT_TIMEOUT_S: Final = 5.0

T = TypeVar("T")


class QueueLookup:
    """Looks up queues, their bounds and their offsets, by calls to NameServers and storage actors. Thread-safe."""

    def __init__(self, routes: RouteCache, storages: StorageClients, names: Namespace = NO_NAMESPACE) -> None:
        self._names = names
        self._routes = routes
        self._storages = storages

    def queues(self, topic: str) -> list[MessageQueue]:
        """Return a topic's readable queues, sorted, from the current routes of the NameServers. Raises
        TopicNotExistError if the topic does not exist, and IllegalNameError if its name is illegal. Raises
        ServiceNotAvailableError or RequestTimeoutError if no NameServer answers within 10 s."""
        stored = self._names.wrap(check_topic(topic))
        self._routes.invalidate(stored)
        return self._names.shown_queues(self._routes.wait(stored, LOOKUP_TIMEOUT_S).subscribe_queues)

    def check(self, queue: MessageQueue) -> MessageQueue:
        """Check that a queue exists, and return it with its stored topic name. Raises TopicNotExistError or
        InvalidArgumentError if the topic or the queue does not exist."""
        queue = checked_queue("queue", queue)
        stored = self._names.queue(queue)
        if stored not in self._routes.wait(check_topic(stored.topic), LOOKUP_TIMEOUT_S).subscribe_queues:
            known = self.queues(queue.topic)  # the queue may be new, so fetch the route again
            if self._names.shown_queue(stored) not in known:
                raise InvalidArgumentError(
                    f"queue {queue} does not exist: topic {queue.topic!r} has {len(known)} queues"
                )
        return stored

    def bounds(self, queue: MessageQueue) -> QueueBounds:
        """Return a queue's bounds: the offset of its first stored message, and the offset that its next message will
        get."""
        return self._persist(
            queue,
            lambda stored, storage, left_s: storage.queue_bounds(
                stored.topic, stored.queue_id, min(left_s, LOOKUP_ATTEMPT_TIMEOUT_S)
            ),
        )

    def begin_offsets(self, queues: Iterable[MessageQueue]) -> dict[MessageQueue, int]:
        """Return the first offset that each queue still holds."""
        return {queue: self.bounds(queue).min_offset for queue in queues}

    def end_offsets(self, queues: Iterable[MessageQueue]) -> dict[MessageQueue, int]:
        """Return the offset that the next message of each queue will get."""
        return {queue: self.bounds(queue).max_offset for queue in queues}

    def offsets_for_times(self, times_ms: Mapping[MessageQueue, int]) -> dict[MessageQueue, int]:
        """Return, for each queue, the offset of the first message stored at or after a time in ms since 1970. The
        result is within the queue's bounds."""
        return {queue: self._offset_for(queue, time_ms) for queue, time_ms in times_ms.items()}

    def _offset_for(self, queue: MessageQueue, time_ms: int) -> int:
        return self._persist(
            queue,
            lambda stored, storage, left_s: storage.offset_by_time(
                stored.topic, stored.queue_id, time_ms, min(left_s, LOOKUP_ATTEMPT_TIMEOUT_S)
            ),
        )

    def _persist(self, queue: MessageQueue, call: Callable[[MessageQueue, StorageClient, float], T]) -> T:
        """Make a repeatable call to the queue's storage actor. If the actor restarts or the master changes, the call is
        retried for up to LOOKUP_TIMEOUT_S."""
        stored = self.check(queue)
        return call_master(self._routes, self._storages, stored, LOOKUP_TIMEOUT_S, partial(call, stored))


QueueChangeListener = Callable[[str, list[MessageQueue]], None]
"""Listener for changes of a topic's queues. After a change it is called with the topic's name and the present queues,
sorted."""


@dataclass(slots=True)
class _Watched:
    """A registered listener for changes of a topic's queues. `known` holds the topic's queues at the last
    check."""

    topic: str
    callback: QueueChangeListener
    known: list[MessageQueue]


class QueueWatch:
    """Checks topics for changed queues every `interval_s` in a separate thread. The same thread calls the listeners,
    one after another.

    `queues_of(topic)` returns a topic's current queues. While it raises a RaymqError (no NameServer answers, or the
    topic does not exist), no listener of that topic is called.
    """

    def __init__(self, queues_of: Callable[[str], list[MessageQueue]], interval_s: float, name: str) -> None:
        self._queues_of = queues_of
        self._interval_s = interval_s
        self._name = name
        self._lock = threading.Lock()
        self._watched: list[_Watched] = []
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def register(self, topic: str, callback: QueueChangeListener) -> None:
        """Register a listener. `callback` is called each time that a check finds that the topic's queues have changed,
        compared with the queues at registration or at the last change."""
        watched = _Watched(topic, callback, self._queues_of(topic))
        with self._lock:
            self._watched.append(watched)
            if self._thread is None and not self._stopped.is_set():
                self._thread = start_daemon(self._run, name=self._name)

    def stop(self) -> None:
        """Stop calling listeners. Does not wait for a running listener call, because that call may be the caller of
        this method."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            with self._lock:
                watched = list(self._watched)
            for entry in watched:
                self._check(entry)

    def _check(self, entry: _Watched) -> None:
        try:
            queues = self._queues_of(entry.topic)
        except RaymqError as error:
            logger.info("cannot look up the queues of topic %s: %s", entry.topic, error)
            return
        if queues == entry.known or self._stopped.is_set():
            return
        entry.known = queues
        # a listener that raises, perhaps SystemExit, must not keep the other listeners from being called
        failure = f"the queue-change listener of topic {entry.topic} raised an exception"
        contained(logger, failure, entry.callback, entry.topic, list(queues))
