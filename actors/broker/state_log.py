"""The broker's state on disk: a log of changes in its own store, and a snapshot so that less of the log must be
replayed.

This module makes changes durable; stored_state.py reads the state at a start.

    change → decide (actors.core.broker.state) → a record in `rmq_sys_broker_state` → apply
    start  ← snapshot in config/ ← later records

To decide a change is to check the request against the state, and to build the records. One write runs at a time.
Changes that arrive during a write are decided together, in the order of their arrival. Each change is decided on the
state that includes the changes before it. The records of all these changes form one batch. So the log and the state
have the same order. Readers of the state see a change only after it is durable.

A separate thread, the writer, makes the writes and waits for the store. In the usual case the thread of the broker's
lane (direct socket connection) makes a write itself (`_write_directly`): it sends the records and receives the answer
as an event, so a commit wakes no thread. In unusual cases the lane's thread passes the write to the writer.

A change is answered after every replica that may become the next master has its record. This is true if the record is
acknowledged as durable, or if it can be read. After another replica becomes the master, no change is decided until the
new master's log has been read. Waiting changes are then decided on the state from that log.

The log may have records that the state lacks, for example of a change whose outcome was not known in time. The broker
detects such records because the next record does not get the expected offset. It then reads the records before the next
record. After a change of unknown outcome, the broker first writes a marker record. The marker changes nothing, but
after it is stored, every earlier record has been read.

After a crash the snapshot and the later records restore every change that was answered. A change that was not answered
may or may not be restored.
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
"""Time limit, in seconds, for a change of the broker's state. It covers the wait for the running write, the marker
record (written if an earlier change has an unknown outcome), and the change's own write."""
CHANGES_MAX: Final = 10_000
"""Maximum number of changes of the broker's state that wait until they are written to the state log."""
WRITE_MAX_RECORDS: Final = 2000
WRITE_MAX_BYTES: Final = 1 << 20
"""Maximum size, in bytes, of the records in one write to the state log. A single larger change is written
alone."""
DIRECT_CHANGES_MAX: Final = 200
"""Maximum number of requested changes that the thread of the lane (direct socket connection) processes at a time.
During this time the other clients of the lane wait."""

DecidedChanges = Change | Sequence[Change] | None
Decide = Callable[[BrokerState], DecidedChanges]
Done = Callable[[bool, Exception | None], None]
"""Callback that receives a change's result (True if topics changed) or its error. The callback must not block."""


@dataclass(slots=True, eq=False)
class _Pending:
    """A change of the broker's state that waits for its write. `deadline_s`: the latest time at which its write may
    begin.

    `changed_topics` is set when the change is decided. `error`: why the change was rejected.
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
    """One write to the state log. `decided`: the requested changes that are answered after this write. `changes`: the
    changes to store. `sent`: the records of `changes`, if they were already sent to the store.

    `left`: the number of requested changes that were still waiting when this write was decided, and are not part of it.
    """

    now_ms: int
    decided: list[_Pending] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    left: int = 0
    sent: SentRecords | None = None


class StateLog(StoredState):
    """One broker's state, with a log that makes each change durable. Thread-safe.

    `append` stores records with the given bodies in the state topic's queue, in order (StateRecords.append). Only the
    thread that is writing to the state log calls `append`. `copies`: clients of the other replicas' stores. Snapshots
    are written to these stores, too, because one of the other replicas may become the next master.
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
        # True if the state log may contain a change whose outcome this broker does not know. True at the start, because
        # the previous broker process may have left such a change.
        self._outcome_unknown = True
        self._writing = False
        self._alone = 0
        """Number of waiting changes that are written one by one, because writing them in one batch has failed."""
        self._waiting: deque[_Pending] = deque()
        self._handed_over: _Write | None = None
        """The write to the state log that the lane's thread (the thread of the direct socket connections) has started
        and passed to the writer thread. None if there is no such write, and after the writer thread has taken the
        write."""
        self._direct: DirectAppends | None = None
        self._writer: threading.Thread | None = None
        self._closed = False

    def move(self, storage: StorageClient, copies: Sequence[StorageClient]) -> None:
        """Switch to the log of another replica, the new master. No change is decided until `load` has read the new
        master's log.

        Waits for a running write, whose records may already be in the new master's log.
        """
        self._replaced.set()
        with self._changed:
            self._changed.wait_for(lambda: not self._writing)
            self._ready.clear()
            self._replaced.clear()
            self._storage, self._copies = storage, copies
            self.waiting_for = f"storage actor {storage.name} to become master"

    # Methods that change the broker's state

    def change(self, decide: Decide) -> bool:
        """Change the broker's state: call `decide` to get the changes, store their records, and apply them. Returns
        True if topics changed.

        Raises RequestTimeoutError if the outcome is unknown; the caller may retry the change. If `decide` raises an
        error, nothing is stored and the error is raised.
        """
        try:
            return self.submit(decide).result(CHANGE_TIMEOUT_S)
        except FutureTimeoutError as error:
            if isinstance(error, RaymqError):
                raise
            raise RequestTimeoutError(
                f"storing a change of the broker's state at {self._storage.name}", CHANGE_TIMEOUT_S
            ) from None

    def submit(self, decide: Decide) -> Future[bool]:
        """Submit a change without waiting; see `change`. The thread that writes the change sets the result or the error
        of the returned future.

        `decide` runs in the writing thread, on the newest state, and must not block. Raises SystemBusyError if too many
        changes wait, and ServiceNotAvailableError after `close`.
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
        """Submit a change as `submit` does, with the callback `done` instead of a future."""
        with self._changed:
            if self._closed:
                raise ServiceNotAvailableError(f"broker {self._broker_name!r} is stopping; try again later")
            if len(self._waiting) >= CHANGES_MAX:
                raise SystemBusyError(
                    f"{CHANGES_MAX} changes already wait for storage actor {self._storage.name}; try again later"
                )
            self._waiting.append(_Pending(decide, done, time.monotonic() + READY_WAIT_S))
            if self._writing:
                return  # another thread is writing changes now, and will then also write the change that was just added
            direct = self._may_write_directly() and self._direct is not None and self._direct.is_own_thread
            if direct:
                self._writing = True
            else:
                self._wake_writer()
        if direct:
            self._write_directly()

    def close(self) -> None:
        """Write the waiting changes, and stop the writer thread. Idempotent."""
        with self._changed:
            writer, self._closed = self._writer, True
            self._changed.notify_all()
        if writer is not None:
            writer.join(CHANGE_TIMEOUT_S)

    def _may_write(self) -> bool:
        """Return True if the broker's state is loaded from the current master, and no other replica is becoming the
        master. The caller holds the lock."""
        return self._ready.is_set() and not self._replaced.is_set()

    # Methods that run in the thread of the lane (direct socket connection)

    def write_by(self, direct: DirectAppends) -> None:
        """From now on, let the thread of `direct`, the broker's lane (direct socket connection), write the changes that
        are submitted in this thread. Only writes that may block are passed to the writer thread."""
        self._direct = direct

    def _may_write_directly(self) -> bool:
        """Return True if the next write of state changes to the store cannot block. The lane's thread may make such a
        write itself. A write that can block needs the writer thread. The caller holds the state log's lock."""
        return self._may_write() and not self._outcome_unknown and not self._alone

    def _write_directly(self) -> None:
        """Turn the waiting requests for changes into records, and send the records without blocking. After the store's
        answer, `_sent` continues the write.

        This method differs from `_write` in two ways. It never writes a marker record, which only a change of unknown
        outcome requires. It leaves the write to the writer thread if the store must open topics first, or if the
        records cannot be sent without waiting.
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
        except Exception as error:  # catch every error: the callers wait for an answer
            self._give_up(write, error)
        if self._begins_next():
            # Begin the next write in a later call of the event loop, because other clients of the lane (direct socket
            # connection) also wait for this thread.
            direct.call_soon(self._write_directly)

    def _send(self, direct: DirectAppends, write: _Write) -> bool:
        """Send the records of a write to the store, over the lane (direct socket connection). Returns False if the
        records cannot be sent now."""
        bodies = [encode_change(change) for change in write.changes]
        self._outcome_unknown = True
        if direct.send(self._storage, bodies, lambda sent: self._sent(write, sent)):
            return True
        self._outcome_unknown = False
        return False

    def _sent(self, write: _Write, sent: SentRecords) -> None:
        """Finish a write to the state log after the store has answered, or after the lane (direct socket connection)
        has failed."""
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
        """End the current write to the state log. If changes wait and the current thread may write them, begin the next
        write and return True. Otherwise wake the writer thread if needed, and return False."""
        with self._changed:
            if self._waiting and self._may_write_directly():
                return True
            self._writing = False
            if self._waiting or self._closed or self._replaced.is_set():
                self._wake_writer()
        return False

    def _hand_over(self, write: _Write) -> None:
        """Pass a write to the state log from the thread of the lane (direct socket connection) to the writer thread,
        which continues the write."""
        with self._changed:
            self._handed_over = write
            self._wake_writer()

    # Methods that run in the writer thread

    def _wake_writer(self) -> None:
        """Wake the writer thread, and all threads that wait for a write to finish. The caller holds the lock."""
        if self._writer is None:
            self._writer = threading.Thread(target=self._write_all, name="broker-writer", daemon=True)
            self._writer.start()
        self._changed.notify_all()

    def _write_all(self) -> None:
        """Run the writer thread: write changes as they arrive, until `close`."""
        while (write := self._next_write()) is not None:
            try:
                self._write(write)
                if self._direct is not None and not self._outcome_unknown:
                    self._direct.connect(self._storage)
            finally:
                self._end_write()

    def _end_write(self) -> None:
        """End a write to the state log by the writer thread. If changes wait, let the thread of the lane (direct socket
        connection) write them if possible."""
        with self._changed:
            direct = self._direct
            if self._waiting and self._may_write_directly() and direct is not None and direct.leads_to(self._storage):
                direct.call_soon(self._write_directly)
                return
            self._writing = False
            self._changed.notify_all()

    def _next_write(self) -> _Write | None:
        """Wait until a write to the state log can begin or must be continued, and return this write. Returns None after
        the log is closed."""
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
        """Return the write to the state log that can begin or must be continued; None if there is no such write. Also
        return the changes that expired before their write could begin. The caller holds the lock."""
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
        """Carry out one write to the state log. If the write has no changes yet, first turn waiting requests into
        changes, up to the limit of one write. Then store the records of the changes, and answer the callers."""
        try:
            if not write.changes:
                if self._outcome_unknown:
                    self._store(_Write(write.now_ms, changes=[MARK]))
                self._decide(write)
            if write.changes:
                if write.sent is None:
                    self._open_topics(write.changes)
                if self._store(write):
                    # Open the write's new topics in the store again, so that the store accepts messages for them.
                    # Another broker may have deleted some of these topics during the write.
                    self._open_topics(write.changes)
                    for pending in write.decided:
                        pending.changed_topics = True
        except Exception as error:  # catch every error: the callers wait for an answer
            self._give_up(write, error)
        else:
            for pending in write.decided:
                pending.answer()

    def _give_up(self, write: _Write, error: Exception) -> None:
        """Fail the changes of a failed write, and the waiting changes that would fail for the same reason.

        But if a retry of the write would fail too, and the write has several changes, one of them may be the cause.
        Then no change fails yet, and each is written alone.
        """
        failed, retryable = write.decided, isinstance(error, RaymqError) and error.retryable
        with self._lock:
            self._ahead = self._state.copy()
            if len(failed) > 1 and not retryable:
                self._waiting.extendleft(reversed(failed))
                self._alone = len(failed)
                return
            # No single change of this write caused the failure, so it would also hit the waiting changes. So all
            # changes of this write and the waiting changes fail.
            if retryable or not failed:
                left = write.left if write.changes else len(self._waiting)
                failed = failed + [self._waiting.popleft() for _ in range(left)]
        for pending in failed:
            pending.error = _copy_of(error)
            pending.answer()

    def _decide(self, write: _Write, most: int = CHANGES_MAX) -> None:
        """Turn the waiting requests, in their order, into the changes of one write.

        A request whose answer must wait for the write's records is added to the write's `decided`. A request that does
        not depend on these records is answered now.
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
        """Return the changes that one caller requests, and apply them to `_ahead`: the broker's state with all changes
        that are being stored. Returns an empty list if the request is rejected."""
        before = self._ahead.topics_version
        try:
            decided = pending.decide(self._ahead)
        # catch every error: `decide` is the caller's function, and its error is passed to the caller
        except Exception as error:
            pending.error = error
            return []
        changes = [decided] if isinstance(decided, dict) else list(decided or ())
        for change in changes:
            self._ahead.apply(change, now_ms)
        pending.changed_topics = self._ahead.topics_version != before
        return changes

    def _store(self, write: _Write) -> bool:
        """Store the records of a write's changes in the state log. Then apply these records, and every earlier record
        that is not applied yet, to the broker's state.

        Returns True if the log also contains other records that the state did not include when this write began. They
        come before or between the records of this write.
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
        """Apply the changes of a write to the broker's state. The records of the write are durable, and directly follow
        the records that the state already includes."""
        with self._lock:
            for change in write.changes:
                self._apply(change, write.now_ms)
            self._position = stored.next_offset
        self._outcome_unknown = False


def _copy_of(error: Exception) -> Exception:
    """Copy a raymq error, with its class and text. Several threads raise the same error, and each thread adds its own
    traceback."""
    if not isinstance(error, RaymqError):
        return error
    copy = type(error)(*error.args)
    copy.__cause__ = error
    return copy
