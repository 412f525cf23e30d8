"""The broker's state as stored: reads the state's log and its snapshot, and writes snapshots.

This module reads the state at a start, and opens topics in the store. state_log.py decides and writes changes.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from actors.broker.state_records import STORE_TIMEOUT_S, StoredRecords
from actors.broker.state_snapshots import CALL_TIMEOUT_S, StateSnapshots
from actors.core.broker.snapshot import dump_snapshot
from actors.core.broker.state import BrokerState, Change, decode_change, replay
from actors.core.pop.leases import LeaseClock
from actors.core.replica.deleted_topics import CLOSED_TOPICS_FILE
from raymq.common.errors import (
    NotMasterError,
    RaymqError,
    RequestTimeoutError,
    ServiceNotAvailableError,
)
from raymq.common.names import STATE_TOPIC
from raymq.common.protocol.store import FetchRequest
from raymq.common.retry import persist_until
from raymq.records.format.decode import decode_records
from raymq.remoting.storage_client import StorageClient

READY_WAIT_S: Final = 10.0
CONFIRM_WAIT_S: Final = 5.0
"""Maximum time, in seconds, to wait until a new state record becomes readable. A record is readable only after it was
copied to enough replicas."""
SNAPSHOTS_OF_A_CHANGE: Final = 2
"""Number of consecutive snapshots that must include a state change before retention may delete the change's records
from the log. Stores of version 0.2.0 keep the previous snapshot in their `.bak` files, and may need it."""
NO_SNAPSHOT: Final = -1
"""Stands for the position of the last snapshot while a store may have no snapshot."""
REPLAY_BATCH: Final = 1000

LEASE_CLOCK: Final = LeaseClock(
    lambda: time.time_ns() // 1_000_000, lambda: time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000
)
"""The clock of this broker's leases. It never returns an earlier time than the pop times of the leases that the broker
has read, and their extensions. It also counts the time while the machine sleeps."""

logger = logging.getLogger(__name__)

T = TypeVar("T")


class StoredState:
    """One broker's state, with its position in the store's log. Thread-safe.

    Any thread may call the public methods. Only the thread that makes the running write (StateLog) calls the private
    methods. A private method's docstring states whether the caller must hold the lock.
    """

    def __init__(self, broker_name: str, storage: StorageClient, copies: Sequence[StorageClient]) -> None:
        self._broker_name = broker_name
        self._storage, self._copies = storage, copies
        self._lock = threading.Lock()
        """Lock that guards the broker's state and the other attributes. Held only briefly, and never during a call to a
        store."""
        self._snapshot_lock = threading.Lock()
        """Lock for the one thread that writes a snapshot."""
        self._changed = threading.Condition(self._lock)
        self._state = BrokerState()
        self._ahead = BrokerState()
        """The broker's state after all accepted changes, including changes that the store is still writing. Each new
        change is decided on this state. Equal to `_state` if no write is running."""
        self._closed_topics: set[str] = set()
        """Deleted topics for which the store may reject messages, until the broker requests that the store accepts them
        again (`open_topics`)."""
        self._position = self._snapshot_position = 0
        self._snapshots_left = 0
        """Number of snapshots that must still be written of the state at `_snapshot_position`. Each such state is
        written twice (SNAPSHOTS_OF_A_CHANGE)."""
        self._snapshots = StateSnapshots(broker_name)
        self._has_leases = False
        """True once this process has read the leases. Later leases of a new master's log were timed by this process's
        own clock."""
        self._ready = threading.Event()
        self._replaced = threading.Event()
        """Set while `StateLog.move` waits for the running write. While this event is set, no other write may
        begin."""
        self.waiting_for = f"storage actor {storage.name} to open its store"

    @property
    def is_ready(self) -> bool:
        """True if the broker's state has been read from the store."""
        return self._ready.is_set()

    @property
    def position(self) -> int:
        """The queue offset of the first log record that the broker's state does not include. Every change advances the
        position."""
        return self._position

    def ready(self) -> BrokerState:
        """Return the broker's state, for reading. Raises ServiceNotAvailableError if the state is not read from the
        store within READY_WAIT_S."""
        if not self._ready.wait(READY_WAIT_S):
            raise self._not_ready()
        return self._state

    def state_now(self) -> BrokerState | None:
        """Return the broker's state, for reading, without a wait; None if the state is not read from the store yet."""
        return self._state if self._ready.is_set() else None

    def _not_ready(self) -> ServiceNotAvailableError:
        return ServiceNotAvailableError(f"broker {self._broker_name!r} is starting and waits for: {self.waiting_for}")

    def load_until(self, stopping: threading.Event) -> None:
        """Call `load` until it succeeds or `stopping` is set."""
        while not stopping.is_set() and not self._ready.is_set():
            try:
                self.load()
            except RaymqError as error:
                logger.warning("broker %s cannot read its state yet, retrying: %s", self._broker_name, error)
                stopping.wait(0.5)

    def load(self, agree: Callable[[BrokerState], None] = lambda state: None) -> None:
        """Read the snapshot and the later records, and call `agree` with the broker's state before any change is
        decided.

        Raises RaymqError if the store cannot be read now, and raises the errors of `agree`. After an error no change
        can be decided until `load` succeeds.
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
                raise ServiceNotAvailableError(
                    f"storage actor {storage.name} was replaced as master while the broker read it; retry with "
                    "the new master"
                )
            if self._has_leases:
                LEASE_CLOCK.not_before(state.pop.newest_ms())
            else:
                LEASE_CLOCK.resume(state.pop.newest_ms())
            self._has_leases = True
            self._state, self._ahead = state, state.copy()
            self._closed_topics = set(json.loads(closed or "[]"))
            self._position, self._snapshot_position = position, snapshot_position
            self._snapshots_left = 1 if snapshot_position else 0
            self._ready.set()
            self._changed.notify_all()

    def _load(self, storage: StorageClient) -> tuple[BrokerState, int, int]:
        state, snapshot_position, bounds = self._snapshots.read(storage, self._copies)
        position = snapshot_position
        while position < bounds.max_offset:
            before = position
            records, position = self._next_records(storage, position, 0.0)
            replay(state, records)
            if position == before:
                raise ServiceNotAvailableError(
                    f"storage actor {storage.name} serves the broker's state only up to offset {position}, "
                    f"not up to {bounds.max_offset}; retry later"
                )
        return state, position, snapshot_position

    def _next_records(
        self, storage: StorageClient, position: int, wait_s: float
    ) -> tuple[list[tuple[bytes, int]], int]:
        """Read the next records of the state log from `position` on. Returns them as (body, store time in ms), and the
        log position after them.

        Waits up to `wait_s` for the first record.
        """
        request = FetchRequest(STATE_TOPIC, 0, position, REPLAY_BATCH)
        [result] = storage.fetch([request], 4 << 20, wait_s, CALL_TIMEOUT_S)
        records = decode_records(result.records, broker_name=self._broker_name) if result.count else []
        return [(record.body, record.store_timestamp_ms) for record in records], max(position, result.next_offset)

    def read(self, reader: Callable[[BrokerState], T]) -> T:
        """Call `reader` with the broker's state and return its result. The state does not change during the
        call."""
        while True:
            self.ready()
            with self._lock:
                # if the flag `_ready` has been cleared since the wait, another replica has just become the master: wait
                # until the new master's state is read
                if self._ready.is_set():
                    return reader(self._state)

    def peek(self, reader: Callable[[BrokerState], T]) -> T | None:
        """Call `reader` with the broker's state as `read` does, without waiting. Returns None if the state is not
        loaded."""
        with self._lock:
            return reader(self._state) if self._ready.is_set() else None

    def _follows(self, stored: StoredRecords, changes: Sequence[Change]) -> bool:
        """Return True if the stored records of `changes` directly follow the records that the broker's state includes,
        and no other records lie between them."""
        return stored.queue_offset <= self._position and len(changes) == stored.next_offset - stored.queue_offset

    def _apply(self, change: Change, now_ms: int) -> None:
        """Apply a durable change to the broker's state. The caller holds the lock."""
        self._state.apply(change, now_ms)
        if change["kind"] == "topic_delete":
            # Record that the store will reject messages for this deleted topic, because a later call deletes the topic
            # in the store. Before the topic is used again, the broker must request that the store accepts its messages
            # again (opens it).
            self._closed_topics.add(change["topic"])

    def _read_up_to(self, next_offset: int) -> None:
        """Apply the records before `next_offset` to the broker's state as soon as they can be read. A record that can
        be read survives the loss of this master."""
        deadline_s = time.monotonic() + CONFIRM_WAIT_S
        try:
            while self._position < next_offset:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise RequestTimeoutError(
                        f"copying a change of the broker's state from {self._storage.name} to its replicas",
                        CONFIRM_WAIT_S,
                    )
                records, position = self._next_records(self._storage, self._position, left_s)
                with self._lock:
                    for body, stored_ms in records:
                        self._apply(decode_change(body), stored_ms)
                    self._position = position
        except NotMasterError as error:
            raise RequestTimeoutError(
                f"storing a change of the broker's state at {self._storage.name}", CONFIRM_WAIT_S
            ) from error

    def _open_topics(self, changes: Sequence[Change]) -> None:
        """Make the store accept messages for new topics, before the topics exist.

        The store may remember that topics of the same names were deleted. In a group with several replicas, a store has
        recorded only the deletions that happened while it was the master. So the broker cannot tell which topics the
        store refuses. Therefore this method calls the store for each new topic.
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
                return ServiceNotAvailableError(
                    f"storage actor {self._storage.name} is being replaced as master; try again later"
                )
            try:
                self._storage.control("open_topics", topics, timeout_s=min(left_s, CALL_TIMEOUT_S))
            except NotMasterError as error:
                # Do not retry at a store that is no longer the master. `StateLog.move` waits for the end of this write
                # before it uses the new master.
                return error
            return None

        replaced = persist_until(time.monotonic() + STORE_TIMEOUT_S, call)
        if replaced is not None:
            raise replaced

    def change_copies(self, copies: Sequence[StorageClient]) -> None:
        """Change the stores that get a copy of each snapshot. The next `snapshot` writes to all of them, even if the
        state has not changed, because a new store has no snapshot."""
        with self._lock:
            self._copies, self._snapshot_position = copies, NO_SNAPSHOT

    def snapshot(self) -> None:
        """Write the snapshot of the broker's state to the stores. Does nothing if every store already has the current
        state twice (SNAPSHOTS_OF_A_CHANGE).

        Retention keeps the whole log from the position of the second-newest snapshot on. Raises RaymqError if the
        snapshot cannot be written to the master's store; in that case the log still has every record.
        """
        with self._snapshot_lock:
            self._write_snapshot()

    def _write_snapshot(self) -> None:
        with self._lock:
            position, storage, copies = self._position, self._storage, self._copies
            left = SNAPSHOTS_OF_A_CHANGE if position != self._snapshot_position else self._snapshots_left
            if not left or not self._ready.is_set():
                # Write no snapshot in two cases: every store already has the newest snapshot, or the state of a new
                # master is not loaded yet. In the second case, the state in memory does not match the new master's log.
                return
            state = self._state.copy()
        files = dump_snapshot(state, position)
        self._snapshots.write(storage, files, position)
        left -= 1
        for copy in copies:
            try:
                self._snapshots.write(copy, files, position)
            except RaymqError as error:
                # Continue with the next store. In the store that failed, retention keeps the state records until a
                # later snapshot succeeds.
                logger.info("cannot write the state snapshot to %s; a later snapshot retries: %s", copy.name, error)
                left = SNAPSHOTS_OF_A_CHANGE
        with self._lock:
            if self._storage is storage and self._copies is copies and self._ready.is_set():
                self._snapshot_position, self._snapshots_left = position, left
