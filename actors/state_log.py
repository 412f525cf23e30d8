"""The broker's state on disk: a log of changes in its own store, and a snapshot that shortens it.

    change → decide (actors.core.broker_state) → a record in `rmq_sys_broker_state` → apply
    start  ← snapshot in config/ ← records behind it

A change is answered once its record is as durable as the store's settings promise. While a change is stored no other
is decided, so that the log's order is the state's.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from actors.core import broker_state
from actors.core.broker_state import STATE_TOPIC, BrokerState, Change
from raymq.errors import NotMasterError, RaymqError, RequestTimeoutError, SendUnknownError, ServiceNotAvailableError
from raymq.message import Message, SendResult
from raymq.record import decode_records
from raymq.storage_client import StorageClient, persist_until
from raymq.store_api import FetchRequest
from storage.cleaner import HOLDS_FILE
from storage.config_files import parse_fastjson

STORE_TIMEOUT_S: Final = 20.0
READY_WAIT_S: Final = 10.0
REPLAY_BATCH: Final = 1000
COPY_TIMEOUT_S: Final = 3.0

_log = logging.getLogger(__name__)

T = TypeVar("T")

Decision = Change | Sequence[Change] | None


class StateLog:
    """One broker's state. `send` stores records in the state topic's queue, in order; `copies` are the other replicas
    of `storage`, which get the snapshots too: one of them may be the master next. Thread-safe."""

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
        self._ready = threading.Event()
        self.waiting_for = f"{storage.name} to open its store"

    @property
    def is_ready(self) -> bool:
        """Whether the state was read."""
        return self._ready.is_set()

    def ready(self) -> BrokerState:
        """The state, to be read; ServiceNotAvailableError while the store cannot be read."""
        if not self._ready.wait(READY_WAIT_S):
            raise ServiceNotAvailableError(f"{self._broker_name} is starting and waits: {self.waiting_for}")
        return self._state

    def move(self, storage: StorageClient, copies: Sequence[StorageClient]) -> None:
        """Another replica is the master: what counts is in its log. Call `load` again."""
        with self._lock:
            self._ready.clear()
            self._storage, self._copies = storage, copies
            self.waiting_for = f"{storage.name} to lead"

    def load_until(self, stopping: threading.Event) -> None:
        """Read snapshot and records; again and again until it works or `stopping` is set."""
        while not stopping.is_set() and not self._ready.is_set():
            try:
                self.load()
            except RaymqError as error:
                _log.warning("%s waits for its state: %s", self._broker_name, error)
                stopping.wait(0.5)

    def load(self) -> None:
        """Read snapshot and records once. Raises RaymqError where the store cannot be read now."""
        try:
            self._load()
        except RaymqError as error:
            self.waiting_for = str(error)
            raise
        self._ready.set()

    def _load(self) -> None:
        state, position = broker_state.load_snapshot(
            lambda name: self._storage.control("read_config", name, timeout_s=STORE_TIMEOUT_S), parse_fastjson
        )
        # Before anything is changed: retention keeps the state's records from here on until a snapshot has them.
        if self._storage.control("read_config", HOLDS_FILE, timeout_s=STORE_TIMEOUT_S) is None:
            self._hold(position)
        # A snapshot may be behind a log whose start was deleted by retention: what is missing then is in the snapshot.
        position = max(position, self._storage.queue_bounds(STATE_TOPIC, 0, STORE_TIMEOUT_S).min_offset)
        snapshot_position = position
        while True:
            request = FetchRequest(STATE_TOPIC, 0, position, REPLAY_BATCH)
            [result] = self._storage.fetch([request], 4 << 20, 0.0, STORE_TIMEOUT_S)
            if not result.count:
                break
            records = decode_records(result.records, broker_name=self._broker_name)
            broker_state.replay(state, [(record.body, record.store_timestamp_ms) for record in records])
            position = result.next_offset
        with self._lock:
            self._state, self._position, self._snapshot_position = state, position, snapshot_position

    def change(self, decide: Callable[[BrokerState], Decision]) -> bool:
        """Decide, store, apply. Returns whether topics changed. RequestTimeoutError: it may have been stored; the same
        change may be tried again."""
        self.ready()
        with self._lock:
            decided = decide(self._state)
            changes = [decided] if isinstance(decided, dict) else list(decided or ())
            if not changes:
                return False
            self._open_topics(changes)
            records = [Message(STATE_TOPIC, broker_state.encode_change(change)) for change in changes]
            try:
                results = self._send(records)
            except SendUnknownError:
                # Stored or not, storing the same changes again does no harm: the caller may try again.
                raise RequestTimeoutError(f"{self._storage.name}, to store a change,", STORE_TIMEOUT_S) from None
            now_ms, before = time.time_ns() // 1_000_000, self._state.topics_version
            for change in changes:
                self._state.apply(change, now_ms)
            self._position = results[-1].queue_offset + 1
            return self._state.topics_version != before

    def read(self, look: Callable[[BrokerState], T]) -> T:
        """What `look` makes of the state while nothing changes it."""
        self.ready()
        with self._lock:
            return look(self._state)

    def _open_topics(self, changes: Sequence[Change]) -> None:
        """Before a topic exists its store must take messages for it: one of its name may have been deleted."""
        for change in changes:
            if change["kind"] == "topic" and change["topic"] not in self._state.topics:
                self._control("open_topic", change["topic"])

    def snapshot(self) -> None:
        """Write the snapshot, if anything changed since the last. Raises RaymqError: the log has everything then."""
        with self._lock:
            position = self._position
            if position == self._snapshot_position or not self._ready.is_set():
                return  # while another store's state is not read, what is here is not its
            files = broker_state.dump_snapshot(self._state, position)
        for name, text in files.items():
            self._write_everywhere(name, text)
        # Not from this one's position: the files' .bak, which may be needed, are the snapshot before.
        self._hold(self._snapshot_position)
        self._snapshot_position = position

    def _hold(self, position: int) -> None:
        """Let retention delete the state's records before `position`, which snapshots have, and no others."""
        self._write_everywhere(HOLDS_FILE, json.dumps({STATE_TOPIC: {"0": position}}))

    def _write_everywhere(self, name: str, text: str) -> None:
        self._control("write_config", name, text)
        for copy in self._copies:
            try:
                copy.control("write_config", name, text, timeout_s=COPY_TIMEOUT_S)
            except RaymqError as error:
                # It keeps the records instead, from which a snapshot is made.
                _log.info("%s does not get %s now: %s", copy.name, name, error)

    def _control(self, method: str, *args: str) -> None:
        def call(left_s: float) -> NotMasterError | None:
            try:
                self._storage.control(method, *args, timeout_s=left_s)
            except NotMasterError as error:
                return error  # not tried again: `move` may wait for a change that is under way
            return None

        replaced = persist_until(time.monotonic() + STORE_TIMEOUT_S, call)
        if replaced is not None:
            raise replaced
