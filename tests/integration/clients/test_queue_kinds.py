"""Inner batches and light queues in a whole cluster: written by producers, read by every kind of consumer."""

from __future__ import annotations

import pytest

import raymq
from raymq.message import MessageExt
from tests.support.history.waiting import eventually

FIRST = raymq.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET


def bodies(messages: list[MessageExt]) -> list[bytes]:
    return sorted(message.body for message in messages)


def test_inner_batches_are_written_and_read_in_every_way(mq: raymq.Client, group: str) -> None:
    topic = f"batched-{group}"
    mq.admin.create_topic(topic, queues=2, queue_type="batch")
    with mq.producer() as producer:
        results = producer.send_batch([raymq.Message(topic, b"%03d" % n, keys=f"k-{n}") for n in range(50)])
        producer.send_batch([raymq.Message(topic, b"%03d" % n, tags="red") for n in range(50, 60)])
        with pytest.raises(raymq.MessageIllegalError, match="inner batches"):
            producer.send(raymq.Message(topic, b"later", delay_level=1))
    assert len({result.offset_message_id for result in results}) == 1
    expected = [b"%03d" % n for n in range(60)]
    with mq.pull_consumer(group, consume_from=FIRST) as consumer:
        consumer.subscribe(topic)
        polled: list[MessageExt] = []
        while len(polled) < 60:
            polled += consumer.poll(max_messages=7, timeout_s=30)
        consumer.commit()
    assert bodies(polled) == expected
    with mq.pull_consumer(f"{group}-2", consume_from=FIRST) as consumer:
        consumer.assign(results[0].queue for _ in range(1))
        assert consumer.poll_table(timeout_s=30).num_rows in (50, 60)
    [found] = mq.admin.query_by_key(topic, "k-7")
    assert found.body == b"007"
    assert [message.body for message in mq.admin.query_by_id(topic, results[9].message_id)] == [b"009"]
    assert len(mq.admin.query_by_id(topic, results[9].offset_message_id)) == 50
    assert sum(queue.messages for queue in mq.admin.describe_topic(topic)) == 60


def test_light_queues_are_refused_where_the_settings_are_off(mq: raymq.Client, topic: str, group: str) -> None:
    with mq.producer() as producer, pytest.raises(raymq.MessageIllegalError, match="enable_lmq"):
        producer.send(raymq.Message(topic, b"x", light_queues=["alice"]))
    assert mq.admin.light_queues() == {}
    with mq.pull_consumer(group) as consumer:
        consumer.subscribe(raymq.light_queue("alice"))
        eventually(lambda: len(consumer.assignment()) == 2 or consumer.poll(timeout_s=0.1), "its queues are assigned")
