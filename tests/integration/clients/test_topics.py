"""Topic types in a whole cluster: every way of sending sees the type, and every way of asking shows it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import ray

import raymq
from raymq.errors import MessageIllegalError
from tests.support.clusters.page_example import assert_prints_what_it_says


def test_the_examples_of_the_page_do_what_they_say(mq: raymq.Client) -> None:
    assert_prints_what_it_says("topics.md")


def test_every_way_to_send_sees_the_type_and_a_change_of_it(mq: raymq.Client, topic: str) -> None:
    mq.admin.update_topic(topic, message_type="fifo")
    assert mq.admin.topic_attributes([topic])[topic].message_type is raymq.TopicMessageType.FIFO
    message = raymq.Message(topic, b"x")
    broker: Any = ray.get_actor("broker-a", namespace="raymq")

    async def send_async() -> Any:
        async with mq.async_producer() as producer:
            return await producer.send(message)

    def refused(send: Callable[[], object]) -> None:
        with pytest.raises(MessageIllegalError, match="FIFO"):
            send()

    with mq.producer() as producer:
        refused(lambda: producer.send(message))
        refused(lambda: asyncio.run(send_async()))
        with pytest.raises(ValueError, match="FIFO"):
            ray.get(broker.send.remote(topic, b"x"))
        producer.send(message, sharding_key="k")
        mq.admin.update_topic(topic, message_type="unspecified")
        producer.send(message)
    assert sum(queue.messages for queue in mq.admin.describe_topic(topic)) == 2
