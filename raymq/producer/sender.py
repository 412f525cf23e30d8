"""The thread that carries a producer's messages to one broker group, one request at a time.

While a request is under way, messages gather, and go together in the next one. The thread takes them out of their
queues' buffers, encodes those of each queue as one batch, and appends all batches in one call:

    [buffer per queue] → encode → append → acknowledge
            ↑                       │
            └── refused, or nothing was sent: back to the front of the buffer, or to another broker, encoded anew
                                    └── no answer: the very same bytes again, until the time is up
                                    (raymq.producer.retry_policy)

After each failure the route is asked again for the group's master, so the same sender, with the same sequences, goes on
after a failover. While a batch without an answer is repeated, the messages that wait behind it and asked for no order
go to other brokers.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from raymq.errors import (
    ClientStateError,
    MessageIllegalError,
    RaymqError,
    SendUnknownError,
    ServiceNotAvailableError,
)
from raymq.message import MAX_MESSAGE_SIZE_BYTES, MessageQueue, SendStatus
from raymq.producer.buffer_pool import BufferPool
from raymq.producer.encoder import BatchEncoder, PendingMessage, check_record_size
from raymq.producer.in_flight import InFlightBatch
from raymq.producer.latency_fault import BrokerFaults
from raymq.producer.retry_policy import another_broker_helps, given_up, may_be_stored
from raymq.protocol.store import AppendResult
from raymq.remoting.master_locator import MasterLocator, RouteSource
from raymq.remoting.storage_client import StorageClient, StorageDescription
from raymq.retry import Backoff

BATCH_MAX_MESSAGES: Final = 4096
"""The most messages of one queue in a request."""
REQUEST_MAX_BYTES: Final = 4 * 1024 * 1024
"""The most bytes of messages in a request, by their cost in the buffer pool. One message may be larger."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SenderContext:
    """The parts of a producer that all its senders use. `reroute` gives entries to other brokers' senders than the one
    named; it returns the entries that stay."""

    routes: RouteSource
    storage: Callable[[str], StorageClient]
    encoder: BatchEncoder
    buffer: BufferPool
    faults: BrokerFaults
    reroute: Callable[[list[PendingMessage], str], list[PendingMessage]]
    attempt_timeout_s: float
    retry_when_not_store_ok: bool


class _InSender(threading.local):
    """`active` is true in a sender's thread, which must never wait for itself."""

    active = False


_in_sender = _InSender()


def in_sender() -> bool:
    """True if the caller runs in a sender thread: in a future's callback, or in a hook."""
    return _in_sender.active


class Sender:
    """Sends the messages of one producer to one broker group, in a thread of its own. Other threads call `put` and
    `close`."""

    def __init__(self, broker_name: str, context: SenderContext) -> None:
        self._broker_name = broker_name
        self._context = context
        self._master = MasterLocator(broker_name, context.routes, context.storage)
        self._backoff = Backoff()
        self._wake = threading.Condition()
        self._buffers: dict[MessageQueue, deque[PendingMessage]] = {}
        self._taken: list[PendingMessage] = []
        """The entries that were taken out of the buffers for the request under way."""
        self._last_failure: RaymqError = ServiceNotAvailableError(f"{broker_name} took no messages in time")
        self._closed = False
        self._giving_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"producer-{broker_name}", daemon=True)
        self._thread.start()

    def put(self, entries_by_queue: Mapping[MessageQueue, Sequence[PendingMessage]]) -> None:
        """Add messages to the buffers of their queues. When the sender is closed, none is: ClientStateError."""
        with self._wake:
            if self._closed:
                raise ClientStateError("this producer is closed; make a new one with client.producer(...)")
            for queue, entries in entries_by_queue.items():
                buffer = self._buffers.get(queue)
                if buffer is None:
                    buffer = self._buffers[queue] = deque()
                buffer.extend(entries)
            self._wake.notify()

    def close(self, *, give_up: bool) -> None:
        """Refuse further messages, and end the thread when all messages here have their end; with `give_up`, after the
        attempt under way. Waits for that as long as an attempt may take."""
        with self._wake:
            self._closed = True
            if give_up:
                self._giving_up.set()
            self._wake.notify()
        self._thread.join(self._context.attempt_timeout_s)

    @property
    def alive(self) -> bool:
        """True while the thread runs."""
        return self._thread.is_alive()

    def _run(self) -> None:
        _in_sender.active = True
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._closed or bool(self._buffers))
                if not self._buffers:
                    return
            try:
                self._send_request()
            except Exception as error:  # a bug here must fail the futures, not leave them waiting
                logger.exception("sending to %s failed", self._broker_name)
                self._fail(self._entries_without_end(), error)
            self._taken.clear()

    def _entries_without_end(self) -> list[PendingMessage]:
        """The taken entries that neither have an end nor wait in a buffer, here or at another broker's sender."""
        with self._wake:
            waiting = {id(entry) for buffer in self._buffers.values() for entry in buffer}
        return [
            entry
            for entry in self._taken
            if not entry.outcome.done() and id(entry) not in waiting and entry.queue.broker_name == self._broker_name
        ]

    def _now_s(self) -> float:
        """The monotonic time; infinity while giving up, so that every deadline has passed."""
        return math.inf if self._giving_up.is_set() else time.monotonic()

    def _send_request(self) -> None:
        """Take messages out of the buffers, send them as one request, and repeat it until all have their end or wait in
        a buffer again."""
        with self._wake:
            oldest = next(iter(self._buffers.values()))[0]
        try:
            storage, description = self._connect(oldest.message.topic, oldest.deadline_s)
        except RaymqError as error:
            self._failed(oldest.message.topic, error)
            self._handle_waiting_failure(error, wait=error.retryable)
            self._pause()
            return
        with self._wake:
            taken = self._take()
        self._taken = [entry for _, entries in taken for entry in entries]
        limit = description.max_message_size_bytes
        batches = [batch for queue, entries in taken if (batch := self._encode(queue, entries, limit)) is not None]
        if batches:
            self._deliver(batches, storage, description)

    def _connect(self, topic: str, deadline_s: float) -> tuple[StorageClient, StorageDescription]:
        """The storage actor that leads the group, and its description. When this fails, nothing was sent."""
        storage = self._master.locate(topic)
        return storage, storage.describe(self._attempt_s(deadline_s))

    def _attempt_s(self, deadline_s: float) -> float:
        return min(self._context.attempt_timeout_s, max(deadline_s - self._now_s(), 0.1))

    def _take(self) -> list[tuple[MessageQueue, list[PendingMessage]]]:
        """Take the messages of the next request out of every queue's buffer in turn, up to the limits. Called with the
        lock.

        All have the same `wait_store_msg_ok`: messages that need not wait for the disk do not wait for those that must.
        """
        taken: list[tuple[MessageQueue, list[PendingMessage]]] = []
        waits = next(iter(self._buffers.values()))[0].message.wait_store_msg_ok
        left_bytes = REQUEST_MAX_BYTES
        for queue in list(self._buffers):
            waiting = self._buffers.pop(queue)
            entries: list[PendingMessage] = []
            # The first message of a request always fits, whatever its size.
            while waiting and len(entries) < BATCH_MAX_MESSAGES:
                if left_bytes < waiting[0].cost_bytes and (taken or entries):
                    break
                if waiting[0].message.wait_store_msg_ok is not waits:
                    break
                entry = waiting.popleft()
                left_bytes -= entry.cost_bytes
                entries.append(entry)
            if waiting:
                self._buffers[queue] = waiting  # at the end: the other queues come first next time
            if entries:
                taken.append((queue, entries))
        return taken

    def _put_back(self, queue: MessageQueue, entries: Sequence[PendingMessage]) -> None:
        """Put entries back to the front of their buffer."""
        if entries:
            with self._wake:
                self._buffers.setdefault(queue, deque()).extendleft(reversed(entries))

    def _encode(
        self, queue: MessageQueue, entries: list[PendingMessage], max_body_bytes: int = MAX_MESSAGE_SIZE_BYTES
    ) -> InFlightBatch | None:
        """A batch of the entries that can be sent, None if there are none; the others fail."""
        entries = self._in_time(entries, self._last_failure)
        try:
            if max_body_bytes < MAX_MESSAGE_SIZE_BYTES:
                for entry in entries:
                    self._context.encoder.check_size(entry.message, max_body_bytes)
            if not entries:
                return None
            encoded = self._context.encoder.encode(queue, entries)
        except RaymqError as error:
            if len(entries) == 1:
                self._fail(entries, error)
                return None
            # One message breaks a rule that only encoding checks: fail that one alone.
            legal = self._legal(entries, max_body_bytes)
            if len(legal) == len(entries):
                self._fail(entries, error)
                return None
            return self._encode(queue, legal)
        return InFlightBatch(queue, entries, encoded, min([entry.deadline_s for entry in entries]))

    def _legal(self, entries: list[PendingMessage], max_body_bytes: int) -> list[PendingMessage]:
        """The entries that can be encoded alone; the others fail."""
        legal = []
        for entry in entries:
            try:
                self._context.encoder.check_size(entry.message, max_body_bytes)
                check_record_size(entry.message)
            except RaymqError as error:
                self._fail([entry], error)
            else:
                legal.append(entry)
        return legal

    def _deliver(self, batches: list[InFlightBatch], storage: StorageClient, description: StorageDescription) -> None:
        """Send batches for the first time. On return each message has its end or waits in a buffer again."""
        try:
            results = self._append(batches, storage)
        except RaymqError as error:
            if may_be_stored(error):
                self._repeat(batches, error)
            else:
                self._refused(batches, error, storage, description)
        else:
            self._acknowledge_all(batches, results, description)

    def _append(self, batches: list[InFlightBatch], storage: StorageClient) -> list[AppendResult]:
        started_s = time.monotonic()
        attempt_s = self._attempt_s(min([batch.deadline_s for batch in batches]))
        results = storage.append([batch.encoded.without_ids() for batch in batches], attempt_s)
        now_s = time.monotonic()
        self._context.faults.answered(self._broker_name, (now_s - started_s) * 1000, now_s)
        self._backoff.reset()
        return results

    # Failures

    def _failed(self, topic: str, error: RaymqError) -> None:
        self._last_failure = error
        self._context.faults.failed(self._broker_name, time.monotonic())
        self._master.attempt_failed(topic)

    def _pause(self) -> None:
        """Wait before the next attempt, unless there is nothing left to try."""
        pause_s = self._backoff.next()
        if self._taken or self._buffers:
            self._giving_up.wait(pause_s)

    def _refused(
        self, batches: list[InFlightBatch], error: RaymqError, storage: StorageClient, description: StorageDescription
    ) -> None:
        """Handle a refusal of batches that were sent for the first time: nothing of them is stored, since the store
        takes a request as a whole or not."""
        if another_broker_helps(error):
            self._failed(batches[0].entries[0].message.topic, error)
            for batch in batches:
                self._handle_failure(batch.queue, self._unpacked(batch), error, wait=error.retryable)
            self._pause()
        elif len(batches) > 1:
            for batch in batches:
                self._deliver([batch], storage, description)
        elif isinstance(error, MessageIllegalError) and len(batches[0].entries) > 1:
            # The refusal may concern one message only: halve the batch until that one is alone.
            entries = self._unpacked(batches[0])
            half = len(entries) // 2
            self._put_back(batches[0].queue, entries[half:])
            if (smaller := self._encode(batches[0].queue, entries[:half])) is not None:
                self._deliver([smaller], storage, description)
        else:
            self._fail(batches[0].entries, error)

    def _unpacked(self, batch: InFlightBatch) -> list[PendingMessage]:
        """The messages of a batch that will not be sent again: their sequences are lost, their ids stay."""
        for entry, message_id in zip(batch.entries, batch.encoded.message_ids, strict=True):
            entry.message_id = message_id
        return batch.entries

    def _handle_waiting_failure(self, error: RaymqError, *, wait: bool) -> None:
        """Handle a failure of the broker for the messages that wait in the buffers."""
        for queue in list(self._buffers):
            with self._wake:
                entries = list(self._buffers.pop(queue))
            known = len(self._taken)
            self._taken += entries
            self._handle_failure(queue, entries, error, wait=wait)
            del self._taken[known:]

    def _handle_failure(
        self, queue: MessageQueue, entries: list[PendingMessage], error: RaymqError, *, wait: bool
    ) -> None:
        """Handle a failure for messages that are surely not stored: those whose time is up fail, some go to another
        broker, the others go back to their buffer (`wait`) or fail."""
        entries = self._in_time(entries, error)
        if another_broker_helps(error):
            entries = self._context.reroute(entries, self._broker_name)
        if wait:
            self._put_back(queue, entries)
        else:
            self._fail(entries, error)

    def _repeat(self, batches: list[InFlightBatch], error: RaymqError) -> None:
        """Send the very same bytes again until they are acknowledged or time is up: they may be stored already."""
        while batches := self._still_in_time(batches, error):
            topic = batches[0].entries[0].message.topic
            self._failed(topic, error)
            self._handle_waiting_failure(error, wait=True)
            self._pause()
            try:
                storage, description = self._connect(topic, min([batch.deadline_s for batch in batches]))
                results = self._append(batches, storage)
            except RaymqError as failure:
                error = failure
                if failure.retryable or may_be_stored(failure):
                    continue
                if len(batches) == 1:
                    self._fail_unknown(batches[0], batches[0].waiting(), failure)
                    return
                for batch in batches:
                    self._repeat([batch], failure)
                return
            self._acknowledge_all(batches, results, description)
            return

    def _in_time(self, entries: list[PendingMessage], error: RaymqError) -> list[PendingMessage]:
        """The entries whose time is not up; the others fail, and were not stored."""
        now_s = self._now_s()
        late = [entry for entry in entries if entry.deadline_s <= now_s]
        if not late:
            return entries
        self._fail(late, given_up(error, max(entry.timeout_s for entry in late)))
        return [entry for entry in entries if entry.deadline_s > now_s]

    def _still_in_time(self, batches: list[InFlightBatch], error: RaymqError) -> list[InFlightBatch]:
        """The batches with entries whose time is not up. The other entries fail with SendUnknownError."""
        now_s = self._now_s()
        for batch in [batch for batch in batches if batch.deadline_s <= now_s]:
            self._fail_unknown(batch, [entry for entry in batch.waiting() if entry.deadline_s <= now_s], error)
            batch.expired = True
            batch.deadline_s = min((entry.deadline_s for entry in batch.waiting()), default=now_s)
        return [batch for batch in batches if batch.deadline_s > now_s]

    def _fail_unknown(self, batch: InFlightBatch, entries: list[PendingMessage], error: RaymqError) -> None:
        waited_s = max(entry.timeout_s for entry in entries)
        self._fail(entries, SendUnknownError(str(batch.queue), len(entries), waited_s, str(error)))

    # Ends

    def _acknowledge_all(
        self, batches: list[InFlightBatch], results: list[AppendResult], description: StorageDescription
    ) -> None:
        for batch, first in zip(batches, results, strict=True):
            result = self._await_flush(batch, first) if self._context.retry_when_not_store_ok else first
            self._context.buffer.deallocate(batch.acknowledge(result, description.store_host))

    def _await_flush(self, batch: InFlightBatch, result: AppendResult) -> AppendResult:
        """Repeat a batch that is stored until its status is SEND_OK: a repeat stores nothing and waits for the flush.
        Returns the last result, when that is reached, time is up, or the store refuses."""
        while result.status is not SendStatus.SEND_OK and self._now_s() < batch.deadline_s:
            self._pause()
            try:
                storage, _ = self._connect(batch.entries[0].message.topic, batch.deadline_s)
                [result] = self._append([batch], storage)
            except RaymqError as error:
                self._failed(batch.entries[0].message.topic, error)
                if not error.retryable:
                    return result
        return result

    def _fail(self, entries: list[PendingMessage], error: BaseException) -> None:
        for entry in entries:
            entry.outcome.set_exception(error)
        self._context.buffer.deallocate(entries)
