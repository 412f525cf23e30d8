"""Tests of topics of the type PRIORITY in a cluster: the command line creates one, messages go to the queues of their
levels, and simple and push consumers get high priorities first, while no level starves."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import raymq
from raymq.common.message import MessageExt
from raymq.common.protocol.group import GroupConfig
from tests.support.clusters.commands import run_here
from tests.support.clusters.page_example import assert_prints_what_it_says
from tests.support.history.waiting import eventually

FIRST = raymq.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET
LEASE_S = 600.0
"""Leases that no pause of the machine outlasts: each message is delivered once."""
WAIT_S = 30.0
BROKERS = 2


def command(*arguments: str, stdin: str = "") -> Any:
    done = run_here(*arguments, "--json", stdin=stdin)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def send(mq: raymq.Client, topic: str, count: int, *priorities: int) -> None:
    with mq.producer() as producer:
        for number in range(count):
            for priority in priorities:
                producer.send_async(raymq.Message(topic, b"%d" % number, priority=priority))


def receive_one(consumer: raymq.SimpleConsumer) -> raymq.ReceivedMessage:
    [message] = consumer.receive(1, LEASE_S, wait_s=WAIT_S)
    consumer.ack(message)
    return message


def notes_in(path: Path) -> tuple[Callable[[MessageExt], None], Callable[[], list[int]]]:
    """Return a listener that appends each message's priority to a file, and a function that reads these priorities."""
    name = str(path)

    def listen(message: MessageExt) -> None:
        import os

        handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            os.write(handle, b"%d\n" % message.priority)
        finally:
            os.close(handle)

    return listen, lambda: [int(line) for line in path.read_text().split()] if path.exists() else []


def test_the_command_line_creates_a_topic_with_a_level_for_each_priority_and_sends_to_it(mq: raymq.Client) -> None:
    made = command("topic", "create", "levels", "--type", "priority")
    assert (made["queues"], made["attributes"]) == (10 * BROKERS, {"message.type": "PRIORITY"})
    sent = [
        row for priority in range(10) for row in command("send", "levels", "x", "--priority", str(priority))["sent"]
    ]
    assert [int(row["queue"].rpartition(":")[2]) for row in sent] == list(range(10)), sent
    refused = run_here("send", "levels", "x")
    assert (refused.returncode, "give it a priority" in refused.stderr) == (1, True), refused.stderr
    with mq.simple_consumer("levels-g", consume_from=FIRST) as consumer:
        consumer.subscribe("levels")
        found = [receive_one(consumer) for _ in range(10)]
    assert sorted(message.priority or 0 for message in found) == list(range(10))
    assert all(message.queue_id == message.priority for message in found)
    send(mq, "levels", 30, 4)
    assert {queue.queue.broker_name for queue in mq.admin.describe_topic("levels") if queue.messages > 3} == {
        queue.queue.broker_name for queue in mq.admin.describe_topic("levels")
    }


def test_a_simple_consumer_gets_high_levels_first_and_each_level_within_its_bound(mq: raymq.Client) -> None:
    mq.admin.create_topic("weighted", message_type="priority", brokers=["broker-a"])
    send(mq, "weighted", 40, 0, 5, 9)
    with mq.simple_consumer("weighted-g", consume_from=FIRST) as consumer:
        consumer.subscribe("weighted")
        # Of 36 receives, 27 are strict, and the fair turns of the seven empty levels begin with level 9, too.
        counted = Counter(receive_one(consumer).priority for _ in range(36))
        assert counted == {9: 34, 5: 1, 0: 1}
        rest: Counter[int | None] = Counter()
        while rest.total() < 3 * 40 - 36:
            rest += Counter([receive_one(consumer).priority])
        assert counted + rest == {9: 40, 5: 40, 0: 40}
        # the consumer has drained level 9, and level 0 has a long backlog: a new message of level 9 overtakes it
        send(mq, "weighted", 100, 0)
        assert {receive_one(consumer).priority for _ in range(8)} == {0}
        send(mq, "weighted", 1, 9)
        assert 9 in {receive_one(consumer).priority for _ in range(2)}


def test_a_message_that_is_not_acknowledged_stays_in_its_level_and_keeps_its_priority_as_a_dead_letter(
    mq: raymq.Client,
) -> None:
    mq.admin.create_topic("retried", message_type="priority", brokers=["broker-a"])
    mq.admin.create_group(GroupConfig("retried-g", retry_max_times=1))
    send(mq, "retried", 1, 7)
    with mq.simple_consumer("retried-g", consume_from=FIRST) as consumer:
        consumer.subscribe("retried")
        for attempt in (1, 2):
            [message] = consumer.receive(1, LEASE_S, wait_s=WAIT_S)
            assert (message.attempt, message.topic, message.queue_id, message.priority) == (attempt, "retried", 7, 7)
            consumer.change_invisible(message, 0)
        assert consumer.receive(1, LEASE_S, wait_s=0) == []
    [letter] = eventually(lambda: mq.admin.dead_letters("retried-g").letters(), "the dead letter")
    assert letter.message.priority == 7


def test_a_push_consumer_in_share_mode_gets_high_levels_first(mq: raymq.Client, tmp_path: Path) -> None:
    mq.admin.create_topic("pushed", message_type="priority", brokers=["broker-a"])
    send(mq, "pushed", 60, 1, 8)
    note, notes = notes_in(tmp_path / "notes")
    push = mq.push_consumer(
        "pushed-g", consume_mode="share", threads=1, prefetch_messages=1, invisible_s=LEASE_S, consume_from=FIRST
    )
    push.subscribe("pushed").on_message(note)
    with push.start(print_output=False):
        eventually(lambda: len(notes()) >= 120, "all messages")
    assert Counter(notes()) == {1: 60, 8: 60}
    # Each receive leases one message. Of 36 receives, one is the fair turn of level 1.
    assert Counter(notes()[:36])[1] <= 2


def test_a_pull_consumer_polls_high_levels_first_and_each_level_within_its_bound(mq: raymq.Client) -> None:
    mq.admin.create_topic("polled", message_type="priority", brokers=["broker-a"])
    send(mq, "polled", 100, 0, 5, 9)
    with mq.pull_consumer("polled-g", consume_from=FIRST) as consumer:
        queues = [raymq.MessageQueue("polled", "broker-a", level) for level in (0, 5, 9)]
        consumer.assign(queues)
        found: list[MessageExt] = []

        def next_poll() -> int | None:
            while not (messages := consumer.poll(1, timeout_s=WAIT_S)):
                pass
            found.extend(messages)
            return messages[0].priority

        def all_levels_are_known() -> bool:
            next_poll()
            return {message.priority for message in found} == {0, 5, 9}

        # The first polls may find only some of the queues, because each queue's end is learnt in the background.
        eventually(all_levels_are_known, "messages of each level")
        counted = Counter(next_poll() for _ in range(16))
        assert counted == {9: 12, 5: 2, 0: 2}
        while len(found) < 300:
            next_poll()
    assert Counter(message.priority for message in found) == {0: 100, 5: 100, 9: 100}


def test_a_push_consumer_that_owns_all_queues_gets_high_levels_first(mq: raymq.Client, tmp_path: Path) -> None:
    mq.admin.create_topic("owned", message_type="priority", brokers=["broker-a"])
    send(mq, "owned", 60, 1, 8)
    note, notes = notes_in(tmp_path / "notes")
    push = mq.push_consumer("owned-g", threads=1, consume_from=FIRST).subscribe("owned").on_message(note)
    with push.start(print_output=False):
        eventually(lambda: len(notes()) >= 120, "all messages")
    assert Counter(notes()) == {1: 60, 8: 60}


def test_a_namespace_has_its_own_levels(mq: raymq.Client) -> None:
    with raymq.connect(namespace="levels-team") as team:
        team.admin.create_topic("mine", message_type="priority", brokers=["broker-a"])
        send(team, "mine", 3, 2, 9)
        with team.simple_consumer("mine-g", consume_from=FIRST) as consumer:
            consumer.subscribe("mine")
            found = consumer.receive(6, LEASE_S, wait_s=WAIT_S)
        assert Counter((message.topic, message.queue_id, message.priority) for message in found) == {
            ("mine", 2, 2): 3,
            ("mine", 9, 9): 3,
        }


def test_the_example_of_the_page_prints_the_documented_output(mq: raymq.Client) -> None:
    assert_prints_what_it_says("priorities.md")


@pytest.mark.parametrize("attribute", ["sharding_key", "queue"])
def test_nothing_but_the_priority_chooses_the_queue(mq: raymq.Client, attribute: str) -> None:
    mq.admin.create_topic("chosen", message_type="priority", brokers=["broker-a"])
    where: dict[str, Any] = {"sharding_key": "k", "queue": raymq.MessageQueue("chosen", "broker-a", 0)}
    with mq.producer() as producer, pytest.raises(raymq.MessageIllegalError, match="PRIORITY"):
        producer.send(raymq.Message("chosen", b"x", priority=1), **{attribute: where[attribute]})
