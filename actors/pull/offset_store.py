"""OffsetCommitter asks for the start offsets of a Pull actor's queues and commits, one thread per broker group.

With a thread each, no broker group waits for another. A commit is sent a little after a message was finished, so that
it covers more of them, and at once when a queue waits for it. The next one is sent when the last is answered, and
covers the messages finished meanwhile.
"""

from __future__ import annotations

import logging
import threading
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


class OffsetCommitter:
    """One thread per broker group that has queues at this instance. `store(broker_name)` makes its OffsetStore."""

    def __init__(self, instance: InstanceState, store: Callable[[str], OffsetStore]) -> None:
        self._instance = instance
        self._store = store
        self._lock = threading.Lock()
        self._committers: dict[str, _BrokerCommitter] = {}
        self._closed = threading.Event()

    def wake_committers(self) -> None:
        """Look for queues that need a start offset, and for offsets to commit."""
        for broker_name in {queue.broker_name for queue in self._instance.holding()}:
            with self._lock:
                committer = self._committers.get(broker_name)
                if committer is None:
                    committer = _BrokerCommitter(self._instance, broker_name, self._store(broker_name), self._closed)
                    self._committers[broker_name] = committer
            committer.wake_committer()

    def ask_about_resets(self) -> None:
        """Ask the brokers about every queue held: somebody has reset offsets of the group."""
        with self._lock:
            committers = list(self._committers.values())
        for committer in committers:
            committer.ask_about_resets()

    def close(self) -> None:
        """End the threads; offsets that are not committed by now are not."""
        self._closed.set()
        self.wake_committers()


class _BrokerCommitter:
    """The thread of one broker group."""

    def __init__(self, instance: InstanceState, broker_name: str, store: OffsetStore, closed: threading.Event) -> None:
        self._instance = instance
        self._broker_name = broker_name
        self._store = store
        self._closed = closed
        self._wanted = threading.Event()
        """Something may be there to commit or to start."""
        self._urgent = threading.Event()
        """It is not to wait for COMMIT_AFTER_S."""
        self._ask = threading.Event()
        """The next commit is to ask about every queue."""
        self._prepared = False
        threading.Thread(target=self._run, name=f"offsets-{broker_name}", daemon=True).start()

    def wake_committer(self) -> None:
        self._wanted.set()
        with self._instance.lock:
            urgent = self._instance.core.commit_is_urgent() or bool(self._instance.core.starting(self._broker_name))
        if urgent or self._closed.is_set():
            self._urgent.set()

    def ask_about_resets(self) -> None:
        self._ask.set()
        self._wanted.set()
        self._urgent.set()

    def _run(self) -> None:
        backoff = Backoff()
        while not self._closed.is_set():
            self._wanted.wait(IDLE_S)
            self._wanted.clear()
            self._urgent.wait(COMMIT_AFTER_S)
            self._urgent.clear()
            try:
                if not self._prepared:
                    self._store.prepare()
                    self._prepared = True
                self._commit()
                self._start_queues()
                backoff.reset()
            except GroupNotExistError as error:
                logger.warning("%s: %s", self._instance.name, error)
                self._prepared = False  # it was deleted; or the broker makes no groups by itself, and somebody has to
            except RaymqError as error:
                logger.warning("%s: offsets at %s, trying again: %s", self._instance.name, self._broker_name, error)
                self._wanted.set()
                self._closed.wait(backoff.next())
            except Exception:  # a bug: without this thread the queues of this broker would stand still for ever
                logger.exception("%s: offsets at %s, trying again", self._instance.name, self._broker_name)
                self._wanted.set()
                self._closed.wait(backoff.next())
            self._instance.release()

    def _start_queues(self) -> None:
        """Ask for the start offset of each queue that has none, and let it be fetched."""
        with self._instance.lock:
            starting = self._instance.core.starting(self._broker_name)
        for process_queue in starting:
            try:
                offset = self._store.start_offset(process_queue)
            except TopicNotExistError as error:
                logger.warning("%s drops a queue of deleted topic %s", self._instance.name, error.topic)
                with self._instance.lock:
                    self._instance.core.drop(process_queue.queue)
                continue
            with self._instance.lock:
                self._instance.core.started(process_queue, offset)
            self._instance.on_fetchable()

    def _commit(self) -> None:
        ask = self._ask.is_set()
        self._ask.clear()
        with self._instance.lock:
            commits = self._instance.core.uncommitted(self._broker_name, ask=ask)
        if not commits:
            return
        try:
            answer = self._store.commit_offsets(commits)
        except RaymqError:
            if ask:
                self._ask.set()
            raise
        with self._instance.lock:
            self._instance.core.committed(commits, answer)
        for queue in answer.fenced | answer.gone:
            logger.warning("%s drops %s: it has a new owner, or is deleted", self._instance.name, queue)
        self._instance.work.set()  # a queue may have waited for this
        if answer.reset:
            logger.info("%s goes on where offsets were reset: %s", self._instance.name, dict(answer.reset))
            self._instance.on_fetchable()
