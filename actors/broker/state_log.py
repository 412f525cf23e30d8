"""The broker's state on disk: a log of changes in its own store, and a snapshot that shortens it.

A change of how a decision becomes durable, or of how the state is read at a start, belongs here.

    change → decide (actors.core.broker.state) → a record in `rmq_sys_broker_state` → apply
    start  ← snapshot in config/ ← records behind it

A change is answered once every replica that may lead next has its record: the record is acknowledged as durable, or it
can be read. While a change is stored no other is decided, so that the log's order is the state's. From the moment
another replica is to lead until its log was read, no change is decided at all.

Records that the log has and the state has not, such as a change whose outcome was not known in time, are noticed: the
next record does not get the expected offset, and the records before it are read. A change after one of unknown outcome
first writes a mark, which changes nothing: then everything stored before it has been read.

After a crash the snapshot and the records behind it give every change that was answered. A change that was not answered
may be there or not.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, TypeVar

from actors.core.broker.snapshot import dump_snapshot, load_snapshot
from actors.core.broker.state import MARK, STATE_TOPIC, BrokerState, Change, encode_change, replay
from raymq.errors import NotMasterError, RaymqError, RequestTimeoutError, SendUnknownError, ServiceNotAvailableError
from raymq.message import Message, SendResult, SendStatus
from raymq.protocol.store import FetchRequest
from raymq.record.decode import decode_records
from raymq.remoting.storage_client import StorageClient
from raymq.retry import persist_until
from storage.files.config_files import parse_fastjson
from storage.retention.cleaner import HOLDS_FILE

STORE_TIMEOUT_S: Final = 20.0
READY_WAIT_S: Final = 10.0
CALL_TIMEOUT_S: Final = 5.0
"""The timeout of one call to a store: if the store stands still, another replica leads long before."""
CONFIRM_WAIT_S: Final = 5.0
"""The timeout for reading a record that was stored late, or with too few copies."""
REPLAY_BATCH: Final = 1000

logger = logging.getLogger(__name__)

T = TypeVar("T")

DecidedChanges = Change | Sequence[Change] | None


class StateLog:
    """One broker's state. Thread-safe.

    `send` stores records in the state topic's queue, in order. `copies`: the stores of the other replicas, which get
    the snapshots too, because one of them may be the master next.
    """

    def __init__(
        self,
        broker_name: str,
        storage: StorageClient,
        send: Callable[[list[Message]], list[SendResult]],
        copies: Sequence[StorageClient] = (),
    ) -> None:
        self._broker_name = broker_name
        self._storage, self._copies = storage, copies
        self._send = send
        self._lock = threading.Lock()
        self._state = BrokerState()
        self._position = self._snapshot_position = 0
        self._outcome_unknown = True  # the broker before this one may have left a change under way
        self._snapshots: dict[str, int] = {}
        """The position of the last whole snapshot in each store, by its name, as far as that is known."""
        self._ready = threading.Event()
        self._replaced = threading.Event()
        self.waiting_for = f"{storage.name} to open its store"

    @property
    def is_ready(self) -> bool:
        """True if the state has been read."""
        return self._ready.is_set()

    def ready(self) -> BrokerState:
        """The state, for reading; ServiceNotAvailableError if it has not been read from the store in READY_WAIT_S."""
        if not self._ready.wait(READY_WAIT_S):
            raise ServiceNotAvailableError(f"{self._broker_name} is starting and waits: {self.waiting_for}")
        return self._state

    def move(self, storage: StorageClient, copies: Sequence[StorageClient]) -> None:
        """Use the log of another replica, which is the master now. No change is decided until `load` has read it.

        Waits for a change that is being stored, which may be in the new master's log already.
        """
        self._replaced.set()
        with self._lock:
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
                logger.warning("%s waits for its state: %s", self._broker_name, error)
                stopping.wait(0.5)

    def load(self, agree: Callable[[BrokerState], None] = lambda state: None) -> None:
        """Read the snapshot and the records behind it, and call `agree` with the state before any change is decided.

        Raises RaymqError if the store cannot be read now, and the errors of `agree`; then no change can be decided.
        """
        storage = self._storage
        try:
            state, position, snapshot_position = self._load(storage)
            agree(state)
        except RaymqError as error:
            self.waiting_for = str(error)
            raise
        with self._lock:
            if self._storage is not storage:
                raise ServiceNotAvailableError(f"{storage.name} was replaced while it was read; read the new master")
            self._state, self._position, self._snapshot_position = state, position, snapshot_position
            self._ready.set()

    def _load(self, storage: StorageClient) -> tuple[BrokerState, int, int]:
        state, position = load_snapshot(
            lambda name: storage.control("read_config", name, timeout_s=CALL_TIMEOUT_S), parse_fastjson
        )
        # Before any change: from here on retention keeps the state's records until a snapshot has them.
        if storage.control("read_config", HOLDS_FILE, timeout_s=CALL_TIMEOUT_S) is None:
            _hold_records(storage, position)
        bounds = storage.queue_bounds(STATE_TOPIC, 0, CALL_TIMEOUT_S)
        if position > bounds.max_offset:
            # The log has lost its end, which the snapshot has. New records would count as being in the snapshot.
            logger.warning(
                "%s: the snapshot in %s ends at %d, its log at %d; written again",
                self._broker_name,
                storage.name,
                position,
                bounds.max_offset,
            )
            position = bounds.max_offset
            _write(storage, dump_snapshot(state, position))
        # Retention may have deleted the log's start beyond the snapshot's position: those records are in the snapshot.
        snapshot_position = position = max(position, bounds.min_offset)
        self._snapshots[storage.name] = snapshot_position
        while position < bounds.max_offset:
            before, position = position, self._replay(storage, state, position, 0.0)
            if position == before:
                raise ServiceNotAvailableError(
                    f"{storage.name} shows its state up to {position} and not up to {bounds.max_offset}; read it again"
                )
        return state, position, snapshot_position

    def _replay(self, storage: StorageClient, state: BrokerState, position: int, wait_s: float) -> int:
        """Apply the next records from `position` on, waiting up to `wait_s` for one; returns the next position."""
        request = FetchRequest(STATE_TOPIC, 0, position, REPLAY_BATCH)
        [result] = storage.fetch([request], 4 << 20, wait_s, CALL_TIMEOUT_S)
        if result.count:
            records = decode_records(result.records, broker_name=self._broker_name)
            replay(state, [(record.body, record.store_timestamp_ms) for record in records])
        return max(position, result.next_offset)

    def change(self, decide: Callable[[BrokerState], DecidedChanges]) -> bool:
        """Decide about a change, store its records, and apply them. True if topics changed.

        RequestTimeoutError if the outcome is unknown: the same change may be tried again. Errors of `decide` are raised
        before anything is stored.
        """
        with self._held() as state:
            before = state.topics_version
            if self._outcome_unknown:
                self._store([MARK])
            decided = decide(state)
            changes = [decided] if isinstance(decided, dict) else list(decided or ())
            if changes:
                self._open_topics(changes)
                self._store(changes)
            return state.topics_version != before

    def read(self, reader: Callable[[BrokerState], T]) -> T:
        """The result of `reader`, which gets the state while nothing changes it."""
        with self._held() as state:
            return reader(state)

    @contextmanager
    def _held(self) -> Iterator[BrokerState]:
        """The state of the present master's log, which no other thread changes meanwhile."""
        while True:
            self.ready()
            with self._lock:
                if self._ready.is_set():  # else another replica became the master while the lock was waited for
                    yield self._state
                    return

    def _store(self, changes: Sequence[Change]) -> None:
        """Store the records of changes, and apply them and every record before them to the state."""
        self._outcome_unknown = True
        try:
            results = self._send([Message(STATE_TOPIC, encode_change(change)) for change in changes])
        except SendUnknownError:
            # Stored or not, storing the same changes again does no harm: the caller may try again.
            raise RequestTimeoutError(f"{self._storage.name}, to store a change,", STORE_TIMEOUT_S) from None
        next_offset = results[-1].queue_offset + 1
        durable = all(result.status is SendStatus.SEND_OK for result in results)
        between = results[0].queue_offset > self._position or len(results) != next_offset - results[0].queue_offset
        if durable and not between:
            now_ms = time.time_ns() // 1_000_000
            for change in changes:
                self._state.apply(change, now_ms)
            self._position = next_offset
        else:
            self._read_up_to(next_offset)
        self._outcome_unknown = False

    def _read_up_to(self, next_offset: int) -> None:
        """Apply the records before an offset, as they can be read: a visible record is not lost with this master."""
        deadline_s = time.monotonic() + CONFIRM_WAIT_S
        try:
            while self._position < next_offset:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise RequestTimeoutError(
                        f"{self._storage.name}, to copy a change to its replicas,", CONFIRM_WAIT_S
                    )
                self._position = self._replay(self._storage, self._state, self._position, left_s)
        except NotMasterError as error:
            raise RequestTimeoutError(f"{self._storage.name}, to store a change,", CONFIRM_WAIT_S) from error

    def _open_topics(self, changes: Sequence[Change]) -> None:
        """Have the store accept messages for new topics, before they exist: topics of their names may have been
        deleted."""
        for change in changes:
            if change["kind"] == "topic" and change["topic"] not in self._state.topics:
                self._open_topic(change["topic"])

    def _open_topic(self, topic: str) -> None:
        def call(left_s: float) -> RaymqError | None:
            if self._replaced.is_set():
                return ServiceNotAvailableError(f"{self._storage.name} is being replaced as master; try again")
            try:
                self._storage.control("open_topic", topic, timeout_s=min(left_s, CALL_TIMEOUT_S))
            except NotMasterError as error:
                return error  # not tried again: `move` may wait for a change that is under way
            return None

        replaced = persist_until(time.monotonic() + STORE_TIMEOUT_S, call)
        if replaced is not None:
            raise replaced

    def snapshot(self) -> None:
        """Write the snapshot, if anything changed since the last one. RaymqError on failure: the log still has
        everything."""
        with self._lock:
            position, storage, copies = self._position, self._storage, self._copies
            if position == self._snapshot_position or not self._ready.is_set():
                return  # before another master's state is read, the state here is not its
            files = dump_snapshot(self._state, position)
        self._write_snapshot(storage, files, position)
        with self._lock:
            if self._storage is storage and self._ready.is_set():
                self._snapshot_position = position
        for copy in copies:
            try:
                self._write_snapshot(copy, files, position)
            except RaymqError as error:
                # Its retention keeps the records instead, from which a snapshot can be made.
                logger.info("%s does not get the snapshot now: %s", copy.name, error)

    def _write_snapshot(self, store: StorageClient, files: Mapping[str, str], position: int) -> None:
        """Write the files to one store, in order, up to the first that fails: the position, which is the last, must not
        be ahead of any of them."""
        _write(store, files)
        known = self._snapshots.get(store.name)
        if known is not None:
            # Not up to this snapshot: the files' .bak, which may be needed, have the one before.
            _hold_records(store, known)
        self._snapshots[store.name] = position


def _write(store: StorageClient, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        store.control("write_config", name, text, timeout_s=CALL_TIMEOUT_S)


def _hold_records(store: StorageClient, position: int) -> None:
    """Let a store's retention delete the state's records before `position`, which its snapshots have, and no others."""
    _write(store, {HOLDS_FILE: json.dumps({STATE_TOPIC: {"0": position}})})
