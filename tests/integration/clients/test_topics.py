"""Tests of topics in a whole cluster. Every way of sending checks the topic's message type. Offsets of groups that no
longer subscribe to a topic are deleted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray

import raymq
from raymq.common.errors import MessageIllegalError
from raymq.common.message import MessageQueue
from tests.support.clusters.page_example import assert_prints_what_it_says
from tests.support.history.waiting import eventually

FIRST = raymq.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET
SOON_S = 20.0
SWEEP_S = 180.0
"""Maximum time in seconds that the test waits for a broker to delete unused offsets (a sweep). A broker does not sweep
in the first two minutes after its start."""
SWEPT, KEPT, SWEEPER = "swept", "kept-of-two", "sweeper"


def test_the_examples_of_the_page_print_the_documented_output(mq: raymq.Client) -> None:
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


@pytest.fixture
def usual_sweeps(mq: raymq.Client) -> Iterator[None]:
    """Restore, at the end of the test, the brokers' default interval between two deletions (sweeps) of unused
    offsets."""
    yield
    mq.admin.unset_config("offset_sweep_interval_ms")


@pytest.mark.usefixtures("usual_sweeps")
def test_the_offsets_of_a_topic_that_a_group_has_left_are_swept_and_the_others_stay(mq: raymq.Client) -> None:
    for topic in (SWEPT, KEPT):
        mq.admin.create_topic(topic, queues=2)
    with mq.pull_consumer(SWEEPER, consume_from=FIRST) as consumer:
        consumer.subscribe(SWEPT)
        eventually(lambda: len(consumer.assignment()) == 2, "its queues", SOON_S)
    assert SWEPT in {entry.queue.topic for entry in mq.admin.describe_group(SWEEPER)}
    with mq.pull_consumer(SWEEPER, consume_from=FIRST) as consumer:
        consumer.subscribe(KEPT)
        eventually(lambda: len(consumer.assignment()) == 2, "its other queues", SOON_S)
        mq.admin.set_config("offset_sweep_interval_ms", 500)

        def topics_after_a_poll() -> set[str]:
            consumer.poll(timeout_s=0.1)
            return {entry.queue.topic for entry in mq.admin.describe_group(SWEEPER)} - {f"%RETRY%{SWEEPER}"}

        eventually(lambda: topics_after_a_poll() == {KEPT}, "the sweep", SWEEP_S)
        assert consumer.assignment() == [MessageQueue(KEPT, name, 0) for name in ("broker-a", "broker-b")]
