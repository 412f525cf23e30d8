"""ReplyWatch reads the replies to one client from the reply topic, from its end on.

    the store's node    one thread waits for the ends of the queues, and reads the mapped files (InPlaceReader)
    elsewhere           a long poll per broker group (Fetcher), whose threads take what comes

Its state about queues is a pull consumer's without a group; nothing is committed. The units and records of replies to
other clients are skipped by the code of their tag; those with the same code are left out when they are decoded. While
no request waits, and none has begun for a while, nothing is read.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

from raymq.client.consumer.fetcher import Fetcher
from raymq.client.consumer.pull.fetched_records import FetchedRecords, decode_messages
from raymq.client.consumer.pull.in_place import InPlaceReader
from raymq.client.consumer.pull.poll_turn import Wakeup
from raymq.client.consumer.pull.settings import PullSettings
from raymq.client.consumer.pull.subscription_state import SubscriptionState
from raymq.client.consumer.queue_lookup import QueueLookup
from raymq.client.consumer.subscription import Subscription
from raymq.common.errors import RaymqError
from raymq.common.message import MessageExt, MessageQueue, PullStatus
from raymq.common.protocol.group import QueueOffset
from raymq.common.protocol.store import FetchRequest, FetchResult
from raymq.records.format.memory_records import LocatedRecords
from raymq.remoting.route_cache import RouteCache
from raymq.remoting.storage_clients import StorageClients

REPLIES_MAX: Final = 512
"""The most replies that are taken at a time."""
IDLE_AFTER_S: Final = 10.0
"""Nothing is read once no request has waited for so long."""
_FAILED_PAUSE_S: Final = 0.3
_CLOSE_WITHIN_S: Final = 5.0

logger = logging.getLogger(__name__)


class ReplyWatch:
    """The replies to `client_id`. `take` is called with each of them, in a thread that reads; `idle_s()` says for how
    long nobody has waited for one."""

    def __init__(
        self,
        client_id: str,
        routes: RouteCache,
        storages: StorageClients,
        *,
        take: Callable[[MessageExt], None],
        idle_s: Callable[[], float],
    ) -> None:
        self._client_id = client_id
        self._take, self._idle_s = take, idle_s
        self._lookup = QueueLookup(routes, storages)
        self._lock = threading.Lock()
        """Guards `_core` and `_starts`; never held over a call."""
        self._core = SubscriptionState(PullSettings("replies", auto_commit=False), time.monotonic())
        self._starts: dict[MessageQueue, QueueOffset] = {}
        """The offsets at which the queues began to be read."""
        self._taking = threading.Lock()
        """Held by the thread that takes replies, until all of them are taken."""
        self._closing = threading.Event()
        self._wakeup = Wakeup()
        self._fetcher = Fetcher.by_routes(
            routes,
            storages,
            wanted=self._wanted,
            assigned=self._assigned,
            request=self._request,
            deliver=self._deliver,
            lost=self._lose,
            found=self._found,
        )
        self._in_place = InPlaceReader(
            self._core,
            self._lock,
            storage=storages.get,
            replaced=self._fetcher.replaced,
            lost=self._fetcher.unanswered,
            by_fetches=self._fetcher.wake_readers,
        )
        self._thread: threading.Thread | None = None

    def watches(self, queue: MessageQueue) -> bool:
        """True if a queue is read already."""
        return queue in self._starts

    def begin(self, queue: MessageQueue) -> None:
        """Read a queue from its present end on. RaymqError, when nobody tells where that is. For one thread at a time,
        and not after `close`."""
        subscription = Subscription.parse(queue.topic, self._client_id)
        end = self._lookup.bounds(queue).max_offset
        with self._lock:
            self._starts[queue] = QueueOffset(end)
            self._core.assign({queue.topic: subscription}, self._starts, time.monotonic())
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="replies", daemon=True)
            self._thread.start()

    def wake(self) -> None:
        """Read, after a time in which nothing was."""
        self._wakeup.set()
        self._fetcher.wake_readers()

    def close(self) -> None:
        """End the threads. Idempotent."""
        self._closing.set()
        self._wakeup.set()
        self._fetcher.stop()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_WITHIN_S)
        self._in_place.close()

    # On the store's node

    def _run(self) -> None:
        while not self._closing.is_set():
            self._wakeup.clear()  # before the looks: what comes from now on ends the wait
            idle_s = self._idle_s()
            if idle_s >= IDLE_AFTER_S:
                self._wakeup.wait((), IDLE_AFTER_S)
                continue
            try:
                self._in_place.look()
                self._in_place.read(REPLIES_MAX)
                if self._take_found():
                    continue  # the next look asks for what comes behind
                self._wakeup.wait(self._in_place.descriptors(), min(self._in_place.wait_max_s(), IDLE_AFTER_S))
            except Exception:  # a bug: without this thread no reply would be taken any more
                logger.exception("replies cannot be read, trying again")
                self._closing.wait(_FAILED_PAUSE_S)

    def _found(self, queue: MessageQueue, name: str) -> None:
        if self._in_place.found(queue, name):
            self._wakeup.set()

    # Elsewhere

    def _wanted(self) -> Mapping[MessageQueue, int]:
        if self._idle_s() >= IDLE_AFTER_S:
            return {}
        with self._lock:
            return self._core.wanted()

    def _assigned(self) -> frozenset[MessageQueue]:
        with self._lock:
            return frozenset(self._starts)

    def _request(self, queue: MessageQueue, offset: int) -> FetchRequest:
        with self._lock:
            return self._core.request(queue, offset)

    def _deliver(self, queue: MessageQueue, offset: int, result: FetchResult) -> None:
        with self._lock:
            if result.status is PullStatus.OFFSET_ILLEGAL:
                self._core.out_of_range(queue, offset, result.next_offset)
            else:
                records = LocatedRecords.of_fetch(result.records, result.count, offset, result.next_offset)
                fetched = FetchedRecords(records, result.next_offset)
                self._core.fetched(queue, offset, fetched)
        self._take_found()
        if self._in_place.is_to_be_found_again(queue):
            self._fetcher.find_again(queue)
        if self._in_place.take_up([queue]):
            self._wakeup.set()

    def _lose(self, queue: MessageQueue, offset: int, error: RaymqError) -> None:
        logger.error("%s: the reply at offset %d is lost: %s", queue, offset, error)
        with self._lock:
            self._core.out_of_range(queue, offset, offset + 1)

    # In either way

    def _take_found(self) -> bool:
        """Take the replies that are buffered: this client's, each of them once. True if anything was buffered."""
        any_found = False
        with self._taking:
            while True:
                with self._lock:
                    slices = self._core.peek(REPLIES_MAX)
                if not slices:
                    return any_found
                any_found = True
                for part, messages in decode_messages(slices):
                    with self._lock:
                        self._core.taken(part)
                    for message in messages:
                        if message.body_error is not None:
                            logger.error("a reply is lost: %s", message.body_error)
                        else:
                            self._take(message)
