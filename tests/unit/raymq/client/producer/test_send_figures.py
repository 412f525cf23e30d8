"""Tests of the metrics of sends. Each send is counted once, with its number of messages and its outcome, on every code
path."""

from __future__ import annotations

import pytest

from raymq.client.producer import observers
from raymq.common.errors import MessageIllegalError, RequestTimeoutError
from raymq.common.message import Message
from raymq.telemetry.metrics.client_figures import SEND_COST
from tests.support.clients.fakes import WAIT_S, FakeStore
from tests.support.clients.producers import producers_of_fakes
from tests.support.metrics.counted import Counted

OK, FAILED = ("orders", "success"), ("orders", "failure")


@pytest.fixture
def counted(monkeypatch):
    counted = Counted()
    monkeypatch.setattr(observers, "CLIENT_FIGURES", counted)
    return counted


@pytest.fixture
def make():
    with producers_of_fakes() as make:
        yield make


def test_lone_sends_and_batches_are_counted_with_their_messages(make, counted):
    producer = make(FakeStore())
    for _ in range(3):
        producer.send(Message("orders", b"x"))
    assert counted.values(SEND_COST) == {OK: 3}
    producer.send_batch([Message("orders", b"x") for _ in range(10)])
    for future in [producer.send_async(Message("orders", b"x")) for _ in range(20)]:
        future.result(WAIT_S)
    assert counted.values(SEND_COST) == {OK: 33}


def test_a_message_that_was_sent_twice_is_counted_once(make, counted):
    store = FakeStore(script=[None, ("lost", RequestTimeoutError("append", 1.0))])
    producer = make(store)
    producer.send(Message("orders", b"first"))
    producer.send(Message("orders", b"lost answer"))
    assert len(store.attempts) == 3
    assert counted.values(SEND_COST) == {OK: 2}


def test_a_message_that_is_refused_is_a_failure(make, counted):
    producer = make(FakeStore(script=[MessageIllegalError("no")]))
    with pytest.raises(MessageIllegalError):
        producer.send(Message("orders", b"x"))
    assert counted.values(SEND_COST) == {FAILED: 1}


def test_the_time_of_a_send_begins_when_it_is_handed_over(make, monkeypatch):
    """A send's duration counts from the call of the send method, and is never negative. The producer computes the time
    of this call from the batch's deadline. While a batch is open, its deadline is later than the timeouts of its
    messages. Even then, the duration must not become negative."""
    took_ms = []

    class Noting:
        def sent(self, topic: str, cost_ms: float, count: int, *, ok: bool) -> None:
            took_ms.append(cost_ms)

    monkeypatch.setattr(observers, "CLIENT_FIGURES", Noting())
    producer = make(FakeStore())
    for _ in range(5):
        producer.send_async(Message("orders", b"x")).result(WAIT_S)
        producer.send(Message("orders", b"x"))
    producer.send_batch([Message("orders", b"x") for _ in range(10)])
    assert len(took_ms) == 11
    assert min(took_ms) >= 0
