"""Long polls: threads that read, per storage actor, every queue a consumer instance wants from it.

Used by consumers of both kinds, in the user's process and in Pull actors. What is wanted and where results go are
functions of the owner, so that all state about queues is in one place, the owner's; here are only threads, and a pause
after failures.

One thread per storage actor asks for all its wanted queues. A queue that comes to be wanted while that one waits in its
long poll (it was granted, its buffer has room again, its offset was moved) is asked for at once, by a further thread.

Which storage actor has a queue is found out by a thread of its own, again and again until somebody says it: NameServers
that are away or hang hold up nobody else, and no event is needed to go on when they are back.

A queue is read from its broker group's master, or from another replica that serves reads
(raymq.consumer.pull_from_which_node). The owner hears of a queue whose next message the master cannot read any more;
the others are read meanwhile.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from raymq.consumer.pull_from_which_node import PullFromWhichNode
from raymq.errors import DataLossError, RaymqError
from raymq.message import MessageQueue, PullStatus
from raymq.protocol.store import FetchRequest, FetchResult
from raymq.remoting.storage_client import StorageClient
from raymq.retry import Backoff

FETCH_LONG_POLL_S: Final = 1.0
"""Short compared with RocketMQ's 15 s: it also bounds how long a newly granted queue waits for its first read."""
GONE_PAUSE_S: Final = 0.1
"""A question for an offset that is gone is answered at once, also while the owner cannot jump yet."""
LOSS_PAUSE_S: Final = 1.0
"""How long a queue whose next message is lost is left out; each question for it costs the others a call."""
READERS_MAX: Final = 3
"""Threads per storage actor. If all of them wait, what comes to be wanted does too, at most for one poll."""
FURTHER_AFTER_S: Final = 0.005
"""How long a further thread leaves a question to the first one, which is there in no time unless it waits in its poll,
and asks for several queues at once."""
FETCH_CALL_TIMEOUT_S: Final = 10.0
OTHERS_TIMEOUT_S: Final = 3.0
"""Where another replica may be read from, one that stands still is not waited for as long."""
WAKE_INTERVAL_S: Final = 0.02
"""How long found queues may wait to be read while more are looked for: waking looks at every queue that is held."""
CONSUMER_FETCH_MAX_BYTES: Final = 2 * 1024 * 1024

logger = logging.getLogger(__name__)


Question = tuple[MessageQueue, int]


class _Source:
    """One storage actor: the threads that read from it, and what they have asked it for."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.first = threading.Condition(self.lock)
        """The first thread waits for it, the further ones for `further`."""
        self.further = threading.Condition(self.lock)
        self.asked: set[Question] = set()
        self.readers = 0
        self.first_idle = False
        self.further_idle = 0
        self.version = 0


class Fetcher:
    """Reads from every storage actor that has wanted queues.

    `wanted()` gives queue to next offset for the queues with room; `held()` all queues; `storages(queue)` where one may
    be read, its master first; `deliver(queue, from_offset, result)` takes one result; `outdated(queue)` hears that it
    could not be read where it was said to be; `lost(queue, from_offset, error)` that its next message is lost. They are
    called from several threads.
    """

    def __init__(
        self,
        *,
        wanted: Callable[[], Mapping[MessageQueue, int]],
        held: Callable[[], frozenset[MessageQueue]],
        deliver: Callable[[MessageQueue, int, FetchResult], None],
        request: Callable[[MessageQueue, int], FetchRequest],
        storages: Callable[[MessageQueue], Sequence[str]],
        storage: Callable[[str], StorageClient],
        outdated: Callable[[MessageQueue], None],
        lost: Callable[[MessageQueue, int, DataLossError], None],
    ) -> None:
        self._outdated, self._lost = outdated, lost
        self._left_out: dict[MessageQueue, tuple[int, float]] = {}
        """The offset that is lost, and until when it is not asked for."""
        self._wanted = wanted
        self._held = held
        self._deliver = deliver
        self._request = request
        self._storages = storages
        self._storage = storage
        self._lock = threading.Lock()
        self._which = PullFromWhichNode()
        self._names: dict[MessageQueue, str] = {}
        self._alone: dict[str, bool] = {}
        self._sources: dict[str, _Source] = {}
        self._stopped = threading.Event()
        self._finder: threading.Thread | None = None
        self._find = threading.Event()
        self._not_found: frozenset[MessageQueue] = frozenset()
        """What the finder asks about again after a pause, without being called."""

    def wake(self) -> None:
        """Something may be wanted that was not before."""
        if self._stopped.is_set():
            return
        wanted = self._due()
        by_name: dict[str, set[Question]] = {}
        for queue in self._held():
            name = self._name_of(queue)
            if name is not None:
                questions = by_name.setdefault(name, set())
                if queue in wanted:
                    questions.add((queue, wanted[queue]))
        for name, questions in by_name.items():
            with self._lock:
                source = self._sources.setdefault(name, _Source())
            with source.lock:
                if questions and not questions <= source.asked:
                    self._call_reader(name, source)

    def stop(self) -> None:
        """End the threads; a long poll under way ends within its wait."""
        self._stopped.set()
        self._find.set()
        with self._lock:
            sources = list(self._sources.values())
        for source in sources:
            with source.lock:
                source.first.notify_all()
                source.further.notify_all()

    def _call_reader(self, name: str, source: _Source) -> None:
        source.version += 1
        if source.first_idle:
            source.first.notify()
        elif source.further_idle:
            source.further.notify()
        elif source.readers < READERS_MAX:
            thread = threading.Thread(
                target=self._run, args=(name, source, source.readers == 0), name=f"fetch-{name}", daemon=True
            )
            source.readers += 1
            thread.start()

    def _run(self, name: str, source: _Source, is_first: bool) -> None:
        storage = self._storage(name)
        backoff = Backoff()
        while not self._stopped.is_set():
            if not is_first:
                self._stopped.wait(FURTHER_AFTER_S)
            with source.lock:
                version = source.version
            questions = self._take_questions(name, source)
            if not questions:
                with source.lock:
                    if source.version == version:
                        self._idle(source, is_first)
                continue
            failed = False
            try:
                pause_s = self._read(name, storage, questions)
                backoff.reset()
            except RaymqError as error:
                logger.info("reading from %s fails, trying again: %s", name, error)
                failed = True
                pause_s = backoff.next()
            except Exception:  # records that cannot be decoded, or a bug: without this loop the consumer would hang
                logger.exception("what %s answered cannot be used, trying again", name)
                pause_s = backoff.next()
            if pause_s:
                self._stopped.wait(pause_s)
            with source.lock:
                source.asked.difference_update(questions)
            if failed:
                self._look_again(name, questions)

    def _look_again(self, name: str, questions: Sequence[Question]) -> None:
        """What could not be read from a storage actor may be elsewhere now, where nobody may be reading yet."""
        with self._lock:
            self._which.failed(name, time.monotonic())
        for queue, _ in questions:
            self._names.pop(queue, None)
            self._outdated(queue)
        self._call_finder()

    def _idle(self, source: _Source, is_first: bool) -> None:
        """Wait until something is wanted. Called with the source's lock."""
        if self._stopped.is_set():
            return
        if is_first:
            source.first_idle = True
            source.first.wait(FETCH_LONG_POLL_S)
            source.first_idle = False
        else:
            source.further_idle += 1
            source.further.wait(FETCH_LONG_POLL_S)
            source.further_idle -= 1

    def _due(self) -> dict[MessageQueue, int]:
        """What is wanted, without what was lost a moment ago."""
        wanted, now_s = dict(self._wanted()), time.monotonic()
        for queue, (offset, until_s) in self._left_out.copy().items():
            if wanted.get(queue) == offset and now_s < until_s:
                del wanted[queue]
        return wanted

    def _take_questions(self, name: str, source: _Source) -> list[Question]:
        """What is wanted from this storage actor and not being asked for; it is on return."""
        wanted = [(queue, offset) for queue, offset in self._due().items() if self._name_of(queue) == name]
        with source.lock:
            questions = [question for question in wanted if question not in source.asked]
            source.asked.update(questions)
        return questions

    def _read(self, name: str, storage: StorageClient, questions: Sequence[Question]) -> float:
        """Ask, and deliver the answers. How long to pause then, in s."""
        requests = [self._request(queue, offset) for queue, offset in questions]
        timeout_s = FETCH_CALL_TIMEOUT_S if self._alone.get(name, True) else OTHERS_TIMEOUT_S
        try:
            results = storage.fetch(requests, CONSUMER_FETCH_MAX_BYTES, FETCH_LONG_POLL_S, timeout_s)
        except DataLossError:
            questions, results = self._read_singly(name, storage, questions, timeout_s)
        for (queue, offset), result in zip(questions, results, strict=True):
            self._left_out.pop(queue, None)
            self._deliver(queue, offset, result)
        self._choose_again([queue for queue, _ in questions], name, results)
        gone = any(result.status is PullStatus.OFFSET_ILLEGAL for result in results)
        return GONE_PAUSE_S if gone else 0.0

    def _read_singly(
        self, name: str, storage: StorageClient, questions: Sequence[Question], timeout_s: float
    ) -> tuple[list[Question], list[FetchResult]]:
        """Ask for each queue alone, after one of them has failed all; returns the answers there are."""
        answered, results = [], []
        for queue, offset in questions:
            try:
                results += storage.fetch([self._request(queue, offset)], CONSUMER_FETCH_MAX_BYTES, 0.0, timeout_s)
            except DataLossError as error:
                self._lose(name, queue, offset, error)
            else:
                answered.append((queue, offset))
        return answered, results

    def _lose(self, name: str, queue: MessageQueue, offset: int, error: DataLossError) -> None:
        """A queue cannot be read from `name`. Where that is not its master, which may have the message, ask there."""
        logger.error("%s: offset %d cannot be read from %s: %s", queue, offset, name, error)
        if self._storages(queue)[0] == name:
            self._left_out[queue] = (offset, time.monotonic() + LOSS_PAUSE_S)
            self._lost(queue, offset, error)
        else:
            self._look_again(name, [(queue, offset)])

    def _choose_again(self, queues: Sequence[MessageQueue], name: str, results: Sequence[FetchResult]) -> None:
        """Hear whom the answers of `name` send the queues to."""
        if self._alone.get(name, True):
            return
        now_s, again = time.monotonic(), []
        with self._lock:
            for queue, result in zip(queues, results, strict=True):
                if self._which.answered(queue, name, result.pull_from, now_s):
                    again.append(queue)
        for queue in again:
            self._names.pop(queue, None)
        if again:
            self._call_finder()

    # Where to read

    def _name_of(self, queue: MessageQueue) -> str | None:
        """Where to read a queue; None while that is not known: then it is being found out, and readers are woken."""
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
        """Find out where the queues are to be read of which that is not known, topic by topic."""
        topics: dict[str, list[MessageQueue]] = {}
        for queue in sorted(self._held()):
            if queue not in self._names:
                topics.setdefault(queue.topic, []).append(queue)
        missed: set[MessageQueue] = set()
        woken_s = 0.0
        for queues in topics.values():
            if self._stopped.is_set():
                return
            missed |= self._find_topic(queues)
            if time.monotonic() - woken_s > WAKE_INTERVAL_S:
                self.wake()
                woken_s = time.monotonic()
        self._not_found = frozenset(missed)
        if topics:
            self.wake()

    def _find_topic(self, queues: Sequence[MessageQueue]) -> set[MessageQueue]:
        """Find out where queues of one topic are to be read; returns those of which nobody says it."""
        missed: set[MessageQueue] = set()
        silent: set[str] = set()
        for queue in queues:
            if queue.broker_name in silent:  # the next queue would only wait for the same answer
                missed.add(queue)
                continue
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
            self._names[queue] = name
        return missed
