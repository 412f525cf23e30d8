"""Tests of unique ids that a program gives its messages: which ids are legal, and that the stored record has the id."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, strategies as st

from raymq.client.producer.async_producer import AsyncProducer
from raymq.client.transactions.checks import half_message
from raymq.common.errors import MessageIllegalError, NotMasterError, RequestTimeoutError
from raymq.common.message import Message, MessageQueue
from raymq.common.protocol.recall import RecallHandle
from raymq.records.format.message_id import MESSAGE_ID_CHARS_MAX, checked_message_id
from tests.support.clients.fakes import FakeStore, topic_route
from tests.support.clients.producers import Gate, MakeProducer, producers_of_fakes

printable = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=MESSAGE_ID_CHARS_MAX)


@pytest.fixture
def make() -> Iterator[MakeProducer]:
    with producers_of_fakes() as make:
        yield make


@given(printable)
def test_printable_ascii_is_legal(text: str) -> None:
    assert checked_message_id(text) == text


@pytest.mark.parametrize("wrong", ["", " ", "a b", "a\x01", "a\x02b", "a\n", "\x7f", "ä", "x" * 65, b"a", 7])
def test_another_id_is_refused_and_nothing_is_sent(make: MakeProducer, wrong: Any) -> None:
    store = FakeStore()
    producer = make(store)
    for send in (
        lambda: producer.send(Message("orders", b"x"), message_id=wrong),
        lambda: producer.send_batch([Message("orders", b"x"), Message("orders", b"y")], message_ids=["a", wrong]),
    ):
        with pytest.raises(MessageIllegalError, match="message id"):
            send()
    assert store.attempts == []


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_batch_needs_an_id_for_each_message(make: MakeProducer, count: int) -> None:
    producer, messages = make(FakeStore()), [Message("orders", b"x"), Message("orders", b"y")]
    if count:
        with pytest.raises(MessageIllegalError, match="one id for each"):
            producer.send_batch(messages, message_ids=["a"] * count)
    else:
        assert len(producer.send_batch(messages, message_ids=())) == 2


def test_the_record_and_the_result_have_the_id(make: MakeProducer) -> None:
    store = FakeStore()
    producer = make(store)
    plain, rich = Message("orders", b"x"), Message("orders", b"y", tags="t", keys=["k"], properties={"a": "b"})
    producer.send(plain)  # begins a turn of single sends, which a message with an id must not join
    assert producer.send(plain, message_id="own-1").message_id == "own-1"
    assert producer.send(rich, message_id="own-2", sharding_key="k", timeout_s=9.0).message_id == "own-2"
    results = producer.send_batch([rich, plain, rich], message_ids=["own-3", "own-4", "own-5"])
    assert [one.message_id for one in results] == ["own-3", "own-4", "own-5"]
    assert producer.send_batch([plain], message_ids=["own-6"])[0].message_id == "own-6"
    many = [f"many-{number}" for number in range(200)]
    assert [one.message_id for one in producer.send_batch([plain] * 200, message_ids=many)] == many
    stored = store.messages()
    assert [one.message_id for one in stored[1:7]] == [f"own-{number}" for number in range(1, 7)]
    assert [one.message_id for one in stored[7:]] == many
    assert (stored[2].tags, stored[2].keys, stored[2].properties) == ("t", ("k",), {"a": "b"})
    producer.send(plain)
    assert len(store.messages()[-1].message_id) == 32


def test_messages_with_and_without_ids_that_wait_together_keep_their_own(make: MakeProducer) -> None:
    store, gate = FakeStore(), Gate()
    store.script = [gate]
    producer = make(store, route=topic_route(a=1))

    async def main() -> None:
        async with AsyncProducer(producer) as sender:
            first = asyncio.create_task(sender.send(Message("orders", b"first")))
            assert await asyncio.to_thread(gate.entered.wait, 60)
            sends = [
                asyncio.create_task(
                    sender.send(Message("orders", b"%d" % number), message_id=f"own-{number}" if number % 2 else None)
                )
                for number in range(60)
            ]
            queued = producer.pipeline._senders["a"].state.sends(MessageQueue("orders", "a", 0)).waiting
            while sum(len(batch.messages) for batch in queued) < len(sends):
                await asyncio.sleep(0.01)
            gate.opened.set()
            await first
            results = await asyncio.gather(*sends)
        for number, result in enumerate(results):
            assert (result.message_id == f"own-{number}") == (number % 2 == 1)
        assert len({one.message_id for one in results}) == 60

    asyncio.run(main())
    by_body = {one.body: one.message_id for one in store.messages()}
    assert all(by_body[b"%d" % number] == f"own-{number}" for number in range(1, 60, 2))
    assert store.everything() == [b"first", *(b"%d" % number for number in range(60))]


def test_a_message_that_is_sent_again_keeps_its_id(make: MakeProducer) -> None:
    store = FakeStore(script=[NotMasterError("a", 1), ("lost", RequestTimeoutError("an append", 1.0))])
    assert make(store).send(Message("orders", b"x"), message_id="own").message_id == "own"
    assert {one.message_id for one in store.messages()} == {"own"}
    assert store.everything() == [b"x"]


def test_delayed_messages_and_half_messages_have_the_id(make: MakeProducer) -> None:
    store = FakeStore()
    producer = make(store)
    at_ms = time.time_ns() // 1_000_000 + 60_000
    delayed = producer.send(Message("orders", b"x", deliver_at_ms=at_ms), message_id="own/1")
    assert RecallHandle.parse(delayed.recall_handle).message_id == delayed.message_id == "own/1"
    half = producer.send(half_message(Message("orders", b"x"), "group"), message_id="own/2")
    stored = store.messages()[-1]
    assert stored.system_properties["__transactionId__"] == stored.message_id == half.message_id == "own/2"
