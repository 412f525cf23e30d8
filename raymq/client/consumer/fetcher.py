"""Fetcher reads a consumer instance's queues by long polls, in a few threads per storage actor.

Pull and push consumers use it, in the user's process and in Pull actors. The owner's functions choose the queues and
offsets to read, and take the results. So the owner has all state about queues; the Fetcher has threads, and pauses
after failures.

One thread per storage actor fetches from all its wanted queues in one call. A queue may become wanted while that thread
waits in its long poll: it was granted, its buffer has capacity again, or its offset was moved. A further thread fetches
from this queue at once.

A separate thread finds the storage actor of each queue, and tries until a NameServer answers. So NameServers that are
away or hang delay no other thread, and reading resumes without an event when they are back.

Separate threads read the queues that have a predicate (raymq.client.predicates.source).

A queue is read from its broker group's master, or from another replica that serves reads
(raymq.client.consumer.pull_from_which_node). If the master cannot read a queue's next message, the owner is called, and
the other queues continue.
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
from raymq.common.protocol.store import FetchRequest, FetchResult
from raymq.common.retry import Backoff
from raymq.remoting.route_cache import RouteCache
from raymq.remoting.storage_client import StorageClient
from raymq.remoting.storage_clients import StorageClients

FETCH_LONG_POLL_S: Final = 1.0
"""Short compared with RocketMQ's 15 s: it also bounds how long a newly granted queue waits for its first read."""
GONE_PAUSE_S: Final = 0.1
"""The pause after a fetch from an offset that is gone, which is answered at once, also while the owner cannot jump."""
LOSS_PAUSE_S: Final = 1.0
"""How long a queue whose next message is lost is left out: each fetch from it costs the other queues a call."""
READERS_MAX: Final = 3
"""The most threads per storage actor. If all of them wait in a long poll, a newly wanted queue waits for the end of
one."""
FURTHER_AFTER_S: Final = 0.005
"""How long a further thread leaves a queue to the first one, which fetches from several queues in one call and is back
in less time than this unless it waits in its long poll."""
FETCH_CALL_TIMEOUT_S: Final = 10.0
OTHERS_TIMEOUT_S: Final = 3.0
"""The timeout in place of FETCH_CALL_TIMEOUT_S if another replica could be read instead."""
WAKE_INTERVAL_S: Final = 0.02
"""How long a queue whose storage actor is found may wait for its first read while other queues are looked for. Waking
the readers looks at every assigned queue, so it is not done for each one."""
CONSUMER_FETCH_MAX_BYTES: Final = 8 * 1024 * 1024

logger = logging.getLogger(__name__)


FetchPosition = tuple[MessageQueue, int]
"""A queue and the offset to fetch from it next."""
Lost = Callable[[MessageQueue, int, DataLossError | PredicateFailedError], None]
_Source = tuple[str, GroupPredicate | None]
"""A storage actor, and the predicate through which it is read."""


class _Readers:
    """The threads that read from one storage actor, through one predicate or none, and the positions they are fetching
    from."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Guards everything below."""
        self.first = threading.Condition(self.lock)
        """The first thread waits for it while nothing is wanted."""
        self.further = threading.Condition(self.lock)
        """The further threads wait for it."""
        self.fetching: set[FetchPosition] = set()
        """The positions in calls that are not answered."""
        self.threads = 0
        """The number of threads."""
        self.first_idle = False
        """True while the first thread waits."""
        self.further_idle = 0
        """How many of the further threads wait."""
        self.version = 0
        """Counts the wake-ups: a thread that found nothing to fetch waits only if none came since it looked."""


class Fetcher:
    """Reads from every storage actor that has wanted queues. The functions are called from several threads.

    `wanted()` gives the next offset by queue, for the queues that may be fetched from now; `assigned()` all queues;
    `request(queue, offset)` makes one read; `storages(queue)` names the storage actors that may be read from, the
    master first; `storage(name)` connects to one. `deliver(queue, from_offset, result)` takes one result;
    `outdated(queue)` is called when the queue could not be read from the storage actor that its route names;
    `lost(queue, from_offset, error)` when its next message is lost, or its predicate failed on it; `found(queue, name)`
    when it is known which storage actor to read the queue from. `predicate(queue)` says through which one it is read.
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
        """By queue an offset that is lost, and the time until which it is not fetched."""
        self._predicate = predicate
        self._wanted = wanted
        self._assigned = assigned
        self._deliver = deliver
        self._request = request
        self._storages = storages
        self._storage = storage
        self._lock = threading.Lock()
        """Guards `_which`, `_readers`, `_finder` and `_forgotten`, and changes of `_names`."""
        self._which = PullFromWhichNode()
        self._names: dict[MessageQueue, str] = {}
        """The storage actor that each queue is read from, if known."""
        self._forgotten: set[MessageQueue] = set()
        """Queues whose storage actor must be found again: a search under way for them is outdated."""
        self._alone: dict[str, bool] = {}
        """By storage actor, True if no other replica could be read instead."""
        self._readers: dict[_Source, _Readers] = {}
        """The reading threads by what they read from."""
        self._stopped = threading.Event()
        self._finder: threading.Thread | None = None
        """The thread that finds out which storage actors have the queues; None before it is needed."""
        self._find = threading.Event()
        """Wakes the finder."""
        self._not_found: frozenset[MessageQueue] = frozenset()
        """The queues that the finder asks about again after a pause, without being woken."""

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
        """A Fetcher that finds the storage actors in the routes of a cluster. `in_place`: `deliver` takes FoundInPlace,
        too (raymq.remoting.storage_client)."""
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
        """Fetch from queues that may be wanted now and were not before."""
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
        """Note that `name` has answered for a queue, and that `pull_from`, if not empty, must be read instead. Returns
        True if the storage actor will be found again, after which `found` is called."""
        if self._alone.get(name, True):
            return False
        with self._lock:
            again = self._which.answered(queue, name, pull_from, time.monotonic())
        if again:
            self.find_again(queue)
        return again

    def find_again(self, queue: MessageQueue) -> None:
        """Find the storage actor of a queue again, after which `found` is called."""
        self._forget([queue])
        self._call_finder()

    def unanswered(self, name: str, queues: Sequence[MessageQueue]) -> None:
        """Find the storage actors of these queues again: `name` does not answer."""
        self._look_again(name, [(queue, 0) for queue in queues])

    def stop(self) -> None:
        """End the threads; a long poll under way ends within its wait."""
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
            thread = threading.Thread(
                target=self._run, args=(source, readers, readers.threads == 0), name=f"fetch-{source[0]}", daemon=True
            )
            readers.threads += 1
            thread.start()

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
                logger.info("reading from %s waits for %d ms: %s", name, error.retry_after_ms, error)
                pause_s = max(backoff.next(), min(error.retry_after_ms / 1000, FETCH_LONG_POLL_S))
            except RaymqError as error:
                logger.info("reading from %s fails, trying again: %s", name, error)
                failed = True
                pause_s = backoff.next()
            except Exception:  # records that cannot be decoded, or a bug: without this loop the consumer would hang
                logger.exception("what %s answered cannot be used, trying again", name)
                pause_s = backoff.next()
            if pause_s:
                self._stopped.wait(pause_s)
            with readers.lock:
                readers.fetching.difference_update(positions)
            if failed:
                self._look_again(name, positions)

    def _look_again(self, name: str, positions: Sequence[FetchPosition]) -> None:
        """Find the storage actors of queues again that could not be read from `name`."""
        with self._lock:
            self._which.failed(name, time.monotonic())
        self._forget([queue for queue, _ in positions])
        for queue, _ in positions:
            self._outdated(queue)
        self._call_finder()

    def _idle(self, readers: _Readers, is_first: bool) -> None:
        """Wait until something is wanted. Called with the readers' lock held."""
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
        """Return the wanted positions, except positions that were lost less than LOSS_PAUSE_S ago."""
        wanted, now_s = dict(self._wanted()), time.monotonic()
        for queue, (offset, until_s) in self._left_out.copy().items():
            if wanted.get(queue) == offset and now_s < until_s:
                del wanted[queue]
        return wanted

    def _take_positions(self, source: _Source, readers: _Readers) -> list[FetchPosition]:
        """Take the positions that are wanted from this source and that no thread is fetching from. They count as being
        fetched on return."""
        wanted = [(queue, offset) for queue, offset in self._due().items() if self._source_of(queue) == source]
        with readers.lock:
            positions = [position for position in wanted if position not in readers.fetching]
            readers.fetching.update(positions)
        return positions

    def _read(self, name: str, storage: StorageClient | PredicateStorage, positions: Sequence[FetchPosition]) -> float:
        """Fetch from the positions, deliver the results, and return how long to pause then, in s."""
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
        """Fetch from each queue alone, after one queue has failed the call for all. Returns the positions that were
        answered, and their results."""
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
        """Report the next message of a queue as lost, if `name` is its master; else read the queue from there, because
        the master may have the message."""
        logger.error("%s: offset %d cannot be read from %s: %s", queue, offset, name, error)
        if self._storages(queue)[0] == name:
            self._leave_out(queue, offset, error)
        else:
            self._look_again(name, [(queue, offset)])

    def _leave_out(self, queue: MessageQueue, offset: int, error: DataLossError | PredicateFailedError) -> None:
        """Report why a queue does not get on, and try it again after LOSS_PAUSE_S."""
        self._left_out[queue] = (offset, time.monotonic() + LOSS_PAUSE_S)
        self._lost(queue, offset, error)

    def _choose_again(self, queues: Sequence[MessageQueue], name: str, results: Sequence[FetchResult]) -> None:
        """Follow the answers of `name` that send a queue to another replica."""
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

    # Where to read

    def _forget(self, queues: Sequence[MessageQueue]) -> None:
        """Have the storage actors of queues found again, even if the finder is just about to store them."""
        with self._lock:
            self._forgotten.update(queues)
            for queue in queues:
                self._names.pop(queue, None)

    def _source_of(self, queue: MessageQueue) -> _Source | None:
        """The source to read a queue from; None while its storage actor is not known."""
        name = self._name_of(queue)
        return None if name is None else (name, self._predicate(queue))

    def _name_of(self, queue: MessageQueue) -> str | None:
        """The storage actor to read a queue from; None while that is not known: then the finder looks for it, and wakes
        the readers."""
        name = self._names.get(queue)
        if name is None and queue not in self._not_found:
            self._call_finder()
        return name

    def _call_finder(self) -> None:
        with self._lock:
            if self._finder is None:
                self._finder = threading.Thread(target=self._run_finder, name="fetch-routes", daemon=True)
                self._finder.start()
        self._find.set()

    def _run_finder(self) -> None:
        backoff = Backoff()
        while not self._stopped.is_set():
            self._find.wait(backoff.next() if self._not_found else None)
            self._find.clear()
            try:
                self._find_all()
            except Exception:  # a bug: without this thread new queues would never be read
                logger.exception("finding out where to read fails, trying again")
                self._stopped.wait(backoff.next())
                self._find.set()
            if not self._not_found:
                backoff.reset()

    def _find_all(self) -> None:
        """Find the storage actors of the queues without a known one, topic by topic."""
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
        """Find the storage actors of queues of one topic. Returns the queues whose storage actor no NameServer
        knows."""
        missed: set[MessageQueue] = set()
        silent: set[str] = set()
        for queue in queues:
            if queue.broker_name in silent:  # the next queue would only wait for the same answer
                missed.add(queue)
                continue
            with self._lock:
                self._forgotten.discard(queue)
            try:
                storages = self._storages(queue)
            except RaymqError as error:
                logger.info("%s is not read now: %s", queue, error)
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
