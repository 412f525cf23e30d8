"""Tests of topics in a whole cluster. Every way of sending checks the topic's message type. Offsets of groups that no
longer subscribe to a topic are deleted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
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


LIMIT = 10


@pytest.fixture
def bounded(mq: raymq.Client, group: str) -> str:
    """Create a topic with one queue whose backlog may have LIMIT messages, fill it, and wait until it is full. Returns
    the topic's name."""
    name = f"bounded-{group}"[:100]
    mq.admin.create_group(group)
    mq.admin.create_topic(name, queues=1, max_backlog=LIMIT, backlog_groups=[group])
    with mq.producer("filler", send_timeout_s=2.0) as producer:
        eventually(lambda: is_full(lambda: producer.send(raymq.Message(name, b"x"))), "the topic is full")
    return name


def is_full(send: Callable[[], object]) -> bool:
    """Return True if a send raises TopicFullError. On a busy machine a send may fail in another way; it is repeated."""
    for _ in range(20):
        try:
            send()
        except raymq.TopicFullError:
            return True
        except raymq.RaymqError:
            continue
        return False
    return False


def consume_all(mq: raymq.Client, topic: str, group: str) -> int:
    """Consume and commit all messages of a topic. Returns their number."""
    held = sum(queue.messages for queue in mq.admin.describe_topic(topic))
    with mq.pull_consumer(group, consume_from=FIRST, auto_commit=False) as consumer:
        consumer.subscribe(topic)
        eventually(lambda: _poll(consumer) or lag(mq, topic, group) == 0, "the group has consumed everything")
    return held


def _poll(consumer: raymq.PullConsumer) -> bool:
    consumer.poll(timeout_s=0.2)
    consumer.commit()
    return False


def lag(mq: raymq.Client, topic: str, group: str) -> int:
    """Return the number of messages that a group has not committed."""
    progress = [one for one in mq.admin.describe_group(group) if one.queue.topic == topic]
    return sum(one.max_offset - (one.committed or 0) for one in progress) if progress else -1


def test_every_way_to_send_meets_the_limit_of_a_topic(mq: raymq.Client, bounded: str, group: str) -> None:
    message = raymq.Message(bounded, b"x")

    async def send_async() -> Any:
        async with mq.async_producer("limit-async", send_timeout_s=2.0) as producer:
            return await producer.send(message)

    before = sum(queue.messages for queue in mq.admin.describe_topic(bounded))
    with mq.producer("limit", send_timeout_s=2.0) as producer:
        assert is_full(lambda: producer.send(message))
        assert is_full(lambda: producer.send_async(message).result())
        assert is_full(lambda: producer.send_batch([message] * 3))
        assert is_full(lambda: producer.send_table(bounded, pa.table({"body": [b"x"] * 3})))
        assert is_full(lambda: producer.send(raymq.Message(bounded, b"x", delay_level=1)))
    assert is_full(lambda: asyncio.run(send_async()))
    assert sum(queue.messages for queue in mq.admin.describe_topic(bounded)) == before
    consume_all(mq, bounded, group)
    with mq.producer("limit", send_timeout_s=20.0) as producer:
        for _ in range(LIMIT):
            producer.send(message)
    with mq.producer("limit", send_timeout_s=2.0) as producer:
        assert is_full(lambda: producer.send(message))
    assert lag(mq, bounded, group) == LIMIT


def test_a_waiting_producer_goes_on_when_the_group_consumes(mq: raymq.Client, bounded: str, group: str) -> None:
    with mq.producer("waiting", send_timeout_s=SOON_S * 3) as producer:
        futures = [producer.send_async(raymq.Message(bounded, b"%d" % number)) for number in range(3 * LIMIT)]
        consume_all(mq, bounded, group)
        eventually(lambda: _consume_some(mq, bounded, group, futures), "all messages are stored")


def _consume_some(mq: raymq.Client, topic: str, group: str, futures: list[Any]) -> bool:
    consume_all(mq, topic, group)
    assert not [future for future in futures if future.done() and future.exception()]
    return all(future.done() for future in futures)


def test_a_full_topic_with_the_policy_drop_skips_and_keeps_messages(mq: raymq.Client, group: str) -> None:
    name = f"dropping-{group}"[:100]
    mq.admin.create_group(group)
    mq.admin.create_topic(name, queues=1, max_backlog=LIMIT, backlog_policy="drop", backlog_groups=[group])
    with mq.producer("dropping") as producer:
        producer.send_batch([raymq.Message(name, b"x")] * 100, sharding_key="k")
    eventually(lambda: 0 < lag(mq, name, group) <= LIMIT, "the group has skipped its oldest messages")
    [queue] = mq.admin.describe_topic(name)
    assert (queue.min_offset, queue.max_offset) == (0, 100)
