"""Tests of requests and replies in a whole cluster: listeners and a pull consumer reply, requesters leave, and replies
arrive late."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import uuid4

import pytest

import raymq
from raymq.common.errors import CreateReplyMessageError, RequesterGoneError, RequestTimeoutError
from raymq.common.message import MessageExt
from raymq.common.protocol.request_reply import reply_queue
from tests.support.clusters.page_example import assert_prints_what_it_says
from tests.support.history.waiting import eventually

FIRST = raymq.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET
REQUEST_S = 30.0
"""Timeout of a request, in seconds. A reply takes far less, so no test waits for the timeout."""


def upper(message: MessageExt) -> object:
    """A listener that replies with the message's body in capitals."""
    return raymq.reply(message.body.upper(), keys=["k"], properties={"by": "upper"})


def test_a_concurrent_and_an_orderly_listener_answer(mq: raymq.Client, topic: str) -> None:
    for orderly in (False, True):
        consumer = mq.push_consumer(f"answers-{uuid4().hex[:8]}", orderly=orderly).subscribe(topic)
        with consumer.on_message(upper).start() as running, mq.producer() as producer:
            answer = producer.request(raymq.Message(topic, b"hello"), timeout_s=REQUEST_S)
            assert (answer.body, answer.keys, answer.properties) == (b"HELLO", ("k",), {"by": "upper"})
            futures = [
                producer.request_async(raymq.Message(topic, b"n%d" % n), timeout_s=REQUEST_S) for n in range(100)
            ]
            assert [future.result(REQUEST_S).body for future in futures] == [b"N%d" % n for n in range(100)]
            producer.send(raymq.Message(topic, b"nobody asks"))
            eventually(lambda: running.reply_statistics().no_request, "the message that is not a request")
            replies = running.reply_statistics()
            assert (replies.sent >= 101, replies.gone, replies.unsent) == (True, 0, 0)


def test_a_batch_listener_answers_each_message_and_asyncio_asks(mq: raymq.Client, topic: str) -> None:
    consumer = mq.push_consumer(f"batches-{uuid4().hex[:8]}").subscribe(topic)

    async def ask() -> list[bytes]:
        async with mq.async_producer() as producer:
            requests = [producer.request(raymq.Message(topic, b"n%d" % n), timeout_s=REQUEST_S) for n in range(50)]
            return [reply.body for reply in await asyncio.gather(*requests)]

    with consumer.on_messages(lambda messages: [upper(message) for message in messages]).start():
        assert asyncio.run(ask()) == [b"N%d" % n for n in range(50)]


def test_a_reply_that_comes_late_is_dropped_and_counted(mq: raymq.Client, topic: str) -> None:
    """A reply that arrives after the request's timeout is dropped and counted, because the requester no longer has its
    correlation id. Source: golden fact 164 of spec/features.md."""
    before = mq.producer().request_statistics()
    with mq.pull_consumer(f"late-{uuid4().hex[:8]}", consume_from=FIRST) as c:
        c.subscribe(topic)
        with mq.producer() as producer:
            with pytest.raises(RequestTimeoutError):
                producer.request(raymq.Message(topic, b"slow"), timeout_s=0.2)
            [request] = eventually(lambda: c.poll(timeout_s=1.0), "a message")
            producer.reply(request, b"too late")
            eventually(lambda: producer.request_statistics().late == before.late + 1, "the late reply")
            after = producer.request_statistics()
            assert (after.timed_out - before.timed_out, after.waiting) == (1, 0)
            producer.send(raymq.Message(topic, b"no request"))
            [plain] = eventually(lambda: c.poll(timeout_s=1.0), "a message")
            with pytest.raises(CreateReplyMessageError, match="is not a request"):
                producer.reply(plain, b"x")


def test_a_reply_to_a_client_that_is_gone_is_stored_and_said_to_be_so(mq: raymq.Client, topic: str) -> None:
    """A reply to a client that has left is stored, and the send of the reply raises an error that states both facts.
    Source: golden fact 163 (spec/features.md §12)."""
    asker = raymq.connect()
    future = asker.producer().request_async(raymq.Message(topic, b"anybody?"), timeout_s=REQUEST_S)
    with mq.pull_consumer(f"gone-{uuid4().hex[:8]}", consume_from=FIRST) as c:
        c.subscribe(topic)
        [request] = eventually(lambda: c.poll(timeout_s=1.0), "a message")
        asker.close()
        with pytest.raises(raymq.ClientStateError, match="closed"):
            future.result(REQUEST_S)
        with mq.producer() as producer, pytest.raises(RequesterGoneError, match="is stored"):
            producer.reply(request, b"too late")
        queue = reply_queue("raymq", request.broker_name, request.system_properties["REPLY_TO_CLIENT"])
        [stored] = [part for part in mq.admin.describe_topic(queue.topic) if part.queue == queue]
        [answer] = mq.admin.pull(queue, stored.max_offset - 1).messages
        assert (answer.body, answer.system_properties["MSG_TYPE"]) == (b"too late", "reply")
        assert answer.system_properties["CORRELATION_ID"] == request.system_properties["CORRELATION_ID"]


@pytest.mark.parametrize("mode", ["queue", "share", "orderly"])
def test_one_listener_answers_stored_requests_and_requests_that_are_not_stored(
    mq: raymq.Client, topic: str, mode: str
) -> None:
    how: dict[str, Any] = {"consume_mode": "share"} if mode == "share" else {"orderly": mode == "orderly"}
    consumer = mq.push_consumer(f"direct-{uuid4().hex[:8]}", request_threads=4, **how).subscribe(topic)
    with consumer.on_message(upper).start(instances=2) as running, mq.producer() as producer:
        stored = sum(queue.max_offset for queue in mq.admin.describe_topic(topic))
        hello = raymq.Message(topic, b"hello")
        answer = producer.request(hello, durable=False, timeout_s=REQUEST_S)
        assert (answer.body, answer.keys, answer.properties) == (b"HELLO", ("k",), {"by": "upper"})
        futures = [
            producer.request_async(raymq.Message(topic, b"n%d" % n), durable=False, timeout_s=REQUEST_S)
            for n in range(100)
        ]
        assert [future.result(REQUEST_S).body for future in futures] == [b"N%d" % n for n in range(100)]
        assert sum(queue.max_offset for queue in mq.admin.describe_topic(topic)) == stored
        assert producer.request(hello, timeout_s=REQUEST_S).body == b"HELLO"
        eventually(lambda: running.reply_statistics().sent == 102, "the counts of replies")
        running.suspend()
        eventually(lambda: not answered(producer, hello), "the end of the taking of requests")
        running.resume()
        eventually(lambda: answered(producer, hello), "a reply after the consumer was resumed")
    with mq.producer() as producer, pytest.raises(raymq.NoListenerError):
        producer.request(hello, durable=False, timeout_s=REQUEST_S)


def answered(producer: raymq.Producer, message: raymq.Message) -> bool:
    try:
        return producer.request(message, durable=False, timeout_s=REQUEST_S).body == message.body.upper()
    except raymq.NoListenerError:
        return False


def test_a_killed_listener_gives_an_error_and_its_next_process_answers_again(mq: raymq.Client, topic: str) -> None:
    def slow_or_ended(message: MessageExt) -> object:
        import os

        import raymq

        if message.body == b"end":
            os._exit(1)
        return raymq.reply(message.body.upper())

    consumer = mq.push_consumer(f"killed-{uuid4().hex[:8]}", request_threads=2).subscribe(topic)
    with consumer.on_message(slow_or_ended).start(), mq.producer() as producer:
        with pytest.raises(raymq.ServiceNotAvailableError, match="may have been executed"):
            producer.request(raymq.Message(topic, b"end"), durable=False, timeout_s=REQUEST_S)
        eventually(lambda: answered(producer, raymq.Message(topic, b"again")), "a reply of the restarted listener")


def test_asyncio_and_a_program_in_a_namespace_send_requests_that_are_not_stored(mq: raymq.Client) -> None:
    name = f"direct-{uuid4().hex[:8]}"
    with raymq.connect(namespace=f"team-{uuid4().hex[:6]}") as team:
        team.admin.create_topic(name, queues=1)
        consumer = team.push_consumer("answers", request_threads=1).subscribe(name, "A")

        async def ask() -> list[bytes]:
            async with team.async_producer() as producer:
                requests = [
                    producer.request(raymq.Message(name, b"n%d" % n, "A"), durable=False, timeout_s=REQUEST_S)
                    for n in range(50)
                ]
                return [reply.body for reply in await asyncio.gather(*requests)]

        with consumer.on_message(lambda message: raymq.reply(message.topic.encode())).start():
            assert asyncio.run(ask()) == [name.encode()] * 50
            with team.producer() as producer, pytest.raises(raymq.NoListenerError, match=f"'{name}' with tag 'B'"):
                producer.request(raymq.Message(name, b"?", "B"), durable=False, timeout_s=REQUEST_S)


def test_only_a_stored_request_has_a_queue_or_a_delay(mq: raymq.Client, topic: str) -> None:
    with mq.producer() as producer:
        for message, where in (
            (raymq.Message(topic, b"?"), {"sharding_key": "k"}),
            (raymq.Message(topic, b"?", delay_level=1), {}),
            (raymq.Message(topic, b"?", light_queues=["q"]), {}),
        ):
            with pytest.raises(raymq.InvalidArgumentError, match="is stored in no queue"):
                producer.request(message, durable=False, **where)
        with pytest.raises(TypeError, match="no option 'sharding'"):
            producer.request_async(raymq.Message(topic, b"?"), durable=False, sharding="k")  # type: ignore[call-arg]


@pytest.mark.parametrize("index", [0, 1])
def test_the_examples_of_the_page_print_the_documented_output(mq: raymq.Client, index: int) -> None:
    assert_prints_what_it_says("request-reply.md", index)
