"""ReplyWatch reads the replies to one client from the reply topic: a long poll per broker group, from its end on.

The store skips the replies to other clients by the code of their tag; those with the same code are left out here. While
no request waits, and none has begun for a while, nothing is read.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Final

from raymq.consumer.fetcher import Fetcher
from raymq.consumer.queue_lookup import QueueLookup
from raymq.consumer.subscription import Subscription
from raymq.errors import RaymqError
from raymq.message import MessageExt, MessageQueue, PullStatus
from raymq.protocol.store import FetchRequest, FetchResult
from raymq.record.decode import decode_records
from raymq.remoting.route_cache import RouteCache
from raymq.remoting.storage_clients import StorageClients

REPLIES_MAX: Final = 512
"""The most replies of one fetch."""
IDLE_AFTER_S: Final = 10.0
"""Nothing is read once no request has waited for so long."""

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
        """Guards `_offsets`."""
        self._offsets: dict[MessageQueue, int] = {}
        """The offset to read next, by queue."""
        self._codes: frozenset[int] | None = None
        self._fetcher = Fetcher.by_routes(
            routes,
            storages,
            wanted=self._wanted,
            assigned=lambda: frozenset(self._copy()),
            request=self._request,
            deliver=self._deliver,
            lost=self._lose,
        )

    def watches(self, queue: MessageQueue) -> bool:
        """True if a queue is read already."""
        return queue in self._offsets

    def begin(self, queue: MessageQueue) -> None:
        """Read a queue from its present end on. RaymqError, when nobody tells where that is."""
        codes = Subscription.parse(queue.topic, self._client_id).tag_codes
        end = self._lookup.bounds(queue).max_offset
        with self._lock:
            self._codes = codes
            self._offsets.setdefault(queue, end)

    def wake(self) -> None:
        """Read, after a time in which nothing was."""
        self._fetcher.wake_readers()

    def close(self) -> None:
        """End the threads."""
        self._fetcher.stop()

    def _copy(self) -> dict[MessageQueue, int]:
        with self._lock:
            return dict(self._offsets)

    def _wanted(self) -> Mapping[MessageQueue, int]:
        return self._copy() if self._idle_s() < IDLE_AFTER_S else {}

    def _request(self, queue: MessageQueue, offset: int) -> FetchRequest:
        return FetchRequest(queue.topic, queue.queue_id, offset, REPLIES_MAX, self._codes)

    def _deliver(self, queue: MessageQueue, offset: int, result: FetchResult) -> None:
        with self._lock:
            if self._offsets[queue] != offset:
                return  # another thread has read the same
            self._offsets[queue] = result.next_offset
        if result.status is PullStatus.FOUND:
            for message in decode_records(result.records, broker_name=queue.broker_name):
                if message.tags == self._client_id:
                    self._take(message)

    def _lose(self, queue: MessageQueue, offset: int, error: RaymqError) -> None:
        logger.error("%s: the reply at offset %d is lost: %s", queue, offset, error)
        with self._lock:
            if self._offsets[queue] == offset:
                self._offsets[queue] = offset + 1
