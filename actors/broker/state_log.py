"""The broker's state on disk: a log of changes in its own store, and a snapshot that shortens it.

How a decision becomes durable belongs here. How the state is read at a start belongs in stored_state.py.

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

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from typing import Final

from actors.broker.direct_appends import DirectAppends, SentRecords
from actors.broker.state_records import STORE_TIMEOUT_S, StoredRecords
from actors.broker.stored_state import CONFIRM_WAIT_S, READY_WAIT_S, StoredState
from actors.core.broker.state import MARK, BrokerState, Change, encode_change
from raymq.common.errors import (
    RaymqError,
    RequestTimeoutError,
    ServiceNotAvailableError,
    SystemBusyError,
)
from raymq.remoting.storage_client import StorageClient

CHANGE_TIMEOUT_S: Final = READY_WAIT_S + 3 * (STORE_TIMEOUT_S + CONFIRM_WAIT_S)
"""Bounds the wait for a change, including the running write, the mark, and the change's own write."""
CHANGES_MAX: Final = 10_000
"""The most changes that wait for the writer."""
WRITE_MAX_RECORDS: Final = 2000
WRITE_MAX_BYTES: Final = 1 << 20
"""The largest batch of records; a larger change is written alone."""
DIRECT_CHANGES_MAX: Final = 200
"""The most changes that the lane's thread decides at a time: its other clients wait during that."""

DecidedChanges = Change | Sequence[Change] | None
Decide = Callable[[BrokerState], DecidedChanges]


Done = Callable[[bool, Exception | None], None]
"""Receives a change's result (True if topics changed) or its error. It must not block."""


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


class StateLog(StoredState):
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
        super().__init__(broker_name, storage, copies)
        self._append = append
        self._outcome_unknown = True  # the previous broker may have left a change unfinished
        self._writing = False
        self._alone = 0
        """The number of next changes that are written one by one."""
        self._waiting: deque[_Pending] = deque()
        self._handed_over: _Write | None = None
        """The running write, if the writer has to continue it."""
        self._direct: DirectAppends | None = None
        self._writer: threading.Thread | None = None
        self._closed = False

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

    def write_by(self, direct: DirectAppends) -> None:
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

    def _send(self, direct: DirectAppends, write: _Write) -> bool:
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

    def _take_stored(self, write: _Write, stored: StoredRecords) -> None:
        """Apply a write's changes, which are durable and the next ones."""
        with self._lock:
            for change in write.changes:
                self._apply(change, write.now_ms)
            self._position = stored.next_offset
        self._outcome_unknown = False


def _copy_of(error: Exception) -> Exception:
    """Copy an error, with its class and text: several threads raise it, and each adds its own traceback."""
    if not isinstance(error, RaymqError):
        return error
    copy = type(error)(*error.args)
    copy.__cause__ = error
    return copy
