"""Fetcher reads a consumer instance's queues by long polls, in a few threads per storage actor.

Pull and push consumers use it, in the user's process and in Pull actors. The owner of a Fetcher is the consumer that
created it. The owner's functions choose the queues and offsets to read, and receive the results. The owner keeps all
state about queues. The Fetcher keeps only its threads and their pauses after failures.

One thread per storage actor fetches from all wanted queues of the actor in one call. A queue may become wanted while
that thread waits in its long poll: the queue was granted, its buffer has capacity again, or its offset was moved. A
further thread fetches from this queue at once.

A separate thread finds the storage actor of each queue, and retries until a NameServer answers. So NameServers that are
down or hang delay no other thread, and reading resumes as soon as a NameServer answers again.

Separate threads read the queues that have a predicate (raymq.client.predicates.source).

A queue is read from its broker group's master, or from another replica that serves reads
(raymq.client.consumer.pull_from_which_node). If the master cannot read a queue's next message, the Fetcher calls the
owner's `lost`, and continues with the other queues.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from raymq.client.consumer.pull_from_which_node import PullFromWhichNode
from raymq.client.predicates.scan import FetchFailed
from raymq.client.predicates.source import GroupPredicate, PredicateStorage
from raymq.common.errors import DataLossError, PredicateFailedError, QuotaExceededError, RaymqError
from raymq.common.message import MessageQueue, PullStatus
from raymq.common.parallel import start_daemon
from raymq.common.protocol.store import FetchRequest, FetchResult
from raymq.common.retry import Backoff
from raymq.remoting.route_cache import RouteCache
from raymq.remoting.storage_client import StorageClient
from raymq.remoting.storage_clients import StorageClients

FETCH_LONG_POLL_S: Final = 1.0
"""Time in s that a fetch waits in a storage actor for new messages. It is short compared with RocketMQ's 15 s, because
a newly granted queue may wait this long for its first read."""
GONE_PAUSE_S: Final = 0.1
"""Pause in s after a fetch from an offset that the queue no longer has. A storage actor answers such a fetch at once.
The consumer may not be able to move to another offset yet, so without this pause it would fetch in a busy loop."""
LOSS_PAUSE_S: Final = 1.0
"""Time in s for which the consumer does not fetch from a queue whose next message is lost. Such a queue can make a
fetch of several queues fail. The consumer must then fetch from each of these queues in a separate call."""
READERS_MAX: Final = 3
"""Maximum number of reader threads per storage actor. If all of these threads wait in long polls, a queue that is added
is not read before one of the long polls ends."""
FURTHER_AFTER_S: Final = 0.005
"""Time in s that a further reader thread waits before it fetches from a newly wanted queue. The first reader thread
fetches from several queues in one call. Unless it waits in its long poll, its call returns within this time, and it
then fetches from the new queue too."""
FETCH_CALL_TIMEOUT_S: Final = 10.0
OTHERS_TIMEOUT_S: Final = 3.0
"""Timeout in s of a fetch whose queues can also be read from another replica. Without another replica, the timeout is
FETCH_CALL_TIMEOUT_S."""
WAKE_INTERVAL_S: Final = 0.02
"""After a queue's storage actor is found, the queue's first read may be delayed up to this time, in s. Then one wake-up
of the readers serves all queues whose storage actors are found within this time. This saves work, because each wake-up
checks every assigned queue."""
CONSUMER_FETCH_MAX_BYTES: Final = 8 * 1024 * 1024

logger = logging.getLogger(__name__)


FetchPosition = tuple[MessageQueue, int]
"""A queue, and the offset of the next fetch from the queue."""
Lost = Callable[[MessageQueue, int, DataLossError | PredicateFailedError], None]
_Source = tuple[str, GroupPredicate | None]
"""A storage actor, and the predicate that filters the messages read from it (or None)."""


class _Readers:
    """A group of reader threads of one storage actor. All threads of the group use the same predicate, or none uses a
    predicate. The object also contains the positions (queue and offset) from which the threads are fetching now."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Lock that guards all attributes of this object, which represents the reader threads of one storage
        actor."""
        self.first = threading.Condition(self.lock)
        """Condition on which the first reader thread waits while no queue may be fetched."""
        self.further = threading.Condition(self.lock)
        """Condition on which all reader threads except the first wait while no queue may be fetched."""
        self.fetching: set[FetchPosition] = set()
        """Positions (queue and offset) from which reader threads are fetching now."""
        self.threads = 0
        """Number of reader threads that run now."""
        self.first_idle = False
        """True while the first reader thread waits for a queue that it may fetch."""
        self.further_idle = 0
        """Number of reader threads, apart from the first, that wait for a queue that they may fetch."""
        self.version = 0
        """Number of wake-ups of these reader threads. A thread that found nothing to fetch waits only if this number
        has not changed since the thread began to search."""


class Fetcher:
    """Reads the wanted queues from their storage actors. The owner passes the callbacks below; several threads call
    them.

    `wanted()` returns the queues that may be fetched at present, each with its next offset; `assigned()` returns all
    queues. `request(queue, offset)` creates the request of one read. `storages(queue)` returns the names of the storage
    actors that serve reads of the queue, the master first. `storage(name)` connects to a storage actor. `deliver(queue,
    from_offset, result)` receives one result. `outdated(queue)` is called if the storage actor in the queue's route
    could not read the queue. `lost(queue, from_offset, error)` is called if the queue's next message is lost, or if the
    predicate failed on this message. `found(queue, name)` is called when the queue's storage actor was found.
    `predicate(queue)` returns the predicate that filters the queue, or None.
    """

    def __init__(
        self,
        *,
        wanted: Callable[[], Mapping[MessageQueue, int]],
        assigned: Callable[[], frozenset[MessageQueue]],
        deliver: Callable[[MessageQueue, int, FetchResult], None],
        request: Callable[[MessageQueue, int], FetchRequest],
        storages: Callable[[MessageQueue], Sequence[str]],
        storage: Callable[[str], StorageClient],
        outdated: Callable[[MessageQueue], None],
        lost: Lost,
        found: Callable[[MessageQueue, str], object] = lambda queue, name: None,
        predicate: Callable[[MessageQueue], GroupPredicate | None] = lambda queue: None,
        in_place: bool = False,
    ) -> None:
        self._in_place = in_place
        self._outdated, self._lost, self._found = outdated, lost, found
        self._left_out: dict[MessageQueue, tuple[int, float]] = {}
        """For each queue whose next message is lost: the message's offset, and the time until which the consumer does
        not fetch from this offset."""
        self._predicate = predicate
        self._wanted = wanted
        self._assigned = assigned
        self._deliver = deliver
        self._request = request
        self._storages = storages
        self._storage = storage
        self._lock = threading.Lock()
        """Lock that guards `_which`, `_readers`, `_finder` and `_forgotten`, and changes of `_names`."""
        self._which = PullFromWhichNode()
        self._names: dict[MessageQueue, str] = {}
        """For each queue, the storage actor from which the queue is read. Queues without a known storage actor are
        missing."""
        self._forgotten: set[MessageQueue] = set()
        """Queues whose storage actor must be searched again. If a search already runs for such a queue, its result is
        outdated."""
        self._alone: dict[str, bool] = {}
        """For each storage actor: True if no other replica serves reads of the actor's queues."""
        self._readers: dict[_Source, _Readers] = {}
        """The reader threads for each pair of storage actor and predicate (source)."""
        self._stopped = threading.Event()
        self._finder: threading.Thread | None = None
        """The thread that finds the storage actors of the queues; None before the first search."""
        self._find = threading.Event()
        """Event that wakes the thread that finds storage actors."""
        self._not_found: frozenset[MessageQueue] = frozenset()
        """Queues whose storage actor was not found. The finder thread searches again after a pause, without being
        woken."""

    @classmethod
    def by_routes(
        cls,
        routes: RouteCache,
        storages: StorageClients,
        *,
        wanted: Callable[[], Mapping[MessageQueue, int]],
        assigned: Callable[[], frozenset[MessageQueue]],
        request: Callable[[MessageQueue, int], FetchRequest],
        deliver: Callable[[MessageQueue, int, FetchResult], None],
        lost: Lost,
        found: Callable[[MessageQueue, str], object] = lambda queue, name: None,
        predicate: Callable[[MessageQueue], GroupPredicate | None] = lambda queue: None,
        in_place: bool = False,
    ) -> Fetcher:
        """Create a Fetcher that finds the storage actors through the routes of a cluster. `in_place`: True if the
        callback `deliver` also accepts FoundInPlace, a result whose records lie in the store's mapped files
        (raymq.remoting.storage_client)."""
        return cls(
            wanted=wanted,
            assigned=assigned,
            request=request,
            deliver=deliver,
            lost=lost,
            found=found,
            predicate=predicate,
            storages=lambda queue: routes.get(queue.topic).pull_storages(queue.broker_name),
            storage=storages.get,
            in_place=in_place,
            outdated=lambda queue: routes.invalidate(queue.topic),
        )

    def wake_readers(self) -> None:
        """Wake the reader threads, because more queues or other offsets may be fetched now."""
        if self._stopped.is_set():
            return
        by_source: dict[_Source, set[FetchPosition]] = {}
        for position in self._due().items():
            source = self._source_of(position[0])
            if source is not None:
                by_source.setdefault(source, set()).add(position)
        for source, positions in by_source.items():
            with self._lock:
                readers = self._readers.setdefault(source, _Readers())
            with readers.lock:
                if not positions <= readers.fetching:
                    self._wake_reader(source, readers)

    def replaced(self, queue: MessageQueue, name: str, pull_from: str) -> bool:
        """Record that the storage actor `name` has answered for a queue. If `pull_from` is not empty, it names the
        storage actor that must be read instead. Returns True if a new search for the queue's storage actor starts;
        `found` is called with its result."""
        if self._alone.get(name, True):
            return False
        with self._lock:
            again = self._which.answered(queue, name, pull_from, time.monotonic())
        if again:
            self.find_again(queue)
        return again

    def find_again(self, queue: MessageQueue) -> None:
        """Start a new search for the storage actor of a queue; `found` is called with the result."""
        self._forget([queue])
        self._call_finder()

    def source_of(self, queue: MessageQueue) -> str | None:
        """Return the name of the storage actor from which a queue is read; None if it is unknown now."""
        return self._names.get(queue)

    def unanswered(self, name: str, queues: Sequence[MessageQueue]) -> None:
        """Start a new search for the storage actors of these queues, because the storage actor `name` does not
        answer."""
        self._look_again(name, [(queue, 0) for queue in queues])

    def stop(self) -> None:
        """Stop the reader threads and the finder thread. A long poll in flight ends within its maximum wait."""
        self._stopped.set()
        self._find.set()
        with self._lock:
            all_readers = list(self._readers.values())
        for readers in all_readers:
            with readers.lock:
                readers.first.notify_all()
                readers.further.notify_all()

    def _wake_reader(self, source: _Source, readers: _Readers) -> None:
        readers.version += 1
        if readers.first_idle:
            readers.first.notify()
        elif readers.further_idle:
            readers.further.notify()
        elif readers.threads < READERS_MAX:
            is_first = readers.threads == 0
            # At the interpreter's exit no thread starts, and the consumer gets no records from this storage actor.
            if start_daemon(self._run, source, readers, is_first, name=f"fetch-{source[0]}") is not None:
                readers.threads += 1

    def _run(self, source: _Source, readers: _Readers, is_first: bool) -> None:
        name, predicate = source
        storage = self._storage(name) if predicate is None else predicate.read_from(self._storage(name))
        backoff = Backoff()
        while not self._stopped.is_set():
            if not is_first:
                self._stopped.wait(FURTHER_AFTER_S)
            with readers.lock:
                version = readers.version
            positions = self._take_positions(source, readers)
            if not positions:
                with readers.lock:
                    if readers.version == version:
                        self._idle(readers, is_first)
                continue
            failed = False
            try:
                pause_s = self._read(name, storage, positions)
                backoff.reset()
            except QuotaExceededError as error:
                logger.info("reading from storage actor %s pauses for %d ms: %s", name, error.retry_after_ms, error)
                pause_s = max(backoff.next(), min(error.retry_after_ms / 1000, FETCH_LONG_POLL_S))
            except RaymqError as error:
                logger.info("cannot read from storage actor %s, retrying: %s", name, error)
                failed = True
                pause_s = backoff.next()
            except Exception:  # catch undecodable records and bugs: if this loop ended, the consumer would hang
                logger.exception("cannot decode the answer of storage actor %s, retrying", name)
                pause_s = backoff.next()
            if pause_s:
                self._stopped.wait(pause_s)
            with readers.lock:
                readers.fetching.difference_update(positions)
            if failed:
                self._look_again(name, positions)

    def _look_again(self, name: str, positions: Sequence[FetchPosition]) -> None:
        """Start a new search for the storage actors of queues that could not be read from the storage actor
        `name`."""
        with self._lock:
            self._which.failed(name, time.monotonic())
        self._forget([queue for queue, _ in positions])
        for queue, _ in positions:
            self._outdated(queue)
        self._call_finder()

    def _idle(self, readers: _Readers, is_first: bool) -> None:
        """Let a reader thread wait until a queue may be fetched. The caller holds the readers' lock."""
        if self._stopped.is_set():
            return
        if is_first:
            readers.first_idle = True
            readers.first.wait(FETCH_LONG_POLL_S)
            readers.first_idle = False
        else:
            readers.further_idle += 1
            readers.further.wait(FETCH_LONG_POLL_S)
            readers.further_idle -= 1

    def _due(self) -> dict[MessageQueue, int]:
        """Return the queues that may be fetched now, each with its next offset. Leaves out queues whose next message
        was reported lost within the last LOSS_PAUSE_S."""
        wanted, now_s = dict(self._wanted()), time.monotonic()
        for queue, (offset, until_s) in self._left_out.copy().items():
            if wanted.get(queue) == offset and now_s < until_s:
                del wanted[queue]
        return wanted

    def _take_positions(self, source: _Source, readers: _Readers) -> list[FetchPosition]:
        """Return the queues to fetch now from the storage actor of `source`, each with its offset. Only queues with the
        predicate of `source` are returned; if `source` has none, only queues without a predicate. Queues that another
        thread is fetching are left out. Marks the returned queues as being fetched."""
        wanted = [(queue, offset) for queue, offset in self._due().items() if self._source_of(queue) == source]
        with readers.lock:
            positions = [position for position in wanted if position not in readers.fetching]
            readers.fetching.update(positions)
        return positions

    def _read(self, name: str, storage: StorageClient | PredicateStorage, positions: Sequence[FetchPosition]) -> float:
        """Fetch from the given queues and offsets, and deliver the results. Returns the pause in s before the next
        fetch."""
        requests = [self._request(queue, offset) for queue, offset in positions]
        timeout_s = FETCH_CALL_TIMEOUT_S if self._alone.get(name, True) else OTHERS_TIMEOUT_S
        try:
            fetch = storage.find if self._in_place else storage.fetch
            results = fetch(requests, CONSUMER_FETCH_MAX_BYTES, FETCH_LONG_POLL_S, timeout_s)
        except DataLossError:
            positions, results = self._read_singly(name, storage, positions, timeout_s)
        for (queue, offset), result in zip(positions, results, strict=True):
            self._left_out.pop(queue, None)
            if isinstance(result, FetchFailed) and result.error is not None:
                self._leave_out(queue, offset, result.error)
            else:
                self._deliver(queue, offset, result)
        self._choose_again([queue for queue, _ in positions], name, results)
        gone = any(result.status is PullStatus.OFFSET_ILLEGAL for result in results)
        return GONE_PAUSE_S if gone else 0.0

    def _read_singly(
        self,
        name: str,
        storage: StorageClient | PredicateStorage,
        positions: Sequence[FetchPosition],
        timeout_s: float,
    ) -> tuple[list[FetchPosition], list[FetchResult]]:
        """Fetch from each queue in a separate call, because one call for all these queues failed for one of them.
        Returns the queues and offsets that were answered, and their results."""
        answered, results = [], []
        for queue, offset in positions:
            try:
                results += storage.fetch([self._request(queue, offset)], CONSUMER_FETCH_MAX_BYTES, 0.0, timeout_s)
            except DataLossError as error:
                self._lose(name, queue, offset, error)
            else:
                answered.append((queue, offset))
        return answered, results

    def _lose(self, name: str, queue: MessageQueue, offset: int, error: DataLossError) -> None:
        """Report the next message of a queue as lost if `name` is the queue's master. Otherwise read the queue from the
        master, which may have the message."""
        logger.error("queue %s: cannot read offset %d from storage actor %s: %s", queue, offset, name, error)
        if self._storages(queue)[0] == name:
            self._leave_out(queue, offset, error)
        else:
            self._look_again(name, [(queue, offset)])

    def _leave_out(self, queue: MessageQueue, offset: int, error: DataLossError | PredicateFailedError) -> None:
        """Report why the message at `offset` of a queue cannot be read, and read the queue again after
        LOSS_PAUSE_S."""
        self._left_out[queue] = (offset, time.monotonic() + LOSS_PAUSE_S)
        self._lost(queue, offset, error)

    def _choose_again(self, queues: Sequence[MessageQueue], name: str, results: Sequence[FetchResult]) -> None:
        """Search again for the storage actors of queues that the consumer should read from another replica. Storage
        actor `name` has answered so in `results`, which has one result for each of `queues`."""
        if self._alone.get(name, True):
            return
        now_s, again = time.monotonic(), []
        with self._lock:
            for queue, result in zip(queues, results, strict=True):
                if self._which.answered(queue, name, result.pull_from, now_s):
                    again.append(queue)
        if again:
            self._forget(again)
            self._call_finder()

    # Methods that find the storage actor of each queue

    def _forget(self, queues: Sequence[MessageQueue]) -> None:
        """Forget the storage actors of queues, so that the finder thread searches again. If a search is running, its
        result is ignored."""
        with self._lock:
            self._forgotten.update(queues)
            for queue in queues:
                self._names.pop(queue, None)

    def _source_of(self, queue: MessageQueue) -> _Source | None:
        """Return the storage actor from which to read a queue, and the predicate that selects the queue's messages.
        Returns None while the queue's storage actor is unknown."""
        name = self._name_of(queue)
        return None if name is None else (name, self._predicate(queue))

    def _name_of(self, queue: MessageQueue) -> str | None:
        """Return the name of the storage actor to read a queue from. Returns None if the storage actor is unknown; the
        finder thread then searches for it, and wakes the readers."""
        name = self._names.get(queue)
        if name is None and queue not in self._not_found:
            self._call_finder()
        return name

    def _call_finder(self) -> None:
        with self._lock:
            if self._finder is None:
                self._finder = start_daemon(self._run_finder, name="fetch-routes")
        self._find.set()

    def _run_finder(self) -> None:
        backoff = Backoff()
        while not self._stopped.is_set():
            self._find.wait(backoff.next() if self._not_found else None)
            self._find.clear()
            try:
                self._find_all()
            except Exception:  # catch bugs: if this thread ended, the consumer would never read new queues
                logger.exception("cannot find the storage actors to read from, retrying")
                self._stopped.wait(backoff.next())
                self._find.set()
            if not self._not_found:
                backoff.reset()

    def _find_all(self) -> None:
        """Find the storage actor of each queue that has no known storage actor, topic by topic."""
        topics: dict[str, list[MessageQueue]] = {}
        for queue in sorted(self._assigned()):
            if queue not in self._names:
                topics.setdefault(queue.topic, []).append(queue)
        missed: set[MessageQueue] = set()
        woken_s = 0.0
        for queues in topics.values():
            if self._stopped.is_set():
                return
            missed |= self._find_topic(queues)
            if time.monotonic() - woken_s > WAKE_INTERVAL_S:
                self.wake_readers()
                woken_s = time.monotonic()
        self._not_found = frozenset(missed)
        if topics:
            self.wake_readers()

    def _find_topic(self, queues: Sequence[MessageQueue]) -> set[MessageQueue]:
        """Find the storage actors of queues of one topic. Returns the queues for which no storage actor was
        found."""
        missed: set[MessageQueue] = set()
        silent: set[str] = set()
        for queue in queues:
            # The search has already found no storage actor for another queue of this broker group. A search for this
            # queue would only wait and fail too, so skip the queue.
            if queue.broker_name in silent:
                missed.add(queue)
                continue
            with self._lock:
                self._forgotten.discard(queue)
            try:
                storages = self._storages(queue)
            except RaymqError as error:
                logger.info("queue %s cannot be read now: %s", queue, error)
                silent.add(queue.broker_name)
                missed.add(queue)
                continue
            with self._lock:
                name = self._which.choose(queue, storages, time.monotonic())
            self._alone[name] = len(storages) == 1
            self._found(queue, name)
            with self._lock:
                if queue not in self._forgotten:
                    self._names[queue] = name
        return missed
