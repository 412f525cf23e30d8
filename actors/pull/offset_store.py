"""Where a Pull actor's queues begin, and its commits: a thread per broker group, so that none waits for another.

A commit is sent a little after something was finished, so that it covers more; at once when a queue waits for it. The
next one is sent when the last is answered, and takes what has been finished meanwhile.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from actors.core.consume.process_queue import ProcessQueue
from actors.pull.local_offsets import DEFAULT_DIRECTORY, LocalOffsets
from actors.pull.shared import InstanceState
from raymq.consumer.group_offsets import GroupOffsets
from raymq.errors import GroupNotExistError, RaymqError, TopicNotExistError
from raymq.message import MessageQueue
from raymq.protocol.group import CommitAnswer, OffsetCommit, QueueOffset
from raymq.retry import Backoff

COMMIT_AFTER_S: Final = 0.1
IDLE_S: Final = 1.0
COMMIT_TIMEOUT_S: Final = 5.0


logger = logging.getLogger(__name__)


class OffsetStore(Protocol):
    """Where offsets are: at a broker, or in a file here."""

    def prepare(self) -> None:
        """Once before the first use, and again when the group has become unknown."""

    def start(self, held: ProcessQueue) -> QueueOffset:
        """Where to begin with a queue."""

    def commit(self, commits: dict[MessageQueue, OffsetCommit]) -> CommitAnswer:
        """Durable on return."""


class RemoteBrokerOffsetStore:
    """CLUSTERING: at one broker group."""

    def __init__(self, shared: InstanceState, offsets: GroupOffsets, broker_name: str) -> None:
        self._start = shared.settings.start
        self._offsets = offsets
        self._broker_name = broker_name

    def prepare(self) -> None:
        self._offsets.ensure_group(self._broker_name, COMMIT_TIMEOUT_S)

    def start(self, held: ProcessQueue) -> QueueOffset:
        return self._offsets.start(held.queue, self._start, held.generation, COMMIT_TIMEOUT_S)

    def commit(self, commits: dict[MessageQueue, OffsetCommit]) -> CommitAnswer:
        return self._offsets.commit(commits, COMMIT_TIMEOUT_S)


class LocalFileOffsetStore:
    """BROADCASTING: in this instance's file, which all its broker groups share."""

    def __init__(self, shared: InstanceState, offsets: GroupOffsets) -> None:
        settings = shared.settings
        self._query = settings.start
        self._brokers = offsets
        directory = Path(settings.offsets_dir or DEFAULT_DIRECTORY).expanduser()
        self._file = LocalOffsets(directory / settings.group / (settings.instance_name or shared.name))
        self._lock = threading.Lock()
        self._known: dict[MessageQueue, int] | None = None

    def prepare(self) -> None:
        with self._lock:
            if self._known is None:
                self._known = self._file.load()

    def start(self, held: ProcessQueue) -> QueueOffset:
        self._brokers.check_broadcast(held.queue.broker_name, COMMIT_TIMEOUT_S)
        with self._lock:
            known = None if self._known is None else self._known.get(held.queue)
        if known is not None:
            return QueueOffset(known)
        self._brokers.ensure_group(held.queue.broker_name, COMMIT_TIMEOUT_S)
        return self._brokers.start(held.queue, self._query, 0, COMMIT_TIMEOUT_S)

    def commit(self, commits: dict[MessageQueue, OffsetCommit]) -> CommitAnswer:
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
    """One thread per broker group that has queues here. `store(broker_name)` makes what it asks."""

    def __init__(self, shared: InstanceState, store: Callable[[str], OffsetStore]) -> None:
        self._shared = shared
        self._store = store
        self._lock = threading.Lock()
        self._keepers: dict[str, _BrokerCommitter] = {}
        self._closed = threading.Event()

    def wake(self) -> None:
        """There are queues to begin with, or offsets to commit."""
        for broker_name in {queue.broker_name for queue in self._shared.holding()}:
            with self._lock:
                keeper = self._keepers.get(broker_name)
                if keeper is None:
                    keeper = _BrokerCommitter(self._shared, broker_name, self._store(broker_name), self._closed)
                    self._keepers[broker_name] = keeper
            keeper.wake()

    def ask(self) -> None:
        """Somebody has reset offsets of the group: ask about every queue held."""
        with self._lock:
            keepers = list(self._keepers.values())
        for keeper in keepers:
            keeper.ask()

    def close(self) -> None:
        """End the threads; what is not committed stays so."""
        self._closed.set()
        self.wake()


class _BrokerCommitter:
    def __init__(self, shared: InstanceState, broker_name: str, store: OffsetStore, closed: threading.Event) -> None:
        self._shared = shared
        self._broker_name = broker_name
        self._store = store
        self._closed = closed
        self._wanted = threading.Event()
        self._urgent = threading.Event()
        self._ask = threading.Event()
        self._prepared = False
        threading.Thread(target=self._run, name=f"offsets-{broker_name}", daemon=True).start()

    def wake(self) -> None:
        self._wanted.set()
        with self._shared.lock:
            urgent = self._shared.core.commit_is_urgent() or bool(self._shared.core.starting(self._broker_name))
        if urgent or self._closed.is_set():
            self._urgent.set()

    def ask(self) -> None:
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
                self._begin()
                backoff.reset()
            except GroupNotExistError as error:
                logger.warning("%s: %s", self._shared.name, error)
                self._prepared = False  # it was deleted; or the broker makes no groups by itself, and somebody has to
            except RaymqError as error:
                logger.warning("%s: offsets at %s, trying again: %s", self._shared.name, self._broker_name, error)
                self._wanted.set()
                self._closed.wait(backoff.next())
            except Exception:  # a bug: without this thread the queues of this broker would stand still for ever
                logger.exception("%s: offsets at %s, trying again", self._shared.name, self._broker_name)
                self._wanted.set()
                self._closed.wait(backoff.next())
            self._shared.release()

    def _begin(self) -> None:
        with self._shared.lock:
            starting = self._shared.core.starting(self._broker_name)
        for held in starting:
            try:
                offset = self._store.start(held)
            except TopicNotExistError as error:
                logger.warning("%s lets go of a queue of deleted topic %s", self._shared.name, error.topic)
                with self._shared.lock:
                    self._shared.core.drop(held.queue)
                continue
            with self._shared.lock:
                self._shared.core.begin(held, offset)
            self._shared.on_room()

    def _commit(self) -> None:
        ask = self._ask.is_set()
        self._ask.clear()
        with self._shared.lock:
            commits = self._shared.core.uncommitted(self._broker_name, ask=ask)
        if not commits:
            return
        try:
            answer = self._store.commit(commits)
        except RaymqError:
            if ask:
                self._ask.set()
            raise
        with self._shared.lock:
            self._shared.core.committed(commits, answer)
        for queue in answer.fenced | answer.gone:
            logger.warning("%s lets go of %s: it has a new owner, or is gone", self._shared.name, queue)
        self._shared.work.set()  # a queue may have waited for this
        if answer.reset:
            logger.info("%s goes on where offsets were reset: %s", self._shared.name, dict(answer.reset))
            self._shared.on_room()
