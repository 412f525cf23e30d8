"""Sends a broker's state records from the thread of its lane, which receives the answers as events.

How a record reaches the store without a waiting thread belongs here. Failures are not handled here: after one, the
writer of the state log continues with the same batch (actors.broker.state_records).
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
"""The pause after a failure to open a lane."""
DIRECT_MAX_BYTES: Final = 64 << 10
"""The longest records that are sent: a socket accepts this much at once."""
PROMPT_S: Final = 0.2
"""The limit for steps that should not wait at all: sending that much, and receiving the rest of an answer."""

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class SentRecords:
    """Records that were sent to the store. `deadline_s`: the latest time of the answer.

    `stored` is the records' place; None until the store has answered, and if its answer is no place.
    """

    records: StateRecords
    batch: EncodedBatch
    done: Callable[[SentRecords], None]
    deadline_s: float
    stored: StoredRecords | None = None
    in_doubt: bool = True

    def finish(self) -> StoredRecords:
        """Return the records' place, sending them again if it is unknown. Raises as StateRecords.append."""
        return self.stored or self.records.store(self.batch, in_doubt=self.in_doubt)


class DirectAppends:
    """One lane to the group's master, for one batch of records at a time.

    Any thread may call `connect`, `leads_to`, `call_soon` and `close`; only the lane's loop calls the other methods.
    """

    def __init__(self, loop: Loop, records: StateRecords, node_id: str) -> None:
        """`node_id`: the Ray node that this process runs on."""
        self._loop, self._records, self._node_id = loop, records, node_id
        self._storage: StorageClient | None = None
        """The store that the lane leads to; None without a lane."""
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
        """True in the loop's thread."""
        return self._loop.is_own_thread

    def leads_to(self, storage: StorageClient) -> bool:
        """True if there is a lane to this store that is not known to be broken."""
        return self._storage is storage

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Make the loop's thread call `callback`. After `close`, when that thread may have ended, call it here."""
        with self._lock:
            if not self._is_closed:
                self._loop.call_soon(callback)
                return
        callback()

    def connect(self, storage: StorageClient) -> None:
        """Open a lane to the store, unless there is one, or opening one just failed.

        Not over TLS: epoll does not report what a TLS socket has decrypted, so the writer sends the records then.
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
                "cannot open a lane to %s for the broker's state; the writer thread sends its records: %r",
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
        """Send records with these bodies in one batch. `done` is called when the store has answered, or will not.

        Returns False, and sends nothing, without a lane to this store, and for long records.
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
        """Stop sending, and pass on what was sent. Call it before the loop is stopped."""
        with self._lock:
            self._is_closed = True
        self._loop.call_soon(self._drop_lane)

    def _on_event(self, _events: int) -> None:
        """Receive the answer. An event without a question means that the lane has ended."""
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
        """Close the lane if its answer is late."""
        self._is_timed = False
        if self._sent is None:
            return
        if time.monotonic() >= self._sent.deadline_s:
            self._drop_lane()
            return
        self._is_timed = True
        self._loop.call_at(self._sent.deadline_s, self._look_at_time)

    def _drop_lane(self) -> None:
        """Close the lane, and pass on the records that were sent."""
        lane, self._lane, self._storage = self._lane, None, None
        if lane is not None:
            with suppress(OSError):  # epoll no longer has a socket that a failure has closed
                self._loop.forget(self._descriptor)
            lane.close()
        if self._sent is not None:
            self._end(self._sent)
