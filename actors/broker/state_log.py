"""The broker's state on disk: a log of changes in its own store, and a snapshot that shortens it.

How a decision becomes durable, and how the state is read at a start, belongs here.

    change → decide (actors.core.broker.state) → a record in `rmq_sys_broker_state` → apply
    start  ← snapshot in config/ ← later records

One write runs at a time. Changes that arrive during a write are decided together, in the order of their arrival, each
on the state with the changes before it. They go into one batch of records. So the log and the state have one order.
Readers of the state see a change only when it is durable.

A thread of its own, the writer, makes the writes and waits for the store. In the usual case the thread of the broker's
lane makes a write itself (`_write_directly`): it sends the records and receives the answer as one of its events, so no
thread is woken for a commit. In unusual cases it passes the same write to the writer.

A change is answered once every replica that may lead next has its record: the record is acknowledged as durable, or it
can be read. After another replica becomes the master, no change is decided until its log was read; waiting changes are
then decided on the state from that log.

The log may have records that the state lacks, such as a change whose outcome was not known in time. They are found
because the next record does not get the expected offset; the records before it are then read. A change after one of
unknown outcome first writes a mark, which changes nothing: then everything stored before the mark has been read.

After a crash the snapshot and the later records give every change that was answered. A change that was not answered may
or may not be among them.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeVar

from actors.broker.state_records import STORE_TIMEOUT_S, StoredRecords
from actors.broker.state_snapshots import CALL_TIMEOUT_S, StateSnapshots
from actors.core.broker.snapshot import dump_snapshot
from actors.core.broker.state import MARK, BrokerState, Change, decode_change, encode_change, replay
from actors.core.pop.leases import LeaseClock
from actors.core.replica.deleted_topics import CLOSED_TOPICS_FILE
from raymq.common.errors import (
    NotMasterError,
    RaymqError,
    RequestTimeoutError,
    ServiceNotAvailableError,
    SystemBusyError,
)
from raymq.common.names import STATE_TOPIC
from raymq.common.protocol.store import FetchRequest
from raymq.common.retry import persist_until
from raymq.records.format.decode import decode_records
from raymq.remoting.storage_client import StorageClient

READY_WAIT_S: Final = 10.0
CONFIRM_WAIT_S: Final = 5.0
"""The timeout for reading a record that was stored late, or with too few copies."""
CHANGE_TIMEOUT_S: Final = READY_WAIT_S + 3 * (STORE_TIMEOUT_S + CONFIRM_WAIT_S)
"""Bounds the wait for a change, including the running write, the mark, and the change's own write."""
SNAPSHOTS_OF_A_CHANGE: Final = 2
"""Retention may delete the records of a change once two snapshots have it: a file, and its .bak."""
REPLAY_BATCH: Final = 1000
CHANGES_MAX: Final = 10_000
"""The most changes that wait for the writer."""
WRITE_MAX_RECORDS: Final = 2000
WRITE_MAX_BYTES: Final = 1 << 20
"""The largest batch of records; a larger change is written alone."""
DIRECT_CHANGES_MAX: Final = 200
"""The most changes that the lane's thread decides at a time: its other clients wait during that."""

LEASE_CLOCK: Final = LeaseClock(lambda: time.time_ns() // 1_000_000, lambda: time.monotonic_ns() // 1_000_000)
"""The clock of this broker's leases. It continues from the times of the records that the broker has read."""

logger = logging.getLogger(__name__)

T = TypeVar("T")

DecidedChanges = Change | Sequence[Change] | None
Decide = Callable[[BrokerState], DecidedChanges]


Done = Callable[[bool, Exception | None], None]
"""Receives a change's result (True if topics changed) or its error. It must not block."""


class SentRecords(Protocol):
    """Records that were sent to the store."""

    @property
    def stored(self) -> StoredRecords | None:
        """Return the records' place, once the store has reported it; None if the answer differs, or is missing."""

    def finish(self) -> StoredRecords:
        """Wait until the records are stored, as StateRecords.append; send them again if necessary."""


class DirectWrites(Protocol):
    """Sends records from the thread of the broker's lane (actors.broker.direct_appends)."""

    @property
    def is_own_thread(self) -> bool:
        """True in the lane's thread, the only one that calls `send`."""

    def connect(self, storage: StorageClient) -> None:
        """Make `send` possible, if it is not. Called by a thread that may wait."""

    def leads_to(self, storage: StorageClient) -> bool:
        """True if `send` to this store is possible now, as far as is known."""

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Make the lane's thread call `callback`."""

    def send(self, storage: StorageClient, bodies: Sequence[bytes], done: Callable[[SentRecords], None]) -> bool:
        """Send records without waiting; `done` is called later. Returns False, and sends nothing, if that is impossible
        now.
        """


@dataclass(slots=True, eq=False)
class _Pending:
    """A waiting change. `deadline_s`: the latest time to begin with it.

    `changed_topics` is set once the change is decided; `error`: why it was refused.
    """

    decide: Decide
    done: Done
    deadline_s: float
    changed_topics: bool = False
    error: Exception | None = None

    def answer(self) -> None:
        self.done(self.changed_topics, self.error)


@dataclass(slots=True, eq=False)
class _Write:
    """A write: the `decided` changes that it answers, the `changes` to store, and their records if they were `sent`
    already.

    `left`: the number of changes that waited at that time, and were not decided.
    """

    now_ms: int
    decided: list[_Pending] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    left: int = 0
    sent: SentRecords | None = None


class StateLog:
    """One broker's state. Thread-safe.

    `append` stores records with these bodies in the state topic's queue, in order (StateRecords.append); only the owner
    of the running write calls it. `copies`: the stores of the other replicas, which get the snapshots too, because one
    of them may be the next master.
    """

    def __init__(
        self,
        broker_name: str,
        storage: StorageClient,
        append: Callable[[Sequence[bytes]], StoredRecords],
        copies: Sequence[StorageClient] = (),
    ) -> None:
        self._broker_name = broker_name
        self._storage, self._copies = storage, copies
        self._append = append
        self._lock = threading.Lock()
        """Guards the fields below. Held only briefly, and never during a call to a store."""
        self._changed = threading.Condition(self._lock)
        self._state = BrokerState()
        self._ahead = BrokerState()
        """The state including the changes that are being stored; equal to the state while no write runs."""
        self._closed_topics: set[str] = set()
        """The topics whose messages the store may refuse, because the topics were deleted."""
        self._position = self._snapshot_position = 0
        self._snapshots_left = 0
        """How many more times the snapshot of `_snapshot_position` must be written."""
        self._outcome_unknown = True  # the previous broker may have left a change unfinished
        self._snapshots = StateSnapshots(broker_name)
        self._ready = threading.Event()
        self._replaced = threading.Event()
        """Set while `move` waits for the running write; no other write begins."""
        self._writing = False
        self._alone = 0
        """The number of next changes that are written one by one."""
        self._waiting: deque[_Pending] = deque()
        self._handed_over: _Write | None = None
        """The running write, if the writer has to continue it."""
        self._direct: DirectWrites | None = None
        self._writer: threading.Thread | None = None
        self._closed = False
        self.waiting_for = f"{storage.name} to open its store"

    @property
    def is_ready(self) -> bool:
        """True if the state has been read."""
        return self._ready.is_set()

    @property
    def position(self) -> int:
        """The first record of the log that is not in the state. Moves with each change."""
        return self._position

    def ready(self) -> BrokerState:
        """Return the state, for reading. ServiceNotAvailableError: it was not read from the store within
        READY_WAIT_S.
        """
        if not self._ready.wait(READY_WAIT_S):
            raise self._not_ready()
        return self._state

    def _not_ready(self) -> ServiceNotAvailableError:
        return ServiceNotAvailableError(f"{self._broker_name} is starting and waits: {self.waiting_for}")

    def move(self, storage: StorageClient, copies: Sequence[StorageClient]) -> None:
        """Use the log of another replica, the new master. No change is decided until `load` has read it.

        Waits for a running write, which may be in the new master's log already.
        """
        self._replaced.set()
        with self._changed:
            self._changed.wait_for(lambda: not self._writing)
            self._ready.clear()
            self._replaced.clear()
            self._storage, self._copies = storage, copies
            self.waiting_for = f"{storage.name} to lead"

    def load_until(self, stopping: threading.Event) -> None:
        """Call `load` until it succeeds or `stopping` is set."""
        while not stopping.is_set() and not self._ready.is_set():
            try:
                self.load()
            except RaymqError as error:
                logger.warning("%s cannot read its state yet, and retries: %s", self._broker_name, error)
                stopping.wait(0.5)

    def load(self, agree: Callable[[BrokerState], None] = lambda state: None) -> None:
        """Read the snapshot and the later records, and call `agree` with the state before any change is decided.

        Raises RaymqError if the store cannot be read now, and the errors of `agree`; no change can be decided then.
        """
        storage = self._storage
        try:
            state, position, snapshot_position = self._load(storage)
            agree(state)
            closed = storage.control("read_config", CLOSED_TOPICS_FILE, timeout_s=CALL_TIMEOUT_S)
        except RaymqError as error:
            self.waiting_for = str(error)
            raise
        with self._changed:
            if self._storage is not storage:
                raise ServiceNotAvailableError(f"{storage.name} was replaced while it was read; read the new master")
            self._state, self._ahead = state, state.copy()
            self._closed_topics = set(json.loads(closed or "[]"))
            self._position, self._snapshot_position = position, snapshot_position
            self._snapshots_left = 1 if snapshot_position else 0
            self._ready.set()
            self._changed.notify_all()

    def _load(self, storage: StorageClient) -> tuple[BrokerState, int, int]:
        state, snapshot_position, bounds = self._snapshots.read(storage)
        position = snapshot_position
        while position < bounds.max_offset:
            before = position
            records, position = self._next_records(storage, position, 0.0)
            replay(state, records)
            if records:
                LEASE_CLOCK.not_before(records[-1][1])
            if position == before:
                raise ServiceNotAvailableError(
                    f"{storage.name} shows its state up to {position} and not up to {bounds.max_offset}; read it again"
                )
        return state, position, snapshot_position

    def _next_records(
        self, storage: StorageClient, position: int, wait_s: float
    ) -> tuple[list[tuple[bytes, int]], int]:
        """Return the next records from `position` on, as (body, store time in ms), and the position after them.

        Waits up to `wait_s` for the first record.
        """
        request = FetchRequest(STATE_TOPIC, 0, position, REPLAY_BATCH)
        [result] = storage.fetch([request], 4 << 20, wait_s, CALL_TIMEOUT_S)
        records = decode_records(result.records, broker_name=self._broker_name) if result.count else []
        return [(record.body, record.store_timestamp_ms) for record in records], max(position, result.next_offset)

    def read(self, reader: Callable[[BrokerState], T]) -> T:
        """Return the result of `reader`, which gets the state while nothing changes it."""
        while True:
            self.ready()
            with self._lock:
                if self._ready.is_set():  # otherwise another replica has become the master
                    return reader(self._state)

    def peek(self, reader: Callable[[BrokerState], T]) -> T | None:
        """Read as `read`, without waiting. Returns None while the state is not loaded."""
        with self._lock:
            return reader(self._state) if self._ready.is_set() else None

    # Changes

    def change(self, decide: Decide) -> bool:
        """Decide about a change, store its records, and apply them. True if topics changed.

        RequestTimeoutError: the outcome is unknown; the same change may be tried again. Errors of `decide` are raised
        before anything is stored.
        """
        try:
            return self.submit(decide).result(CHANGE_TIMEOUT_S)
        except FutureTimeoutError as error:
            if isinstance(error, RaymqError):
                raise
            raise RequestTimeoutError(f"{self._storage.name}, to store a change,", CHANGE_TIMEOUT_S) from None

    def submit(self, decide: Decide) -> Future[bool]:
        """Submit a change as `change`, without waiting. The future gets the result or the error from the writing
        thread.

        `decide` runs in that thread, on the newest state, and must not block. SystemBusyError: too many changes wait.
        ServiceNotAvailableError: `close` was called.
        """
        future: Future[bool] = Future()

        def done(changed_topics: bool, error: Exception | None) -> None:
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(changed_topics)

        self.submit_with(decide, done)
        return future

    def submit_with(self, decide: Decide, done: Done) -> None:
        """Submit a change as `submit`, with a function instead of the future."""
        with self._changed:
            if self._closed:
                raise ServiceNotAvailableError(f"{self._broker_name} is being stopped")
            if len(self._waiting) >= CHANGES_MAX:
                raise SystemBusyError(f"{CHANGES_MAX} changes wait for {self._storage.name}; try again")
            self._waiting.append(_Pending(decide, done, time.monotonic() + READY_WAIT_S))
            if self._writing:
                return  # the owner of the running write takes this change next
            direct = self._may_write_directly() and self._direct is not None and self._direct.is_own_thread
            if direct:
                self._writing = True
            else:
                self._wake_writer()
        if direct:
            self._write_directly()

    def close(self) -> None:
        """Carry out the waiting changes, and end the writer's thread. Idempotent."""
        with self._changed:
            writer, self._closed = self._writer, True
            self._changed.notify_all()
        if writer is not None:
            writer.join(CHANGE_TIMEOUT_S)

    def _may_write(self) -> bool:
        """True if a master's state is loaded, and no other replica is taking over. Called with the lock."""
        return self._ready.is_set() and not self._replaced.is_set()

    # Run by the lane's thread

    def write_by(self, direct: DirectWrites) -> None:
        """Let the thread of `direct` write the changes that it submits, in the usual case."""
        self._direct = direct

    def _may_write_directly(self) -> bool:
        """True if nothing needs the writer, which alone may wait. Called with the lock."""
        return self._may_write() and not self._outcome_unknown and not self._alone

    def _write_directly(self) -> None:
        """Decide about the waiting changes, and send their records; `_answered_directly` continues.

        It differs from `_write` in two ways: it writes no mark, and it leaves the write to the writer if the store must
        open topics first, or cannot be reached without waiting.
        """
        direct = self._direct
        assert direct is not None
        write = _Write(time.time_ns() // 1_000_000)
        try:
            self._decide(write, DIRECT_CHANGES_MAX)
            if write.changes:
                if self._topics_to_open(write.changes) or not self._send(direct, write):
                    self._hand_over(write)
                return
        except Exception as error:  # whatever the error is, the callers wait for an answer
            self._give_up(write, error)
        if self._begins_next():
            direct.call_soon(self._write_directly)  # not at once: other clients of the lane wait for this thread, too

    def _send(self, direct: DirectWrites, write: _Write) -> bool:
        """Send a write's records directly. Returns False if that is impossible now."""
        bodies = [encode_change(change) for change in write.changes]
        self._outcome_unknown = True
        if direct.send(self._storage, bodies, lambda sent: self._sent(write, sent)):
            return True
        self._outcome_unknown = False
        return False

    def _sent(self, write: _Write, sent: SentRecords) -> None:
        """Handle the outcome of records that were sent directly."""
        stored = sent.stored
        if stored is None or not stored.durable or not self._follows(stored, write.changes):
            write.sent = sent
            self._hand_over(write)
            return
        try:
            self._take_stored(write, stored)
            for pending in write.decided:
                pending.answer()
        finally:
            if self._begins_next():
                self._write_directly()

    def _begins_next(self) -> bool:
        """End a write, and begin the next one if this thread may make it."""
        with self._changed:
            if self._waiting and self._may_write_directly():
                return True
            self._writing = False
            if self._waiting or self._closed or self._replaced.is_set():
                self._wake_writer()
        return False

    def _hand_over(self, write: _Write) -> None:
        """Let the writer continue a write."""
        with self._changed:
            self._handed_over = write
            self._wake_writer()

    # Run by the writer's thread

    def _wake_writer(self) -> None:
        """Wake the writer, and threads that wait for the end of a write. Called with the lock."""
        if self._writer is None:
            self._writer = threading.Thread(target=self._write_all, name="broker-writer", daemon=True)
            self._writer.start()
        self._changed.notify_all()

    def _write_all(self) -> None:
        """Carry out changes as they arrive, until `close`."""
        while (write := self._next_write()) is not None:
            try:
                self._write(write)
                if self._direct is not None and not self._outcome_unknown:
                    self._direct.connect(self._storage)
            finally:
                self._end_write()

    def _end_write(self) -> None:
        """End a write of the writer; the lane's thread makes the next one, if it may."""
        with self._changed:
            direct = self._direct
            if self._waiting and self._may_write_directly() and direct is not None and direct.leads_to(self._storage):
                direct.call_soon(self._write_directly)
                return
            self._writing = False
            self._changed.notify_all()

    def _next_write(self) -> _Write | None:
        """Wait for the next write, or for one to continue, and begin it. Returns None when the log is closed."""
        while True:
            with self._changed:
                write, late = self._begin()
                while write is None and not late:
                    if self._closed and not self._waiting and not self._writing:
                        return None
                    left_s = self._waiting[0].deadline_s - time.monotonic() if self._waiting else None
                    self._changed.wait(None if self._writing else left_s)
                    write, late = self._begin()
            if write is not None:
                return write
            for pending in late:
                pending.error = self._not_ready()
                pending.answer()

    def _begin(self) -> tuple[_Write | None, list[_Pending]]:
        """Return a write to continue or begin, and the changes that expired before they could. Called with the lock."""
        handed_over, self._handed_over = self._handed_over, None
        if handed_over is not None or self._writing or not self._waiting:
            return handed_over, []
        if self._may_write():
            self._writing = True
            return _Write(time.time_ns() // 1_000_000), []
        late, now_s = [], time.monotonic()
        while self._waiting and self._waiting[0].deadline_s <= now_s:
            late.append(self._waiting.popleft())
        return None, late

    def _write(self, write: _Write) -> None:
        """Decide about the next changes, up to the limit of one write, store their records and answer them.

        Continues with a write that was begun already.
        """
        try:
            if not write.changes:
                if self._outcome_unknown:
                    self._store(_Write(write.now_ms, changes=[MARK]))
                self._decide(write)
            if write.changes:
                if write.sent is None:
                    self._open_topics(write.changes)
                if self._store(write):
                    self._open_topics(write.changes)  # another instance may have deleted some of the topics in between
                    for pending in write.decided:
                        pending.changed_topics = True
        except Exception as error:  # whatever the error is, the callers wait for an answer
            self._give_up(write, error)
        else:
            for pending in write.decided:
                pending.answer()

    def _give_up(self, write: _Write, error: Exception) -> None:
        """Answer the changes of a failed write, and waiting changes that would fail in the same way.

        If the write cannot succeed, one of its changes may be the cause: then each is written alone.
        """
        failed, retryable = write.decided, isinstance(error, RaymqError) and error.retryable
        with self._lock:
            self._ahead = self._state.copy()
            if len(failed) > 1 and not retryable:
                self._waiting.extendleft(reversed(failed))
                self._alone = len(failed)
                return
            if retryable or not failed:  # the cause concerns all changes: the store, or the mark
                left = write.left if write.changes else len(self._waiting)
                failed = failed + [self._waiting.popleft() for _ in range(left)]
        for pending in failed:
            pending.error = _copy_of(error)
            pending.answer()

    def _decide(self, write: _Write, most: int = CHANGES_MAX) -> None:
        """Decide about waiting changes, in order.

        Changes that must be answered when the write's changes are stored become its `decided`. All others, whose
        answers depend on none of the write's changes, are answered now.
        """
        changes, decided = write.changes, write.decided
        size_bytes = 0
        while self._waiting and most and len(changes) < WRITE_MAX_RECORDS and size_bytes < WRITE_MAX_BYTES:
            most -= 1
            with self._lock:
                pending = self._waiting.popleft()
                decided.append(pending)
                pending.error = None
                own = self._decide_one(pending, write.now_ms)
            changes += own
            size_bytes += sum([len(change.get("offsets", ())) * 16 + 256 for change in own])
            if not changes:
                decided.remove(pending)
                pending.answer()
            if self._alone:
                self._alone -= 1
                break
        write.left = len(self._waiting)

    def _decide_one(self, pending: _Pending, now_ms: int) -> list[Change]:
        """Return the changes that one caller asks for, applied to the state ahead; none if they are refused."""
        before = self._ahead.topics_version
        try:
            decided = pending.decide(self._ahead)
        except Exception as error:  # an error of the caller's function
            pending.error = error
            return []
        changes = [decided] if isinstance(decided, dict) else list(decided or ())
        for change in changes:
            self._ahead.apply(change, now_ms)
        pending.changed_topics = self._ahead.topics_version != before
        return changes

    def _store(self, write: _Write) -> bool:
        """Store the records of a write's changes, then apply them and every earlier record to the state.

        Returns True if there were other records before them.
        """
        self._outcome_unknown = True
        if write.sent is not None:
            stored = write.sent.finish()
        else:
            stored = self._append([encode_change(change) for change in write.changes])
        follows = self._follows(stored, write.changes)
        if stored.durable and follows:
            self._take_stored(write, stored)
            return False
        self._read_up_to(stored.next_offset)
        with self._lock:
            self._ahead = self._state.copy()
        self._outcome_unknown = False
        return not follows

    def _follows(self, stored: StoredRecords, changes: Sequence[Change]) -> bool:
        """True if the records of changes are the next ones, without other records between them."""
        return stored.queue_offset <= self._position and len(changes) == stored.next_offset - stored.queue_offset

    def _take_stored(self, write: _Write, stored: StoredRecords) -> None:
        """Apply a write's changes, which are durable and the next ones."""
        with self._lock:
            for change in write.changes:
                self._apply(change, write.now_ms)
            self._position = stored.next_offset
        self._outcome_unknown = False

    def _apply(self, change: Change, now_ms: int) -> None:
        """Apply a durable change to the state. Called with the lock."""
        self._state.apply(change, now_ms)
        if change["kind"] == "topic_delete":
            self._closed_topics.add(change["topic"])  # the store gets the deletion next

    def _read_up_to(self, next_offset: int) -> None:
        """Apply the records before an offset once they can be read: a visible record survives the loss of this
        master.
        """
        deadline_s = time.monotonic() + CONFIRM_WAIT_S
        try:
            while self._position < next_offset:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise RequestTimeoutError(
                        f"{self._storage.name}, to copy a change to its replicas,", CONFIRM_WAIT_S
                    )
                records, position = self._next_records(self._storage, self._position, left_s)
                with self._lock:
                    for body, stored_ms in records:
                        self._apply(decode_change(body), stored_ms)
                    self._position = position
        except NotMasterError as error:
            raise RequestTimeoutError(f"{self._storage.name}, to store a change,", CONFIRM_WAIT_S) from error

    def _open_topics(self, changes: Sequence[Change]) -> None:
        """Make the store accept messages for new topics, before the topics exist.

        Topics of the same names may have been deleted. A store of several replicas has only the deletions from the time
        when it led, so the call is made for each topic.
        """
        wanted = self._topics_to_open(changes)
        if wanted:
            self._open_at_store(wanted)
            with self._lock:
                self._closed_topics -= set(wanted)

    def _topics_to_open(self, changes: Sequence[Change]) -> list[str]:
        topics = [change["topic"] for change in changes if change["kind"] == "topic"]
        if not topics:
            return []
        with self._lock:
            new = [topic for topic in dict.fromkeys(topics) if topic not in self._state.topics]
            closed = [topic for topic in dict.fromkeys(topics) if topic in self._closed_topics]
        return [*dict.fromkeys([*new, *closed])] if self._copies else closed

    def _open_at_store(self, topics: list[str]) -> None:
        def call(left_s: float) -> RaymqError | None:
            if self._replaced.is_set():
                return ServiceNotAvailableError(f"{self._storage.name} is being replaced as master; try again")
            try:
                self._storage.control("open_topics", topics, timeout_s=min(left_s, CALL_TIMEOUT_S))
            except NotMasterError as error:
                return error  # not retried: `move` may wait for the running change
            return None

        replaced = persist_until(time.monotonic() + STORE_TIMEOUT_S, call)
        if replaced is not None:
            raise replaced

    # Snapshots

    def snapshot(self) -> None:
        """Write the snapshot, unless all stores have it twice.

        Retention keeps the records after the last snapshot but one, and with them the whole log from there on.
        RaymqError: the snapshot failed; the log still has everything.
        """
        with self._lock:
            position, storage, copies = self._position, self._storage, self._copies
            left = SNAPSHOTS_OF_A_CHANGE if position != self._snapshot_position else self._snapshots_left
            if not left or not self._ready.is_set():
                return  # before another master's state is loaded, the state here does not match its log
            state = self._state.copy()
        files = dump_snapshot(state, position)
        self._snapshots.write(storage, files, position)
        left -= 1
        for copy in copies:
            try:
                self._snapshots.write(copy, files, position)
            except RaymqError as error:
                # That store's retention keeps the records instead, from which a snapshot can be made.
                logger.info("cannot write the snapshot to %s; a later snapshot retries: %s", copy.name, error)
                left = SNAPSHOTS_OF_A_CHANGE
        with self._lock:
            if self._storage is storage and self._ready.is_set():
                self._snapshot_position, self._snapshots_left = position, left


def _copy_of(error: Exception) -> Exception:
    """Copy an error, with its class and text: several threads raise it, and each adds its own traceback."""
    if not isinstance(error, RaymqError):
        return error
    copy = type(error)(*error.args)
    copy.__cause__ = error
    return copy
