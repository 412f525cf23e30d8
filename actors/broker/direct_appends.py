"""Sends a broker's state records to the store over a lane (direct socket connection), without a waiting thread.

The lane's event loop receives the store's answers as events. This module does not retry: after a failure, the writer of
the state log sends the same batch again (actors.broker.state_records).
"""

from __future__ import annotations

import logging
import select
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from actors.broker.state_records import ATTEMPT_TIMEOUT_S, StateRecords, StoredRecords, stored_records
from raymq.client.producer.senders.retry_policy import may_be_stored
from raymq.common.errors import RaymqError
from raymq.records.format.encode import EncodedBatch
from raymq.remoting.lane.appends import ClientHandles, decode_results, encode_append
from raymq.remoting.lane.client import Lane
from raymq.remoting.lane.frames import FrameKind
from raymq.remoting.lane.loop import Loop
from raymq.remoting.lane_pool import LANE_NOT_OPENED
from raymq.remoting.storage_client import StorageClient

CONNECT_PAUSE_S: Final = 5.0
"""Pause, in seconds, after a failure to open a lane (direct socket connection) to the store."""
DIRECT_MAX_BYTES: Final = 64 << 10
"""Maximum total size, in bytes, of records that the broker sends over the lane (direct socket connection) to the store.
A socket accepts this many bytes without blocking."""
PROMPT_S: Final = 0.2
"""Time limit, in seconds, for socket operations that should not block: sending one batch of records, and receiving the
rest of an answer that has begun."""

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class SentRecords:
    """A batch of records that was sent to the store. `deadline_s`: the time by which the store must answer.

    `stored` is the log position of the records. It is None before the store has answered, and if the store's answer has
    no position.
    """

    records: StateRecords
    batch: EncodedBatch
    done: Callable[[SentRecords], None]
    deadline_s: float
    stored: StoredRecords | None = None
    in_doubt: bool = True

    def finish(self) -> StoredRecords:
        """Return the log position at which this write's records are stored. If no position is known yet, sends the
        records again. Raises the errors of StateRecords.append."""
        return self.stored or self.records.store(self.batch, in_doubt=self.in_doubt)


class DirectAppends:
    """A lane (direct socket connection) to the group's master that sends one batch of state records at a time.

    Any thread may call `connect`, `leads_to`, `call_soon` and `close`. Only the thread of the lane's loop may call the
    other methods.
    """

    def __init__(self, loop: Loop, records: StateRecords, node_id: str) -> None:
        """`node_id`: the Ray node that this process runs on."""
        self._loop, self._records, self._node_id = loop, records, node_id
        self._storage: StorageClient | None = None
        """The store that the lane (direct socket connection) is connected to; None if the lane is closed."""
        self._lane: Lane | None = None
        self._descriptor = -1
        self._handles = ClientHandles()
        self._sent: SentRecords | None = None
        self._is_timed = False
        self._connect_at_s = 0.0
        self._lock = threading.Lock()
        self._is_closed = False

    @property
    def is_own_thread(self) -> bool:
        """Return True if the caller runs in the thread of the event loop that serves the lanes (direct socket
        connections)."""
        return self._loop.is_own_thread

    def leads_to(self, storage: StorageClient) -> bool:
        """Return True if a working lane (direct socket connection) to the store `storage` is open."""
        return self._storage is storage

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Call `callback` in the thread of the event loop that serves the lanes (direct socket connections). After
        `close`, call it in the current thread, because the loop's thread may have ended."""
        with self._lock:
            if not self._is_closed:
                self._loop.call_soon(callback)
                return
        callback()

    def connect(self, storage: StorageClient) -> None:
        """Open a lane (direct socket connection) to the store, unless one is open or an attempt has failed within
        CONNECT_PAUSE_S.

        No lane is opened if lanes use TLS, because epoll does not report data that a TLS socket has already decrypted.
        The writer of the state log then sends the records.
        """
        if self._storage is storage or self._is_closed or time.monotonic() < self._connect_at_s:
            return
        self._connect_at_s = time.monotonic() + CONNECT_PAUSE_S
        try:
            description = storage.describe()
            remote = description.node_id != self._node_id
            if remote and description.lane.tls:
                return
            lane = Lane(description.lane, remote=remote)
        except (RaymqError, *LANE_NOT_OPENED) as error:
            logger.info(
                "cannot open a lane to storage actor %s for the broker's state; the writer thread sends the "
                "records: %r",
                storage.name,
                error,
            )
            return
        self._connect_at_s = 0.0
        self._loop.call_soon(lambda: self._use(storage, lane))

    def _use(self, storage: StorageClient, lane: Lane) -> None:
        self._drop_lane()
        if self._is_closed:
            lane.close()
            return
        self._storage, self._lane, self._descriptor = storage, lane, lane.fileno()
        self._handles.forget()
        self._loop.watch(self._descriptor, select.EPOLLIN, self._on_event)

    def send(self, storage: StorageClient, bodies: Sequence[bytes], done: Callable[[SentRecords], None]) -> bool:
        """Send one batch of records with these bodies. `done` is called after the store has answered, or after the lane
        (direct socket connection) has failed.

        Returns False and sends nothing if no lane to this store is open, or if the records are too long.
        """
        lane = self._lane
        if lane is None or self._is_closed or self._storage is not storage or sum(map(len, bodies)) > DIRECT_MAX_BYTES:
            return False
        batch = self._records.encode(bodies)
        opens, parts = encode_append([batch], self._handles)
        before = b"".join([lane.pack_unanswered(FrameKind.OPEN, one) for one in opens]) if opens else b""
        now_s = time.monotonic()
        self._sent = SentRecords(self._records, batch, done, now_s + ATTEMPT_TIMEOUT_S)
        try:
            lane.send(FrameKind.APPEND, parts, now_s + PROMPT_S, count=1, before=before)
        except OSError:
            self._loop.call_soon(self._drop_lane)
            return True
        if not self._is_timed:
            self._is_timed = True
            self._loop.call_at(self._sent.deadline_s, self._look_at_time)
        return True

    def close(self) -> None:
        """Stop sending batches to the store, and close the lane. The batch in flight is passed to its `done` callback
        without an answer. The caller must call this method before it stops the lane's event loop."""
        with self._lock:
            self._is_closed = True
        self._loop.call_soon(self._drop_lane)

    def _on_event(self, _events: int) -> None:
        """Receive an answer from the store. An event without a request in flight means that the store closed the
        connection."""
        lane, sent = self._lane, self._sent
        if lane is None:
            return
        try:
            answer = lane.receive(time.monotonic() + PROMPT_S)
            [result] = decode_results(answer.payload, answer.count)
        except RaymqError as error:
            if sent is not None:
                sent.in_doubt = may_be_stored(error)
                self._end(sent)
            return
        except (OSError, EOFError, ValueError) as error:
            logger.info("the lane for the broker's state ended: %r", error)
            self._drop_lane()
            return
        if sent is not None:
            sent.stored = stored_records(result, len(sent.batch))
            self._end(sent)

    def _end(self, sent: SentRecords) -> None:
        self._sent = None
        sent.done(sent)

    def _look_at_time(self) -> None:
        """Close the lane (direct socket connection) if the store's answer is late."""
        self._is_timed = False
        if self._sent is None:
            return
        if time.monotonic() >= self._sent.deadline_s:
            self._drop_lane()
            return
        self._is_timed = True
        self._loop.call_at(self._sent.deadline_s, self._look_at_time)

    def _drop_lane(self) -> None:
        """Close the lane (direct socket connection), and pass the batch in flight to its `done` callback."""
        lane, self._lane, self._storage = self._lane, None, None
        if lane is not None:
            with suppress(OSError):  # ignore the error: a failed socket is closed and no longer registered with epoll
                self._loop.forget(self._descriptor)
            lane.close()
        if self._sent is not None:
            self._end(self._sent)
