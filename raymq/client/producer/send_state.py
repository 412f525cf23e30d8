"""The decisions of a sender: what goes next, and what an answer, or none, means for the messages concerned.

No clock, no thread, no calls: time comes in as `now_s`, infinity when the producer gives up what it has. The sender
(raymq.client.producer.sender) makes the calls, and calls these methods with the producer's lock held.

    put ──► QUEUED ──take──► IN_FLIGHT ──answered──► ENDED (acknowledged)
              ▲  │               │  │ └─answered, not as safe as asked─► STORED ─(the same bytes again)─► ENDED
              │  │ time is up    │  └─no answer──► UNKNOWN ─(the same bytes again)─► ENDED
              │  └──► ENDED      │
              └─────refused──────┘

A *flight* holds the messages of one queue that are encoded together; a queue has one at a time, so its messages keep
their order. An *attempt* is one request, with the flights of several queues. The rules by which an error is a refusal,
or leaves the outcome unknown, are in raymq.client.producer.retry_policy; TRANSITIONS says what follows from either.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Final, Protocol

from msgspec import Struct

from raymq.client.producer import send_batch
from raymq.client.producer.completion import Outcome
from raymq.client.producer.retry_policy import another_broker_helps, given_up, may_be_stored
from raymq.client.producer.send_batch import SEALED, Flight, QueueSends, SendBatch, Stage
from raymq.common.errors import (
    ClientStateError,
    MessageIllegalError,
    RaymqError,
    SendUnknownError,
    ServiceNotAvailableError,
)
from raymq.common.message import MessageQueue, SendStatus
from raymq.common.protocol.store import AppendResult


class Event(Enum):
    """The things that happen to messages on their way."""

    TAKEN = "they are taken for a request"
    ANSWERED = "they are stored as safely as was asked"
    NOT_SAFE = "they are stored, and not as safe as was asked"
    NO_ANSWER = "the attempt may have stored them"
    REFUSED = "the attempt stored nothing, and a later one may succeed"
    REFUSED_FOR_GOOD = "the attempt stored nothing, and no later one will"
    TIME_UP = "their time is up"


TRANSITIONS: Final[Mapping[tuple[Stage, Event], Stage]] = {
    (Stage.QUEUED, Event.TAKEN): Stage.IN_FLIGHT,
    (Stage.QUEUED, Event.REFUSED): Stage.QUEUED,  # here, or at another broker
    (Stage.QUEUED, Event.REFUSED_FOR_GOOD): Stage.ENDED,
    (Stage.QUEUED, Event.TIME_UP): Stage.ENDED,  # nothing of them is stored
    (Stage.IN_FLIGHT, Event.ANSWERED): Stage.ENDED,
    (Stage.IN_FLIGHT, Event.NOT_SAFE): Stage.STORED,
    (Stage.IN_FLIGHT, Event.NO_ANSWER): Stage.UNKNOWN,
    (Stage.IN_FLIGHT, Event.REFUSED): Stage.QUEUED,
    (Stage.IN_FLIGHT, Event.REFUSED_FOR_GOOD): Stage.ENDED,
    (Stage.UNKNOWN, Event.ANSWERED): Stage.ENDED,
    (Stage.UNKNOWN, Event.NOT_SAFE): Stage.STORED,
    (Stage.UNKNOWN, Event.NO_ANSWER): Stage.UNKNOWN,
    (Stage.UNKNOWN, Event.REFUSED): Stage.UNKNOWN,  # an earlier attempt may have stored them all the same
    (Stage.UNKNOWN, Event.REFUSED_FOR_GOOD): Stage.ENDED,  # as unknown
    (Stage.UNKNOWN, Event.TIME_UP): Stage.ENDED,  # as unknown
    (Stage.STORED, Event.ANSWERED): Stage.ENDED,
    (Stage.STORED, Event.NOT_SAFE): Stage.STORED,
    (Stage.STORED, Event.NO_ANSWER): Stage.STORED,
    (Stage.STORED, Event.REFUSED): Stage.STORED,
    (Stage.STORED, Event.REFUSED_FOR_GOOD): Stage.ENDED,  # acknowledged as they are
    (Stage.STORED, Event.TIME_UP): Stage.ENDED,  # acknowledged as they are
}
"""The stage that follows, for each stage and event that may come together."""


class LoneTurn(Protocol):
    """A message that its caller sends itself. `begun` while it has the turn of its queue."""

    sends: QueueSends
    begun: bool


class SendAttempt(Struct, eq=False):
    """Flights that go in one request. `error`: the failure because of which they are sent again, if they are."""

    flights: list[Flight]
    error: RaymqError | None = None

    @property
    def again(self) -> bool:
        """True if the flights were sent before: the same bytes go again."""
        return self.flights[0].stage is not Stage.IN_FLIGHT

    @property
    def topic(self) -> str:
        """The topic by whose route the master is found."""
        return self.flights[0].topic

    @property
    def deadline_s(self) -> float:
        """The earliest deadline of its messages."""
        return min([flight.deadline_s for flight in self.flights])


class SendDecision(Struct, eq=False):
    """The consequences of an event, for the shell to carry out.

    `ended`: batches and their ends. `leaving`: batches to be given to other brokers; those for which there is none come
    back by `SendState.stay`. `acknowledged`: flights with the store's answers. `divided`: generations of the buffer
    pool in which there is a holder more. `broker_failed`: the broker does not serve now. `pause`: no attempt before a
    while.
    """

    ended: list[tuple[SendBatch, Outcome]] = []
    leaving: list[SendBatch] = []
    acknowledged: list[tuple[Flight, AppendResult]] = []
    divided: list[int] = []
    broker_failed: bool = False
    pause: bool = False


class SendState:
    """The messages of one producer for one broker group that have no end yet.

    `settle_status`: repeat messages that are stored until their status is SEND_OK (retry_when_not_store_ok).
    """

    def __init__(self, broker_name: str, *, settle_status: bool) -> None:
        self._settle_status = settle_status
        self._queues: dict[MessageQueue, QueueSends] = {}
        self._waiting: dict[QueueSends, None] = {}
        """The queues with batches that wait and no flight under way; the next request begins with the first one."""
        self._attempts: deque[SendAttempt] = deque()
        """Attempts to be made before any other message is taken."""
        self._under_way = 0
        self.last_failure: RaymqError = ServiceNotAvailableError(f"{broker_name} took no messages in time")

    # What there is

    def sends(self, queue: MessageQueue) -> QueueSends:
        """The sends to one queue."""
        sends = self._queues.get(queue)
        if sends is None:
            sends = self._queues[queue] = QueueSends(queue)
        return sends

    @property
    def quiet(self) -> bool:
        """True if nothing waits or is under way."""
        return not (self._waiting or self._attempts or self._under_way)

    @property
    def empty(self) -> bool:
        """True if all messages have their end."""
        return self.quiet and not any(sends.waiting or sends.busy for sends in self._queues.values())

    @property
    def has_work(self) -> bool:
        """True if an attempt can be made."""
        return bool(self._waiting or self._attempts)

    def may_overtake(self, sends: QueueSends) -> bool:
        """True if a message for the queue may be sent by its own caller at once: nothing of the queue waits or is under
        way, and no attempt is to be repeated."""
        return not (sends.busy or sends.waiting or self._attempts)

    def next_attempt(self) -> SendAttempt | None:
        """The attempt to be made next; None if messages that wait come first (`oldest`), or there is nothing."""
        return self._attempts.popleft() if self._attempts else None

    def oldest(self) -> SendBatch | None:
        """The batch with which the next request begins; None if none waits."""
        sends = next(iter(self._waiting), None)
        return None if sends is None else sends.waiting[0]

    # On the way

    def put(self, batch: SendBatch) -> None:
        """Let a batch wait behind those of its queue; none joins the batch before it any more."""
        sends = batch.sends
        if sends.waiting:
            sends.waiting[-1].limit_bytes = SEALED
        sends.waiting.append(batch)
        if not sends.busy:
            self._waiting.setdefault(sends)

    def begin(self, sends: QueueSends) -> None:
        """A flight of the queue is about to be sent; other messages of the queue wait until it has its end."""
        sends.busy = True
        self._under_way += 1
        self._waiting.pop(sends, None)

    def begin_alone(self, lone: LoneTurn) -> bool:
        """`begin` if nothing waits or is under way; else False."""
        if self._waiting or self._attempts or self._under_way:
            return False
        lone.sends.busy = True
        self._under_way = 1
        lone.begun = True  # no signal handler comes between these three
        return True

    def release_alone(self, lone: LoneTurn) -> None:
        """`release` after `begin_alone`, once."""
        sends = lone.sends
        if lone.begun:
            sends.busy = False
            self._under_way -= 1
            lone.begun = False  # no signal handler comes between these three
        if sends.waiting and not sends.busy:
            self._waiting.setdefault(sends)

    def release(self, sends: QueueSends) -> None:
        """The queue has no flight any more."""
        if sends.busy:
            sends.busy = False
            self._under_way -= 1
            if sends.waiting:
                self._waiting.setdefault(sends)

    def take(self, now_s: float) -> tuple[list[tuple[QueueSends, list[SendBatch]]], SendDecision]:
        """Take the batches of the next request out of every queue in turn, up to the limits; they are sealed. Their
        queues are busy now. Batches whose time is up end.

        All have the same `wait_store_msg_ok`: messages that need not wait for the disk do not wait for those that must.
        """
        verdict = SendDecision()
        for sends in list(self._waiting):
            self._end_late(sends, now_s, self.last_failure, verdict)
        taken: list[tuple[QueueSends, list[SendBatch]]] = []
        oldest = self.oldest()
        left_bytes = send_batch.REQUEST_MAX_BYTES
        for sends in list(self._waiting) if oldest is not None else ():
            batches: list[SendBatch] = []
            count = 0
            while sends.waiting:
                batch = sends.waiting[0]
                # The first batch of a request always fits, whatever its size.
                if left_bytes < batch.cost_bytes and (taken or batches):
                    break
                if oldest is None or batch.waits is not oldest.waits:
                    break
                if batches and (batch.alone or batches[0].alone):
                    break
                if batches and count + len(batch.messages) > send_batch.BATCH_MAX_MESSAGES:
                    break
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
        return taken, verdict

    def not_encoded(self, sends: QueueSends, batches: Sequence[SendBatch], error: RaymqError) -> SendDecision:
        """Batches that were taken break a rule that only encoding checks: the message that breaks it ends with the
        error, the others are sent."""
        return self._only_the_illegal(sends, batches, error)

    def stay(self, batches: Sequence[SendBatch], error: RaymqError) -> SendDecision:
        """Batches that found no other broker wait here again, if the error will pass; else they end with it."""
        verdict = SendDecision()
        self._wait_again(batches, error, verdict)
        return verdict

    # Answers

    def answered(self, attempt: SendAttempt, results: Sequence[AppendResult], now_s: float) -> SendDecision:
        """The store has answered. Flights that are stored end, or are repeated until they are as safe as asked for."""
        verdict = SendDecision()
        for flight, result in zip(attempt.flights, results, strict=True):
            flight.stored = result
            if self._settle_status and result.status is not SendStatus.SEND_OK and now_s < flight.deadline_s:
                self._follow(flight, Event.NOT_SAFE)
                self._attempts.append(SendAttempt([flight]))
                verdict.pause = True
            else:
                self._acknowledge(flight, result, Event.ANSWERED, verdict)
        return verdict

    def failed(self, attempt: SendAttempt, error: RaymqError, now_s: float) -> SendDecision:
        """An attempt has failed, or no connection for it could be made."""
        verdict = SendDecision()
        stage = attempt.flights[0].stage
        if stage is Stage.STORED:
            self._not_settled(attempt, error, now_s, verdict)
        elif stage is Stage.UNKNOWN:
            self._still_unknown(attempt, error, now_s, verdict)
        elif may_be_stored(error):
            self._repeat(attempt, error, Event.NO_ANSWER, now_s, verdict)
        else:
            self._refused(attempt, error, now_s, verdict)
        return verdict

    def away(self, error: RaymqError, now_s: float) -> SendDecision:
        """There is no connection to the broker: nothing was sent."""
        verdict = SendDecision(broker_failed=True, pause=True)
        self._waiting_failed(error, now_s, verdict)
        return verdict

    def settle_expired(self, attempt: SendAttempt, now_s: float) -> SendDecision:
        """Before an attempt is repeated: messages whose time is up end. What is left of the attempt is to be made."""
        verdict = SendDecision()
        if attempt.flights[0].stage is Stage.STORED:
            for flight in list(attempt.flights):
                if now_s >= flight.deadline_s and flight.stored is not None:
                    attempt.flights.remove(flight)
                    self._acknowledge(flight, flight.stored, Event.TIME_UP, verdict)
        elif attempt.error is not None:
            self._end_unknown_in_time(attempt, attempt.error, now_s, verdict)
        return verdict

    def abandon(self, batches: Sequence[SendBatch], error: BaseException) -> SendDecision:
        """A bug: of these batches, those that neither have their end nor wait end with `error`; their queues go on."""
        verdict = SendDecision()
        ending = [batch for batch in batches if batch.stage not in (Stage.ENDED, Stage.QUEUED)]
        queues = {batch.sends for batch in ending}
        for attempt in self._attempts:
            attempt.flights = [flight for flight in attempt.flights if flight.sends not in queues]
        self._attempts = deque(attempt for attempt in self._attempts if attempt.flights)
        verdict.ended += [(batch, error) for batch in ending]
        for sends in queues:
            self.release(sends)
        return verdict

    def _refused(self, attempt: SendAttempt, error: RaymqError, now_s: float, verdict: SendDecision) -> None:
        """Nothing is stored, since the store takes a request as a whole or not."""
        if another_broker_helps(error):
            verdict.broker_failed = verdict.pause = True
            for flight in reversed(attempt.flights):
                self._requeue(flight, Event.REFUSED)
                batches = self._in_time(flight.keep_ids(), now_s, error, verdict)
                self._leave_or_wait(batches, error, verdict)
        elif len(attempt.flights) > 1:
            self._attempts.extendleft(SendAttempt([flight]) for flight in reversed(attempt.flights))
        elif isinstance(error, MessageIllegalError):
            [flight] = attempt.flights
            flight.keep_ids()
            verdict_of_encoding = self._only_the_illegal(flight.sends, flight.batches, error)
            verdict.ended += verdict_of_encoding.ended
            verdict.divided += verdict_of_encoding.divided
        else:
            [flight] = attempt.flights
            self._finish(flight, Event.REFUSED_FOR_GOOD)
            verdict.ended += [(batch, error) for batch in flight.batches]

    def _only_the_illegal(self, sends: QueueSends, batches: Sequence[SendBatch], error: RaymqError) -> SendDecision:
        """Divide batches until the message alone that an error concerns has it for its end: the others wait again, and
        are sent in smaller parts."""
        verdict = SendDecision()
        self.release(sends)
        if batches[0].numbered:
            verdict.ended += [(batch, error) for batch in batches]
            return verdict
        if len(batches) == 1 and len(batches[0].messages) == 1:
            verdict.ended.append((batches[0], error))
            return verdict
        parts: list[SendBatch] = []
        for batch in batches:
            if len(batches) == 1:
                parts += batch.divide(len(batch.messages) // 2)
                verdict.divided.append(batch.generation)
            else:
                batch.alone = True
                parts.append(batch)
        self._to_the_front(parts)
        return verdict

    def _repeat(
        self, attempt: SendAttempt, error: RaymqError, event: Event, now_s: float, verdict: SendDecision
    ) -> None:
        """The same bytes go again. Messages that wait behind them and asked for no order go to other brokers."""
        for flight in attempt.flights:
            self._follow(flight, event)
        attempt.error = error
        self._end_unknown_in_time(attempt, error, now_s, verdict)
        if attempt.flights:
            verdict.broker_failed = verdict.pause = True
            self._waiting_failed(error, now_s, verdict, wait=True)
            self._attempts.appendleft(attempt)

    def _still_unknown(self, attempt: SendAttempt, error: RaymqError, now_s: float, verdict: SendDecision) -> None:
        if error.retryable or may_be_stored(error):
            event = Event.NO_ANSWER if may_be_stored(error) else Event.REFUSED
            self._repeat(attempt, error, event, now_s, verdict)
        elif len(attempt.flights) > 1:
            self._attempts.extendleft(SendAttempt([flight], error) for flight in reversed(attempt.flights))
            verdict.pause = True
        else:
            [flight] = attempt.flights
            self._end_unknown(flight, flight.batches, error, now_s, verdict)
            self._finish(flight, Event.REFUSED_FOR_GOOD)

    def _not_settled(self, attempt: SendAttempt, error: RaymqError, now_s: float, verdict: SendDecision) -> None:
        [flight] = attempt.flights
        verdict.broker_failed = True
        assert flight.stored is not None
        if error.retryable and now_s < flight.deadline_s:
            self._follow(flight, Event.NO_ANSWER if may_be_stored(error) else Event.REFUSED)
            self._attempts.appendleft(attempt)
            verdict.pause = True
        else:
            event = Event.TIME_UP if error.retryable else Event.REFUSED_FOR_GOOD
            self._acknowledge(flight, flight.stored, event, verdict)

    # Failures of the broker, for messages that are surely not stored

    def _waiting_failed(
        self, error: RaymqError, now_s: float, verdict: SendDecision, *, wait: bool | None = None
    ) -> None:
        """The broker failed, and messages wait: those whose time is up end, some go to another broker, the others wait
        on (`wait`, by default if the error is one that passes) or end."""
        for sends in self._queues.values():
            if sends.waiting:
                batches = self._in_time(sends.waiting, now_s, error, verdict)
                sends.waiting.clear()
                self._waiting.pop(sends, None)
                self._leave_or_wait(batches, error, verdict, wait=wait)

    def _leave_or_wait(
        self, batches: Sequence[SendBatch], error: RaymqError, verdict: SendDecision, *, wait: bool | None = None
    ) -> None:
        leaving = [batch for batch in batches if batch.movable and another_broker_helps(error)]
        for batch in leaving:
            batch.limit_bytes = SEALED
        verdict.leaving += leaving
        self._wait_again([batch for batch in batches if batch not in leaving], error, verdict, wait=wait)

    def _wait_again(
        self, batches: Sequence[SendBatch], error: RaymqError, verdict: SendDecision, *, wait: bool | None = None
    ) -> None:
        if error.retryable if wait is None else wait:
            self._to_the_front(batches)
        else:
            verdict.ended += [(batch, error) for batch in batches]

    def _to_the_front(self, batches: Sequence[SendBatch]) -> None:
        """Let batches wait before all others of their queues, in their order."""
        for batch in reversed(batches):
            if batch.sends.waiting:
                batch.limit_bytes = SEALED
            batch.stage = Stage.QUEUED
            batch.sends.waiting.appendleft(batch)
            if not batch.sends.busy:
                self._waiting.setdefault(batch.sends)

    def _end_late(self, sends: QueueSends, now_s: float, error: RaymqError, verdict: SendDecision) -> None:
        if sends.failure is not None:
            verdict.ended += [(batch, sends.failure) for batch in sends.waiting]
            sends.waiting.clear()
            self._waiting.pop(sends, None)
            return
        batches = self._in_time(sends.waiting, now_s, error, verdict)
        if len(batches) < len(sends.waiting):
            sends.waiting = deque(batches)
            if not batches:
                self._waiting.pop(sends, None)

    def _in_time(
        self, batches: Sequence[SendBatch], now_s: float, error: RaymqError, verdict: SendDecision
    ) -> list[SendBatch]:
        """The batches whose time is not up; the others end, and were not stored. Numbered ones end together: none is
        stored without those before it."""
        late = [batch for batch in batches if batch.deadline_s <= now_s]
        if late and late[0].numbered:
            late = list(batches)
        if late:
            failure = given_up(error, max(batch.timeout_s for batch in late))
            for batch in late:
                batch.limit_bytes = SEALED
            verdict.ended += [(batch, failure) for batch in late]
        return [batch for batch in batches if batch not in late] if late else list(batches)

    # Flights

    def _follow(self, flight: Flight, event: Event) -> None:
        flight.stage = TRANSITIONS[flight.stage, event]
        for batch in flight.batches:
            if batch.stage is not Stage.ENDED:
                batch.stage = flight.stage

    def _requeue(self, flight: Flight, event: Event) -> None:
        """A flight that was refused is none any more: its batches wait again, or end."""
        self._follow(flight, event)
        self.release(flight.sends)

    def _finish(self, flight: Flight, event: Event) -> None:
        flight.stage = TRANSITIONS[flight.stage, event]
        self.release(flight.sends)

    def _acknowledge(self, flight: Flight, result: AppendResult, event: Event, verdict: SendDecision) -> None:
        self._finish(flight, event)
        verdict.acknowledged.append((flight, result))

    def _end_unknown_in_time(
        self, attempt: SendAttempt, error: RaymqError, now_s: float, verdict: SendDecision
    ) -> None:
        """Messages of an attempt whose time is up end as unknown; flights without other messages leave the attempt."""
        for flight in [flight for flight in attempt.flights if flight.deadline_s <= now_s]:
            late = [batch for batch in flight.batches if batch.deadline_s <= now_s]
            self._end_unknown(flight, late, error, now_s, verdict)
            left = [batch.deadline_s for batch in flight.batches if batch.stage is not Stage.ENDED]
            if left:
                flight.deadline_s = min(left)
            else:
                attempt.flights.remove(flight)
                self._finish(flight, Event.TIME_UP)

    def _end_unknown(
        self, flight: Flight, batches: Sequence[SendBatch], error: RaymqError, now_s: float, verdict: SendDecision
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
            verdict.ended += [(batch, unknown) for batch in ending]


def closed_error() -> ClientStateError:
    """The error of a send to a producer that is closed."""
    return ClientStateError("this producer is closed; make a new one with client.producer(...)")
