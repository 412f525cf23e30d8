"""Tests of hooks that a producer calls for its sends. Hooks receive every message, may refuse it, and cannot
change it."""

from __future__ import annotations

import pytest

from raymq.common.errors import ClientStateError, NoPermissionError, SendUnknownError, ServiceNotAvailableError
from raymq.common.message import Message, MessageQueue
from tests.support.clients.fakes import WAIT_S, FakeStore
from tests.support.clients.producers import Gate

QUEUE = MessageQueue("orders", "a", 0)
GONE = ServiceNotAvailableError("the actor is restarting")


class Hook:
    """Send hook that records its calls and stores a number in the send context."""

    def __init__(self) -> None:
        self.before, self.after = [], []

    def before_send(self, context) -> None:
        context.value = len(self.before)
        self.before.append((context.group, context.message.body, context.queue))

    def after_send(self, context) -> None:
        self.after.append((context.value, context.message.body, context.result, context.error))


class Failing:
    def before_send(self, context) -> None:
        raise ValueError("before")

    def after_send(self, context) -> None:
        raise ValueError("after")


def test_a_hook_sees_each_message_before_and_after_with_a_value_of_its_own(make):
    hook, other = Hook(), Hook()
    producer = make(FakeStore(), hooks=[hook, other])
    result = producer.send(Message("orders", b"1"))
    batch = producer.send_batch([Message("orders", b"2"), Message("orders", b"3")])
    assert hook.before == [("group", body, QUEUE) for body in (b"1", b"2", b"3")]
    assert hook.after == [(0, b"1", result, None), (1, b"2", batch[0], None), (2, b"3", batch[1], None)]
    assert hook.after == other.after


def test_a_send_hook_receives_a_failure(make, clock):
    hook = Hook()
    producer = make(FakeStore(script=[clock.passes(GONE)]), hooks=[hook])
    with pytest.raises(SendUnknownError) as raised:
        producer.send(Message("orders", b"1"))
    [(number, body, result, error)] = hook.after
    assert (number, body, result, type(error), error.args) == (0, b"1", None, SendUnknownError, raised.value.args)


def test_a_send_hook_receives_the_error_of_a_closed_producer(make):
    hook = Hook()
    producer = make(FakeStore(), hooks=[hook])
    producer.send(Message("orders", b"1"))
    producer.pipeline._senders["a"].close(give_up=False)
    with pytest.raises(ClientStateError) as raised:
        producer.send(Message("orders", b"2"))
    assert hook.after[1] == (1, b"2", None, raised.value)


def test_a_hook_that_fails_is_logged_and_changes_nothing(make, caplog):
    hook = Hook()
    producer = make(FakeStore(), hooks=[Failing(), hook])
    assert producer.send(Message("orders", b"1")).queue_offset == 0
    assert len(hook.after) == 1
    assert caplog.text.count("a send hook raised an exception for a message to queue orders@a:0") == 2


def test_the_error_of_a_check_reaches_the_sender_and_nothing_of_the_batch_is_sent(make):
    hook, seen = Hook(), []

    def forbid(context) -> None:
        seen.append((context.message.body, context.queue))
        if context.message.body == b"bad":
            raise NoPermissionError("not on Sundays")

    producer = make(store := FakeStore(), hooks=[hook], check_forbidden=[forbid], max_buffered_messages=2)
    for _ in range(3):
        with pytest.raises(NoPermissionError, match="Sundays"):
            producer.send_batch([Message("orders", b"good"), Message("orders", b"bad")])
    assert hook.before == []
    assert producer.send_async(Message("orders", b"good")).result(WAIT_S)
    assert store.everything() == [b"good"]
    assert seen[:2] == [(b"good", QUEUE), (b"bad", QUEUE)]


def test_a_check_sees_each_message_also_while_a_batch_gathers(make):
    """A check hook receives each message, also while a batch is being collected. A producer that has only check hooks
    must not use a faster path without checks."""

    def forbid(context) -> None:
        if context.message.body == b"bad":
            raise NoPermissionError("not on Sundays")

    store = FakeStore(script=[gate := Gate()])
    producer = make(store, check_forbidden=[forbid])
    futures = [producer.send_async(Message("orders", b"1"))]
    try:
        assert gate.entered.wait(WAIT_S)
        # the second message waits in an open batch, because the sender is busy with the first message
        futures.append(producer.send_async(Message("orders", b"2")))
        for send in (producer.send_async, producer.send_oneway, producer.send):
            with pytest.raises(NoPermissionError, match="Sundays"):
                send(Message("orders", b"bad"))
    finally:
        gate.opened.set()
    for future in futures:
        future.result(WAIT_S)
    assert producer.send(Message("orders", b"3")).queue_offset == 2
    with pytest.raises(NoPermissionError, match="Sundays"):
        producer.send(Message("orders", b"bad"))
    assert store.everything() == [b"1", b"2", b"3"]
