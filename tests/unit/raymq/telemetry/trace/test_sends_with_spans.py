"""Tests of each kind of send with OpenTelemetry spans on: the store gets the same messages as without spans, plus the
span's context."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest
from msgspec import structs
from opentelemetry import propagate
from opentelemetry.sdk.trace import TracerProvider

from raymq.client.producer.observers import SendSpans
from raymq.client.producer.producer import Producer
from raymq.client.transactions.checks import half_message
from raymq.client.transactions.producer import TransactionProducer
from raymq.common.message import (
    MAX_PROPERTIES_BYTES,
    Message,
    MessageExt,
    MessageQueue,
    SendStatus,
)
from raymq.common.names import HALF_TOPIC
from raymq.common.protocol.request_reply import Reply, reply_message, request_message
from raymq.common.protocol.transactions import EndResult, EndTransactionRequest, LocalTransactionState
from raymq.telemetry.trace.spans import Spans
from tests.support.clients.fakes import WAIT_S, FakeStore, topic_route
from tests.support.clients.producers import MakeProducer, producers_of_fakes

MESSAGE = Message("orders", b"x", tags="paid", keys=["k", "l"], properties={"mine": "1"})
CONTEXT = "traceparent"
BY_PRODUCER = {"UNIQ_KEY", "__transactionId__", "RMQ_PID", "RMQ_SEQ"}
"""Properties whose values differ between two producers."""


class SpansStore(FakeStore):
    """A FakeStore that also ends transactions."""

    def end_transaction(self, end: EndTransactionRequest, timeout_s: float) -> EndResult:
        return EndResult(SendStatus.SEND_OK, 0, 0, 1, topic="orders", queue_id=0)


@pytest.fixture
def make() -> Iterator[MakeProducer]:
    with producers_of_fakes() as make:
        yield make


@pytest.fixture
def spans() -> SendSpans:
    return SendSpans("group", Spans(TracerProvider().get_tracer("raymq")))


def send_in_transaction(producer: Producer, message: Message) -> None:
    """Send a message in a transaction and commit the transaction. The test's TransactionProducer sends through
    `producer`."""
    transactions = TransactionProducer(
        producer,
        lambda message: None,
        routes=producer.test_routes,
        storage=producer._storage,
        brokers=tuple,
        client_id="me",
    )
    try:
        result = transactions.send_in_transaction(
            message, lambda transaction, argument: LocalTransactionState.COMMIT_MESSAGE, check_immunity_s=60
        )
        assert (result.end_error, result.local_transaction_state) == ("", LocalTransactionState.COMMIT_MESSAGE)
        with transactions.transaction(message):
            pass
    finally:
        transactions._listener.close()


def send_request(producer: Producer, message: Message) -> None:
    """Send a message as a request."""
    producer.send(request_message(message, "c-1", "client", "c", 3000))


def send_reply(producer: Producer, message: Message) -> None:
    """Send a reply with the body, keys and properties of `message`, as an answer to a request."""
    asked = request_message(message, "c-1", "client", "c", 3000).properties
    request = MessageExt("orders", b"?", None, (), {}, 0, "a", 0, 7, 0, 0, 0, "", "", "ID", "", 0, 0, asked)
    reply, queue = reply_message(request, Reply(message.body, message.keys, message.properties))
    producer.test_routes.routes[queue.topic] = topic_route(queue.topic, a=8)
    producer.send(reply, queue=queue)


def send_table(producer: Producer, message: Message) -> None:
    """Send a table of 600 equal rows: each row has the values of `message`."""
    columns = {
        "body": pa.array([message.body] * 600),
        "tags": pa.array([message.tags] * 600, pa.string()),
        "keys": pa.array([list(message.keys)] * 600, pa.list_(pa.string())),
        "properties": pa.array([list(message.properties.items())] * 600, pa.map_(pa.string(), pa.string())),
    }
    producer.send_table("orders", pa.table(columns))


Send = Callable[[Producer, Message], Any]
SENDS: dict[str, Send] = {
    "send": lambda producer, message: [producer.send(message) for _ in range(3)],
    "send_async": lambda producer, message: [producer.send_async(message).result(WAIT_S) for _ in range(3)],
    "send_oneway": lambda producer, message: (producer.send_oneway(message), producer.flush()),
    "sharding key": lambda producer, message: producer.send(message, sharding_key="customer"),
    "queue": lambda producer, message: producer.send(message, queue=MessageQueue("orders", "a", 0)),
    "batch of one": lambda producer, message: producer.send_batch([message]),
    "small batch": lambda producer, message: producer.send_batch([message] * 3),
    "batch": lambda producer, message: producer.send_batch([message] * 500, sharding_key="customer"),
    "table": send_table,
    "transaction": send_in_transaction,
    "request": send_request,
    "reply": send_reply,
}
MESSAGES = {
    "all fields": structs.replace(MESSAGE, flag=7, light_queues=["l1", "l2"], wait_store_msg_ok=False),
    "plain": Message("orders", b"x"),
    "delay level": structs.replace(MESSAGE, delay_level=3),
    "delivery time": structs.replace(MESSAGE, deliver_at_ms=time.time_ns() // 1_000_000 + 3_600_000),
}


def stored(store: FakeStore) -> list[tuple[Any, ...]]:
    """Return the fields of the messages that a store received, without the span's context, ids and times."""
    return [
        (
            message.topic,
            message.queue_id,
            message.body,
            message.tags,
            message.keys,
            message.flag,
            {name: value for name, value in message.properties.items() if name != CONTEXT},
            {name: value for name, value in message.system_properties.items() if name not in BY_PRODUCER},
        )
        for message in store.messages()
    ]


def sent(make: MakeProducer, send: Send, message: Message, observers: tuple[SendSpans, ...]) -> FakeStore:
    """Send a message to a new store, and return the store."""
    store = SpansStore()
    send(make(store, observers=observers), message)
    return store


@pytest.mark.parametrize("kind", SENDS)
def test_each_kind_of_send_stores_the_same_messages_with_a_context(make: Any, spans: SendSpans, kind: str) -> None:
    plain = sent(make, SENDS[kind], MESSAGE, ())
    traced = sent(make, SENDS[kind], MESSAGE, (spans,))
    assert sorted(map(repr, stored(traced))) == sorted(map(repr, stored(plain)))
    assert len(traced.messages()) > 0
    assert all(CONTEXT in message.properties for message in traced.messages())


@pytest.mark.parametrize("kind", ["send", "small batch", "batch"])
@pytest.mark.parametrize("message", MESSAGES.values(), ids=MESSAGES)
def test_each_field_of_a_message_is_the_same_with_a_context(
    make: Any, spans: SendSpans, kind: str, message: Message
) -> None:
    plain = sent(make, SENDS[kind], message, ())
    traced = sent(make, SENDS[kind], message, (spans,))
    assert stored(traced) == stored(plain)
    assert all(CONTEXT in one.properties for one in traced.messages())


def test_a_half_message_is_stored_as_one_and_the_users_message_is_unchanged(make: Any, spans: SendSpans) -> None:
    store = sent(make, send_in_transaction, MESSAGE, (spans,))
    assert {(half.topic, half.system_properties["TRAN_MSG"]) for half in store.messages()} == {(HALF_TOPIC, "true")}
    assert {half.system_properties["PGROUP"] for half in store.messages()} == {"group"}
    assert MESSAGE.properties == {"mine": "1"}


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda half: pickle.loads(pickle.dumps(half))])
def test_a_half_message_can_be_copied(copied: Callable[[Message], Message]) -> None:
    half = half_message(MESSAGE, "group")
    assert copied(half) == half
    assert structs.replace(half, tags="other").properties == half.properties


@pytest.mark.parametrize("kind", [kind for kind in SENDS if kind != "reply"])
def test_a_message_whose_properties_leave_no_space_is_sent_without_a_context(
    make: Any, spans: SendSpans, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    # The user's properties leave enough space for raymq's own properties, but not for the properties of a span context
    # of 500 bytes.
    carried = {CONTEXT: "p", "baggage": "b" * 500}
    monkeypatch.setattr(propagate, "inject", lambda carrier, context: carrier.update(carried))
    full = structs.replace(MESSAGE, properties={"mine": "x" * (MAX_PROPERTIES_BYTES - 450)})
    plain = sent(make, SENDS[kind], full, ())
    traced = sent(make, SENDS[kind], full, (spans,))
    assert sorted(map(repr, stored(traced))) == sorted(map(repr, stored(plain)))


@pytest.mark.parametrize("name", [CONTEXT, "baggage", "tracestate"])
@pytest.mark.parametrize("kind", ["send", "small batch", "batch", "table", "transaction"])
def test_a_property_of_the_user_is_not_overwritten(
    make: Any, spans: SendSpans, monkeypatch: pytest.MonkeyPatch, kind: str, name: str
) -> None:
    monkeypatch.setattr(propagate, "inject", lambda carrier, context: carrier.update({CONTEXT: "p", name: "theirs"}))
    store = sent(make, SENDS[kind], Message("orders", b"x", properties={name: "mine"}), (spans,))
    assert {message.properties[name] for message in store.messages()} == {"mine"}
    assert all(len(message.properties) == 1 for message in store.messages())


@pytest.mark.parametrize("value", [7, "", " ", "a\x01b", "\ud800"])
def test_a_value_of_a_usual_name_is_checked_too(make: Any, spans: SendSpans, monkeypatch: Any, value: object) -> None:
    monkeypatch.setattr(propagate, "inject", lambda carrier, context: carrier.update({"baggage": value}))
    store = sent(make, SENDS["send"], MESSAGE, (spans,))
    assert [message.properties for message in store.messages()] == [{"mine": "1"}] * 3


@pytest.mark.parametrize("kind", ["send", "small batch", "batch", "table", "transaction"])
def test_a_propagator_cannot_break_a_record(
    make: Any, spans: SendSpans, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    carried: dict[str, Any] = {
        CONTEXT: "p",
        "TAGS": "theirs",
        "blank": " ",
        "cut": "a\x02TAGS\x01b",
        "": "x",
        "number": 7,
        "baggage": "é",
    }
    monkeypatch.setattr(propagate, "inject", lambda carrier, context: carrier.update(carried))
    store = sent(make, SENDS[kind], MESSAGE, (spans,))
    assert {tuple(message.properties.items()) for message in store.messages()} == {
        (("mine", "1"), (CONTEXT, "p"), ("baggage", "é"))
    }
    assert {message.tags for message in store.messages()} == {"paid"}
