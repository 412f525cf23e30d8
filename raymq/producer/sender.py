"""The thread that carries a producer's messages to one broker group, one request at a time.

While a request is under way, messages gather, and go together in the next one. It takes them out of their queues'
buffers, encodes each queue's as one batch, and appends all batches in one call:

    [buffer per queue] → encode → append → acknowledge
            ↑                       │
            └── refused, or nothing was sent: back to the front of the buffer, or to another broker, encoded anew
                                    └── no answer: the very same bytes again, until the time is up
                                    (raymq.producer.retry_policy)

Which storage actor is the group's master is asked of the route again after each failure, so the same sender, with the
same sequences, goes on after a failover. While a batch without an answer is repeated, what waits behind it and asked
for no order goes to other brokers.
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
REQUEST_MAX_BYTES: Final = 4 * 1024 * 1024

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SenderContext:
    """What all senders of a producer share. `elsewhere` gives messages to other brokers' senders than the one named;
    it returns those that stay."""

    routes: RouteSource
    storage: Callable[[str], StorageClient]
    encoder: BatchEncoder
    buffer: BufferPool
    faults: BrokerFaults
    elsewhere: Callable[[list[PendingMessage], str], list[PendingMessage]]
    attempt_timeout_s: float
    retry_when_not_store_ok: bool


class _InSender(threading.local):
    """Whether this thread is a sender's, which must never wait for itself."""

    active = False


_in_sender = _InSender()


def in_sender() -> bool:
    """Whether the caller runs in a sender thread: in a future's callback, or in a hook."""
    return _in_sender.active


class Sender:
    """Everything of one producer that goes to one broker group. `put` and `close` are for other threads."""

    def __init__(self, broker_name: str, shared: SenderContext) -> None:
        self._broker_name = broker_name
        self._shared = shared
        self._master = MasterLocator(broker_name, shared.routes, shared.storage)
        self._backoff = Backoff()
        self._wake = threading.Condition()
        self._buffers: dict[MessageQueue, deque[PendingMessage]] = {}
        self._taken: list[PendingMessage] = []
        """What is out of the buffers and has no end yet."""
        self._last_failure: RaymqError = ServiceNotAvailableError(f"{broker_name} took no messages in time")
        self._closed = False
        self._giving_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"producer-{broker_name}", daemon=True)
        self._thread.start()

    def put(self, entries_by_queue: Mapping[MessageQueue, Sequence[PendingMessage]]) -> None:
        """Take messages to be sent. ClientStateError when the sender was closed meanwhile; nothing is taken then."""
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
        """Take no more, and end when everything here has its end; with `give_up`, after the attempt under way."""
        with self._wake:
            self._closed = True
            if give_up:
                self._giving_up.set()
            self._wake.notify()
        self._thread.join(self._shared.attempt_timeout_s)

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def _run(self) -> None:
        _in_sender.active = True
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._closed or bool(self._buffers))
                if not self._buffers:
                    return
            try:
                self._round()
            except Exception as error:  # a bug here must fail the futures, not leave them waiting
                logger.exception("sending to %s failed", self._broker_name)
                self._fail(self._lost(), error)
            self._taken.clear()

    def _lost(self) -> list[PendingMessage]:
        """What was taken and neither has an end nor waits in a buffer, here or at another broker's sender."""
        with self._wake:
            waiting = {id(entry) for buffer in self._buffers.values() for entry in buffer}
        return [
            entry
            for entry in self._taken
            if not entry.outcome.done() and id(entry) not in waiting and entry.queue.broker_name == self._broker_name
        ]

    def _now_s(self) -> float:
        """When giving up, everybody's time is up."""
        return math.inf if self._giving_up.is_set() else time.monotonic()

    def _round(self) -> None:
        """One request, and what becomes of it."""
        with self._wake:
            oldest = next(iter(self._buffers.values()))[0]
        try:
            storage, description = self._connect(oldest.message.topic, oldest.deadline_s)
        except RaymqError as error:
            self._failed(oldest.message.topic, error)
            self._settle_waiting(error, wait=error.retryable)
            self._pause()
            return
        with self._wake:
            taken = self._take()
        self._taken = [entry for _, entries in taken for entry in entries]
        limit = description.max_message_size_bytes
        flights = [flight for queue, entries in taken if (flight := self._encode(queue, entries, limit)) is not None]
        if flights:
            self._deliver(flights, storage, description)

    def _connect(self, topic: str, deadline_s: float) -> tuple[StorageClient, StorageDescription]:
        """The master, ready to be sent to. When this fails, nothing was sent."""
        storage = self._master.client(topic)
        return storage, storage.describe(self._attempt_s(deadline_s))

    def _attempt_s(self, deadline_s: float) -> float:
        return min(self._shared.attempt_timeout_s, max(deadline_s - self._now_s(), 0.1))

    def _take(self) -> list[tuple[MessageQueue, list[PendingMessage]]]:
        """What goes into the next request: from every queue in turn, up to the limits. Called with the lock.

        All have the same `wait_store_msg_ok`: what need not wait for the disk does not wait for what must.
        """
        taken: list[tuple[MessageQueue, list[PendingMessage]]] = []
        waits = next(iter(self._buffers.values()))[0].message.wait_store_msg_ok
        room = REQUEST_MAX_BYTES
        for queue in list(self._buffers):
            waiting = self._buffers.pop(queue)
            entries: list[PendingMessage] = []
            # The first message of a request always fits, whatever its size.
            while waiting and len(entries) < BATCH_MAX_MESSAGES:
                if room < waiting[0].cost_bytes and (taken or entries):
                    break
                if waiting[0].message.wait_store_msg_ok is not waits:
                    break
                entry = waiting.popleft()
                room -= entry.cost_bytes
                entries.append(entry)
            if waiting:
                self._buffers[queue] = waiting  # at the end: the other queues come first next time
            if entries:
                taken.append((queue, entries))
        return taken

    def _put_back(self, queue: MessageQueue, entries: Sequence[PendingMessage]) -> None:
        """To the front of their buffer."""
        if entries:
            with self._wake:
                self._buffers.setdefault(queue, deque()).extendleft(reversed(entries))

    def _encode(
        self, queue: MessageQueue, entries: list[PendingMessage], max_body_bytes: int = MAX_MESSAGE_SIZE_BYTES
    ) -> InFlightBatch | None:
        """A flight with those that can go; the others have their end."""
        entries = self._in_time(entries, self._last_failure)
        try:
            if max_body_bytes < MAX_MESSAGE_SIZE_BYTES:
                for entry in entries:
                    self._shared.encoder.check_size(entry.message, max_body_bytes)
            if not entries:
                return None
            batch = self._shared.encoder.encode(queue, entries)
        except RaymqError as error:
            if len(entries) == 1:
                self._fail(entries, error)
                return None
            # One message breaks a rule that shows only here: find out which.
            legal = self._legal(entries, max_body_bytes)
            if len(legal) == len(entries):
                self._fail(entries, error)
                return None
            return self._encode(queue, legal)
        return InFlightBatch(queue, entries, batch, min([entry.deadline_s for entry in entries]))

    def _legal(self, entries: list[PendingMessage], max_body_bytes: int) -> list[PendingMessage]:
        legal = []
        for entry in entries:
            try:
                self._shared.encoder.check_size(entry.message, max_body_bytes)
                check_record_size(entry.message)
            except RaymqError as error:
                self._fail([entry], error)
            else:
                legal.append(entry)
        return legal

    def _deliver(self, flights: list[InFlightBatch], storage: StorageClient, description: StorageDescription) -> None:
        """Send batches for the first time, and see to it that each message has its end or waits again."""
        try:
            results = self._append(flights, storage)
        except RaymqError as error:
            if may_be_stored(error):
                self._repeat(flights, error)
            else:
                self._refused(flights, error, storage, description)
        else:
            self._acknowledge_all(flights, results, description)

    def _append(self, flights: list[InFlightBatch], storage: StorageClient) -> list[AppendResult]:
        started_s = time.monotonic()
        attempt_s = self._attempt_s(min([flight.deadline_s for flight in flights]))
        results = storage.append([flight.batch.without_ids() for flight in flights], attempt_s)
        now_s = time.monotonic()
        self._shared.faults.answered(self._broker_name, (now_s - started_s) * 1000, now_s)
        self._backoff.reset()
        return results

    # Failures

    def _failed(self, topic: str, error: RaymqError) -> None:
        self._last_failure = error
        self._shared.faults.failed(self._broker_name, time.monotonic())
        self._master.failed(topic)

    def _pause(self) -> None:
        """Wait before the next attempt, unless there is nothing left to try."""
        pause_s = self._backoff.next()
        if self._taken or self._buffers:
            self._giving_up.wait(pause_s)

    def _refused(
        self, flights: list[InFlightBatch], error: RaymqError, storage: StorageClient, description: StorageDescription
    ) -> None:
        """Nothing of these batches, sent for the first time, is stored; the store takes a request as a whole or not."""
        if another_broker_helps(error):
            self._failed(flights[0].entries[0].message.topic, error)
            for flight in flights:
                self._settle(flight.queue, self._unpacked(flight), error, wait=error.retryable)
            self._pause()
        elif len(flights) > 1:
            for flight in flights:
                self._deliver([flight], storage, description)
        elif isinstance(error, MessageIllegalError) and len(flights[0].entries) > 1:
            # It may concern one message only: halve until that one is alone.
            entries = self._unpacked(flights[0])
            half = len(entries) // 2
            self._put_back(flights[0].queue, entries[half:])
            if (smaller := self._encode(flights[0].queue, entries[:half])) is not None:
                self._deliver([smaller], storage, description)
        else:
            self._fail(flights[0].entries, error)

    def _unpacked(self, flight: InFlightBatch) -> list[PendingMessage]:
        """The messages of a batch that will not be sent again: their sequences are lost, their ids stay."""
        for entry, message_id in zip(flight.entries, flight.batch.message_ids, strict=True):
            entry.message_id = message_id
        return flight.entries

    def _settle_waiting(self, error: RaymqError, *, wait: bool) -> None:
        """Deal with what waits in the buffers while the broker fails."""
        for queue in list(self._buffers):
            with self._wake:
                entries = list(self._buffers.pop(queue))
            known = len(self._taken)
            self._taken += entries
            self._settle(queue, entries, error, wait=wait)
            del self._taken[known:]

    def _settle(self, queue: MessageQueue, entries: list[PendingMessage], error: RaymqError, *, wait: bool) -> None:
        """What becomes of messages that are surely not stored: too late, to another broker, wait on, or failed."""
        entries = self._in_time(entries, error)
        if another_broker_helps(error):
            entries = self._shared.elsewhere(entries, self._broker_name)
        if wait:
            self._put_back(queue, entries)
        else:
            self._fail(entries, error)

    def _repeat(self, flights: list[InFlightBatch], error: RaymqError) -> None:
        """Send the very same bytes again until they are acknowledged or time is up: they may be stored already."""
        while flights := self._still_in_time(flights, error):
            topic = flights[0].entries[0].message.topic
            self._failed(topic, error)
            self._settle_waiting(error, wait=True)
            self._pause()
            try:
                storage, description = self._connect(topic, min([flight.deadline_s for flight in flights]))
                results = self._append(flights, storage)
            except RaymqError as failure:
                error = failure
                if failure.retryable or may_be_stored(failure):
                    continue
                if len(flights) == 1:
                    self._unknown(flights[0], flights[0].waiting(), failure)
                    return
                for flight in flights:
                    self._repeat([flight], failure)
                return
            self._acknowledge_all(flights, results, description)
            return

    def _in_time(self, entries: list[PendingMessage], error: RaymqError) -> list[PendingMessage]:
        """Those whose time is not up; the others fail, and were not stored."""
        now_s = self._now_s()
        late = [entry for entry in entries if entry.deadline_s <= now_s]
        if not late:
            return entries
        self._fail(late, given_up(error, max(entry.timeout_s for entry in late)))
        return [entry for entry in entries if entry.deadline_s > now_s]

    def _still_in_time(self, flights: list[InFlightBatch], error: RaymqError) -> list[InFlightBatch]:
        """Those of which somebody still waits. Of the others it is unknown whether they are stored."""
        now_s = self._now_s()
        for flight in [flight for flight in flights if flight.deadline_s <= now_s]:
            self._unknown(flight, [entry for entry in flight.waiting() if entry.deadline_s <= now_s], error)
            flight.expired = True
            flight.deadline_s = min((entry.deadline_s for entry in flight.waiting()), default=now_s)
        return [flight for flight in flights if flight.deadline_s > now_s]

    def _unknown(self, flight: InFlightBatch, entries: list[PendingMessage], error: RaymqError) -> None:
        waited_s = max(entry.timeout_s for entry in entries)
        self._fail(entries, SendUnknownError(str(flight.queue), len(entries), waited_s, str(error)))

    # Ends

    def _acknowledge_all(
        self, flights: list[InFlightBatch], results: list[AppendResult], description: StorageDescription
    ) -> None:
        for flight, first in zip(flights, results, strict=True):
            result = self._insist(flight, first) if self._shared.retry_when_not_store_ok else first
            self._shared.buffer.give(flight.acknowledge(result, description.store_host))

    def _insist(self, flight: InFlightBatch, result: AppendResult) -> AppendResult:
        """Ask again whether a batch that is stored is safe by now: a repeat stores nothing and waits for the flush."""
        while result.status is not SendStatus.SEND_OK and self._now_s() < flight.deadline_s:
            self._pause()
            try:
                storage, _ = self._connect(flight.entries[0].message.topic, flight.deadline_s)
                [result] = self._append([flight], storage)
            except RaymqError as error:
                self._failed(flight.entries[0].message.topic, error)
                if not error.retryable:
                    return result
        return result

    def _fail(self, entries: list[PendingMessage], error: BaseException) -> None:
        for entry in entries:
            entry.outcome.set_exception(error)
        self._shared.buffer.give(entries)
