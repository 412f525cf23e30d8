"""Sender: the thread and the remote calls that carry one producer's messages to one broker group.

While a request is in flight, further messages gather, and the next request takes them together. The thread takes the
batches out of their queues, encodes one batch per queue, and appends all of them in one call. If the queue is idle, a
message does not wait for the thread. Its caller encodes it, sends it and reads the answer (`send_at_once`,
`send_single`). If the caller's attempt fails, the thread sends the very same bytes again.

In Python 3.12, no thread can be started while the interpreter shuts down. A sender that is made then has no
thread. The callers that leave messages to it send the messages themselves before they return (ThreadlessSenders in
raymq.client.producer.senders.sender_context).

SendState (raymq.client.producer.senders.send_state) decides what an answer or a failure means. After each failure the
sender looks up the group's master in the route again, so after a failover it continues with the same sequences.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable

from raymq.client.producer.buffer_pool import end_all
from raymq.client.producer.completion import Completion
from raymq.client.producer.observers import OBSERVER_FAILED
from raymq.client.producer.results import Acknowledged, Outcome, offset_message_id
from raymq.client.producer.senders.send_batch import Flight, QueueSends, SendBatch, SingleSend, Stage
from raymq.client.producer.senders.send_queues import SendAttempt
from raymq.client.producer.senders.send_state import SendDecision, SendState, closed_error, unknown_after
from raymq.client.producer.senders.sender_context import (
    SenderContext,
    Target,
    in_sender,
    mark_sender_thread,
)
from raymq.common.errors import QuotaExceededError, RaymqError, ServiceNotAvailableError, SystemBusyError
from raymq.common.message import SendResult, SendStatus
from raymq.common.parallel import aside, contained, start_daemon
from raymq.common.protocol.store import AppendResult
from raymq.records.format.encode import EncodedBatch
from raymq.records.format.message_id import IdRange
from raymq.records.kernels.message_columns import MessageColumns
from raymq.remoting.master_locator import MasterLocator
from raymq.remoting.storage_client import StorageClient, StorageDescription

logger = logging.getLogger(__name__)


class Sender:
    """Sends the messages of one producer to one broker group, in its own thread and in the threads of callers.

    The producer's lock guards `state` and `target`. Methods whose names end in `_locked` are called while that lock is
    held.
    """

    def __init__(self, broker_name: str, context: SenderContext) -> None:
        self.broker_name = broker_name
        self._context = context
        self._master = MasterLocator(broker_name, context.routes, context.storage)
        self._pauses = context.pauses()
        self.state = SendState(broker_name, settle_status=context.retry_when_not_store_ok)
        self.target: Target | None = None
        """The master of the broker group; None after a failure, until the thread has connected again."""
        self._failed_at_once: deque[tuple[SendAttempt, RaymqError]] = deque()
        self._wake = threading.Condition(context.lock)
        self._idle = False
        self._resume_s = -math.inf
        self._closed = self._giving_up = False
        self._taken: list[SendBatch] = []
        """Batches of the attempt that the sender's thread currently makes."""
        self._begun: SendAttempt | None = None
        """The attempt that may have reached the store, until its answer or its failure is processed."""
        self._limit_s = math.inf
        """Monotonic time until which a caller sends for a sender without a thread."""
        self._thread = start_daemon(self._run, name=f"producer-{broker_name}")
        """The sender's thread; None if the interpreter shut down when the sender was made."""
        if self._thread is None:
            context.threadless.senders.append(self)

    @property
    def closed(self) -> bool:
        """True if the sender is closed and refuses further messages."""
        return self._closed

    @property
    def alive(self) -> bool:
        """True while the sender's thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def put_locked(self, batch: SendBatch) -> None:
        """Append a batch to its queue, for the sender's thread. Raises ClientStateError if the sender is
        closed."""
        if self._closed:
            raise closed_error()
        self.state.put(batch)
        self.wake_locked()

    def wake_locked(self) -> None:
        """Wake the sender's thread if it is idle."""
        if self._idle:
            self._wake.notify()
            # Mark the sender's thread as awake only after `notify`. If a signal handler raises an exception inside
            # `notify`, the next call notifies the thread again.
            self._idle = False

    def close(self, *, give_up: bool) -> None:
        """Refuse further messages, and stop the sender's thread after all messages have an outcome.

        With `give_up`, the thread stops after the attempt in flight. Waits for the end of the thread for at most the
        time of one attempt.
        """
        with self._context.lock:
            self._closed = True
            self._giving_up |= give_up
            self._wake.notify_all()
        if self._thread is None:
            self.send_left(self._context.clock() + self._context.attempt_timeout_s, lambda: False)
        else:
            self._thread.join(self._context.attempt_timeout_s)

    # Methods that run in the thread of a caller, not in the sender's thread

    def begin_at_once_locked(self, batch: SendBatch) -> bool:
        """Return True if the caller must send the batch itself (`send_at_once`). If so, no other thread sends to the
        batch's queue until the caller has sent the batch."""
        state = self.state
        if self.target is None or self._closed or self._failed_at_once:
            return False
        if not (state.idle if batch.movable else state.may_overtake(batch.sends)):
            return False
        state.begin(batch.sends)
        batch.stage = Stage.IN_FLIGHT
        return True

    def require_target(self) -> Target:
        """Return the target of a send: the storage actor of the broker group's master. Call this method only after
        `begin_at_once_locked` has returned True, because then the master is known."""
        assert self.target is not None
        return self.target

    def send_at_once(self, batch: SendBatch, target: Target) -> None:
        """Send a batch for which `begin_at_once_locked` returned True, and read the answer.

        On return the batch has an outcome, or the sender's thread continues to send it. If a bug raises an exception
        before the batch is sent, the batch fails with it, and this method raises it. After a later bug the batch fails
        with SendUnknownError. A signal handler's exception is raised after the batch is in one of these states.
        """
        storage, description = target
        flight: Flight | None = None
        interrupt: BaseException | None = None
        try:
            flight = Flight.of(batch.sends, [batch], self._encoded(batch.sends, [batch], description))
            attempt_s = min(self._context.attempt_timeout_s, max(batch.timeout_s, 0.1))
            [result] = self._append([flight.encoded], storage, attempt_s)
            flight.store_host = description.store_host
            if self._context.retry_when_not_store_ok and result.status is not SendStatus.SEND_OK:
                self._settle(flight, result)
            else:
                [(ended, acknowledged)] = flight.acknowledge(result)
                interrupt = self._end(ended, acknowledged)
                self._end_at_once(batch.sends, batch.cost_bytes, len(batch.messages), batch.generation)
        except BaseException as error:
            self._caller_failed(batch, flight, error)
            if not isinstance(error, RaymqError) and (flight is None or not isinstance(error, Exception)):
                interrupt = error
        # The messages that waited for this send are other messages. Their failure must not change the outcome
        # of this batch.
        self._send_rest(batch)
        if interrupt is not None:
            raise interrupt

    def _caller_failed(self, batch: SendBatch, flight: Flight | None, error: BaseException) -> None:
        """Handle the failure of a batch that its caller sent. `flight`: the encoded batch, or None if the batch could
        not be encoded."""
        if batch.stage is not Stage.IN_FLIGHT:
            # the batch has its outcome, or the sender's thread already has to send the batch again
            return
        if isinstance(error, RaymqError):
            if flight is None:
                self._not_encoded(batch.sends, [batch], error)
            else:
                self._hand_to_thread(flight, error)
        elif flight is not None and not isinstance(error, Exception):
            # A signal handler interrupted the calling thread during its send. The store may have stored the batch, so
            # the sender's thread must send the batch again.
            self._hand_to_thread(flight, ServiceNotAvailableError(f"the send was interrupted ({error!r})"))
        else:
            if flight is not None:
                logger.error("sending to broker group %s failed", self.broker_name, exc_info=error)
            self._abandon([batch], error, sent=flight is not None)

    def _end_at_once(self, sends: QueueSends, cost_bytes: int, count: int, generation: int) -> None:
        """Record that the store has stored messages that the calling thread sent itself: release their queue for the
        next send, and free their buffer space."""
        with self._context.lock:
            self.state.release(sends)
            futures = self._context.buffer.deallocate_locked(cost_bytes, count, generation)
            if sends.waiting or self._closed:
                self.wake_locked()
        if futures:
            end_all(futures)

    def begin_single_locked(self, single: SingleSend) -> Target | None:
        """Return the master to which the caller must send the message itself (`send_single`).

        If a master is returned, no other thread sends to the message's queue until the caller has sent the message.
        Returns None if any message of the sender is in flight or waits.
        """
        target = self.target
        if target is None or self._closed or self._failed_at_once or not self.state.begin_single(single):
            return None
        return target

    def send_single(self, single: SingleSend, target: Target) -> SendResult | Completion:
        """Send a message for which `begin_single_locked` returned the master, and read the answer. This is a faster
        variant of `send_at_once`, for a message without special options.

        If the attempt succeeds, no batch is made. If the attempt fails, the message becomes a SendBatch, which the
        sender's thread continues to send, and this method returns the batch's Completion. If this method raises
        anything but a RaymqError, the caller must call `interrupted`.
        """
        context, sends, (storage, description) = self._context, single.sends, target
        try:
            if len(single.message.body) > description.max_message_size_bytes:
                context.encoder.check_size(single.message, description.max_message_size_bytes)
            if single.message.light_queues and not description.light_queues:
                context.encoder.check_light_queues([single.message])
            single.record = record = context.encoder.encode_one(sends, single.message)
            result = storage.append_one(record, min(context.attempt_timeout_s, max(single.timeout_s, 0.1)))
            now_s = context.clock()
            cost_ms = (now_s - single.now_s) * 1000
            context.faults.answered(self.broker_name, cost_ms, now_s)
        except RaymqError as error:
            return aside(self._single_failed, single, error)
        if result.status is not SendStatus.SEND_OK and context.retry_when_not_store_ok:
            return aside(self._single_not_safe, single, result, description)
        with context.lock:
            self.state.release_single(single)
            settles = context.buffer.deallocate_single_locked(single)
            if sends.waiting or self._closed:
                self.wake_locked()
        if settles:
            aside(context.buffer.settle)
        if self._thread is None:
            aside(self.send_left, single.now_s, lambda: True)
        offset = result.queue_offset if result.queue_offsets is None else result.queue_offsets[0]
        physical = result.physical_offset if result.physical_offsets is None else result.physical_offsets[0]
        offset_id = offset_message_id(description.store_host, physical)
        sent = SendResult(result.status, f"{record.stem}{record.counter:04X}", offset_id, sends.queue, offset)
        topic = context.encoder.stored_topic(single.message.topic)
        for observer in context.observers:
            try:
                observer.sent(topic, (single.message,), lambda: (sent,), cost_ms)
            except Exception:  # the message is stored, so its send must not fail
                logger.exception(OBSERVER_FAILED)
        return sent

    def interrupted(self, single: SingleSend, error: BaseException) -> Completion | None:
        """Release the queue and the buffer space that a single message holds. A signal handler or a bug raised `error`
        in the caller and interrupted the send. If the message may be stored already, the sender's thread completes the
        send, and this method returns the message's Completion."""
        completion: Completion | None = None
        if single.begun and single.record is not None:
            failure = ServiceNotAvailableError(f"the send was interrupted ({error!r})")
            completion = self._single_failed(single, failure)
        with self._context.lock:
            self.state.release_single(single)
            self._context.buffer.deallocate_single_locked(single)
            self.wake_locked()
        self._context.buffer.settle()
        self.send_left(single.now_s, lambda: True)
        return completion

    def _single_failed(self, single: SingleSend, error: RaymqError) -> Completion:
        """Convert a single message to a batch, which the sender's thread then sends. Called after the caller's thread
        has failed to send the message itself."""
        batch = self._as_batch(single)
        if single.record is None:
            self._not_encoded(batch.sends, [batch], error)
        else:
            self._hand_to_thread(Flight.of(batch.sends, [batch], single.record.batch()), error)
        self._send_rest(batch)
        return batch.completion

    def _single_not_safe(self, single: SingleSend, result: AppendResult, description: StorageDescription) -> Completion:
        """Convert a single message, which was stored less durably than requested, to a batch. The sender's thread sends
        this batch again."""
        assert single.record is not None
        batch = self._as_batch(single)
        flight = Flight.of(batch.sends, [batch], single.record.batch())
        flight.store_host = description.store_host
        self._settle(flight, result)
        self._send_rest(batch)
        return batch.completion

    def _as_batch(self, single: SingleSend) -> SendBatch:
        """Convert a single message to a batch, which takes over the message's queue and buffer space."""
        with self._context.lock:
            single.begun = single.allocated = False
        return single.batch()

    def _settle(self, flight: Flight, result: AppendResult) -> None:
        """Process the store's answer that the messages of `flight` are stored, but less durably than requested. The
        sender's thread sends these messages again."""
        attempt = SendAttempt([flight])
        with self._context.lock:
            decision = self.state.answered(attempt, [result], self._now_s())
            self.wake_locked()
        self._carry_out(decision)

    def _hand_to_thread(self, flight: Flight, error: RaymqError) -> None:
        with self._context.lock:
            self._failed_at_once.append((SendAttempt([flight]), error))
            self.wake_locked()

    def send_left(self, until_s: float, is_done: Callable[[], bool]) -> None:
        """Send the messages that wait for the sender's thread, if the sender has no thread. `until_s`, `is_done`: see
        `ThreadlessSenders.send`. Does nothing in a callback of a send: the thread that makes the callback sends them
        afterwards."""
        if self._thread is None and not in_sender():
            self._context.threadless.send(until_s, is_done)

    def _send_rest(self, batch: SendBatch) -> None:
        """Send the messages that wait for the sender's thread, after the calling thread has sent `batch` itself."""
        self.send_left(batch.deadline_s, lambda: batch.completion.done(batch.first))

    # The methods of the sender's thread. If the sender has no thread, `send_here` calls them in threads of callers.

    def _run(self) -> None:
        mark_sender_thread()
        while self._await_work(idles=True):
            try:
                self._work_safely()
                # a callback may have enqueued messages for a sender without a thread, or a message has moved there
                if self._context.threadless:
                    self._context.threadless.send(self._context.clock(), lambda: True)
            # No signal handler runs in this thread, so other code has raised SystemExit or KeyboardInterrupt. The
            # thread must not end, because other messages wait for it.
            except BaseException:
                logger.exception("sending for a broker group without a thread was interrupted")

    def has_work(self) -> bool:
        """Return True if the sender has an attempt to make."""
        with self._context.lock:
            return self.state.has_work or self.state.has_rests or bool(self._failed_at_once)

    def send_here(self, limit_s: float) -> None:
        """Make the sender's next attempt in the calling thread, if it has one to make. Waits no longer than until the
        monotonic time `limit_s`. Only ThreadlessSenders calls this method."""
        self._limit_s = limit_s
        if self._await_work(idles=False):
            self._work_safely()

    def _work_safely(self) -> None:
        try:
            self._work()
        except BaseException as error:
            if self._thread is None and not isinstance(error, Exception):
                # a signal handler interrupted a caller, which sends for a sender without a thread
                self._interrupted(error)
                raise
            # a bug in `_work` must fail the futures of the messages; otherwise the callers would wait forever
            self._abandon(self._taken, error, sent=self._begun is not None)
            logger.exception("sending to broker group %s failed", self.broker_name)
        finally:
            self._taken, self._begun = [], None

    def _interrupted(self, error: BaseException) -> None:
        """Keep the messages of an attempt that a signal handler interrupted with `error`, so that the next caller sends
        them."""
        with self._context.lock:
            # a message that joins an open batch is not sent by its caller
            self._context.open_batches.clear_locked()
            if self._begun is None:
                self.state.put_back(self._taken)
            else:
                failure = ServiceNotAvailableError(f"the send was interrupted ({error!r})")
                self._failed_at_once.appendleft((self._begun, failure))

    def _await_work(self, *, idles: bool) -> bool:
        """Wait until the sender has work and the pause after a failure is over. Returns False if the thread must stop.
        Without `idles`, also returns False if the sender has no work, or if the pause does not end in time."""
        with self._context.lock:
            while True:
                state = self.state
                rests_until_s = state.end_rests(self._now_s())
                if not (state.has_work or self._failed_at_once):
                    if rests_until_s is not None:
                        # Every message waits for room in a full topic.
                        left_s = self._limit_s - self._context.clock()
                        if left_s <= 0:
                            return False
                        self._idle = True
                        self._wake.wait(min(max(rests_until_s - self._now_s(), 0.0), left_s))
                        self._idle = False
                        continue
                    if not idles or (self._closed and state.empty):
                        return False
                    self._idle = True
                    self._wake.wait()
                    self._idle = False
                elif (pause_s := self._resume_s - self._now_s()) > 0:
                    left_s = self._limit_s - self._context.clock()
                    if left_s <= 0:
                        return False
                    self._wake.wait(min(pause_s, left_s))
                else:
                    return True

    def _work(self) -> None:
        """Make the sender's next attempt, or handle the failure of an attempt that a caller made."""
        with self._context.lock:
            attempt, error = (
                self._failed_at_once.popleft() if self._failed_at_once else (self.state.next_attempt(), None)
            )
            if attempt is not None:
                self._taken = [batch for flight in attempt.flights for batch in flight.batches]
        if attempt is None:
            self._send_waiting()
        elif error is not None:
            self._begun = attempt
            self._fail(attempt, error)
        else:
            self._repeat(attempt)

    def _send_waiting(self) -> None:
        """Take waiting messages of this sender's broker, and send them as one request."""
        with self._context.lock:
            oldest = self.state.oldest()
        if oldest is None:
            return
        try:
            storage, description = self._connect(oldest.topic, oldest.deadline_s)
        except RaymqError as error:
            with self._context.lock:
                decision = self.state.unreachable(error, self._now_s())
            self._carry_out(decision, error, oldest.topic)
            return
        with self._context.lock:
            taken, decision = self.state.take(self._now_s())
            self._taken = [batch for _, batches in taken for batch in batches]
        self._carry_out(decision)
        flights = []
        for sends, batches in taken:
            try:
                flights.append(Flight.of(sends, batches, self._encoded(sends, batches, description)))
            except RaymqError as error:
                self._not_encoded(sends, batches, error)
        if flights:
            self._attempt(SendAttempt(flights), storage, description)

    def _repeat(self, attempt: SendAttempt) -> None:
        """Send an attempt (a request to the store) again, without the messages whose deadlines have passed."""
        if attempt.again:
            with self._context.lock:
                decision = self.state.settle_expired(attempt, self._now_s())
            self._carry_out(decision)
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
            self._begun = attempt
            results = self._append(batches, storage, self._attempt_s(attempt.deadline_s))
        except RaymqError as error:
            self._fail(attempt, error)
            return
        self._pauses.reset()
        for flight in attempt.flights:
            flight.store_host = description.store_host
        with self._context.lock:
            decision = self.state.answered(attempt, results, self._now_s())
            self._begun = None
        self._carry_out(decision)

    def _fail(self, attempt: SendAttempt, error: RaymqError) -> None:
        topic = attempt.topic
        with self._context.lock:
            decision = self.state.failed(attempt, error, self._now_s())
            self._begun = None
            self._share_locked(decision)
        self._carry_out(decision, error, topic)

    def _not_encoded(self, sends: QueueSends, batches: list[SendBatch], error: RaymqError) -> None:
        with self._context.lock:
            decision = self.state.not_encoded(sends, batches, error)
            self._share_locked(decision)
            self.wake_locked()
        self._carry_out(decision)

    def _abandon(self, batches: list[SendBatch], error: BaseException, *, sent: bool) -> None:
        with self._context.lock:
            decision = self.state.abandon(batches, error, sent=sent)
            self.wake_locked()
        self._carry_out(decision)

    # Methods that make remote calls

    def _connect(self, topic: str, deadline_s: float) -> Target:
        """Look up the storage actor of the broker group's master, and its StorageDescription. If the lookup raises an
        exception, the attempt has sent nothing, so another attempt is safe."""
        storage = self._master.locate(topic)
        description = storage.describe(self._attempt_s(deadline_s))
        self.target = storage, description
        return storage, description

    def _now_s(self) -> float:
        """Return the monotonic time in seconds. Returns infinity while the sender abandons its messages, so that every
        deadline has passed."""
        return math.inf if self._giving_up else self._context.clock()

    def _attempt_s(self, deadline_s: float) -> float:
        return min(self._context.attempt_timeout_s, max(min(deadline_s, self._limit_s) - self._now_s(), 0.1))

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

    # Methods that carry out a decision of SendState

    def _carry_out(self, decision: SendDecision, error: RaymqError | None = None, topic: str = "") -> None:
        """Carry out a decision of SendState about this sender's batches. `error`: the failure that led to the decision;
        None if no failure led to it.

        If a signal handler raises an exception in a callback, this method raises the exception after the whole decision
        is carried out.
        """
        if error is not None:
            # Drop the traceback, because the sender stores this error. The traceback's frames would keep the messages
            # in memory.
            error.__traceback__ = None
        if decision.broker_failed and error is not None:
            with self._context.lock:
                self.target, self.state.last_failure = None, error
            self._context.faults.failed(self.broker_name, self._context.clock())
            self._master.attempt_failed(topic)
        staying = [batch for batch in decision.leaving if not self._moved(batch)]
        if staying and error is not None:
            with self._context.lock:
                decision.ended += self.state.take_back(staying, error).ended
        for flight, result in decision.acknowledged:
            try:
                decision.ended += flight.acknowledge(result)
            # The answer does not match the messages. The store answered all the same, so the messages may be stored.
            except ValueError as mismatch:
                logger.exception("the answer of broker group %s is wrong", self.broker_name)
                unended = [batch for batch in flight.batches if batch.stage is not Stage.ENDED]
                decision.ended += [(batch, unknown_after(batch, mismatch)) for batch in unended]
        interrupt: BaseException | None = None
        for batch, outcome in decision.ended:
            interrupt = self._end(batch, outcome) or interrupt
        if decision.ended:
            buffer, futures = self._context.buffer, []
            with self._context.lock:
                for batch, _ in decision.ended:
                    self._context.open_batches.close_locked(batch)
                    futures += buffer.deallocate_locked(batch.cost_bytes, len(batch.messages), batch.generation)
            end_all(futures)
        if decision.pause:
            self._pause(error)
        if interrupt is not None:
            raise interrupt

    def _end(self, batch: SendBatch, outcome: Outcome) -> BaseException | None:
        """Notify the observers of a batch, and set its outcome. Logs an exception of an observer. Returns the exception
        of a signal handler that ran in an observer or a callback of the program."""
        interrupt = contained(logger, OBSERVER_FAILED, self._observe, batch, outcome)
        return contained(logger, OBSERVER_FAILED, batch.end, outcome) or interrupt

    def _observe(self, batch: SendBatch, outcome: Outcome) -> None:
        """Notify the sender's observers of the outcome of a batch."""
        took_ms = (self._context.clock() - batch.handed_over_s) * 1000
        topic = self._context.encoder.stored_topic(batch.topic)
        for observer in self._context.observers:
            if isinstance(outcome, Acknowledged):
                observer.sent(topic, batch.messages, outcome.results, took_ms)
            else:
                observer.failed(topic, len(batch.messages), took_ms)

    def _moved(self, batch: SendBatch) -> bool:
        """Move a batch to the sender of another broker. Returns False if no other broker can accept the batch."""
        try:
            return self._context.move(batch, self.broker_name)
        except Exception:
            logger.exception("cannot send a message for queue %s to another broker", batch.queue)
            return False

    def _share_locked(self, decision: SendDecision) -> None:
        for generation in decision.divided:
            self._context.buffer.share_locked(generation)

    def _pause(self, error: RaymqError | None) -> None:
        """Delay the sending thread's next attempt after `error`. If the store is busy or the quota is used up, the
        delay is at least as long as the error requests."""
        pause_s = self._pauses.next()
        if isinstance(error, SystemBusyError | QuotaExceededError):
            pause_s = max(pause_s, error.retry_after_s or 0.0)
        with self._context.lock:
            self._resume_s = self._context.clock() + pause_s


def _shipped(batch: EncodedBatch) -> EncodedBatch:
    """Return the batch as it is sent to the store. A list of message ids is omitted, because the store reads the ids
    from the records. A range of ids (IdRange) is kept."""
    return batch if isinstance(batch.message_ids, IdRange) else batch.without_ids()
