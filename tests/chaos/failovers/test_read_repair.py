"""Tests of read repair on running replicas: bits are flipped in the log files of the master or of a slave while the
group runs. Every reader gets every message intact, and the logs are equal afterwards.

RAYMQ_CHAOS_SEED repeats the flipped records and fields of a run.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import raymq
from tests.support.cases import chaos_seed
from tests.support.clusters.cluster import SMALL_LOG_FILE_BYTES, Sandbox, one_group
from tests.support.history.listener_notes import ListenerNotes
from tests.support.history.waiting import eventually
from tests.support.replicas.ray_replicas import RayReplicas, log_checksum
from tests.support.stores.damage import FIELDS, flip

BROKER, REPLICAS = "broker-a", 3
SETTINGS = one_group("{replicas: 3, spread: false, min_in_sync_replicas: 2}")
FIRST = raymq.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET
BODIES = [b"%06d" % number + b"x" * 1000 for number in range(300)]
READ_TIMEOUT_S = 60.0


def fill(mq: raymq.Client, topic: str) -> list[int]:
    """Send BODIES to a queue of their own. Returns the physical offset of each record."""
    mq.admin.create_topic(topic, queues=1)
    with mq.producer() as producer:
        for sent in [producer.send_async(raymq.Message(topic, body)) for body in BODIES]:
            sent.result(60)
    [entry] = mq.admin.describe_topic(topic)
    found: list[raymq.MessageExt] = []
    while len(found) < len(BODIES):
        found += mq.admin.pull(entry.queue, len(found), max_messages=1000).messages
    return [message.physical_offset for message in found]


def damage(store: Path, places: list[int], dice: random.Random) -> None:
    """Flip a bit of each field, each in another record of a store."""
    fields = [field for field in FIELDS if field != "size"]
    for number, field in zip(dice.sample(range(len(places)), len(fields)), fields, strict=True):
        print(f"{store.name}: {field} of message {number}")
        flip(store, places[number], field, file_size=SMALL_LOG_FILE_BYTES)


def check_read(read: Callable[[], list[raymq.MessageExt]]) -> None:
    """Read until every message has arrived. Each of them is intact."""
    found: dict[int, bytes] = {}

    def is_complete() -> bool:
        for message in read():
            assert found.setdefault(message.queue_offset, message.body) == message.body
        return len(found) == len(BODIES)

    eventually(is_complete, "all messages", READ_TIMEOUT_S)
    assert [found[offset] for offset in range(len(BODIES))] == BODIES


def receive(consumer: raymq.SimpleConsumer) -> list[raymq.MessageExt]:
    messages = consumer.receive(max_messages=100, wait_s=1.0)
    consumer.ack(messages)
    return list(messages)


def check_equal_logs(group: RayReplicas, box: Sandbox) -> None:
    group.wait_for_no_holes()
    end = group.equal_end()
    assert len({log_checksum(box.data / f"{BROKER}-{replica}", end) for replica in range(REPLICAS)}) == 1


def test_a_poll_and_a_receive_return_messages_intact_that_the_masters_disk_has_damaged(
    mq: raymq.Client, box: Sandbox
) -> None:
    dice, group = random.Random(chaos_seed()), RayReplicas(BROKER, REPLICAS)
    topic = "damaged-at-the-master"
    places = fill(mq, topic)
    group.equal_end()
    damage(box.data / f"{BROKER}-{group.settled()['master']}", places, dice)
    with mq.pull_consumer("polls", consume_from=FIRST) as consumer:
        consumer.subscribe(topic)
        check_read(lambda: consumer.poll(timeout_s=1.0))
    damage(box.data / f"{BROKER}-{group.settled()['master']}", places, dice)
    with mq.simple_consumer("receives", consume_from=FIRST) as simple:
        simple.subscribe(topic)
        check_read(lambda: receive(simple))
    check_equal_logs(group, box)


def test_a_listener_gets_messages_intact_that_the_masters_disk_has_damaged(
    mq: raymq.Client, box: Sandbox, tmp_path: Path
) -> None:
    dice, group = random.Random(chaos_seed()), RayReplicas(BROKER, REPLICAS)
    topic, notes = "damaged-before-a-listener", ListenerNotes(tmp_path / "notes")

    def listen(message: raymq.MessageExt) -> None:
        notes.write(f"{message.queue_offset} {message.body.decode()}")

    places = fill(mq, topic)
    group.equal_end()
    damage(box.data / f"{BROKER}-{group.settled()['master']}", places, dice)
    with mq.push_consumer("listens", consume_from=FIRST).subscribe(topic).on_message(listen).start() as push:
        try:
            eventually(lambda: len(set(notes.lines())) >= len(BODIES), "all messages at the listener", READ_TIMEOUT_S)
        except AssertionError:
            print(push.status())
            raise
    assert set(notes.lines()) == {f"{offset} {body.decode()}" for offset, body in enumerate(BODIES)}
    check_equal_logs(group, box)


def test_a_poll_returns_messages_intact_that_the_next_masters_disk_has_damaged(mq: raymq.Client, box: Sandbox) -> None:
    dice, group = random.Random(chaos_seed()), RayReplicas(BROKER, REPLICAS)
    topic = "damaged-at-a-slave"
    places = fill(mq, topic)
    group.equal_end()
    slave = dice.choice([replica for replica in range(REPLICAS) if replica != group.settled()["master"]])
    damage(box.data / f"{BROKER}-{slave}", places, dice)
    group.lead(slave)
    with mq.pull_consumer("polls-later", consume_from=FIRST) as consumer:
        consumer.subscribe(topic)
        check_read(lambda: consumer.poll(timeout_s=1.0))
    check_equal_logs(group, box)
