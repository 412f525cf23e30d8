"""Tests of inner batches and light queues in a whole cluster. The tests write messages, read them with pull and push
consumers, find them by key and id, and list them."""

from __future__ import annotations

from pathlib import Path

import pytest

import raymq
from raymq.common.message import MessageExt
from tests.support.clusters.cluster import SERVER_SETTINGS
from tests.support.clusters.page_example import assert_prints_what_it_says
from tests.support.history.listener_notes import ListenerNotes
from tests.support.history.waiting import eventually

SETTINGS = SERVER_SETTINGS
FIRST = raymq.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET
ALICE = raymq.light_queue("alice")


def poll(consumer: raymq.PullConsumer, count: int) -> list[MessageExt]:
    polled: list[MessageExt] = []
    while len(polled) < count:
        polled += consumer.poll(timeout_s=30)
    return polled


def test_the_example_of_the_page_prints_the_documented_output(mq: raymq.Client) -> None:
    assert_prints_what_it_says("light-queues.md")


def test_a_subscriber_reads_its_queue_over_restarts_and_by_a_listener(
    mq: raymq.Client, topic: str, group: str, tmp_path: Path
) -> None:
    journal = ListenerNotes(tmp_path / "journal")
    with mq.producer() as producer:
        for n in range(20):
            names = ["alice", "bob"] if n % 2 else ["bob"]
            producer.send(raymq.Message(topic, b"%d" % n, light_queues=names))
    expected = sorted(b"%d" % n for n in range(1, 20, 2))
    with mq.pull_consumer(group, consume_from=FIRST) as consumer:
        consumer.subscribe(ALICE)
        polled = poll(consumer, 10)
        consumer.commit()
    assert sorted(message.body for message in polled) == expected
    assert {(message.topic, message.sent_to) for message in polled} == {(ALICE, topic)}
    with mq.producer() as producer:
        producer.send(raymq.Message(topic, b"new", light_queues=["alice"]))
    with mq.pull_consumer(group) as consumer:
        consumer.subscribe(ALICE)
        assert [message.body for message in poll(consumer, 1)] == [b"new"]
    assert mq.admin.light_queues("a*") == {"alice": 11}
    with mq.push_consumer(f"{group}-push", consume_from=FIRST).subscribe(ALICE).on_message(journal).start():
        eventually(lambda: len(set(journal.lines())) == 11, "the listener has all")


def test_light_queues_are_within_a_namespace(mq: raymq.Client, tmp_path: Path) -> None:
    journal = ListenerNotes(tmp_path / "journal")
    for team in ("rome", "oslo"):
        with raymq.connect(namespace=team) as client, client.producer() as producer:
            client.admin.create_topic("rooms", 1)
            producer.send(raymq.Message("rooms", team.encode(), light_queues=["erin"]))
    with raymq.connect(namespace="rome") as rome:
        with rome.pull_consumer("phone", consume_from=FIRST) as consumer:
            consumer.subscribe(raymq.light_queue("erin"))
            [message] = poll(consumer, 1)
        assert (message.body, message.topic, message.sent_to) == (b"rome", raymq.light_queue("erin"), "rooms")
        assert message.light_queues == ("erin",)
        assert rome.admin.light_queues("e*") == {"erin": 1}
        push = rome.push_consumer("laptop", consume_from=FIRST).subscribe(raymq.light_queue("erin")).on_message(journal)
        with push.start():
            eventually(journal.lines, "the listener has it")
        assert len(journal.lines()) == 1


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
