"""InPlaceReader reads queues from the mapped files of the storage actors on this node, in the thread that polls.

    ask (queues and offsets) → the store's answer: their visible ends → units → records in the map

A poll gets the records without another thread and without a copy. A watch is a connection on which the store reports
new messages. The store answers a watch request as soon as one of the queues has new messages. So a poll waits for the
file descriptors of the watches.

If a queue's next record was deleted or lost, the mapped files do not show it. The same holds if the queue's records
contain several messages each. Then fetches (raymq.client.consumer.fetcher) read the queue, until a fetch has returned a
result.

A thread of the fetcher finds the storage actor of a queue and opens its watch. The thread or task that polls does
everything else.
"""

from __future__ import annotations

import logging
import math
import select
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, Protocol

from raymq.client.consumer.pull.fetched_records import FetchedRecords
from raymq.client.consumer.pull.subscription_state import SubscriptionState
from raymq.client.predicates.evaluation import FunctionHere
from raymq.client.predicates.matching_records import keep
from raymq.common.errors import DataLossError, PredicateFailedError, RaymqError
from raymq.common.message import MessageQueue
from raymq.common.protocol.store import FetchRequest, QueueEnds
from raymq.records.format.memory_records import LocatedRecords
from raymq.records.logfiles.log_reader import LogReader

WATCH_WAIT_S: Final = 30.0
"""Maximum time in s that a store may delay its answer to a watch request while there are no new messages."""
WATCH_GRACE_S: Final = 10.0
"""Extra time in s after WATCH_WAIT_S in which the store's answer to a watch request may arrive. After that the watch
counts as broken."""
WATCH_AGAIN_AFTER_S: Final = 0.005
"""Maximum time in s for which new messages may go unnoticed while other queues have enough records to read. A watch
request names every queue, so sending one in each poll would be too expensive."""
READ_AHEAD: Final = 64
"""Minimum number of records that one read of the mapped files locates, even if the poll wants fewer. Located records
stay in the mapped file."""
READ_MAX_BYTES: Final = 64 << 20
"""Maximum bytes of records that one poll locates in the mapped files."""
READ_MAX_S: Final = 0.02
"""Maximum time in s for which one read skips messages that the tags exclude. After that, the poll checks its deadline
again."""
LOOK_AT_MAX: Final = 1024
"""Maximum number of records that are passed to a predicate at once. After each such group of records, the reader checks
how many records the predicate has accepted so far."""
LOOK_AT_MAX_BYTES: Final = 64 << 20
OPEN_AGAIN_AFTER_S: Final = 1.0
"""After a watch (the connection that reports new messages) has ended or could not be opened: time in s for which the
consumer reads from the storage actor by fetches instead."""
STAY_CHECK_S: Final = 1.0
"""Interval in s between checks whether a queue that is read from a slave can be read from its master again."""

logger = logging.getLogger(__name__)


class WatchConnection(Protocol):
    """Connection to a store that reports new messages in queues; StorageClient.open_watch opens the connection."""

    def fileno(self) -> int:
        """Return the connection's file descriptor, which is readable when an answer has arrived."""

    def ask(self, requests: Sequence[FetchRequest], wait_s: float) -> None:
        """Request the end offsets of the queues in `requests`. This request replaces the previous one. The store
        answers as soon as one of the queues has a message at the requested offset or later, or does not contain the
        offset. It answers after `wait_s` in any case."""

    def receive(self) -> list[QueueEnds]:
        """Return the answer to the last request, in the order of its queues. Returns an empty list if the answer
        belongs to an earlier request."""

    def count_read(self, messages: int) -> None:
        """Report the number of messages that a read has found, for the store's statistics."""

    def close(self) -> None:
        """Close the connection to the store."""


class WatchableStorage(Protocol):
    """Interface of a storage actor's client. If the actor runs on this node, the client can read the actor's files and
    watch its queues."""

    def reader(self) -> LogReader | None:
        """Return the reader of the storage actor's mapped files; None if this process cannot read the files."""

    def open_watch(self) -> WatchConnection | None:
        """Open a new watch of the storage actor's queues. Returns None if the actor is not on this node."""


class _MappedStore:
    """A storage actor on this node whose files this consumer has mapped, with the watch connection that reports new
    messages."""

    def __init__(self, name: str, reader: LogReader, watch: WatchConnection) -> None:
        self.name, self.reader, self.watch = name, reader, watch
        self._poll = select.poll()
        self._poll.register(watch.fileno(), select.POLLIN)
        self.asked: list[tuple[MessageQueue, FetchRequest]] = []
        """The queues that the watch request in flight names; empty if no request is in flight."""
        self.asked_s = 0.0
        self.answered_s = -math.inf
        self.version = -1
        """The SubscriptionState's version at the time of the last watch request; -1 before the first request. If the
        version has changed since, the request in flight may name outdated queues or offsets."""
        self.stay_checked_s = 0.0

    @property
    def answered(self) -> bool:
        """True if the watch's descriptor is readable: an answer has arrived, or the connection has ended."""
        return bool(self.asked) and bool(self._poll.poll(0))

    @property
    def deadline_s(self) -> float:
        """Time by which the store must answer the watch request (a request to report new messages) that is in
        flight."""
        return self.asked_s + WATCH_WAIT_S + WATCH_GRACE_S


class InPlaceReader:
    """Finds the records of the queues that `core`, guarded by `lock`, reads in place (from mapped files).

    `storage(name)` returns the client of a storage actor. The other arguments are callbacks. `replaced(queue, name,
    pull_from)` is called after storage actor `name` has answered for a queue. If `pull_from` is not empty, it names
    another storage actor to read. `replaced` returns True if a new search for the storage actor starts; `found` is then
    called with the result. `lost(name, queues)` is called when a storage actor does not answer. `by_fetches()` is
    called when queues must be read by fetches, not in place. `came` is called with records that were found and their
    size in bytes.
    """

    def __init__(
        self,
        core: SubscriptionState,
        lock: threading.Lock,
        *,
        storage: Callable[[str], WatchableStorage],
        replaced: Callable[[MessageQueue, str, str], bool],
        lost: Callable[[str, Sequence[MessageQueue]], None],
        by_fetches: Callable[[], None],
        came: Callable[[MessageQueue, FetchedRecords, int], None] = lambda queue, records, size_bytes: None,
    ) -> None:
        self._core, self._lock = core, lock
        self._storage = storage
        self._replaced, self._lost, self._by_fetches, self._came = replaced, lost, by_fetches, came
        self._open_lock = threading.Lock()
        """Lock that guards `_stores`, `_not_before_s` and `_closed`. No thread holds it during a remote call."""
        self._stores: dict[str, _MappedStore] = {}
        self._not_before_s: dict[str, float] = {}
        """For each storage actor on this node, the earliest time at which a new watch may be opened to it. A watch is
        the connection on which the actor reports new messages."""
        self._closed = False
        self._store_of: dict[MessageQueue, _MappedStore] = {}
        self._finds: Counter[MessageQueue] = Counter()
        """For each queue, the number of calls of `found`. If the number has changed while `_follow` starts a new search
        for the queue's storage actor, `found` has already recorded the new storage actor."""
        self._retried_s: dict[MessageQueue, float] = {}
        """For each queue whose storage actor has no watch (connection that reports new messages): the time at which the
        consumer next tries to read the queue in place."""
        self._functions: dict[str, FunctionHere] = {}
        """For each topic with a predicate: the user's predicate function."""
        self._made: set[MessageQueue] = set()
        """Queues whose records the store builds for each reader (light queues, and queues with inner batches). The
        consumer reads these queues by fetches, not in place."""

    # Methods that any thread may call

    def found(self, queue: MessageQueue, name: str) -> bool:
        """Read a queue in place if its storage actor `name` is on this node, otherwise by fetches. Blocks for remote
        calls to the actor. Returns True if the queue is read in place."""
        store = self._open(name)
        with self._open_lock:
            again_s = self._not_before_s.get(name)
        with self._lock:
            self._finds[queue] += 1
            # Read the queue by fetches if the store is not on this node. Do the same if the store's watch (connection
            # that reports new messages) has ended since `_open` returned the store.
            if store is None or self._stores.get(name) is not store:
                self._store_of.pop(queue, None)
                if again_s is not None or store is not None:
                    self._retried_s[queue] = again_s or time.monotonic()
                self._core.read_by_fetches(queue)
                return False
            self._store_of[queue] = store
            if queue in self._made:
                return False
            self._core.read_in_place(queue)
            return True

    def source_of(self, queue: MessageQueue) -> str | None:
        """Return the name of the storage actor in whose files a queue is read; None if it is not read in place."""
        with self._lock:
            store = self._store_of.get(queue)
        return None if store is None else store.name

    def is_to_be_found_again(self, queue: MessageQueue) -> bool:
        """Return True if `found` should be called again for a queue, to try again to read the queue in place (from
        mapped files). The last attempt failed, because the queue's storage actor could not be watched for new messages.
        Returns True once per failed attempt."""
        with self._lock:
            due = self._retried_s.get(queue, math.inf) <= time.monotonic()
            if due:
                del self._retried_s[queue]
            return due

    def take_up(self, queues: Sequence[MessageQueue]) -> bool:
        """Read queues in place (from mapped files) if their storage actor is on this node. Returns True if there is any
        such queue."""
        with self._lock:
            known = [queue for queue in queues if queue in self._store_of and queue not in self._made]
            for queue in known:
                self._core.read_in_place(queue)
        return bool(known)

    def _open(self, name: str) -> _MappedStore | None:
        with self._open_lock:
            store = self._stores.get(name)
            too_early = time.monotonic() < self._not_before_s.get(name, 0.0)
        if store is not None or too_early:
            return store
        reader: LogReader | None = None
        watch: WatchConnection | None = None
        failed = True
        try:
            storage = self._storage(name)
            reader = storage.reader()
            watch = None if reader is None else storage.open_watch()
            failed = reader is not None and watch is None
        except (RaymqError, OSError) as error:
            logger.info("cannot watch the files of storage actor %s, reading by fetches instead: %s", name, error)
        with self._open_lock:
            if failed:
                self._not_before_s[name] = time.monotonic() + OPEN_AGAIN_AFTER_S
            else:
                self._not_before_s.pop(name, None)
            if reader is None or watch is None:
                return None
            if not self._closed:
                return self._stores.setdefault(name, _MappedStore(name, reader, watch))
        watch.close()
        return None

    # Methods that only the polling thread calls

    def descriptors(self) -> list[int]:
        """Return the file descriptors of the stores that have not answered a request for new messages yet. A descriptor
        becomes readable when its store's answer arrives."""
        return [store.watch.fileno() for store in self._all() if store.asked]

    def wait_max_s(self) -> float:
        """Return the longest time in s for which a poll may wait for the stores' answers about new messages; 0 if more
        records can be read at once."""
        with self._lock:
            if self._core.has_unread:
                return 0.0
        now_s = time.monotonic()
        return max(0.0, min((store.deadline_s - now_s for store in self._all() if store.asked), default=WATCH_WAIT_S))

    def look(self) -> None:
        """Process the stores' answers that have arrived, and send new watch requests for messages after the known end
        of each queue."""
        now_s = time.monotonic()
        for store in self._all():
            try:
                if store.answered:
                    self._take_answer(store, now_s)
                elif store.asked and now_s > store.deadline_s:
                    raise TimeoutError("the storage actor did not answer in time")
                self._ask(store, now_s)
            except (RaymqError, OSError, EOFError) as error:
                self._break(store, error)

    def read(self, max_messages: int) -> None:
        """Find up to `max_messages` records (at least READ_AHEAD) in the queues that have unread messages, queue by
        queue."""
        until_s, left_bytes = time.monotonic() + READ_MAX_S, READ_MAX_BYTES
        while max_messages > 0 and left_bytes > 0 and time.monotonic() < until_s:
            with self._lock:
                turn = self._core.next_unread(max(max_messages, READ_AHEAD))
                store = self._store_of.get(turn[0]) if turn is not None else None
            if turn is None:
                return
            queue, request, end = turn
            if store is None:
                self._read_by_fetches([queue])
                continue
            try:
                records, next_offset = self._find(store, queue, request, end, left_bytes, until_s)
            except PredicateFailedError:
                # read the queue by a fetch, which reports the predicate's failure and retries after a pause
                self._read_by_fetches([queue])
                continue
            except DataLossError as error:
                logger.info("cannot read queue %s from its files, reading by one fetch instead: %s", queue, error)
                if store.reader.makes_records(queue.topic, queue.queue_id):
                    self._made.add(queue)
                self._read_by_fetches([queue])
                continue
            found = [FetchedRecords(part, int(part.offsets[-1]) + 1) for part in records]
            if found:
                found[-1].next_offset = next_offset
            with self._lock:
                self._core.fetched(
                    queue, request.queue_offset, *found or [FetchedRecords(LocatedRecords.read(b""), next_offset)]
                )
            count = sum(part.count for part in found)
            if count:
                store.watch.count_read(count)
            max_messages -= count
            sizes = [part.size_bytes for part in found]
            left_bytes -= sum(sizes)
            for part, size_bytes in zip(found, sizes, strict=True):
                self._came(queue, part, size_bytes)

    def _find(
        self,
        store: _MappedStore,
        queue: MessageQueue,
        request: FetchRequest,
        end: int,
        max_bytes: int,
        until_s: float,
    ) -> tuple[list[LocatedRecords], int]:
        """Find the records that a fetch request names and that match the topic's predicate. Also returns the offset
        after these records, or the offset of the first record on which the predicate failed. Raises
        PredicateFailedError if the predicate fails on the first record."""
        with self._lock:
            predicate = self._core.predicate(request.topic)
        if predicate is None:
            return store.reader.find(request, end, max_bytes)
        function = self._functions.get(request.topic)
        if function is None or function.predicate is not predicate:
            function = self._functions[request.topic] = FunctionHere(predicate)
        records, next_offset = store.reader.find(replace(request, max_messages=LOOK_AT_MAX), end, LOOK_AT_MAX_BYTES)
        kept = keep(
            records,
            next_offset,
            partial(function.evaluate, queue.broker_name),
            max_messages=request.max_messages,
            max_bytes=max_bytes,
            until_s=until_s,
        )
        if kept.failure and not kept.looked:
            raise PredicateFailedError(predicate.text, str(queue), kept.next_offset, kept.failure)
        return kept.records, kept.next_offset

    def close(self) -> None:
        """Close the watches (connections that report new messages) of all storage actors. Called after the last
        poll."""
        with self._open_lock:
            self._closed = True
            stores = list(self._stores.values())
            self._stores.clear()
        for store in stores:
            store.watch.close()

    def _all(self) -> list[_MappedStore]:
        with self._open_lock:
            return list(self._stores.values())

    def _take_answer(self, store: _MappedStore, now_s: float) -> None:
        ends = store.watch.receive()
        if not ends:
            return
        asked, store.asked, store.answered_s = store.asked, [], now_s
        if len(ends) != len(asked):
            raise ConnectionError(f"storage actor {store.name} answered for {len(ends)} queues, not {len(asked)}")
        check_all = now_s - store.stay_checked_s > STAY_CHECK_S
        if check_all:
            store.stay_checked_s = now_s
        # Most queues have no new messages. Skip these queues here, before the lock is taken.
        told = [
            (queue, request.queue_offset, known)
            for (queue, request), known in zip(asked, ends, strict=True)
            if known[1] != request.queue_offset or known[0] > known[1] or known[2] or check_all
        ]
        with self._lock:
            strange = [
                queue
                for queue, offset, known in told
                if not self._core.end_known(queue, offset, known.min_offset, known.max_offset)
            ]
        if strange:
            self._read_by_fetches(strange)
        for queue, _, known in told:
            self._follow(store, queue, known.pull_from)

    def _follow(self, store: _MappedStore, queue: MessageQueue, pull_from: str) -> None:
        """Report the store's answer for a queue, with `pull_from`, to `_replaced`. If this starts a new search for the
        queue's storage actor, stop reading the queue from this store."""
        with self._lock:
            finds = self._finds[queue]
        if self._replaced(queue, store.name, pull_from):
            with self._lock:
                # If the count in `_finds` has changed, `found` was called during `_replaced`, and has already recorded
                # the queue's new storage actor.
                if self._finds[queue] == finds:
                    self._store_of.pop(queue, None)
                    self._core.read_by_fetches(queue)

    def _ask(self, store: _MappedStore, now_s: float) -> None:
        """Send a watch request to a store. Send none if the request in flight still has the queues and offsets for
        which the consumer waits now."""
        with self._lock:
            version = self._core.version
            if store.asked and store.version == version:
                return
            if store.version == version and self._core.has_unread and now_s - store.answered_s < WATCH_AGAIN_AFTER_S:
                # Send no new watch request yet: this poll returns records that are already known, and the next poll
                # sends the request.
                return
            waits = self._core.waits()
            if len(self._stores) > 1:
                waits = [wait for wait in waits if self._store_of.get(wait[0]) is store]
        if waits:
            store.watch.ask([request for _, request in waits], WATCH_WAIT_S)
            store.asked_s = now_s
        # If no queue waits for new messages now, no new watch request is sent to the store. The previous watch request
        # stays in flight, but the answer to it is ignored.
        store.asked, store.version = waits, version

    def _read_by_fetches(self, queues: Sequence[MessageQueue]) -> None:
        with self._lock:
            for queue in queues:
                self._core.read_by_fetches(queue)
        self._by_fetches()

    def _break(self, store: _MappedStore, error: Exception) -> None:
        """Close the watch (connection that reports new messages) of a storage actor that has ended or hangs. The
        actor's queues are read by fetches until the actor is found again."""
        logger.info("the connection that watches storage actor %s has ended: %s", store.name, error)
        with self._open_lock:
            self._stores.pop(store.name, None)
            self._not_before_s[store.name] = time.monotonic() + OPEN_AGAIN_AFTER_S
        store.watch.close()
        with self._lock:
            queues = [queue for queue, of_queue in self._store_of.items() if of_queue is store]
            for queue in queues:
                del self._store_of[queue]
                self._core.read_by_fetches(queue)
        self._lost(store.name, queues)
