"""Tests of the producer and the asyncio producer in a whole cluster.

Their behaviour when stores fail is tested with fakes in tests/unit and tests/property, and in tests/chaos.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter

import pyarrow as pa
import pytest

import raymq
from raymq.common.errors import ClientStateError, InvalidArgumentError, MessageIllegalError, NoPermissionError
from raymq.common.message import MessageExt, MessageQueue, SendStatus
from tests.support.clusters.faults import standing_still
from tests.support.history.waiting import eventually

STORES = ("storage-broker-a-0", "storage-broker-b-0")


def read_all(mq: raymq.Client, topic: str) -> dict[MessageQueue, list[MessageExt]]:
    """Return every message of a topic, by queue."""
    read: dict[MessageQueue, list[MessageExt]] = {}
    for entry in mq.admin.describe_topic(topic):
        messages: list[MessageExt] = []
        while len(messages) < entry.max_offset:
            messages.extend(mq.admin.pull(entry.queue, len(messages), max_messages=1000).messages)
        read[entry.queue] = messages
    return read


def bodies(mq: raymq.Client, topic: str) -> Counter[bytes]:
    return Counter(message.body for messages in read_all(mq, topic).values() for message in messages)


def test_a_message_goes_where_it_is_said(mq: raymq.Client, topic: str) -> None:
    queues = mq.routes.get(topic).publish_queues
    with mq.producer() as producer:
        for queue in queues:
            assert producer.send(raymq.Message(topic, b"named"), queue=queue).queue == queue
        chosen = producer.send(raymq.Message(topic, b"chosen"), selector=lambda q, m, n: q[n], argument=3)
        assert chosen.queue == queues[3]
        assert producer.send(raymq.Message(topic, b"hashed"), sharding_key=1001).queue == queues[1]
        with pytest.raises(InvalidArgumentError, match="another topic"):
            producer.send(raymq.Message(topic, b"x"), queue=MessageQueue("other", "broker-a", 0))
        with pytest.raises(InvalidArgumentError, match="does not exist"):
            producer.send(raymq.Message(topic, b"x"), queue=MessageQueue(topic, "broker-a", 99))


def test_a_table_is_stored_row_by_row(mq: raymq.Client, topic: str) -> None:
    table = pa.table(
        {
            "body": [b"%d" % n for n in range(20_000)],
            "tags": ["even" if n % 2 == 0 else "odd" for n in range(20_000)],
            "sharding_key": [f"user-{n % 50}" if n % 3 else None for n in range(20_000)],
        }
    )
    with mq.producer() as producer:
        result = producer.send_table(topic, table)
    assert result.count == sum(piece.count for piece in result.ranges) == 20_000
    assert result.statuses == {SendStatus.SEND_OK: 20_000}
    read = read_all(mq, topic)
    assert {queue: len(messages) for queue, messages in read.items()} == {
        queue: sum(piece.count for piece in result.ranges if piece.queue == queue) for queue in read
    }
    for messages in read.values():
        for user in range(50):
            rows = [int(m.body) for m in messages if int(m.body) % 3 and int(m.body) % 50 == user]
            assert rows == sorted(rows)
            assert all(m.tags == ("even" if int(m.body) % 2 == 0 else "odd") for m in messages)


def test_the_async_twin_sends_over_a_kill_of_both_stores(mq: raymq.Client, topic: str) -> None:
    async def run() -> list[raymq.SendResult]:
        async with mq.async_producer("twin", max_buffered_messages=200) as producer:
            first = [asyncio.create_task(producer.send(raymq.Message(topic, b"%d" % n))) for n in range(1000)]
            await first[0]
            for name in STORES:
                os.kill(mq.storages.get(name).describe().pid, signal.SIGKILL)
            late = [producer.send(raymq.Message(topic, b"%d" % n), sharding_key=n) for n in range(1000, 2000)]
            return [*await asyncio.gather(*first), *await asyncio.gather(*late)]

    results = asyncio.run(run())
    assert bodies(mq, topic) == Counter(b"%d" % n for n in range(2000))
    read = read_all(mq, topic)
    for number, result in enumerate(results):
        assert read[result.queue][result.queue_offset].body == b"%d" % number
        assert read[result.queue][result.queue_offset].message_id == result.message_id


def test_while_one_store_is_away_new_messages_go_to_the_other(mq: raymq.Client, topic: str) -> None:
    """One of the two stores is stopped, and new messages are sent to the other store. The stopped store is not killed,
    so Ray does not restart it, and calls to it time out. Messages that are in flight to the stopped store are not sent
    to the other store."""
    with mq.producer(attempt_timeout_s=0.5) as producer:
        for _ in range(20):
            producer.send(raymq.Message(topic, b"before"))
        pid = mq.storages.get(STORES[0]).describe().pid
        with standing_still(pid):
            pinned = [producer.send_async(raymq.Message(topic, b"pinned"), queue=MessageQueue(topic, "broker-a", 0))]
            faults = producer.pipeline._context.faults
            eventually(lambda: not faults.reachable("broker-a", time.monotonic()), "the store is found to be away", 30)
            results = [producer.send(raymq.Message(topic, b"%d" % n), timeout_s=20.0) for n in range(50)]
        assert {result.queue.broker_name for result in results} == {"broker-b"}
        assert pinned[0].result(60).queue.broker_name == "broker-a"
    stored = bodies(mq, topic)
    assert stored == Counter({b"before": 20, b"pinned": 1, **{b"%d" % n: 1 for n in range(50)}})


def test_hooks_see_sends_and_may_forbid_them(mq: raymq.Client, topic: str) -> None:
    seen: list[tuple[bytes, bool]] = []

    class Hook:
        def before_send(self, context: object) -> None:
            raise ValueError("logged and swallowed")

        def after_send(self, context: raymq.SendContext) -> None:
            seen.append((context.message.body, context.result is not None))

    def forbid(context: raymq.SendContext) -> None:
        if context.message.body == b"bad":
            raise NoPermissionError("not this one")

    with mq.producer(hooks=[Hook()], check_forbidden=[forbid]) as producer:
        producer.send(raymq.Message(topic, b"good"))
        with pytest.raises(NoPermissionError):
            producer.send(raymq.Message(topic, b"bad"))
    assert seen == [(b"good", True)]
    assert bodies(mq, topic) == Counter([b"good"])


def test_closed_and_bad_input_are_said_so(mq: raymq.Client, topic: str) -> None:
    producer = mq.producer(max_message_size_bytes=10)
    with pytest.raises(MessageIllegalError, match="max_message_size_bytes"):
        producer.send(raymq.Message(topic, b"x" * 11))
    producer.close()
    with pytest.raises(ClientStateError):
        producer.send(raymq.Message(topic, b"x"))
    with pytest.raises(InvalidArgumentError):
        mq.producer(send_timeout_s=0)
    with pytest.raises(TypeError):
        mq.producer(colour="red")
