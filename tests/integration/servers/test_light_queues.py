"""Light queues in a cluster that has them switched on: pull and push consumers, offsets, and the listing."""

from __future__ import annotations

from pathlib import Path

import raymq
from raymq.message import MessageExt
from tests.support.clusters.cluster import SETTINGS as DEFAULTS
from tests.support.history.listener_notes import ListenerNotes
from tests.support.history.waiting import eventually

SETTINGS = DEFAULTS.replace("store:\n", "store:\n  enable_lmq: true\n  enable_multi_dispatch: true\n")
FIRST = raymq.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET
ALICE = raymq.light_queue("alice")


def poll(consumer: raymq.PullConsumer, count: int) -> list[MessageExt]:
    polled: list[MessageExt] = []
    while len(polled) < count:
        polled += consumer.poll(timeout_s=30)
    return polled


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
