"""The shell around a SendState: the thread that carries a producer's messages to one broker group, and its calls.

While a request is under way, messages gather, and go together in the next one. The thread takes them out of their
queues, encodes those of each queue as one batch, and appends all batches in one call. A lone message on an idle queue
does not wait for the thread: `send_at_once` has the caller encode it, send it and read the answer. When that fails, the
thread goes on with it, with the very same bytes.

What an answer or a failure means is decided in raymq.client.producer.send_state. After each failure the route is asked
again for the group's master, so the same sender, with the same sequences, goes on after a failover.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from msgspec import Struct

from raymq.client.producer.buffer_pool import BufferPool, end_all
from raymq.client.producer.completion import Acknowledged, Completion, Outcome, offset_message_id
from raymq.client.producer.encoder import BatchEncoder
from raymq.client.producer.latency_fault import BrokerFaults
from raymq.client.producer.send_batch import Flight, QueueSends, SendBatch, Stage
from raymq.client.producer.send_state import SendAttempt, SendDecision, SendState, closed_error
from raymq.common.errors import QuotaExceededError, RaymqError, ServiceNotAvailableError, SystemBusyError
from raymq.common.message import Message, MessageQueue, SendResult, SendStatus
from raymq.common.parallel import aside
from raymq.common.protocol.store import AppendResult
from raymq.records.format.encode import EncodedBatch, LoneRecord
from raymq.records.format.message_id import IdRange
from raymq.records.kernels.message_columns import MessageColumns
from raymq.remoting.master_locator import MasterLocator, RouteSource
from raymq.remoting.storage_client import StorageClient, StorageDescription
from raymq.telemetry.metrics.client_figures import CLIENT_FIGURES
from raymq.telemetry.trace.sends import SendTrace

logger = logging.getLogger(__name__)


class Pauses(Protocol):
    """The pauses between attempts (raymq.common.retry.Backoff)."""

    def next(self) -> float: ...

    def reset(self) -> None: ...


@dataclass(frozen=True, slots=True)
class SenderContext:
    """The parts of a producer that all its senders use.

    `lock` is the producer's and the buffer pool's. `open_batches`: by topic, or by queue for messages that asked for
    one, the batches that messages may join without more ado. `move` gives a batch to another broker's sender than the
    one named; False if there is none. `clock` tells monotonic time in seconds.
    """

    lock: threading.Lock
    clock: Callable[[], float]
    pauses: Callable[[], Pauses]
    routes: RouteSource
    storage: Callable[[str], StorageClient]
    encoder: BatchEncoder
    buffer: BufferPool
    open_batches: dict[str | MessageQueue, SendBatch]
    faults: BrokerFaults
    move: Callable[[SendBatch, str], bool]
    attempt_timeout_s: float
    retry_when_not_store_ok: bool
    max_message_size_bytes: int
    trace: SendTrace | None = None


class _InSender(threading.local):
    """`active` is true in a sender's thread, which must never wait for itself."""

    active = False


_in_sender = _InSender()


def in_sender() -> bool:
    """True if the caller runs in a sender thread: in a future's callback, or in a hook."""
    return _in_sender.active


class LoneSend(Struct, eq=False):
    """One message that its caller sends itself to a queue, from time `now_s` on. `movable`: it may go to another queue,
    because it names none."""

    message: Message
    sends: QueueSends
    now_s: float
    timeout_s: float
    cost_bytes: int
    generation: int
    movable: bool
    begun: bool = False
    """It has the turn of its queue, and is nobody else's yet."""
    allocated: bool = False
    """It has space in the buffer."""
    record: LoneRecord | None = None
    """It as it is sent; from then on it may be stored."""

    def batch(self) -> SendBatch:
        """The message as a batch that is on its way."""
        message, queue = self.message, self.sends.queue
        return SendBatch(
            message.topic, queue, self.sends, [message], Completion(), self.movable, message.wait_store_msg_ok,
            self.timeout_s, self.now_s + self.timeout_s, self.cost_bytes, self.generation, stage=Stage.IN_FLIGHT,
        )  # fmt: skip


Target = tuple[StorageClient, StorageDescription]
"""The storage actor that leads the broker group, and its description."""


class Sender:
    """Sends the messages of one producer to one broker group, in a thread of its own and in its callers' threads.

    `state` and `target` are guarded by the producer's lock.
    """

    def __init__(self, broker_name: str, context: SenderContext) -> None:
        self.broker_name = broker_name
        self._context = context
        self._master = MasterLocator(broker_name, context.routes, context.storage)
        self._pauses = context.pauses()
        self.state = SendState(broker_name, settle_status=context.retry_when_not_store_ok)
        self.target: Target | None = None
        """The master, as long as it answers."""
        self._failed_at_once: deque[tuple[SendAttempt, RaymqError]] = deque()
        self._wake = threading.Condition(context.lock)
        self._idle = False
        self._resume_s = -math.inf
        self._closed = self._giving_up = False
        self._taken: list[SendBatch] = []
        """The batches that the thread works on."""
        self._thread = threading.Thread(target=self._run, name=f"producer-{broker_name}", daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        """True if it takes no further messages."""
        return self._closed

    @property
    def alive(self) -> bool:
        """True while the thread runs."""
        return self._thread.is_alive()

    def put_locked(self, batch: SendBatch) -> None:
        """Let a batch wait for its turn. ClientStateError if the sender is closed. Called with the lock."""
        if self._closed:
            raise closed_error()
        self.state.put(batch)
        self.wake_locked()

    def wake_locked(self) -> None:
        """Wake the thread if it sleeps for want of work. Called with the lock."""
        if self._idle:
            self._wake.notify()
            self._idle = False  # not before: a signal handler may raise in `notify`

    def close(self, *, give_up: bool) -> None:
        """Refuse further messages, and end the thread when all messages here have their end; with `give_up`, after the
        attempt under way. Waits for that as long as an attempt may take."""
        with self._context.lock:
            self._closed = True
            self._giving_up |= give_up
            self._wake.notify_all()
        self._thread.join(self._context.attempt_timeout_s)

    # In the thread of a caller

    def begin_at_once_locked(self, batch: SendBatch) -> bool:
        """True if the caller is to send the batch itself (`send_at_once`); nobody else sends to its queue now. Called
        with the lock."""
        state = self.state
        if self.target is None or self._closed or self._failed_at_once:
            return False
        if not (state.quiet if batch.movable else state.may_overtake(batch.sends)):
            return False
        state.begin(batch.sends)
        batch.stage = Stage.IN_FLIGHT
        return True

    def require_target(self) -> Target:
        """The master, which is known where `begin_at_once_locked` was true. Called with the lock."""
        assert self.target is not None
        return self.target

    def send_at_once(self, batch: SendBatch, target: Target) -> None:
        """Send a batch for which `begin_at_once_locked` was true, and read the answer.

        On return it has its end, or waits for the thread to go on with it. What a bug raises is the batch's end, too.
        """
        storage, description = target
        flight: Flight | None = None
        try:
            flight = Flight.of(batch.sends, [batch], self._encoded(batch.sends, [batch], description))
            attempt_s = min(self._context.attempt_timeout_s, max(batch.timeout_s, 0.1))
            [result] = self._append([flight.encoded], storage, attempt_s)
            flight.store_host = description.store_host
            if self._context.retry_when_not_store_ok and result.status is not SendStatus.SEND_OK:
                self._settle(flight, result)
                return
            for ended, acknowledged in flight.acknowledge(result):
                self._count_sent(ended, acknowledged)
                ended.end(acknowledged)
        except BaseException as error:
            self._go_on(batch, flight, error)
            if not isinstance(error, RaymqError):
                raise
            return
        self._end_at_once(batch.sends, batch.cost_bytes, len(batch.messages), batch.generation)

    def _go_on(self, batch: SendBatch, flight: Flight | None, error: BaseException) -> None:
        """A caller's batch has failed; `flight` is None if it could not be encoded."""
        if isinstance(error, RaymqError):
            if flight is None:
                self._not_encoded(batch.sends, [batch], error)
            else:
                self._hand_to_thread(flight, error)
        elif flight is not None and not isinstance(error, Exception):
            # The caller was interrupted while it waited: whatever happened, the message goes on.
            self._hand_to_thread(flight, ServiceNotAvailableError(f"the send was interrupted ({error!r})"))
        else:
            self._abandon([batch], error)

    def _end_at_once(self, sends: QueueSends, cost_bytes: int, count: int, generation: int) -> None:
        """Messages that their caller sent are stored as safely as was asked."""
        with self._context.lock:
            self.state.release(sends)
            futures = self._context.buffer.deallocate_locked(cost_bytes, count, generation)
            if sends.waiting or self._closed:
                self.wake_locked()
        if futures:
            end_all(futures)

    def begin_lone_locked(self, lone: LoneSend) -> Target | None:
        """The master to which the caller is to send one message itself (`send_lone`), if nothing is under way or waits;
        nobody else sends to the queue then. Called with the lock."""
        target = self.target
        if target is None or self._closed or self._failed_at_once or not self.state.begin_alone(lone):
            return None
        return target

    def send_lone(self, lone: LoneSend, target: Target) -> SendResult | Completion:
        """Send a message for which `begin_lone_locked` gave the master, and read the answer: `send_at_once` in fewer
        steps, for a message that asked for nothing special.

        Nothing is made for it but its record and its result. Where something goes wrong it becomes a SendBatch, as if
        it had been one: the thread goes on with that, and its end is in the Completion. A caller to whom anything else
        than a RaymqError is raised calls `interrupted`.
        """
        context, sends, (storage, description) = self._context, lone.sends, target
        try:
            if len(lone.message.body) > description.max_message_size_bytes:
                context.encoder.check_size(lone.message, description.max_message_size_bytes)
            if lone.message.light_queues and not description.light_queues:
                context.encoder.check_light_queues([lone.message])
            lone.record = record = context.encoder.encode_one(sends, lone.message)
            result = storage.append_one(record, min(context.attempt_timeout_s, max(lone.timeout_s, 0.1)))
            now_s = context.clock()
            cost_ms = (now_s - lone.now_s) * 1000
            context.faults.answered(self.broker_name, cost_ms, now_s)
        except RaymqError as error:
            return aside(self._lone_failed, lone, error)
        if result.status is not SendStatus.SEND_OK and context.retry_when_not_store_ok:
            return aside(self._lone_not_safe, lone, result, description)
        with context.lock:
            self.state.release_alone(lone)
            settles = context.buffer.deallocate_lone_locked(lone)
            if sends.waiting or self._closed:
                self.wake_locked()
        if settles:
            aside(context.buffer.settle)
        CLIENT_FIGURES.sent(context.encoder.stored_topic(lone.message.topic), cost_ms, 1, ok=True)
        offset = result.queue_offset if result.queue_offsets is None else result.queue_offsets[0]
        physical = result.physical_offset if result.physical_offsets is None else result.physical_offsets[0]
        offset_id = offset_message_id(description.store_host, physical)
        sent = SendResult(result.status, f"{record.stem}{record.counter:04X}", offset_id, sends.queue, offset)
        if context.trace is not None:
            topic = context.encoder.stored_topic(lone.message.topic)
            aside(context.trace.sent, topic, (lone.message,), lambda: (sent,), cost_ms)
        return sent

    def interrupted(self, lone: LoneSend, error: BaseException) -> None:
        """Free the turn and the space of a message whose caller was interrupted: a signal handler, or a bug, raised
        `error`. If the message may be stored, the thread finishes it."""
        if lone.begun and lone.record is not None:
            self._lone_failed(lone, ServiceNotAvailableError(f"the send was interrupted ({error!r})"))
        with self._context.lock:
            self.state.release_alone(lone)
            self._context.buffer.deallocate_lone_locked(lone)
            self.wake_locked()
        self._context.buffer.settle()

    def _lone_failed(self, lone: LoneSend, error: RaymqError) -> Completion:
        """A message that its caller sent has failed: it goes on as a batch."""
        batch = self._as_batch(lone)
        if lone.record is None:
            self._not_encoded(batch.sends, [batch], error)
        else:
            self._hand_to_thread(Flight.of(batch.sends, [batch], lone.record.batch()), error)
        return batch.completion

    def _lone_not_safe(self, lone: LoneSend, result: AppendResult, description: StorageDescription) -> Completion:
        """A message that its caller sent is stored and not as safe as asked for."""
        assert lone.record is not None
        batch = self._as_batch(lone)
        flight = Flight.of(batch.sends, [batch], lone.record.batch())
        flight.store_host = description.store_host
        self._settle(flight, result)
        return batch.completion

    def _as_batch(self, lone: LoneSend) -> SendBatch:
        """The message as a batch, which has the turn of its queue and the space from now on."""
        with self._context.lock:
            lone.begun = lone.allocated = False
        return lone.batch()

    def _settle(self, flight: Flight, result: AppendResult) -> None:
        """A caller's message is stored and not as safe as asked for: the thread goes on with it."""
        attempt = SendAttempt([flight])
        with self._context.lock:
            verdict = self.state.answered(attempt, [result], self._now_s())
            self.wake_locked()
        self._carry_out(verdict)

    def _hand_to_thread(self, flight: Flight, error: RaymqError) -> None:
        with self._context.lock:
            self._failed_at_once.append((SendAttempt([flight]), error))
            self.wake_locked()

    # The thread

    def _run(self) -> None:
        _in_sender.active = True
        while self._await_work():
            try:
                self._work()
            except Exception as error:  # a bug here must fail the futures, not leave them waiting
                logger.exception("sending to %s failed", self.broker_name)
                self._abandon(self._taken, error)
            self._taken = []

    def _await_work(self) -> bool:
        """Wait until there is something to do and the pause is over. False at the end of the sender's life."""
        with self._context.lock:
            while True:
                state = self.state
                if not (state.has_work or self._failed_at_once):
                    if self._closed and state.empty:
                        return False
                    self._idle = True
                    self._wake.wait()
                    self._idle = False
                elif (pause_s := self._resume_s - self._now_s()) > 0:
                    self._wake.wait(pause_s)
                else:
                    return True

    def _work(self) -> None:
        """Make one attempt, or handle the failure of one that a caller made."""
        with self._context.lock:
            attempt, error = (
                self._failed_at_once.popleft() if self._failed_at_once else (self.state.next_attempt(), None)
            )
            if attempt is not None:
                self._taken = [batch for flight in attempt.flights for batch in flight.batches]
        if attempt is None:
            self._send_waiting()
        elif error is not None:
            self._fail(attempt, error)
        else:
            self._repeat(attempt)

    def _send_waiting(self) -> None:
        """Take messages that wait, and send them as one request."""
        with self._context.lock:
            oldest = self.state.oldest()
        if oldest is None:
            return
        try:
            storage, description = self._connect(oldest.topic, oldest.deadline_s)
        except RaymqError as error:
            with self._context.lock:
                verdict = self.state.away(error, self._now_s())
            self._carry_out(verdict, error, oldest.topic)
            return
        with self._context.lock:
            taken, verdict = self.state.take(self._now_s())
            self._taken = [batch for _, batches in taken for batch in batches]
        self._carry_out(verdict)
        flights = []
        for sends, batches in taken:
            try:
                flights.append(Flight.of(sends, batches, self._encoded(sends, batches, description)))
            except RaymqError as error:
                self._not_encoded(sends, batches, error)
        if flights:
            self._attempt(SendAttempt(flights), storage, description)

    def _repeat(self, attempt: SendAttempt) -> None:
        """Send flights that were sent before, as far as their time is not up."""
        if attempt.again:
            with self._context.lock:
                verdict = self.state.settle_expired(attempt, self._now_s())
            self._carry_out(verdict)
            if not attempt.flights:
                return
        try:
            storage, description = self._connect(attempt.topic, attempt.deadline_s)
        except RaymqError as error:
            self._fail(attempt, error)
        else:
            self._attempt(attempt, storage, description)

    def _attempt(self, attempt: SendAttempt, storage: StorageClient, description: StorageDescription) -> None:
        try:
            batches = [flight.encoded for flight in attempt.flights]
            results = self._append(batches, storage, self._attempt_s(attempt.deadline_s))
        except RaymqError as error:
            self._fail(attempt, error)
            return
        self._pauses.reset()
        for flight in attempt.flights:
            flight.store_host = description.store_host
        with self._context.lock:
            verdict = self.state.answered(attempt, results, self._now_s())
        self._carry_out(verdict)

    def _fail(self, attempt: SendAttempt, error: RaymqError) -> None:
        topic = attempt.topic
        with self._context.lock:
            verdict = self.state.failed(attempt, error, self._now_s())
            self._share_locked(verdict)
        self._carry_out(verdict, error, topic)

    def _not_encoded(self, sends: QueueSends, batches: list[SendBatch], error: RaymqError) -> None:
        with self._context.lock:
            verdict = self.state.not_encoded(sends, batches, error)
            self._share_locked(verdict)
            self.wake_locked()
        self._carry_out(verdict)

    def _abandon(self, batches: list[SendBatch], error: BaseException) -> None:
        with self._context.lock:
            verdict = self.state.abandon(batches, error)
            self.wake_locked()
        self._carry_out(verdict)

    # Calls

    def _connect(self, topic: str, deadline_s: float) -> Target:
        """The storage actor that leads the group, and its description. When this fails, nothing was sent."""
        storage = self._master.locate(topic)
        description = storage.describe(self._attempt_s(deadline_s))
        self.target = storage, description
        return storage, description

    def _now_s(self) -> float:
        """The time; infinity while giving up, so that every deadline has passed."""
        return math.inf if self._giving_up else self._context.clock()

    def _attempt_s(self, deadline_s: float) -> float:
        return min(self._context.attempt_timeout_s, max(deadline_s - self._now_s(), 0.1))

    def _encoded(self, sends: QueueSends, batches: list[SendBatch], description: StorageDescription) -> EncodedBatch:
        limit = description.max_message_size_bytes
        if limit < self._context.max_message_size_bytes:
            for batch in batches:
                self._context.encoder.check_sizes(batch.messages, limit)
        if not description.light_queues:
            for batch in batches:
                if not (batch.plain or isinstance(batch.messages, MessageColumns)):
                    self._context.encoder.check_light_queues(batch.messages)
        return self._context.encoder.encode(sends, batches)

    def _append(self, batches: list[EncodedBatch], storage: StorageClient, attempt_s: float) -> list[AppendResult]:
        started_s = self._context.clock()
        results = storage.append([_shipped(batch) for batch in batches], attempt_s)
        now_s = self._context.clock()
        self._context.faults.answered(self.broker_name, (now_s - started_s) * 1000, now_s)
        return results

    # Consequences

    def _carry_out(self, verdict: SendDecision, error: RaymqError | None = None, topic: str = "") -> None:
        """Carry out a verdict, which on a failure was about `error`."""
        if error is not None:
            error.__traceback__ = None  # it leads to the frames that hold what was sent
        if verdict.broker_failed and error is not None:
            with self._context.lock:
                self.target, self.state.last_failure = None, error
            self._context.faults.failed(self.broker_name, self._context.clock())
            self._master.attempt_failed(topic)
        staying = [batch for batch in verdict.leaving if not self._moved(batch)]
        if staying and error is not None:
            with self._context.lock:
                verdict.ended += self.state.stay(staying, error).ended
        for flight, result in verdict.acknowledged:
            verdict.ended += flight.acknowledge(result)
        for batch, outcome in verdict.ended:
            self._count_sent(batch, outcome)
            batch.end(outcome)
        if verdict.ended:
            buffer, futures = self._context.buffer, []
            with self._context.lock:
                for batch, _ in verdict.ended:
                    place = batch.topic if batch.movable else batch.queue
                    if self._context.open_batches.get(place) is batch:
                        del self._context.open_batches[place]
                    futures += buffer.deallocate_locked(batch.cost_bytes, len(batch.messages), batch.generation)
            end_all(futures)
        if verdict.pause:
            self._pause(error)

    def _count_sent(self, batch: SendBatch, outcome: Outcome) -> None:
        """Count the messages of a batch that ends now, and trace them: from when the first of them was handed over."""
        took_ms = (self._context.clock() - batch.handed_over_s) * 1000
        topic = self._context.encoder.stored_topic(batch.topic)
        CLIENT_FIGURES.sent(topic, took_ms, len(batch.messages), ok=isinstance(outcome, Acknowledged))
        if isinstance(outcome, Acknowledged) and self._context.trace is not None:
            self._context.trace.sent(topic, batch.messages, outcome.results, took_ms)

    def _moved(self, batch: SendBatch) -> bool:
        """True if another broker's sender has the batch now."""
        try:
            return self._context.move(batch, self.broker_name)
        except Exception:
            logger.exception("a message for %s was not given to another broker", batch.queue)
            return False

    def _share_locked(self, verdict: SendDecision) -> None:
        for generation in verdict.divided:
            self._context.buffer.share_locked(generation)

    def _pause(self, error: RaymqError | None) -> None:
        """Have the thread wait before the next attempt, at least as long as a busy store asks for."""
        pause_s = self._pauses.next()
        if isinstance(error, SystemBusyError | QuotaExceededError):
            pause_s = max(pause_s, error.retry_after_s or 0.0)
        with self._context.lock:
            self._resume_s = self._context.clock() + pause_s


def _shipped(batch: EncodedBatch) -> EncodedBatch:
    """The batch as it goes to the store, which reads ids from the records; a range of ids is as short as none."""
    return batch if isinstance(batch.message_ids, IdRange) else batch.without_ids()
