"""QueueReader reads records into a SubscriptionState: from mapped files on this node, and by fetches elsewhere.

    InPlaceReader     a storage actor on this node: records in its mapped files, found by the thread that polls
    Fetcher threads   a storage actor elsewhere: long polls, whose results are buffered until they are polled

Pull consumers and the reply watch of a client (raymq.client.request.reply_watch) read their queues with a QueueReader.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence

from raymq.client.consumer.fetcher import Fetcher, Lost
from raymq.client.consumer.pull.fetched_records import FetchedRecords
from raymq.client.consumer.pull.in_place import InPlaceReader
from raymq.client.consumer.pull.subscription_state import SubscriptionState
from raymq.client.consumer.repair_wait import REPORT_TIMEOUT_S
from raymq.client.predicates.source import GroupPredicate
from raymq.common.message import MessageQueue, PullStatus
from raymq.common.protocol.store import FetchRequest, FetchResult, QueuePosition, RepairState
from raymq.records.format.memory_records import LocatedRecords
from raymq.remoting.route_cache import RouteCache
from raymq.remoting.storage_clients import StorageClients

logger = logging.getLogger(__name__)


class QueueReader:
    """Reads the queues of `core` (a consumer's subscription state), which `lock` guards. Thread-safe; only one thread
    at a time may call `look`.

    The arguments are callbacks. `wake()` makes a thread that waits for records check for them again. `lost` is called
    when a queue's next message cannot be read. `fetched()` is called after a fetch has buffered records (default:
    `wake`). `read_on(queue)` is called with the lock held when a fetch has read a queue. `count` is called with the
    records that a read has found and their size in bytes. `predicate(queue)` returns the predicate of a queue. While
    `rests()` returns True, nothing is fetched.
    """

    def __init__(
        self,
        core: SubscriptionState,
        lock: threading.Lock,
        routes: RouteCache,
        storages: StorageClients,
        *,
        wake: Callable[[], None],
        lost: Lost,
        fetched: Callable[[], object] | None = None,
        read_on: Callable[[MessageQueue], None] = lambda queue: None,
        count: Callable[[MessageQueue, FetchedRecords, int], None] = lambda queue, records, size_bytes: None,
        predicate: Callable[[MessageQueue], GroupPredicate | None] = lambda queue: None,
        rests: Callable[[], bool] = lambda: False,
    ) -> None:
        self._core, self._lock = core, lock
        self._routes, self._storages = routes, storages
        self._wake, self._fetched = wake, wake if fetched is None else fetched
        self._read_on, self._count, self._rests = read_on, count, rests
        self._fetcher = Fetcher.by_routes(
            routes,
            storages,
            wanted=self._wanted,
            assigned=self._assigned,
            request=self._request,
            deliver=self._deliver,
            lost=lost,
            found=self._found,
            predicate=predicate,
        )
        self._in_place = InPlaceReader(
            core,
            lock,
            storage=storages.get,
            replaced=self._fetcher.replaced,
            lost=self._fetcher.unanswered,
            by_fetches=self._fetcher.wake_readers,
            came=count,
        )

    def look(self, max_messages: int) -> None:
        """Find records in the stores' mapped files, if fewer than `max_messages` records are buffered."""
        self._in_place.look()
        with self._lock:
            missing = self._core.missing(max_messages)
        if missing > 0:
            self._in_place.read(missing)

    def descriptors(self) -> list[int]:
        """Return the file descriptors that become readable when a waiting thread should check for records
        again."""
        return self._in_place.descriptors()

    def wait_max_s(self) -> float:
        """Return the longest time in s that a thread may wait before it checks for records again."""
        return self._in_place.wait_max_s()

    def report_damage(self, queue: MessageQueue, positions: Sequence[QueuePosition]) -> list[RepairState]:
        """Report damaged records of a queue to the storage actor from which the queue is read. Blocks for a remote
        call. Raises the errors of StorageClient.report_damage, and of a search for the storage actor."""
        name = self._in_place.source_of(queue) or self._fetcher.source_of(queue)
        if name is None:
            name = self._routes.get(queue.topic).pull_storages(queue.broker_name)[0]
        return self._storages.get(name).report_damage(positions, REPORT_TIMEOUT_S)

    def read_more(self) -> None:
        """Wake the reader threads, because there may be more queues to read, or other offsets to read from."""
        with self._lock:
            hungry = list(self._core.wanted())
        self._in_place.take_up(hungry)
        self._fetcher.wake_readers()
        self._wake()

    def stop(self) -> None:
        """Stop the threads that read queues. A long poll in flight ends within its maximum wait."""
        self._fetcher.stop()

    def close_files(self) -> None:
        """Close the connections to the storage actors on this node whose mapped files this consumer has read. Call it
        only after the last call of `look`."""
        self._in_place.close()

    # Functions that the fetcher's threads call

    def _wanted(self) -> Mapping[MessageQueue, int]:
        if self._rests():
            return {}
        with self._lock:
            return self._core.wanted()

    def _assigned(self) -> frozenset[MessageQueue]:
        with self._lock:
            return frozenset(self._core.assigned_queues)

    def _request(self, queue: MessageQueue, offset: int) -> FetchRequest:
        with self._lock:
            return self._core.request(queue, offset)

    def _found(self, queue: MessageQueue, name: str) -> None:
        if self._in_place.found(queue, name):
            self._wake()

    def _deliver(self, queue: MessageQueue, offset: int, result: FetchResult) -> None:
        if result.status is PullStatus.OFFSET_ILLEGAL:
            self._jump(queue, offset, result.next_offset)
            return
        records = LocatedRecords.of_fetch(result.records, result.count, offset, result.next_offset)
        fetched = FetchedRecords(records, result.next_offset)
        self._count(queue, fetched, len(result.records))
        with self._lock:
            self._read_on(queue)
            is_new = self._core.fetched(queue, offset, fetched) and fetched.count > 0
        if is_new:
            self._fetched()
        if self._in_place.is_to_be_found_again(queue):
            self._fetcher.find_again(queue)
        if self._in_place.take_up([queue]):
            self._wake()

    def _jump(self, queue: MessageQueue, offset: int, next_offset: int) -> None:
        """Continue reading a queue at `next_offset`, because `offset` lies outside the offsets that the queue
        contains."""
        with self._lock:
            jumps = self._core.out_of_range(queue, offset, next_offset)
        if jumps:
            logger.warning("queue %s: offset %d no longer exists, continuing at offset %d", queue, offset, next_offset)
            self._in_place.take_up([queue])
            self._wake()
