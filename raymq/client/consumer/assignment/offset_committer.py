"""OffsetCommitter asks for the start offsets of a consumer's queues, and commits. One thread per broker group does so
for all consumers of a process.

    AssignedQueues.starting → start offsets → started        uncommitted → commit → commit_answered

With a thread each, no broker group waits for another. Commits are coalesced: a commit is sent when the interval since
the last one is over, and covers everything that was finished in between. It is sent at once if a caller waits for it. A
failed call is repeated after a pause.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any, Final, Protocol

from raymq.client.consumer.assignment.assigned_queue import AssignedQueue
from raymq.client.consumer.assignment.assigned_queues import AssignedQueues
from raymq.client.consumer.group_offsets import GroupOffsets
from raymq.common.errors import (
    GroupNotExistError,
    InvalidArgumentError,
    NoPermissionError,
    RaymqError,
    TopicNotExistError,
)
from raymq.common.message import MessageQueue
from raymq.common.protocol.group import CommitAnswer, OffsetCommit, QueueOffset, StartOffsetQuery
from raymq.common.retry import Backoff

RESET_QUERY_INTERVAL_S: Final = 2.0
"""The time in s between two questions about offset resets, for queues held without a group. Members get the resets from
their group."""
FORBIDDEN_INTERVAL_S: Final = 2.0
"""The time in s between two questions to a broker if forbidden queues may be read now."""
COMMIT_TIMEOUT_S: Final = 5.0
"""For one call of a thread here, which calls again after a failure."""

logger = logging.getLogger(__name__)


class OffsetStore(Protocol):
    """Keeps the group's offsets: at a broker, or in a file (RocketMQ's OffsetStore)."""

    may_be_reset: bool
    """True if others may reset the offsets."""

    def prepare(self, broker_name: str, timeout_s: float) -> None:
        """Make the group known to a broker group, or read the file. Called before the first use, and again when the
        group has become unknown."""

    def start_offsets(self, generations: Mapping[MessageQueue, int]) -> dict[MessageQueue, QueueOffset]:
        """The offsets at which the consumer starts with queues, each with the generation that granted it. Queues may be
        left out: they are asked for one by one."""

    def start_offset(self, queue: MessageQueue, generation: int) -> QueueOffset:
        """The offset at which the consumer starts with a queue. TopicNotExistError."""

    def commit_offsets(self, commits: Mapping[MessageQueue, OffsetCommit], timeout_s: float) -> CommitAnswer:
        """Commit offsets; durable on return."""


class RemoteBrokerOffsetStore:
    """Keeps the offsets at the brokers that hold the queues."""

    may_be_reset = True

    def __init__(self, offsets: GroupOffsets, query: StartOffsetQuery) -> None:
        self._query = query
        self._offsets = offsets
        self.prepare, self.commit_offsets = offsets.ensure_group, offsets.commit_offsets

    def start_offsets(self, generations: Mapping[MessageQueue, int]) -> dict[MessageQueue, QueueOffset]:
        return self._offsets.start_offsets(generations, self._query, COMMIT_TIMEOUT_S)

    def start_offset(self, queue: MessageQueue, generation: int) -> QueueOffset:
        return self._offsets.start_offset(queue, self._query, generation, COMMIT_TIMEOUT_S)


class CommitThreads:
    """The threads of a process that call brokers about offsets: one per broker group, made when it is needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: dict[str, _BrokerThread] = {}
        self._closed = False

    def of(self, broker_name: str) -> _BrokerThread:
        """The thread of a broker group."""
        with self._lock:
            thread = self._threads.get(broker_name)
            if thread is None:
                thread = self._threads[broker_name] = _BrokerThread(broker_name, closed=self._closed)
            return thread

    def close(self) -> None:
        """End the threads."""
        with self._lock:
            self._closed = True
            for thread in self._threads.values():
                thread.close()


class OffsetCommitter:
    """The offsets of one consumer, called `name` in logs; `core`, guarded by `lock`, has its queues. Thread-safe.

    `interval_s`: how often finished messages are committed to the `store`; None if the program commits. `on_started`
    is called when queues, or offsets in them, may be fetched that could not be before, `on_committed` when a commit was
    answered: queues may have waited for it.
    """

    def __init__(
        self,
        core: AssignedQueues[Any],
        lock: threading.Lock,
        *,
        name: str,
        store: OffsetStore,
        threads: CommitThreads,
        interval_s: float | None,
        on_started: Callable[[], None],
        on_committed: Callable[[], None],
    ) -> None:
        self.core, self.lock, self.name = core, lock, name
        self.interval_s = math.inf if interval_s is None else interval_s
        self.on_started, self.on_committed = on_started, on_committed
        self.refusal: RaymqError | None = None
        """The error of a commit that cannot succeed; None once it is raised."""
        self.armed = False
        """The threads are to look for finished messages, at their time."""
        self.store, self._threads = store, threads
        self._works_lock = threading.Lock()
        """Guards `_works` and `_closed`."""
        self._works: dict[str, _BrokerWork] = {}
        self._closed = False

    def wake(self) -> None:
        """Look for queues that need a start offset, and for offsets to commit. Calls the brokers at once if a caller
        waits."""
        with self.lock:
            urgent = self.core.waits_for_broker()
            if self.armed and not urgent:
                return
            brokers = {queue.broker_name for queue in self.core.holding}
            self.armed = True
        times_s = [work.schedule(now=urgent) for work in map(self._work, brokers) if work is not None]
        if all(time_s == math.inf for time_s in times_s):
            self.armed = False

    def ask_about_resets(self) -> None:
        """Ask the brokers about every queue held, because offsets of the group were reset."""
        for work in self._all():
            work.ask.set()
            work.forbidden_at_s = -math.inf
            work.schedule(now=True)

    def prepare(self, broker_names: Iterable[str], timeout_s: float) -> None:
        """Make the group known to each of these brokers that is not known to know it. Blocks for calls."""
        for work in map(self._work, sorted(set(broker_names))):
            if work is not None:
                work.prepare(timeout_s)

    def commit(self, timeout_s: float) -> dict[MessageQueue, int]:
        """Commit everything that is finished, in this thread, and return the committed offsets."""
        with ExitStack() as held:
            for work in self._all():
                held.enter_context(work.commit_lock)
                work.commit_at_s = time.monotonic() + self.interval_s
            with self.lock:
                commits = self.core.uncommitted()
            return self.answered(commits, self.store.commit_offsets(commits, timeout_s)) if commits else {}

    def answered(self, commits: Mapping[MessageQueue, OffsetCommit], answer: CommitAnswer) -> dict[MessageQueue, int]:
        """Take the brokers' answer to commits, and return the committed offsets."""
        with self.lock:
            forbidden = set(self.core.forbidden)
            committed = self.core.commit_answered(commits, answer)
            stopped, allowed = self.core.forbidden.keys() - forbidden, forbidden - self.core.forbidden.keys()
        for verdict, queues in (("has a new owner", answer.fenced), ("is deleted", answer.gone)):
            for queue in sorted(queues):
                logger.warning("%s gives up %s: it %s", self.name, queue, verdict)
        for reason in sorted({answer.stopped[queue] for queue in stopped}):
            logger.warning("%s stops reading: %s", self.name, reason)
        if allowed:
            logger.info("%s may read again: %s", self.name, ", ".join(map(str, sorted(allowed))))
        if stopped or allowed:
            self.on_started()
        if answer.reset:
            logger.info("%s goes on where offsets were reset: %s", self.name, dict(answer.reset))
            self.on_started()
        self.on_committed()
        return committed

    def raise_refusal(self) -> None:
        """Raise, once, the error with which a broker has refused a commit of a thread here for good."""
        refusal, self.refusal = self.refusal, None
        if refusal is not None:
            raise refusal

    def close(self) -> None:
        """Commit nothing more; offsets that are not committed by now are not."""
        with self._works_lock:
            self._closed = True
        for work in self._all():
            work.thread.remove(work)

    def _all(self) -> list[_BrokerWork]:
        with self._works_lock:
            return [work for _, work in sorted(self._works.items())]

    def _work(self, broker_name: str) -> _BrokerWork | None:
        """The work at a broker group; None once closed."""
        with self._works_lock:
            work = self._works.get(broker_name)
            if work is None and not self._closed:
                work = _BrokerWork(self, self._threads.of(broker_name))
                self._works[broker_name] = work
            return work


class _BrokerThread:
    """The thread of one broker group, which does the works of all consumers there when they are due."""

    def __init__(self, broker_name: str, *, closed: bool) -> None:
        self.broker_name = broker_name
        self._changed = threading.Condition()
        self._works: dict[_BrokerWork, float] = {}
        """The time at which each work is due, on `time.monotonic`'s clock."""
        self._not_before_s = 0.0
        """The broker did not answer; the other works would only wait for the same."""
        self._closed = closed
        threading.Thread(target=self._run, name=f"offsets-{broker_name}", daemon=True).start()

    def schedule(self, work: _BrokerWork, at_s: float) -> None:
        with self._changed:
            if not work.closed and at_s < self._works.get(work, math.inf):
                self._works[work] = at_s
                self._changed.notify()

    def remove(self, work: _BrokerWork) -> None:
        with self._changed:
            work.closed = True
            self._works.pop(work, None)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _next(self) -> _BrokerWork | None:
        """Wait for the next work that is due, and take it. None once closed."""
        with self._changed:
            while not self._closed:
                work, due_s = min(self._works.items(), key=lambda item: item[1], default=(None, math.inf))
                wait_s = max(due_s, self._not_before_s) - time.monotonic()
                if work is not None and wait_s <= 0:
                    del self._works[work]
                    return work
                self._changed.wait(None if wait_s == math.inf else wait_s)
            return None

    def _run(self) -> None:
        backoff = Backoff()
        while (work := self._next()) is not None:
            try:
                work.do()
                backoff.reset()
            except RaymqError as error:
                logger.warning("%s: offsets at %s, trying again: %s", work.committer.name, self.broker_name, error)
                self._not_before_s = time.monotonic() + backoff.next()
                work.schedule(now=True)
            except Exception:  # a bug, in one consumer: the queues of the others go on
                logger.exception("%s: offsets at %s, trying again", work.committer.name, self.broker_name)
                work.failed()


class _BrokerWork:
    """One consumer's offsets at one broker group."""

    def __init__(self, committer: OffsetCommitter, thread: _BrokerThread) -> None:
        self.committer, self.thread = committer, thread
        self.ask = threading.Event()
        """The next commit is to ask about every queue."""
        self.commit_lock = threading.Lock()
        """Held over a commit, so that one that goes back is not overtaken by one from before."""
        self.closed = False
        self.commit_at_s = time.monotonic() + committer.interval_s
        """The time of the next commit of finished messages."""
        self._asked_s = time.monotonic()
        """When resets were asked about last."""
        self.forbidden_at_s = -math.inf
        """When the broker is asked again about queues that may not be read."""
        self._prepared = False
        self._backoff = Backoff()
        self._not_before_s = 0.0

    def prepare(self, timeout_s: float = COMMIT_TIMEOUT_S) -> None:
        if not self._prepared:
            self.committer.store.prepare(self.thread.broker_name, timeout_s)
            self._prepared = True

    def schedule(self, *, now: bool = False) -> float:
        """Schedule this work `now`, or at the time of the next commit or of the next question about resets. Returns the
        time."""
        committer = self.committer
        at_s = -math.inf if now else math.inf
        with committer.lock:
            if not now and committer.core.has_uncommitted:
                at_s = self.commit_at_s
            if self._asks_alone:
                at_s = min(at_s, self._asked_s + RESET_QUERY_INTERVAL_S)
            if any(queue.broker_name == self.thread.broker_name for queue in committer.core.forbidden):
                at_s = min(at_s, self.forbidden_at_s)
        at_s = max(at_s, self._not_before_s)
        if at_s < math.inf:
            self.thread.schedule(self, at_s)
        return at_s

    @property
    def _asks_alone(self) -> bool:
        """True if no group reports resets. Called with the consumer's lock held."""
        core = self.committer.core
        return self.committer.store.may_be_reset and core.joined and core.offsets_version is None

    def do(self) -> None:
        """Commit finished messages and start queues. Raises RaymqError if the broker does not answer."""
        self.committer.armed = False
        try:
            self.prepare()
            now_s = time.monotonic()
            asks_forbidden = now_s >= self.forbidden_at_s
            if asks_forbidden:
                self.forbidden_at_s = now_s + FORBIDDEN_INTERVAL_S
            self._commit(now_s, asks_forbidden=asks_forbidden)
            self._start_queues(forbidden=asks_forbidden)
            self._backoff.reset()
            self.schedule()
        except RaymqError as error:
            if isinstance(error, GroupNotExistError):
                self._prepared = False  # the group was deleted, or the broker creates no groups by itself
            elif error.retryable:
                raise
            logger.warning("%s: offsets at %s, trying again: %s", self.committer.name, self.thread.broker_name, error)
            self.failed()

    def failed(self) -> None:
        """Leave this consumer alone for a moment."""
        self._not_before_s = time.monotonic() + self._backoff.next()
        self.schedule(now=True)

    def _commit(self, now_s: float, *, asks_forbidden: bool) -> None:
        committer, broker_name = self.committer, self.thread.broker_name
        with self.commit_lock:
            commits: dict[MessageQueue, OffsetCommit] = {}
            before_s = self.commit_at_s
            with committer.lock:
                ask = self.ask.is_set() or (self._asks_alone and now_s >= self._asked_s + RESET_QUERY_INTERVAL_S)
                if asks_forbidden and committer.core.forbidden:
                    commits = committer.core.reset_queries(broker_name, only_forbidden=True)
                if ask:
                    commits = committer.core.reset_queries(broker_name)
                    self._asked_s = now_s
                    self.ask.clear()
                due = now_s >= before_s or (ask and committer.interval_s < math.inf)
                if due or committer.core.commit_is_urgent():
                    commits |= committer.core.uncommitted(broker_name)
                    self.commit_at_s = now_s + committer.interval_s
            if not commits:
                return
            try:
                answer = committer.store.commit_offsets(commits, COMMIT_TIMEOUT_S)
            except RaymqError as error:
                if ask:
                    self.ask.set()
                if not error.retryable:
                    committer.refusal = error
                self.commit_at_s = before_s
                raise
            committer.answered(commits, answer)

    def _start_queues(self, *, forbidden: bool) -> None:
        """Ask for the start offset of each queue without one, and let the queue be fetched. `forbidden`: include the
        queues that the group could not read. A topic that the group may not read stops only its own queues."""
        committer = self.committer
        with committer.lock:
            starting: list[AssignedQueue] = committer.core.starting(self.thread.broker_name, forbidden=forbidden)
        if not starting:
            return
        starts = committer.store.start_offsets({assigned.queue: assigned.generation for assigned in starting})
        refusals: dict[str, NoPermissionError] = {}
        try:
            for assigned in starting:
                try:
                    start = self._start_offset(assigned, starts, refusals)
                except (TopicNotExistError, InvalidArgumentError) as error:  # deleted, or with fewer queues now
                    logger.warning("%s gives up %s: %s", committer.name, assigned.queue, error)
                    with committer.lock:
                        committer.core.lose([assigned.queue])
                    continue
                with committer.lock:
                    if start is not None:
                        committer.core.started(assigned, start)
                        continue
                    refusal = refusals[assigned.queue.topic]
                    new = committer.core.forbid(assigned, refusal)
                if new:
                    logger.warning("%s cannot read %s: %s", committer.name, assigned.queue, refusal)
        finally:
            committer.on_started()

    def _start_offset(
        self,
        assigned: AssignedQueue,
        starts: Mapping[MessageQueue, QueueOffset],
        refusals: dict[str, NoPermissionError],
    ) -> QueueOffset | None:
        """Return the start offset of a queue; None if the group may not read its topic, whose error `refusals` has
        then. Raises TopicNotExistError, InvalidArgumentError."""
        queue = assigned.queue
        if queue in starts or queue.topic in refusals:
            return starts.get(queue)
        try:
            return self.committer.store.start_offset(queue, assigned.generation)
        except NoPermissionError as error:
            refusals[queue.topic] = error
            return None
