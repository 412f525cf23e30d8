"""SendState: decides which messages a sender sends next, and what an answer or a failure means for messages.

This module has no clock, no thread and no remote call. The current time is an argument, `now_s`, which is infinity if
the producer abandons its messages. The sender (raymq.client.producer.senders.sender) calls these methods while it holds
the producer's lock.

    put ──► QUEUED ──take──► IN_FLIGHT ──answered──► ENDED (acknowledged)
              ▲  │               │  │ └─stored, not durable enough─► STORED ─(the same bytes again)─► ENDED
              │  │ deadline      │  └─no answer──► UNKNOWN ─(the same bytes again)─► ENDED
              │  └──► ENDED      │
              └─────refused──────┘

A *flight* is the messages of one queue that are encoded together. A queue has one flight at a time, so its messages
keep their order. An *attempt* is one request with the flights of several queues. SendQueues stores the queues and the
attempts. raymq.client.producer.senders.retry_policy decides if an error is a refusal, or leaves the outcome unknown.
TRANSITIONS lists the stage that follows from each stage and event.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Final

from msgspec import Struct

from raymq.client.producer.results import Outcome
from raymq.client.producer.senders import send_batch
from raymq.client.producer.senders.retry_policy import another_broker_helps, given_up, may_be_stored
from raymq.client.producer.senders.send_batch import SEALED, Flight, QueueSends, SendBatch, Stage
from raymq.client.producer.senders.send_queues import SendAttempt, SendQueues
from raymq.common.errors import (
    ClientStateError,
    MessageIllegalError,
    RaymqError,
    SendUnknownError,
    ServiceNotAvailableError,
    TopicFullError,
)
from raymq.common.message import SendStatus
from raymq.common.protocol.store import AppendResult

FULL_PAUSE_MIN_S: Final = 0.05
"""Minimum rest, in seconds, of a queue whose topic was full."""


class Event(Enum):
    """An event that changes the stage of enqueued messages."""

    TAKEN = "the messages are taken for a request"
    ANSWERED = "the messages are stored as durably as was requested"
    NOT_SAFE = "the messages are stored, but less durably than was requested"
    NO_ANSWER = "the attempt may have stored the messages"
    REFUSED = "the attempt stored nothing, and a later attempt may succeed"
    REFUSED_FOR_GOOD = "the attempt stored nothing, and each later attempt would fail, too"
    TIME_UP = "the deadline has passed"


TRANSITIONS: Final[Mapping[tuple[Stage, Event], Stage]] = {
    (Stage.QUEUED, Event.TAKEN): Stage.IN_FLIGHT,
    # a message that the store refused waits to be sent to the same broker again, or moves to another broker
    (Stage.QUEUED, Event.REFUSED): Stage.QUEUED,
    (Stage.QUEUED, Event.REFUSED_FOR_GOOD): Stage.ENDED,
    # a queued message whose deadline has passed fails, and is certainly not stored
    (Stage.QUEUED, Event.TIME_UP): Stage.ENDED,
    (Stage.IN_FLIGHT, Event.ANSWERED): Stage.ENDED,
    (Stage.IN_FLIGHT, Event.NOT_SAFE): Stage.STORED,
    (Stage.IN_FLIGHT, Event.NO_ANSWER): Stage.UNKNOWN,
    (Stage.IN_FLIGHT, Event.REFUSED): Stage.QUEUED,
    (Stage.IN_FLIGHT, Event.REFUSED_FOR_GOOD): Stage.ENDED,
    (Stage.UNKNOWN, Event.ANSWERED): Stage.ENDED,
    (Stage.UNKNOWN, Event.NOT_SAFE): Stage.STORED,
    (Stage.UNKNOWN, Event.NO_ANSWER): Stage.UNKNOWN,
    # The outcome stays unknown although the store refused this attempt, because an earlier attempt may have stored the
    # messages.
    (Stage.UNKNOWN, Event.REFUSED): Stage.UNKNOWN,
    # The send ends with SendUnknownError, because an earlier attempt may have stored the messages.
    (Stage.UNKNOWN, Event.REFUSED_FOR_GOOD): Stage.ENDED,
    # The send ends with SendUnknownError: until the deadline, no answer of the store has shown whether the messages are
    # stored.
    (Stage.UNKNOWN, Event.TIME_UP): Stage.ENDED,
    (Stage.STORED, Event.ANSWERED): Stage.ENDED,
    (Stage.STORED, Event.NOT_SAFE): Stage.STORED,
    (Stage.STORED, Event.NO_ANSWER): Stage.STORED,
    (Stage.STORED, Event.REFUSED): Stage.STORED,
    # A repeated send was refused for good, but its messages are already stored. So the send succeeds at once, with the
    # status that the store returned last.
    (Stage.STORED, Event.REFUSED_FOR_GOOD): Stage.ENDED,
    # If the messages of a send are stored at its deadline, the send succeeds, with the status that the store returned
    # last.
    (Stage.STORED, Event.TIME_UP): Stage.ENDED,
}
"""The next stage of messages, for each possible pair of current stage and event."""


class SendDecision(Struct, eq=False):
    """The actions that a sender must carry out after an event, such as an answer or a failure.

    `ended`: batches with their outcomes. `leaving`: batches to move to other brokers. If no other broker can accept
    such a batch, the sender calls `SendState.take_back` with it. `acknowledged`: Flights with the store's answers.
    `divided`: one entry for each batch that was divided in two. Each entry is the generation of the batch's buffer-pool
    space, which both halves now hold. `broker_failed`: the broker does not serve at the moment. `pause`: wait before
    the next attempt.
    """

    ended: list[tuple[SendBatch, Outcome]] = []
    leaving: list[SendBatch] = []
    acknowledged: list[tuple[Flight, AppendResult]] = []
    divided: list[int] = []
    broker_failed: bool = False
    pause: bool = False


class SendState(SendQueues):
    """The unfinished messages of one producer for one broker group, and the decisions about these messages.

    `settle_status`: send stored messages again until their status is SEND_OK (retry_when_not_store_ok). `chance`
    returns random numbers from 0 to 1. They lengthen the rests of producers that wait for room in a full topic, so that
    the producers do not all try again at the same time.
    """

    def __init__(self, broker_name: str, *, settle_status: bool, chance: Callable[[], float] = random.random) -> None:
        super().__init__()
        self._settle_status, self._chance = settle_status, chance
        self.last_failure: RaymqError = ServiceNotAvailableError(
            f"broker group {broker_name!r} accepted no messages in time"
        )

    # Methods that select the batches of the next attempt, and take them out of the queues

    def take(self, now_s: float) -> tuple[list[tuple[QueueSends, list[SendBatch]]], SendDecision]:
        """Take the batches of the next request out of all queues, up to the request's limits of bytes and messages.

        The taken batches accept no further messages, and their queues become busy. Batches whose deadline has passed
        fail. All batches of a request have the same `wait_store_msg_ok`, so no message waits for the disk without need.
        """
        decision = SendDecision()
        for sends in list(self._waiting):
            self._end_expired_waiting(sends, now_s, sends.full or self.last_failure, decision)
        taken: list[tuple[QueueSends, list[SendBatch]]] = []
        oldest = self.oldest()
        left_bytes = send_batch.REQUEST_MAX_BYTES
        of_full: dict[str, int] = {}
        for sends in list(self._waiting) if oldest is not None else ():
            batches: list[SendBatch] = []
            count = 0
            while sends.waiting:
                batch = sends.waiting[0]
                # The first batch of a request is taken even if it is larger than the request's limit. Otherwise such a
                # batch would never be sent.
                if left_bytes < batch.cost_bytes and (taken or batches):
                    break
                if oldest is None or batch.waits is not oldest.waits:
                    break
                if batches and (batch.alone or batches[0].alone):
                    break
                if batches and count + len(batch.messages) > send_batch.BATCH_MAX_MESSAGES:
                    break
                if sends.most < send_batch.BATCH_MAX_MESSAGES:
                    # The topic was full: one request has no more messages for it, over all queues, than fit soon.
                    wanted = of_full.get(batch.topic, 0) + len(batch.messages)
                    if wanted > sends.most and batch.topic in of_full:
                        break
                    of_full[batch.topic] = wanted
                sends.waiting.popleft()
                batch.limit_bytes = SEALED
                batch.stage = TRANSITIONS[batch.stage, Event.TAKEN]
                left_bytes -= batch.cost_bytes
                count += len(batch.messages)
                batches.append(batch)
            if batches:
                taken.append((sends, batches))
        for sends, _ in taken:
            self.begin(sends)
        return taken, decision

    def not_encoded(self, sends: QueueSends, batches: Sequence[SendBatch], error: RaymqError) -> SendDecision:
        """Return the sender's next actions after batches could not be encoded. The illegal message fails with `error`;
        the other messages are sent."""
        return self._isolate_illegal(sends, batches, error)

    def take_back(self, batches: Sequence[SendBatch], error: RaymqError) -> SendDecision:
        """Put batches back into the queues of messages to send, because no other broker can accept them. If `error` is
        not retryable, the batches fail instead."""
        decision = SendDecision()
        self._wait_again(batches, error, decision)
        return decision

    def put_back(self, batches: Sequence[SendBatch]) -> None:
        """Put batches back into their queues that were taken for an attempt and certainly not sent. Batches with an
        outcome are left out."""
        taken = [batch for batch in batches if batch.stage is Stage.IN_FLIGHT]
        for sends in {batch.sends for batch in taken}:
            self.release(sends)
        self._put_first(taken)

    # Methods that return the sender's next actions after the store answered an attempt, or the attempt failed

    def answered(self, attempt: SendAttempt, results: Sequence[AppendResult], now_s: float) -> SendDecision:
        """Return the sender's next actions after the store answered an attempt. If `settle_status` is set, a Flight
        (encoded batches) that is not yet as durable as requested is sent again, until its deadline. All other flights
        are acknowledged."""
        decision = SendDecision()
        for flight, result in zip(attempt.flights, results, strict=True):
            flight.stored = result
            flight.sends.full = None
            if flight.sends.most < send_batch.BATCH_MAX_MESSAGES:
                flight.sends.most = min(2 * flight.sends.most, send_batch.BATCH_MAX_MESSAGES)
            if self._settle_status and result.status is not SendStatus.SEND_OK and now_s < flight.deadline_s:
                self._follow(flight, Event.NOT_SAFE)
                self._attempts.append(SendAttempt([flight]))
                decision.pause = True
            else:
                self._acknowledge(flight, result, Event.ANSWERED, decision)
        return decision

    def failed(self, attempt: SendAttempt, error: RaymqError, now_s: float) -> SendDecision:
        """Return the sender's next actions after an attempt to send messages failed, or could not connect to the
        broker."""
        decision = SendDecision()
        stage = attempt.flights[0].stage
        if stage is Stage.STORED:
            self._not_settled(attempt, error, now_s, decision)
        elif stage is Stage.UNKNOWN:
            self._still_unknown(attempt, error, now_s, decision)
        elif may_be_stored(error):
            self._repeat(attempt, error, Event.NO_ANSWER, now_s, decision)
        else:
            self._refused(attempt, error, now_s, decision)
        return decision

    def unreachable(self, error: RaymqError, now_s: float) -> SendDecision:
        """Handle the sender's failure to reach the broker: no message was sent. Returns the next actions of the
        sender."""
        decision = SendDecision(broker_failed=True, pause=True)
        self._waiting_failed(error, now_s, decision)
        return decision

    def settle_expired(self, attempt: SendAttempt, now_s: float) -> SendDecision:
        """End the messages of a failed attempt that have reached their deadlines. The sender calls this method before
        it sends the other messages of the attempt again."""
        decision = SendDecision()
        if attempt.flights[0].stage is Stage.STORED:
            for flight in list(attempt.flights):
                if now_s >= flight.deadline_s and flight.stored is not None:
                    attempt.flights.remove(flight)
                    self._acknowledge(flight, flight.stored, Event.TIME_UP, decision)
        elif attempt.error is not None:
            self._end_unknown_expired(attempt, attempt.error, now_s, decision)
        return decision

    def abandon(self, batches: Sequence[SendBatch], error: BaseException, *, sent: bool) -> SendDecision:
        """After a bug, fail the given batches, except batches that still wait or already have an outcome. The waiting
        batches are sent later.

        `sent`: True if the attempt may have reached the store. A batch that may be stored fails with SendUnknownError,
        and any other batch with `error`.
        """
        decision = SendDecision()
        ending = [batch for batch in batches if batch.stage not in (Stage.ENDED, Stage.QUEUED)]
        queues = {batch.sends for batch in ending}
        for attempt in self._attempts:
            attempt.flights = [flight for flight in attempt.flights if flight.sends not in queues]
        self._attempts = deque(attempt for attempt in self._attempts if attempt.flights)
        for batch in ending:
            may_be_sent = sent or batch.stage is not Stage.IN_FLIGHT
            decision.ended.append((batch, unknown_after(batch, error) if may_be_sent else error))
        for sends in queues:
            self.release(sends)
        return decision

    def _refused(self, attempt: SendAttempt, error: RaymqError, now_s: float, decision: SendDecision) -> None:
        """Add to `decision` the sender's next actions after the store refused an attempt. No message of the attempt is
        stored, because a store accepts or refuses a request as a whole."""
        if isinstance(error, TopicFullError):
            self._full(attempt, error, now_s, decision)
        elif another_broker_helps(error):
            decision.broker_failed = decision.pause = True
            for flight in reversed(attempt.flights):
                self._requeue(flight, Event.REFUSED)
                batches = self._end_expired(flight.keep_ids(), now_s, error, decision)
                self._leave_or_wait(batches, error, decision)
        elif len(attempt.flights) > 1:
            self._attempts.extendleft(SendAttempt([flight]) for flight in reversed(attempt.flights))
        elif isinstance(error, MessageIllegalError):
            [flight] = attempt.flights
            flight.keep_ids()
            of_the_illegal = self._isolate_illegal(flight.sends, flight.batches, error)
            decision.ended += of_the_illegal.ended
            decision.divided += of_the_illegal.divided
        else:
            [flight] = attempt.flights
            self._finish(flight, Event.REFUSED_FOR_GOOD)
            decision.ended += [(batch, error) for batch in flight.batches]

    def _full(self, attempt: SendAttempt, error: TopicFullError, now_s: float, decision: SendDecision) -> None:
        """Handle an attempt that the store refused because a bounded topic is full. Messages for other topics are sent
        again at once. The queues of the full topic rest, and later send their messages in parts that fit soon. If the
        topic's policy is to refuse, its messages fail."""
        pause_s = max(error.retry_after_s or 0.0, FULL_PAUSE_MIN_S) * (1.0 + self._chance() / 2)
        named = any(batch.topic == error.topic for flight in attempt.flights for batch in flight.batches)
        for flight in reversed(attempt.flights):
            self._requeue(flight, Event.REFUSED)
            batches = flight.keep_ids()
            # If no batch is for the topic of the error, each may be: nothing is sent again without a rest.
            full = [batch for batch in batches if batch.topic == error.topic or not named]
            if full and not error.waits:
                decision.ended += [(batch, error) for batch in full]
                self._put_first([batch for batch in batches if batch not in full])
                continue
            batches = self._end_expired(batches, now_s, error, decision)
            if not full:
                self._put_first(batches)
                continue
            flight.sends.full = error
            flight.sends.most = min(flight.sends.most, max(error.most, 1))
            batches = self._in_parts(batches, error.most, decision)
            self._leave_or_wait(batches, error, decision)
            self.rest(flight.sends, now_s + pause_s)

    def _in_parts(self, batches: Sequence[SendBatch], most: int, decision: SendDecision) -> list[SendBatch]:
        """Divide batches into batches of at most `most` messages. Batches that must not be divided stay whole."""
        parts = list(reversed(batches))
        done: list[SendBatch] = []
        while parts:
            batch = parts.pop()
            if len(batch.messages) <= max(most, 1) or batch.numbered or batch.inner:
                done.append(batch)
                continue
            head, tail = batch.divide(len(batch.messages) // 2)
            batch.stage = Stage.ENDED
            decision.divided.append(batch.generation)
            parts += [tail, head]
        return done

    def _isolate_illegal(self, sends: QueueSends, batches: Sequence[SendBatch], error: RaymqError) -> SendDecision:
        """Divide refused batches until the illegal message is alone and fails with `error`. The other messages wait
        again, and are sent in smaller parts."""
        decision = SendDecision()
        self.release(sends)
        if batches[0].numbered:
            decision.ended += [(batch, error) for batch in batches]
            return decision
        if len(batches) == 1 and len(batches[0].messages) == 1:
            decision.ended.append((batches[0], error))
            return decision
        parts: list[SendBatch] = []
        for batch in batches:
            if len(batches) == 1:
                parts += batch.divide(len(batch.messages) // 2)
                # from now on, the two halves have the messages
                batch.stage = Stage.ENDED
                decision.divided.append(batch.generation)
            else:
                batch.alone = True
                parts.append(batch)
        self._put_first(parts)
        return decision

    def _repeat(
        self, attempt: SendAttempt, error: RaymqError, event: Event, now_s: float, decision: SendDecision
    ) -> None:
        """After a failed attempt, schedule another attempt with the same bytes. Messages that still wait to be sent,
        and that need no order, move to other brokers."""
        for flight in attempt.flights:
            self._follow(flight, event)
        attempt.error = error
        self._end_unknown_expired(attempt, error, now_s, decision)
        if attempt.flights:
            decision.broker_failed = decision.pause = True
            self._waiting_failed(error, now_s, decision, wait=True)
            self._attempts.appendleft(attempt)

    def _still_unknown(self, attempt: SendAttempt, error: RaymqError, now_s: float, decision: SendDecision) -> None:
        if error.retryable or may_be_stored(error):
            event = Event.NO_ANSWER if may_be_stored(error) else Event.REFUSED
            self._repeat(attempt, error, event, now_s, decision)
        elif len(attempt.flights) > 1:
            self._attempts.extendleft(SendAttempt([flight], error) for flight in reversed(attempt.flights))
            decision.pause = True
        else:
            [flight] = attempt.flights
            self._end_unknown(flight, flight.batches, error, now_s, decision)
            self._finish(flight, Event.REFUSED_FOR_GOOD)

    def _not_settled(self, attempt: SendAttempt, error: RaymqError, now_s: float, decision: SendDecision) -> None:
        [flight] = attempt.flights
        decision.broker_failed = True
        assert flight.stored is not None
        if error.retryable and now_s < flight.deadline_s:
            self._follow(flight, Event.NO_ANSWER if may_be_stored(error) else Event.REFUSED)
            self._attempts.appendleft(attempt)
            decision.pause = True
        else:
            event = Event.TIME_UP if error.retryable else Event.REFUSED_FOR_GOOD
            self._acknowledge(flight, flight.stored, event, decision)

    # Methods for messages that are certainly not stored, called after the broker failed

    def _waiting_failed(
        self, error: RaymqError, now_s: float, decision: SendDecision, *, wait: bool | None = None
    ) -> None:
        """Handle the failure of a broker for messages that wait. Each message fails if its deadline has passed, moves
        to another broker, or waits again. `wait`: True if the messages may wait again; by default, True if `error` is
        retryable."""
        for sends in self._queues.values():
            if sends.waiting:
                batches = self._end_expired(sends.waiting, now_s, error, decision)
                sends.waiting.clear()
                self._waiting.pop(sends, None)
                self._leave_or_wait(batches, error, decision, wait=wait)

    def _leave_or_wait(
        self, batches: Sequence[SendBatch], error: RaymqError, decision: SendDecision, *, wait: bool | None = None
    ) -> None:
        leaving = [batch for batch in batches if batch.movable and another_broker_helps(error)]
        for batch in leaving:
            batch.limit_bytes = SEALED
        decision.leaving += leaving
        self._wait_again([batch for batch in batches if batch not in leaving], error, decision, wait=wait)

    def _wait_again(
        self, batches: Sequence[SendBatch], error: RaymqError, decision: SendDecision, *, wait: bool | None = None
    ) -> None:
        if error.retryable if wait is None else wait:
            self._put_first(batches)
        else:
            decision.ended += [(batch, error) for batch in batches]

    def _end_expired_waiting(self, sends: QueueSends, now_s: float, error: RaymqError, decision: SendDecision) -> None:
        if sends.failure is not None:
            decision.ended += [(batch, sends.failure) for batch in sends.waiting]
            sends.waiting.clear()
            self._waiting.pop(sends, None)
            return
        batches = self._end_expired(sends.waiting, now_s, error, decision)
        if len(batches) < len(sends.waiting):
            sends.waiting = deque(batches)
            if not batches:
                self._waiting.pop(sends, None)

    def _end_expired(
        self, batches: Sequence[SendBatch], now_s: float, error: RaymqError, decision: SendDecision
    ) -> list[SendBatch]:
        """Fail the batches whose deadline has passed, with an error for messages that are not stored. Returns the other
        batches.

        If the sequence numbers of the first expired batch come from the caller (`numbered`), all batches fail. Such a
        batch must not be stored without the batches before it.
        """
        late = [batch for batch in batches if batch.deadline_s <= now_s]
        if late and late[0].numbered:
            late = list(batches)
        if late:
            failure = given_up(error, max(batch.timeout_s for batch in late))
            for batch in late:
                batch.limit_bytes = SEALED
            decision.ended += [(batch, failure) for batch in late]
        return [batch for batch in batches if batch not in late] if late else list(batches)

    # Methods that change the stage of a Flight (batches that are encoded and sent together)

    def _follow(self, flight: Flight, event: Event) -> None:
        flight.stage = TRANSITIONS[flight.stage, event]
        for batch in flight.batches:
            if batch.stage is not Stage.ENDED:
                batch.stage = flight.stage

    def _requeue(self, flight: Flight, event: Event) -> None:
        """Set the stage of a refused Flight (batches that are encoded together) and of its batches, and free their
        queue. The caller decides whether the batches wait again or fail."""
        self._follow(flight, event)
        self.release(flight.sends)

    def _finish(self, flight: Flight, event: Event) -> None:
        flight.stage = TRANSITIONS[flight.stage, event]
        self.release(flight.sends)

    def _acknowledge(self, flight: Flight, result: AppendResult, event: Event, decision: SendDecision) -> None:
        self._finish(flight, event)
        decision.acknowledged.append((flight, result))

    def _end_unknown_expired(
        self, attempt: SendAttempt, error: RaymqError, now_s: float, decision: SendDecision
    ) -> None:
        """Fail the messages of an attempt that have reached their deadlines, with an unknown outcome. If a Flight
        (encoded batches) has no other messages, it is removed from the attempt."""
        for flight in [flight for flight in attempt.flights if flight.deadline_s <= now_s]:
            late = [batch for batch in flight.batches if batch.deadline_s <= now_s]
            self._end_unknown(flight, late, error, now_s, decision)
            left = [batch.deadline_s for batch in flight.batches if batch.stage is not Stage.ENDED]
            if left:
                flight.deadline_s = min(left)
            else:
                attempt.flights.remove(flight)
                self._finish(flight, Event.TIME_UP)

    def _end_unknown(
        self, flight: Flight, batches: Sequence[SendBatch], error: RaymqError, now_s: float, decision: SendDecision
    ) -> None:
        ending = [batch for batch in batches if batch.stage is not Stage.ENDED]
        if ending:
            count = sum(len(batch.messages) for batch in ending)
            oldest = max(ending, key=lambda batch: batch.timeout_s - max(batch.deadline_s - now_s, 0.0))
            waited_s = oldest.timeout_s - max(oldest.deadline_s - now_s, 0.0)
            is_over = now_s >= oldest.deadline_s
            unknown = SendUnknownError(str(flight.sends.queue), count, max(waited_s, 0.0), str(error), is_over)
            for batch in ending:
                batch.stage = Stage.ENDED
            decision.ended += [(batch, unknown) for batch in ending]


def unknown_after(batch: SendBatch, error: BaseException) -> SendUnknownError:
    """Return the error of a batch that may be stored. `error`: the bug that ended the batch's send."""
    return SendUnknownError(str(batch.queue), len(batch.messages), 0.0, repr(error), is_over=False)


def closed_error() -> ClientStateError:
    """Return the error of a send to a closed producer."""
    return ClientStateError("this producer is closed; create a new producer with client.producer(...)")
