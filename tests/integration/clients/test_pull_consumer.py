"""Tests of the synchronous and the asyncio pull consumer in a cluster: assigned queues, offsets, offsets for times,
tables, resets, and added queues.

test_client.py has the tests of queues that the members of a group share.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest
import ray

import raymq
from raymq.common.message import MessageQueue
from raymq.records.kernels.columns import SCHEMA
from tests.support.clients.twins import KINDS, Blocking, LoopThread
from tests.support.history.waiting import eventually

FIRST = raymq.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET

Make = Callable[..., Any]


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    loop = LoopThread()
    yield loop
    loop.stop()


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest, mq: raymq.Client, loop: LoopThread) -> Iterator[Make]:
    """Yield a function that creates consumers, synchronous or asyncio depending on the test's parameter. The fixture
    closes the consumers after the test."""
    made = []

    def make(group: str, **options: Any) -> Any:
        options = {"consume_from": FIRST, "auto_commit": False, **options}
        if request.param == "sync":
            made.append(mq.pull_consumer(group, **options))
        else:
            made.append(Blocking(loop, loop.run(lambda: mq.async_pull_consumer(group, **options))))
        return made[-1]

    yield make
    for consumer in made:
        consumer.close()


def send(mq: raymq.Client, topic: str, *bodies: bytes, key: str = "one queue") -> MessageQueue:
    """Send messages to one queue of the topic. Returns this queue."""
    with mq.producer() as producer:
        [queue] = {producer.send(raymq.Message(topic, body), sharding_key=key).queue for body in bodies}
    return queue


def poll(consumer: Any, count: int) -> list[bytes]:
    """Poll until `count` messages have arrived. Returns their bodies."""
    bodies: list[bytes] = []

    def enough() -> bool:
        bodies.extend(message.body for message in consumer.poll(count - len(bodies), timeout_s=0.5))
        return len(bodies) >= count

    eventually(enough, f"{count} messages")
    return bodies


def test_assigned_queues_are_read_from_any_place_and_committed_under_the_groups_name(
    mq: raymq.Client, topic: str, group: str, make: Make
) -> None:
    queue = send(mq, topic, *(b"%d" % number for number in range(10)))
    consumer = make(group)
    others = [other for other in consumer.fetch_message_queues(topic) if other != queue]
    assert len(others) == 3
    consumer.assign([queue, others[0]])
    assert consumer.assignment() == sorted([queue, others[0]])
    assert consumer.begin_offsets([queue]) == {queue: 0}
    assert consumer.end_offsets([queue, others[0]]) == {queue: 10, others[0]: 0}
    assert poll(consumer, 4) == [b"0", b"1", b"2", b"3"]
    assert consumer.lag() == {queue: 6, others[0]: 0}
    consumer.seek(queue, 8)
    assert poll(consumer, 2) == [b"8", b"9"]
    assert consumer.commit()[queue] == 10
    consumer.seek(queue, 7)
    assert consumer.commit({queue: 7}) == {queue: 7}
    assert consumer.committed(queue) == 7
    consumer.seek_to_begin(queue)
    assert poll(consumer, 10)[-1] == b"9"
    assert consumer.commit({queue: 9}) == {queue: 9}
    consumer.close()
    again = make(group)
    again.assign([queue])
    assert poll(again, 1) == [b"9"]
    assert {entry.queue: entry.committed for entry in mq.admin.describe_group(group)}[queue] == 9


def test_a_paused_queue_delivers_nothing_while_others_continue(
    mq: raymq.Client, topic: str, group: str, make: Make
) -> None:
    quiet = send(mq, topic, b"quiet", key="a")
    loud = next(queue for key in "bcdefgh" if (queue := send(mq, topic, b"loud", key=key)) != quiet)
    consumer = make(group)
    consumer.assign([quiet, loud])
    consumer.pause([quiet])
    assert consumer.paused() == [quiet]
    assert set(poll(consumer, 1)) == {b"loud"}
    assert b"quiet" not in {message.body for message in consumer.poll(timeout_s=0.3)}
    consumer.resume([quiet])
    assert b"quiet" in poll(consumer, 1)


def test_offsets_for_times_name_the_first_messages_since_the_times(
    mq: raymq.Client, topic: str, group: str, make: Make
) -> None:
    queue = send(mq, topic, b"0", b"1")
    stored_ms = mq.admin.pull(queue, 1).messages[0].store_timestamp_ms
    eventually(lambda: time.time_ns() // 1_000_000 > stored_ms, "the next millisecond")
    between_ms = time.time_ns() // 1_000_000
    send(mq, topic, b"2")
    consumer = make(group)
    times = {0: 0, between_ms: 2, between_ms + 3_600_000: 3}
    assert {at_ms: consumer.offset_for_timestamp(queue, at_ms) for at_ms in times} == times
    [other, *_] = [other for other in consumer.fetch_message_queues(topic) if other != queue]
    assert consumer.offsets_for_times({queue: between_ms, other: between_ms}) == {queue: 2, other: 0}
    consumer.assign([queue])
    consumer.seek(queue, consumer.offset_for_timestamp(queue, between_ms))
    assert poll(consumer, 1) == [b"2"]


def test_tables_have_the_messages_as_columns(mq: raymq.Client, topic: str, group: str, make: Make) -> None:
    with mq.producer() as producer:
        producer.send_batch([raymq.Message(topic, b"%d" % n, tags="A" if n % 2 else "B") for n in range(1000)])
    consumer = make(group)
    consumer.subscribe(topic, "A")
    bodies: list[bytes] = []

    def enough() -> bool:
        table = consumer.poll_table(timeout_s=0.5, body_type="binary")
        assert table.schema == SCHEMA.set(SCHEMA.get_field_index("body"), pa.field("body", pa.binary()))
        assert set(table.column("tags").to_pylist()) <= {"A"}
        bodies.extend(table.column("body").to_pylist())
        return len(bodies) >= 500

    eventually(enough, "all messages")
    assert bodies == [b"%d" % number for number in range(1, 1000, 2)]
    consumer.commit()
    assert sum(consumer.committed(queue) or 0 for queue in consumer.assignment()) == 1000


def test_iteration_commits_earlier_messages(mq: raymq.Client, topic: str, group: str, make: Make) -> None:
    queue = send(mq, topic, *(b"%d" % number for number in range(10)))
    consumer = make(group, auto_commit=True)
    consumer.subscribe(topic)
    bodies = []
    for message in consumer:
        bodies.append(message.body)
        if len(bodies) == 5:
            break
    consumer.close()
    assert bodies == [b"0", b"1", b"2", b"3", b"4"]
    assert {entry.queue: entry.committed for entry in mq.admin.describe_group(group)}[queue] == 5


def test_a_reset_moves_consumers_that_run(mq: raymq.Client, topic: str, group: str, make: Make) -> None:
    """Running consumers continue at the new offsets after a reset of their group. Group members receive the reset with
    their heartbeats. A consumer with manually assigned queues polls for resets."""
    queue = send(mq, topic, *(b"%d" % number for number in range(10)))
    consumers = {}
    for mode in ("subscribe", "assign"):
        consumers[mode] = consumer = make(f"{group}-{mode}")
        consumer.subscribe(topic) if mode == "subscribe" else consumer.assign([queue])
        assert len(poll(consumer, 10)) == 10
        consumer.commit()
        mq.admin.reset_offsets(f"{group}-{mode}", topic, offset=6, queue=queue)
    for consumer in consumers.values():
        assert poll(consumer, 4) == [b"6", b"7", b"8", b"9"]
        assert consumer.commit() == {queue: 10}


def test_a_queue_change_listener_receives_added_queues(mq: raymq.Client, topic: str, group: str, make: Make) -> None:
    consumer = make(group, queue_check_interval_s=1.0)
    calls: list[tuple[str, list[MessageQueue]]] = []
    consumer.register_queue_change_listener(topic, lambda name, queues: calls.append((name, queues)))
    mq.admin.update_topic(topic, queues=6)
    # Wait until the queue change listener is called with all six queues. One broker adds its queues before the other
    # broker, so an earlier call may have only some of the new queues.
    eventually(lambda: calls and len(calls[-1][1]) == 6, "the listener is called with all queues")
    name, queues = calls[-1]
    assert name == topic
    assert queues == consumer.fetch_message_queues(topic)


def test_brokers_list_consumers_and_their_subscriptions(mq: raymq.Client, topic: str, group: str, make: Make) -> None:
    consumer = make(group)
    consumer.subscribe(topic, "A || B")
    broker = ray.get_actor("broker-a", namespace="raymq")
    [known] = eventually(lambda: ray.get(broker.consumer_connections.remote(group)), "the consumer is known")
    assert (known.consumer.consume_type, known.consumer.subscriptions) == ("PULL", {topic: "A || B"})
    consumer.close()
    eventually(lambda: not ray.get(broker.consumer_connections.remote(group)), "it is known no more")


def test_many_async_consumers_share_one_loop(mq: raymq.Client, topic: str, group: str) -> None:
    """Many asyncio tasks each consume a share of a group's messages. A task that waits does not block the other
    tasks."""

    async def consume(seen: list[bytes]) -> None:
        async with mq.async_pull_consumer(group, consume_from=FIRST) as consumer:
            await consumer.subscribe(topic)
            async for message in consumer:
                seen.append(message.body)

    async def main() -> list[bytes]:
        seen: list[bytes] = []
        tasks = [asyncio.create_task(consume(seen)) for _ in range(4)]
        with mq.producer() as producer:
            for number in range(200):
                await asyncio.wrap_future(
                    producer.send_async(raymq.Message(topic, b"%d" % number), sharding_key=str(number))
                )
        deadline_s = time.monotonic() + 60.0
        while len(set(seen)) < 200 and time.monotonic() < deadline_s:
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return seen

    assert sorted(int(body) for body in set(asyncio.run(main()))) == list(range(200))
