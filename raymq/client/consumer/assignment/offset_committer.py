"""OffsetCommitter requests the start offsets of a consumer's queues, and commits offsets. One thread per broker group
does this work for all consumers of a process.

    AssignedQueues.starting → start offsets → started        uncommitted → commit → commit_answered

Each broker group has its own thread, so a slow broker group does not delay the others. Commits are coalesced: after
each commit interval, one commit covers all messages that were finished during the interval. A commit is sent at once if
a caller waits for it. A failed call is retried after a pause.
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
from raymq.common.parallel import start_daemon
from raymq.common.protocol.group import CommitAnswer, OffsetCommit, QueueOffset, StartOffsetQuery
from raymq.common.retry import Backoff

RESET_QUERY_INTERVAL_S: Final = 2.0
"""Interval in s at which a consumer without a group asks its brokers about offset resets. The group reports resets to
its members."""
FORBIDDEN_INTERVAL_S: Final = 2.0
"""Interval in s at which a consumer asks a broker if the group may now read the queues that it was not allowed
to read."""
COMMIT_TIMEOUT_S: Final = 5.0
"""Timeout in s of one call that a background thread makes to a broker to fetch start offsets or to commit. The thread
retries a failed call."""

logger = logging.getLogger(__name__)


class OffsetStore(Protocol):
    """Interface of a store of the group's offsets: at a broker, or in a file (RocketMQ's OffsetStore)."""

    may_be_reset: bool
    """True if processes other than the consumer may reset the offsets that this OffsetStore stores."""

    def prepare(self, broker_name: str, timeout_s: float) -> None:
        """Prepare the offset store for use. An offset store at a broker registers the consumer group at the broker
        group `broker_name`. An offset store in a file reads the file. Called before the first use, and again if the
        broker group no longer has the consumer group."""

    def start_offsets(self, generations: Mapping[MessageQueue, int]) -> dict[MessageQueue, QueueOffset]:
        """Return the start offset of each queue in `generations`, which has the group generation in which each queue
        was granted. The result may omit queues. The caller then calls `start_offset` for each omitted queue."""

    def start_offset(self, queue: MessageQueue, generation: int) -> QueueOffset:
        """Return the offset at which the consumer starts to read a queue. Raises TopicNotExistError if the queue's
        topic does not exist."""

    def commit_offsets(self, commits: Mapping[MessageQueue, OffsetCommit], timeout_s: float) -> CommitAnswer:
        """Commit offsets. The offsets are durable when the call returns."""


class RemoteBrokerOffsetStore:
    """OffsetStore that keeps the group's offsets at the brokers that hold the queues."""

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
    """The threads of a process that call brokers about offsets. Each broker group has one thread, which is started on
    first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: dict[str, _BrokerThread] = {}
        self._closed = False

    def of(self, broker_name: str) -> _BrokerThread:
        """Return the thread of a broker group. The first call for a broker group starts its thread."""
        with self._lock:
            thread = self._threads.get(broker_name)
            if thread is None:
                thread = self._threads[broker_name] = _BrokerThread(broker_name, closed=self._closed)
            return thread

    def close(self) -> None:
        """Stop the threads that call brokers about offsets."""
        with self._lock:
            self._closed = True
            for thread in self._threads.values():
                thread.close()


class OffsetCommitter:
    """Reads and commits the offsets of one consumer. `name`: the consumer's name in logs. `core`, guarded by `lock`,
    holds the consumer's queues. Thread-safe.

    `interval_s`: the interval in which finished messages are committed to the `store`; None if the program itself
    commits. `on_started` is called when queues become fetchable, or when their fetch offset changes. `on_committed` is
    called after a commit was answered, because some queues can be released only after their commit.
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
        """Error of a commit that can never succeed. None if there is no such error, or after the error was raised to
        the program."""
        self.armed = False
        """True if the broker threads are scheduled to look for finished messages at the next interval."""
        self.store, self._threads = store, threads
        self._works_lock = threading.Lock()
        """Lock that guards the attributes `_works` and `_closed`."""
        self._works: dict[str, _BrokerWork] = {}
        self._closed = False

    def wake(self) -> None:
        """Schedule the next work of the broker threads, which fetch missing start offsets and send commits. If a caller
        waits for a start offset or a commit, the threads call the brokers at once."""
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
        """Query the brokers to find which of this consumer's queues were reset to another offset. Called after offsets
        of the group were reset."""
        for work in self._all():
            work.ask.set()
            work.forbidden_at_s = -math.inf
            work.schedule(now=True)

    def prepare(self, broker_names: Iterable[str], timeout_s: float) -> None:
        """Register the group at each of these brokers, unless it is already registered there. Blocks until the brokers
        have answered."""
        for work in map(self._work, sorted(set(broker_names))):
            if work is not None:
                work.prepare(timeout_s)

    def commit(self, timeout_s: float) -> dict[MessageQueue, int]:
        """Commit all finished messages, in the caller's thread, and return the committed offsets."""
        with ExitStack() as held:
            for work in self._all():
                held.enter_context(work.commit_lock)
                work.commit_at_s = time.monotonic() + self.interval_s
            with self.lock:
                commits = self.core.uncommitted()
            return self.answered(commits, self.store.commit_offsets(commits, timeout_s)) if commits else {}

    def answered(self, commits: Mapping[MessageQueue, OffsetCommit], answer: CommitAnswer) -> dict[MessageQueue, int]:
        """Apply the brokers' answer to commits, and return the committed offsets."""
        with self.lock:
            forbidden = set(self.core.forbidden)
            committed = self.core.commit_answered(commits, answer)
            stopped, allowed = self.core.forbidden.keys() - forbidden, forbidden - self.core.forbidden.keys()
        for verdict, queues in (("now belongs to another member", answer.fenced), ("is deleted", answer.gone)):
            for queue in sorted(queues):
                logger.warning("member %s releases queue %s: the queue %s", self.name, queue, verdict)
        for reason in sorted({answer.stopped[queue] for queue in stopped}):
            logger.warning("member %s stops reading: %s", self.name, reason)
        if allowed:
            logger.info("member %s may read again from queues %s", self.name, ", ".join(map(str, sorted(allowed))))
        if stopped or allowed:
            self.on_started()
        if answer.reset:
            logger.info("member %s continues at reset offsets: %s", self.name, dict(answer.reset))
            self.on_started()
        self.on_committed()
        return committed

    def raise_refusal(self) -> None:
        """Raise the permanent error with which a broker refused a commit of a background thread. Each such error is
        raised once."""
        refusal, self.refusal = self.refusal, None
        if refusal is not None:
            raise refusal

    def close(self) -> None:
        """Stop committing offsets. Offsets that are not committed yet stay uncommitted."""
        with self._works_lock:
            self._closed = True
        for work in self._all():
            work.thread.remove(work)

    def _all(self) -> list[_BrokerWork]:
        with self._works_lock:
            return [work for _, work in sorted(self._works.items())]

    def _work(self, broker_name: str) -> _BrokerWork | None:
        """Return the object that fetches and commits this consumer's offsets at one broker group. The first call
        creates it. Returns None after the committer was closed."""
        with self._works_lock:
            work = self._works.get(broker_name)
            if work is None and not self._closed:
                work = _BrokerWork(self, self._threads.of(broker_name))
                self._works[broker_name] = work
            return work


class _BrokerThread:
    """The thread that calls one broker group about offsets, for all consumers of the process. It handles each
    consumer's work when the work is due."""

    def __init__(self, broker_name: str, *, closed: bool) -> None:
        self.broker_name = broker_name
        self._changed = threading.Condition()
        self._works: dict[_BrokerWork, float] = {}
        """The pending work of each consumer, with the time at which it is due, on `time.monotonic`'s clock."""
        self._not_before_s = 0.0
        """Time until which this thread makes no calls to its broker, because a call for one of the consumers has
        failed. Calls for the other consumers would fail, too."""
        self._closed = closed
        # While the interpreter exits, no thread can start. `OffsetCommitter.commit` then calls the broker in its
        # caller's thread.
        start_daemon(self._run, name=f"offsets-{broker_name}")

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
        """Wait until the offset work for some broker is due, remove this work from the schedule and return it. Returns
        None after `close`."""
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
                logger.warning(
                    "member %s cannot read or commit offsets at broker group %s, retrying: %s",
                    work.committer.name,
                    self.broker_name,
                    error,
                )
                self._not_before_s = time.monotonic() + backoff.next()
                work.schedule(now=True)
            except Exception:  # catch a bug in one consumer, so that this thread still serves the other consumers
                logger.exception(
                    "member %s cannot read or commit offsets at broker group %s, retrying",
                    work.committer.name,
                    self.broker_name,
                )
                work.failed()


class _BrokerWork:
    """Gets the start offsets of one consumer's queues at one broker group, and commits the consumer's offsets
    there."""

    def __init__(self, committer: OffsetCommitter, thread: _BrokerThread) -> None:
        self.committer, self.thread = committer, thread
        self.ask = threading.Event()
        """Event that is set after an offset of the group was reset. The next commit then asks the broker about every
        queue, to learn which offsets were reset."""
        self.commit_lock = threading.Lock()
        """Lock that is held during a commit. Otherwise an older commit could overtake a newer commit that moves an
        offset backwards."""
        self.closed = False
        self.commit_at_s = time.monotonic() + committer.interval_s
        """Time at which finished messages are next committed."""
        self._asked_s = time.monotonic()
        """Time at which this consumer last asked the broker about offset resets."""
        self.forbidden_at_s = -math.inf
        """Time at which this consumer next asks the broker whether the group may read its forbidden queues."""
        self._prepared = False
        self._backoff = Backoff()
        self._not_before_s = 0.0

    def prepare(self, timeout_s: float = COMMIT_TIMEOUT_S) -> None:
        if not self._prepared:
            self.committer.store.prepare(self.thread.broker_name, timeout_s)
            self._prepared = True

    def schedule(self, *, now: bool = False) -> float:
        """Schedule the offset work of this consumer at this broker group: start offsets, commits and reset queries. The
        work is done immediately if `now` is true, otherwise at the time of the next commit or reset query. Returns the
        scheduled time; infinite if nothing is due."""
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
        """True if the consumer must ask the brokers about offset resets itself, because the answers to its heartbeats
        report no resets. The caller holds the consumer's lock."""
        core = self.committer.core
        return self.committer.store.may_be_reset and core.joined and core.offsets_version is None

    def do(self) -> None:
        """Commit finished messages and fetch missing start offsets. Raises RaymqError if the broker does not
        answer."""
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
                # The group was deleted, or the broker does not create groups automatically: register the group again.
                self._prepared = False
            elif error.retryable:
                raise
            logger.warning(
                "member %s cannot read or commit offsets at broker group %s, retrying: %s",
                self.committer.name,
                self.thread.broker_name,
                error,
            )
            self.failed()

    def failed(self) -> None:
        """Repeat this consumer's calls for start offsets and commits at this broker after a back-off."""
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
        """Request the missing start offsets of this consumer's queues from the broker, so that these queues can be
        fetched. `forbidden`: True to include the queues of topics that the group could not read before. If the group
        still may not read a topic, only this topic's queues stay stopped."""
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
                # The queue no longer exists: its topic was deleted, or has fewer queues now.
                except (TopicNotExistError, InvalidArgumentError) as error:
                    logger.warning("member %s releases queue %s: %s", committer.name, assigned.queue, error)
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
                    logger.warning("member %s cannot read queue %s: %s", committer.name, assigned.queue, refusal)
        finally:
            committer.on_started()

    def _start_offset(
        self,
        assigned: AssignedQueue,
        starts: Mapping[MessageQueue, QueueOffset],
        refusals: dict[str, NoPermissionError],
    ) -> QueueOffset | None:
        """Return the start offset of a queue. Returns None if the group may not read the queue's topic, and puts the
        topic's error into `refusals`. Raises TopicNotExistError or InvalidArgumentError if the topic or the queue does
        not exist."""
        queue = assigned.queue
        if queue in starts or queue.topic in refusals:
            return starts.get(queue)
        try:
            return self.committer.store.start_offset(queue, assigned.generation)
        except NoPermissionError as error:
            refusals[queue.topic] = error
            return None
