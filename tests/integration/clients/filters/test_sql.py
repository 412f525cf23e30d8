"""Tests of SQL filter expressions in a whole cluster: pull and push consumers, the command line, and groups whose
members have different expressions."""

from __future__ import annotations

from pathlib import Path

import pytest

import raymq
from tests.support.clusters.cluster import poll_until
from tests.support.clusters.page_example import assert_prints_what_it_says
from tests.support.history.listener_notes import ListenerNotes
from tests.support.history.waiting import eventually

FIRST = raymq.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET
RARE = raymq.sql("price > 5 AND region = 'eu'")


def send(mq: raymq.Client, topic: str, count: int) -> set[bytes]:
    """Send `count` messages. One in ten passes the filter RARE. Returns the bodies of the messages that pass."""
    with mq.producer() as producer:
        for number in range(count):
            properties = {"price": str(6 if number % 10 == 0 else 5), "region": "eu"}
            producer.send_async(raymq.Message(topic, b"%d" % number, properties=properties))
    return {b"%d" % number for number in range(0, count, 10)}


def test_the_examples_of_the_page_print_the_documented_output(mq: raymq.Client) -> None:
    assert_prints_what_it_says("filters.md")


def test_a_pull_consumer_gets_matches_and_commits_after_excluded_messages(
    mq: raymq.Client, topic: str, group: str
) -> None:
    expected = send(mq, topic, 500)
    with mq.pull_consumer(group, consume_from=FIRST, auto_commit=False) as consumer:
        consumer.subscribe(topic, RARE)
        assert {message.body for message in poll_until(consumer, len(expected))} == expected

        def committed() -> int:
            assert consumer.poll(timeout_s=0.1) == []
            consumer.commit()
            return sum(consumer.committed(queue) or 0 for queue in consumer.assignment())

        eventually(lambda: committed() == 500, "everything committed")
    with mq.pull_consumer(f"{group}-tables", consume_from=FIRST) as consumer:
        consumer.subscribe(topic, RARE)
        rows: list[bytes] = []

        def all_rows() -> bool:
            rows.extend(consumer.poll_table(timeout_s=0.5, body_type="binary").column("body").to_pylist())
            return len(rows) >= len(expected)

        eventually(all_rows, "all rows")
        assert sorted(rows) == sorted(expected)


def test_a_push_consumer_gets_matches_and_the_group_has_one_expression(
    mq: raymq.Client, topic: str, group: str, tmp_path: Path
) -> None:
    expected = sorted(map(int, send(mq, topic, 200)))
    listener = ListenerNotes(tmp_path / "notes")
    started = mq.push_consumer(group, consume_from=FIRST).subscribe(topic, RARE).on_message(listener).start()
    with started:
        eventually(lambda: sorted(listener.numbers()) == expected, "what passes")
        with pytest.raises(raymq.SubscriptionConflictError, match=r"price > 5.*price < 3"):
            mq.push_consumer(group).subscribe(topic, raymq.sql("price < 3")).on_message(listener).start()
        with pytest.raises(raymq.SubscriptionConflictError, match=r"price > 5.*'\*'"), mq.pull_consumer(group) as pull:
            pull.subscribe(topic)


class LaterOnce:
    """A listener that postpones the first attempt of every message that passes the filter RARE, and records all other
    deliveries."""

    def __init__(self, notes: ListenerNotes) -> None:
        self.notes = notes

    def __call__(self, message: raymq.MessageExt) -> raymq.ConsumeLater | None:
        if message.reconsume_times == 0 and message.properties["price"] == "6":
            return raymq.ConsumeLater(delay_level=1)
        self.notes(message)
        return None


def test_redelivered_messages_pass_whatever_the_group_subscribes_to(
    mq: raymq.Client, topic: str, group: str, tmp_path: Path
) -> None:
    """Redelivered and replayed messages arrive even if they do not pass the group's filter, because the group's retry
    topic is not filtered."""
    expected = sorted(map(int, send(mq, topic, 20)))
    notes = ListenerNotes(tmp_path / "notes")
    started = mq.push_consumer(group, consume_from=FIRST).subscribe(topic, RARE).on_message(LaterOnce(notes)).start()
    with started:
        eventually(lambda: notes.numbers() == expected, "what failed comes again")
        left_out = [
            message
            for entry in mq.admin.describe_topic(topic)
            for message in mq.admin.pull(entry.queue, 0, max_messages=100).messages
            if message.body == b"1"
        ]
        assert mq.admin.replay(topic, ids=[left_out[0].message_id], to_group=group).sent == 1
        eventually(lambda: notes.numbers() == sorted([*expected, 1]), "what is replayed to the group")
    with mq.simple_consumer(f"{group}-pop", consume_from=FIRST) as consumer:
        consumer.subscribe(topic, RARE)
        got = consumer.receive(20, 60.0, wait_s=5.0)
        while len(got) < len(expected):
            got += consumer.receive(20, 60.0, wait_s=5.0)
        assert sorted(int(message.body) for message in got) == expected
        consumer.ack(got)
        assert mq.admin.replay(topic, ids=[left_out[0].message_id], to_group=f"{group}-pop").sent == 1

        def replayed() -> bool:
            again = consumer.receive(20, 60.0, wait_s=0.5)
            consumer.ack(again)
            return [message.body for message in again] == [b"1"]

        eventually(replayed, "what is replayed to the other group")


def test_members_with_different_tags_are_refused_until_the_others_have_left(
    mq: raymq.Client, topic: str, group: str
) -> None:
    with mq.pull_consumer(group) as paid:
        paid.subscribe(topic, "paid || new")
        eventually(lambda: paid.poll(timeout_s=0.1) == [] and bool(paid.assignment()), "the queues")
        with mq.pull_consumer(group) as same, mq.pull_consumer(group) as other:
            same.subscribe(topic, "new||paid")
            with pytest.raises(raymq.SubscriptionConflictError):
                other.subscribe(topic, "refunded")
            same.close()
            paid.close()
            other.subscribe(topic, "refunded")
            eventually(lambda: other.poll(timeout_s=0.1) == [] and bool(other.assignment()), "the queues")
