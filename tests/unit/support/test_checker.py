"""Tests that the checker of the chaos tests finds each kind of violation."""

from __future__ import annotations

from raymq.common.message import MessageQueue
from tests.support.history.checker import check
from tests.support.history.history import History, Operation, Outcome, Sent

QUEUE = MessageQueue("orders", "broker-a", 0)
A, B, C = Sent(0, 0), Sent(0, 1), Sent(0, 2)


def history(*operations: Operation) -> History:
    made = History()
    for operation in operations:
        made.add(operation)
    return made


def ok(sent: Sent, queue_offset: int) -> Operation:
    return Operation(sent, Outcome.OK, QUEUE, queue_offset)


def test_a_faultless_run_has_no_violations():
    report = check(history(ok(A, 0), ok(B, 1)), {QUEUE: [A, B]})
    assert report.violations == {}
    assert (report.acknowledged, report.unknown, report.recovered) == (2, 0, 0)


def test_a_missing_acknowledged_message_is_lost_and_later_messages_misplaced():
    assert check(history(ok(A, 0), ok(B, 1)), {QUEUE: [B]}).violations == {"lost": 1, "misplaced": 2}


def test_a_message_that_is_there_twice_is_duplicated():
    assert check(history(ok(A, 0)), {QUEUE: [A, A]}).violations == {"duplicated": 1}


def test_a_message_that_failed_or_was_never_sent_is_unexpected():
    assert check(history(Operation(A, Outcome.FAILED)), {QUEUE: [A, B]}).violations == {"unexpected": 2}


def test_an_unknown_message_may_be_there_or_not():
    unknown = [Operation(sent, Outcome.UNKNOWN) for sent in (A, B)]
    report = check(history(*unknown), {QUEUE: [B]})
    assert report.violations == {}
    assert (report.unknown, report.recovered) == (2, 1)


def test_a_message_after_a_later_message_of_its_producer_is_reordered():
    other = Sent(1, 0)
    report = check(history(ok(C, 0), ok(other, 1), ok(A, 2), ok(B, 3)), {QUEUE: [C, other, A, B]})
    assert report.violations == {"reordered": 2}


def test_the_identity_of_a_message_is_in_its_body():
    assert Sent.parse(Sent(3, 14).body()) == Sent(3, 14)
