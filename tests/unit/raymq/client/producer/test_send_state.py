"""Tests of a sender's decisions, without threads, clocks or calls. They cover every state transition in TRANSITIONS,
and the actions that each transition causes."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest

from raymq.client.producer.completion import Completion
from raymq.client.producer.senders.send_batch import Flight, SendBatch, Stage
from raymq.client.producer.senders.send_queues import SendAttempt
from raymq.client.producer.senders.send_state import TRANSITIONS, Event, SendDecision, SendState
from raymq.common.errors import (
    ClientStateError,
    MessageIllegalError,
    RaymqError,
    SendUnknownError,
    ServiceNotAvailableError,
    StoreNotWritableError,
    SystemBusyError,
    TopicFullError,
)
from raymq.common.message import Message, MessageQueue, SendStatus
from raymq.common.protocol.store import AppendResult
from raymq.records.format.encode import EncodedBatch
from raymq.records.format.message_id import IdRange

QUEUE, OTHER = MessageQueue("orders", "a", 0), MessageQueue("orders", "a", 1)
GONE = ServiceNotAvailableError("the actor is restarting")
BUSY = SystemBusyError("the lock is held; nothing was stored")
FULL = StoreNotWritableError("the disk is full")
FENCED = ClientStateError("another producer has the name")
DEADLINE_S = 100.0


def batch_in(state: SendState, count: int = 1, queue: MessageQueue = QUEUE, *, movable: bool = True) -> SendBatch:
    messages = [Message("orders", b"%d" % number) for number in range(count)]
    sends = state.sends(queue)
    return SendBatch("orders", queue, sends, messages, Completion(), movable, True, 30.0, DEADLINE_S, 300 * count, 0)


def put(state: SendState, *batches: SendBatch) -> None:
    for batch in batches:
        state.put(batch)


def encoded(batches: list[SendBatch]) -> EncodedBatch:
    count = sum(len(batch.messages) for batch in batches)
    columns = np.full(count, 10, np.int32), np.zeros(count, np.int64)
    return EncodedBatch("orders", 0, b"", *columns, None, IdRange("A" * 28, 0, count))


def depart(state: SendState, now_s: float = 0.0) -> SendAttempt:
    """Return the sender's next request, which is encoded and marked as in flight."""
    taken, verdict = state.take(now_s)
    assert verdict == SendDecision() or not verdict.ended
    return SendAttempt([Flight.of(sends, batches, encoded(batches)) for sends, batches in taken])


def answer(attempt: SendAttempt, status: SendStatus = SendStatus.SEND_OK) -> list[AppendResult]:
    return [AppendResult(status, 7, 700, 1) for _ in attempt.flights]


def state_of(*, settle_status: bool = True) -> SendState:
    return SendState("a", settle_status=settle_status)


def at(stage: Stage) -> tuple[SendState, SendBatch, SendAttempt | None]:
    """Return a sender's state with one batch at `stage`, that batch, and the batch's send attempt if one
    exists."""
    state = state_of()
    batch = batch_in(state)
    put(state, batch)
    if stage is Stage.QUEUED:
        return state, batch, None
    attempt = depart(state)
    if stage is Stage.UNKNOWN:
        state.failed(attempt, GONE, 0.0)
        assert state.next_attempt() is attempt
    elif stage is Stage.STORED:
        state.answered(attempt, answer(attempt, SendStatus.FLUSH_DISK_TIMEOUT), 0.0)
        attempt = state.next_attempt()
    assert batch.stage is stage
    return state, batch, attempt


def happen(state: SendState, attempt: SendAttempt | None, event: Event, stage: Stage) -> SendDecision:
    """Apply an event to the messages of the send attempt `attempt`, or to the waiting messages if `attempt` is
    None."""
    if attempt is None:
        if event is Event.TAKEN:
            return state.take(0.0)[1]
        if event is Event.TIME_UP:
            return state.take(DEADLINE_S)[1]
        error: RaymqError = BUSY if event is Event.REFUSED else FULL
        verdict = state.unreachable(error, 0.0)
        verdict.ended += state.take_back(verdict.leaving, error).ended
        return verdict
    if event in (Event.ANSWERED, Event.NOT_SAFE):
        status = SendStatus.SEND_OK if event is Event.ANSWERED else SendStatus.FLUSH_DISK_TIMEOUT
        return state.answered(attempt, answer(attempt, status), 0.0)
    if event is Event.TIME_UP:
        return state.settle_expired(attempt, DEADLINE_S)
    verdict = state.failed(attempt, {Event.NO_ANSWER: GONE, Event.REFUSED: BUSY}.get(event, FENCED), 0.0)
    verdict.ended += state.take_back(verdict.leaving, BUSY).ended
    return verdict


@pytest.mark.parametrize(("stage", "event"), TRANSITIONS, ids=lambda value: value.name)
def test_transitions_follow_the_table(stage, event):
    state, batch, attempt = at(stage)
    verdict = happen(state, attempt, event, stage)
    after = TRANSITIONS[stage, event]
    acknowledged = [batch for flight, result in verdict.acknowledged for batch, _ in flight.acknowledge(result)]
    ended = [ending for ending, _ in verdict.ended] + acknowledged
    assert ended == ([batch] if after is Stage.ENDED else [])
    assert state.empty is (after is Stage.ENDED)
    if after is not Stage.ENDED:
        assert batch.stage is after
    if after is Stage.QUEUED:
        assert state.oldest() is batch
    if after in (Stage.UNKNOWN, Stage.STORED):
        repeated = state.next_attempt()
        assert [flight.batches for flight in repeated.flights] == [[batch]]
        assert repeated.again


def test_the_table_names_every_event_that_can_come_at_a_stage():
    on_the_way = set(Event) - {Event.TAKEN}
    assert {event for stage, event in TRANSITIONS if stage is Stage.UNKNOWN} == on_the_way
    assert {event for stage, event in TRANSITIONS if stage is Stage.STORED} == on_the_way
    assert {event for stage, event in TRANSITIONS if stage is Stage.IN_FLIGHT} == on_the_way - {Event.TIME_UP}
    assert not [event for stage, event in TRANSITIONS if stage is Stage.ENDED]


@pytest.mark.parametrize("event", [Event.TIME_UP, Event.REFUSED_FOR_GOOD])
def test_messages_that_may_be_stored_end_as_unknown_and_others_with_the_error(event):
    state, _, attempt = at(Stage.UNKNOWN)
    [(_, error)] = happen(state, attempt, event, Stage.UNKNOWN).ended
    assert isinstance(error, SendUnknownError)
    state, _, attempt = at(Stage.QUEUED)
    [(_, error)] = happen(state, attempt, event, Stage.QUEUED).ended
    assert not isinstance(error, SendUnknownError)


def test_a_queue_has_one_flight_at_a_time_and_its_batches_keep_their_order():
    state = state_of()
    first, second, elsewhere = batch_in(state), batch_in(state), batch_in(state, queue=OTHER)
    put(state, first)
    attempt = depart(state)
    put(state, second, elsewhere)
    assert [batches for _, batches in state.take(0.0)[0]] == [[elsewhere]]
    assert not state.has_work
    state.answered(attempt, answer(attempt), 0.0)
    assert [batches for _, batches in state.take(0.0)[0]] == [[second]]


def test_the_batches_of_a_queue_go_together_and_are_sealed():
    state = state_of()
    batches = [batch_in(state, 2) for _ in range(3)]
    for batch in batches:
        batch.limit_bytes = 1000
    put(state, *batches)
    assert [batch.limit_bytes >= 0 for batch in batches] == [False, False, True]
    attempt = depart(state)
    assert [flight.batches for flight in attempt.flights] == [batches]
    assert batches[2].limit_bytes < 0
    verdict = state.answered(attempt, answer(attempt), 0.0)
    [(flight, result)] = verdict.acknowledged
    offsets = [list(acknowledged.queue_offsets) for _, acknowledged in flight.acknowledge(result)]
    assert offsets == [[7, 8], [9, 10], [11, 12]]


def test_a_message_that_is_refused_is_found_by_halves_and_ends_alone():
    state = state_of()
    batch = batch_in(state, 8)
    put(state, batch)
    refused, sent = [], []
    while state.has_work:
        attempt = depart(state)
        [flight] = attempt.flights
        messages = [message for part in flight.batches for message in part.messages]
        if any(message.body == b"5" for message in messages):
            verdict = state.failed(attempt, MessageIllegalError("cursed"), 0.0)
        else:
            verdict = state.answered(attempt, answer(attempt), 0.0)
            sent += [message.body for message in messages]
        refused += [message.body for part, _ in verdict.ended for message in part.messages]
    assert refused == [b"5"]
    assert sent == [b"%d" % number for number in range(8) if number != 5]
    assert state.empty


def test_a_failing_broker_passes_on_only_messages_without_order():
    state = state_of()
    pinned, free, keyed = batch_in(state), batch_in(state, queue=OTHER), batch_in(state, queue=OTHER, movable=False)
    put(state, pinned)
    attempt = depart(state)
    put(state, free, keyed)
    verdict = state.failed(attempt, GONE, 0.0)
    assert (verdict.leaving, verdict.broker_failed, verdict.pause) == ([free], True, True)
    assert state.next_attempt() is attempt
    assert [batches for _, batches in state.take(0.0)[0]] == [[keyed]]


def test_several_queues_that_the_store_refuses_for_good_are_sent_one_by_one():
    state = state_of()
    batches = [batch_in(state), batch_in(state, queue=OTHER)]
    put(state, *batches)
    attempt = depart(state)
    assert state.failed(attempt, FENCED, 0.0).ended == []
    alone = [state.next_attempt(), state.next_attempt()]
    assert [[flight.batches for flight in attempt.flights] for attempt in alone] == [[[batches[0]]], [[batches[1]]]]
    assert not alone[0].again
    assert [batch for batch, _ in state.failed(alone[0], FENCED, 0.0).ended] == [batches[0]]
    assert state.answered(alone[1], answer(alone[1]), 0.0).acknowledged


def test_giving_up_every_deadline_has_passed():
    state, batch, attempt = at(Stage.UNKNOWN)
    waiting = batch_in(state)
    put(state, waiting)
    verdict = state.failed(attempt, GONE, math.inf)
    assert [batch for batch, _ in verdict.ended] == [batch]
    assert [batch for batch, _ in state.take(math.inf)[1].ended] == [waiting]
    assert state.empty


def test_a_message_may_go_before_none_of_its_queue():
    state = state_of()
    sends = state.sends(QUEUE)
    assert state.idle
    assert state.may_overtake(sends)
    put(state, batch_in(state))
    assert not state.may_overtake(sends)
    assert state.may_overtake(state.sends(OTHER))
    attempt = depart(state)
    assert not state.may_overtake(sends)
    assert not state.idle
    state.failed(attempt, GONE, 0.0)
    assert not state.may_overtake(state.sends(OTHER))


def test_a_bug_ends_the_batch_in_flight_and_the_queue_continues():
    state, batch, attempt = at(Stage.IN_FLIGHT)
    behind = batch_in(state)
    put(state, behind)
    bug = ValueError("a bug")
    assert state.abandon(attempt.flights[0].batches, bug, sent=False).ended == [(batch, bug)]
    assert state.oldest() is behind


@pytest.mark.parametrize("stage", [Stage.IN_FLIGHT, Stage.UNKNOWN, Stage.STORED])
def test_a_bug_ends_a_batch_that_may_be_stored_with_an_unknown_outcome(stage):
    state, batch, attempt = at(stage)
    sent = stage is Stage.IN_FLIGHT
    [(ended, outcome)] = state.abandon(attempt.flights[0].batches, ValueError("a bug"), sent=sent).ended
    assert ended is batch
    assert isinstance(outcome, SendUnknownError)
    assert "ValueError('a bug')" in str(outcome)


def test_batches_that_were_taken_and_not_sent_wait_again_in_their_order():
    state, batch, attempt = at(Stage.IN_FLIGHT)
    behind = batch_in(state)
    put(state, behind)
    state.put_back(attempt.flights[0].batches)
    assert not batch.sends.busy
    assert list(batch.sends.waiting) == [batch, behind]
    assert state.oldest() is batch


@pytest.mark.parametrize(
    ("now_s", "text"),
    [
        (70.07, "not acknowledged within 0.07 s "),
        (99.5, "not acknowledged within 29.5 s "),
    ],
)
def test_a_send_ended_early_by_a_failure_reports_its_duration(now_s: float, text: str) -> None:
    state, batch, attempt = at(Stage.UNKNOWN)  # the batch was sent at 70 s, with a timeout of 30 s
    assert attempt is not None
    [(ended, error)] = state.failed(attempt, FENCED, now_s).ended
    assert ended is batch
    assert isinstance(error, SendUnknownError)
    assert text in str(error)
    assert "send_timeout_s" not in str(error)
    assert pickle.loads(pickle.dumps(error)).is_over is False


def test_a_send_that_times_out_suggests_a_longer_timeout() -> None:
    state, _, attempt = at(Stage.UNKNOWN)
    assert attempt is not None
    [(_, error)] = state.failed(attempt, GONE, DEADLINE_S).ended
    assert "not acknowledged within 30 s " in str(error)
    assert "raise send_timeout_s" in str(error)


def of_topic(state: SendState, topic: str, messages: int = 1) -> SendBatch:
    """Put a batch of messages for a queue of `topic` into the state of a sender. The messages cannot move to another
    broker."""
    batch = batch_in(state, messages, MessageQueue(topic, "a", 0), movable=False)
    batch.topic = topic
    put(state, batch)
    return batch


def test_a_full_topic_rests_and_delays_no_other_topic():
    state = SendState("a", settle_status=True, chance=lambda: 0.0)
    full, other = of_topic(state, "orders"), of_topic(state, "bills")
    decision = state.failed(depart(state), TopicFullError("orders", "g", "8 messages", True, 4, 0.5), 1.0)
    assert not any((decision.broker_failed, decision.pause, decision.ended))
    assert state.oldest() is other
    assert state.take(1.0)[0] == [(other.sends, [other])]
    assert not state.has_work
    assert state.has_rests
    assert not state.empty
    assert not state.may_overtake(full.sends)
    assert state.end_rests(1.4) == 1.5
    assert state.end_rests(1.5) is None
    assert state.oldest() is full


def test_messages_of_a_full_topic_are_sent_in_parts_that_fit_soon():
    state = SendState("a", settle_status=True, chance=lambda: 0.0)
    batch = of_topic(state, "orders", 10)
    decision = state.failed(depart(state), TopicFullError("orders", "g", "8 messages", True, 3, 0.5), 1.0)
    state.end_rests(9.0)
    assert len(decision.divided) == 3
    assert batch.stage is Stage.ENDED
    sizes = []
    while state.has_work:
        attempt = depart(state)
        sizes.append(sum(len(one.messages) for flight in attempt.flights for one in flight.batches))
        state.answered(attempt, answer(attempt), 9.0)
    assert sum(sizes) == 10
    assert max(sizes) <= 3
    assert batch.sends.most > 3, "after successes the parts grow again"


def test_a_producer_waits_for_room_until_its_timeout_and_then_gets_the_typed_error():
    state = SendState("a", settle_status=True, chance=lambda: 1.0)
    batch = of_topic(state, "orders")
    error = TopicFullError("orders", "g", "8 messages", True, 4, 100.0)
    assert not state.failed(depart(state), error, 1.0).ended
    assert state.end_rests(1.0) == batch.deadline_s, "a rest ends at the deadline at the latest"
    state.end_rests(batch.deadline_s)
    taken, decision = state.take(batch.deadline_s)
    assert not taken
    [(ended, outcome)] = decision.ended
    assert ended is batch
    assert isinstance(outcome, TopicFullError)
    assert outcome.waited_s == batch.timeout_s


def test_the_policy_refuse_ends_the_messages_of_the_full_topic_only():
    state = state_of()
    full, other = of_topic(state, "orders"), of_topic(state, "bills")
    error = TopicFullError("orders", "g", "8 messages", False, 4, 0.5)
    decision = state.failed(depart(state), error, 1.0)
    assert decision.ended == [(full, error)]
    assert state.oldest() is other
    assert not state.has_rests
