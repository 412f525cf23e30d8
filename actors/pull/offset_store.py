"""OffsetCommitter asks for the start offsets of an instance's queues, and commits; one thread per broker group does so
for all instances of a Pull actor.

With a thread each, no broker group waits for another. A commit is sent a little after a message was finished, so that
it covers more of them, and at once when a queue waits for it. The next one is sent when the last is answered, and
covers the messages finished meanwhile.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from actors.core.consume.process_queue import ProcessQueue
from actors.pull.instance_state import InstanceState
from actors.pull.local_offsets import DEFAULT_DIRECTORY, LocalOffsets
from raymq.consumer.group_offsets import GroupOffsets
from raymq.errors import GroupNotExistError, RaymqError, TopicNotExistError
from raymq.message import MessageQueue
from raymq.protocol.group import CommitAnswer, OffsetCommit, QueueOffset
from raymq.retry import Backoff

COMMIT_AFTER_S: Final = 0.1
"""How long finished messages wait for others to be committed with them."""
IDLE_S: Final = 1.0
COMMIT_TIMEOUT_S: Final = 5.0
"""For one call to a broker; the committer calls again after it."""

logger = logging.getLogger(__name__)


class OffsetStore(Protocol):
    """Keeps the group's offsets: at a broker, or in a file here (RocketMQ's OffsetStore)."""

    def prepare(self) -> None:
        """Make the group known, or read the file. Called before the first use, and again when the group has become
        unknown."""

    def start_offset(self, process_queue: ProcessQueue) -> QueueOffset:
        """The offset at which the instance starts with a queue."""

    def commit_offsets(self, commits: dict[MessageQueue, OffsetCommit]) -> CommitAnswer:
        """Commit offsets; durable on return."""


class RemoteBrokerOffsetStore:
    """CLUSTERING: keeps the offsets at one broker group."""

    def __init__(self, instance: InstanceState, offsets: GroupOffsets, broker_name: str) -> None:
        self._start = instance.settings.start
        self._offsets = offsets
        self._broker_name = broker_name

    def prepare(self) -> None:
        self._offsets.ensure_group(self._broker_name, COMMIT_TIMEOUT_S)

    def start_offset(self, process_queue: ProcessQueue) -> QueueOffset:
        return self._offsets.start_offset(process_queue.queue, self._start, process_queue.generation, COMMIT_TIMEOUT_S)

    def commit_offsets(self, commits: dict[MessageQueue, OffsetCommit]) -> CommitAnswer:
        return self._offsets.commit_offsets(commits, COMMIT_TIMEOUT_S)


class LocalFileOffsetStore:
    """BROADCASTING: keeps the offsets in this instance's file, which all its broker groups share. A queue that is not
    in it starts where the group's broker says."""

    def __init__(self, instance: InstanceState, offsets: GroupOffsets) -> None:
        settings = instance.settings
        self._query = settings.start
        self._brokers = offsets
        directory = Path(settings.offsets_dir or DEFAULT_DIRECTORY).expanduser()
        self._file = LocalOffsets(directory / settings.group / (settings.instance_name or instance.name))
        self._lock = threading.Lock()
        self._known: dict[MessageQueue, int] | None = None

    def prepare(self) -> None:
        with self._lock:
            if self._known is None:
                self._known = self._file.load()

    def start_offset(self, process_queue: ProcessQueue) -> QueueOffset:
        self._brokers.check_broadcast(process_queue.queue.broker_name, COMMIT_TIMEOUT_S)
        with self._lock:
            known = None if self._known is None else self._known.get(process_queue.queue)
        if known is not None:
            return QueueOffset(known)
        self._brokers.ensure_group(process_queue.queue.broker_name, COMMIT_TIMEOUT_S)
        return self._brokers.start_offset(process_queue.queue, self._query, 0, COMMIT_TIMEOUT_S)

    def commit_offsets(self, commits: dict[MessageQueue, OffsetCommit]) -> CommitAnswer:
        with self._lock:
            offsets = dict(self._known or {})
            for queue, commit in commits.items():
                if commit.queue_offset is not None:
                    offsets[queue] = commit.queue_offset
            if offsets != self._known:
                self._file.save(offsets)
                self._known = offsets
        return CommitAnswer()


class CommitThreads:
    """The threads of a Pull actor that call brokers about offsets: one per broker group, made when it is needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: dict[str, _BrokerThread] = {}
        self._closed = threading.Event()

    def of(self, broker_name: str) -> _BrokerThread:
        """The thread of a broker group."""
        with self._lock:
            thread = self._threads.get(broker_name)
            if thread is None:
                thread = self._threads[broker_name] = _BrokerThread(broker_name, self._closed)
            return thread

    def close(self) -> None:
        """End the threads."""
        self._closed.set()
        with self._lock:
            for thread in self._threads.values():
                thread.wake(urgent=True)


class OffsetCommitter:
    """The offsets of one instance. `store(broker_name)` makes its OffsetStore at a broker group."""

    def __init__(self, instance: InstanceState, store: Callable[[str], OffsetStore], threads: CommitThreads) -> None:
        self._instance = instance
        self._store = store
        self._threads = threads
        self._lock = threading.Lock()
        self._works: dict[str, _BrokerWork] = {}
        self._closed = False

    def wake_committers(self) -> None:
        """Look for queues that need a start offset, and for offsets to commit."""
        for broker_name in {queue.broker_name for queue in self._instance.holding()}:
            with self._lock:
                if self._closed:
                    return
                work = self._works.get(broker_name)
                if work is None:
                    work = _BrokerWork(self._instance, broker_name, self._store(broker_name))
                    self._works[broker_name] = work
                    self._threads.of(broker_name).add(work)
            self._threads.of(broker_name).wake(urgent=work.is_urgent())

    def ask_about_resets(self) -> None:
        """Ask the brokers about every queue held: somebody has reset offsets of the group."""
        with self._lock:
            works = list(self._works.items())
        for broker_name, work in works:
            work.ask.set()
            self._threads.of(broker_name).wake(urgent=True)

    def close(self) -> None:
        """Commit nothing more; offsets that are not committed by now are not."""
        with self._lock:
            self._closed = True
            works = list(self._works.items())
        for broker_name, work in works:
            self._threads.of(broker_name).remove(work)


class _BrokerThread:
    """The thread of one broker group, and the works it does in turn."""

    def __init__(self, broker_name: str, closed: threading.Event) -> None:
        self._broker_name = broker_name
        self._closed = closed
        self._lock = threading.Lock()
        self._works: deque[_BrokerWork] = deque()
        self._wanted = threading.Event()
        """Something may be there to commit or to start."""
        self._urgent = threading.Event()
        """It is not to wait for COMMIT_AFTER_S."""
        threading.Thread(target=self._run, name=f"offsets-{broker_name}", daemon=True).start()

    def add(self, work: _BrokerWork) -> None:
        with self._lock:
            self._works.append(work)

    def remove(self, work: _BrokerWork) -> None:
        with self._lock:
            if work in self._works:
                self._works.remove(work)

    def wake(self, *, urgent: bool) -> None:
        self._wanted.set()
        if urgent:
            self._urgent.set()

    def _run(self) -> None:
        backoff = Backoff()
        while not self._closed.is_set():
            self._wanted.wait(IDLE_S)
            self._wanted.clear()
            self._urgent.wait(COMMIT_AFTER_S)
            self._urgent.clear()
            if self._do_all():
                backoff.reset()
            else:
                self._wanted.set()
                self._closed.wait(backoff.next())

    def _do_all(self) -> bool:
        """Do every work once, beginning where the last round has ended. False if the broker does not answer."""
        with self._lock:
            count = len(self._works)
        for _ in range(count):
            with self._lock:
                if not self._works:
                    return True
                work = self._works[0]
                self._works.rotate(-1)
            try:
                work.do()
            except RaymqError as error:
                logger.warning("%s: offsets at %s, trying again: %s", work.instance.name, self._broker_name, error)
                return False  # the others would only wait for the same answer; they are the first next time
            except Exception:  # a bug, in one instance: the queues of the others go on
                logger.exception("%s: offsets at %s, trying again", work.instance.name, self._broker_name)
                work.failed()
                self._wanted.set()
        return True


class _BrokerWork:
    """One instance's offsets at one broker group."""

    def __init__(self, instance: InstanceState, broker_name: str, store: OffsetStore) -> None:
        self.instance = instance
        self.ask = threading.Event()
        """The next commit is to ask about every queue."""
        self._broker_name = broker_name
        self._store = store
        self._prepared = False
        self._backoff = Backoff()
        self._not_before_s = 0.0

    def is_urgent(self) -> bool:
        with self.instance.lock:
            return self.instance.core.commit_is_urgent() or bool(self.instance.core.starting(self._broker_name))

    def do(self) -> None:
        """Commit and start what is to be. RaymqError when the broker does not answer."""
        if time.monotonic() < self._not_before_s:
            return
        try:
            if not self._prepared:
                self._store.prepare()
                self._prepared = True
            self._commit()
            self._start_queues()
            self._backoff.reset()
        except RaymqError as error:
            if isinstance(error, GroupNotExistError):
                self._prepared = False  # it was deleted; or the broker makes no groups by itself, and somebody has to
            elif error.retryable:
                raise
            logger.warning("%s: offsets at %s, trying again: %s", self.instance.name, self._broker_name, error)
            self.failed()
        finally:
            self.instance.release()

    def failed(self) -> None:
        """Leave this instance alone for a moment."""
        self._not_before_s = time.monotonic() + self._backoff.next()

    def _start_queues(self) -> None:
        """Ask for the start offset of each queue that has none, and let it be fetched."""
        with self.instance.lock:
            starting = self.instance.core.starting(self._broker_name)
        for process_queue in starting:
            try:
                offset = self._store.start_offset(process_queue)
            except TopicNotExistError as error:
                logger.warning("%s drops a queue of deleted topic %s", self.instance.name, error.topic)
                with self.instance.lock:
                    self.instance.core.lose([process_queue.queue])
                continue
            with self.instance.lock:
                self.instance.core.started(process_queue, offset)
            self.instance.on_fetchable()

    def _commit(self) -> None:
        ask = self.ask.is_set()
        self.ask.clear()
        with self.instance.lock:
            commits = self.instance.core.reset_queries(self._broker_name) if ask else {}
            commits |= self.instance.core.uncommitted(self._broker_name)
        if not commits:
            return
        try:
            answer = self._store.commit_offsets(commits)
        except RaymqError:
            if ask:
                self.ask.set()
            raise
        with self.instance.lock:
            self.instance.core.commit_answered(commits, answer)
        for queue in answer.fenced | answer.gone:
            logger.warning("%s drops %s: it has a new owner, or is deleted", self.instance.name, queue)
        self.instance.on_work()  # a queue may have waited for this
        if answer.reset:
            logger.info("%s goes on where offsets were reset: %s", self.instance.name, dict(answer.reset))
            self.instance.on_fetchable()
