"""Test of reads from slaves: while no replica leads, consumers read confirmed messages from slaves. Later they read
from the master again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

import raymq
from raymq.common.message import MessageExt
from tests.support.clusters.cluster import actor_processes, one_group, poll_until
from tests.support.clusters.faults import standing_still
from tests.support.history.listener_notes import ListenerNotes
from tests.support.history.waiting import eventually
from tests.support.replicas.ray_replicas import RayReplicas

FIRST = raymq.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET
REPLICAS = 3
MANY, MORE = 300, 40
SETTINGS = one_group("{replicas: 3, spread: false, min_in_sync_replicas: 2, slave_read_enable: true}")


@contextmanager
def nobody_leads(replicas: RayReplicas) -> Iterator[None]:
    """Keep the broker group without a master during a `with` block. Stop the processes of the master and of the
    Controller, because the Controller would elect another master."""
    [controller] = actor_processes("Controller")
    stopped = [controller.pid, replicas.pid(replicas.settled()["master"])]
    with standing_still(*stopped):
        yield
        assert [psutil.Process(pid).status() for pid in stopped] == [psutil.STATUS_STOPPED] * 2


def send(mq: raymq.Client, topic: str, first: int, count: int) -> None:
    with mq.producer() as producer:
        for number in range(first, first + count):
            producer.send(raymq.Message(topic, b"%d" % number))


def lag(mq: raymq.Client, group: str) -> int:
    return sum(entry.lag for entry in mq.admin.describe_group(group))


def test_consumers_read_from_a_slave_without_a_master_and_return_to_the_master(
    mq: raymq.Client, topic: str, group: str, tmp_path: Path
) -> None:
    replicas, notes = RayReplicas("broker-a", REPLICAS), ListenerNotes(tmp_path / "notes")
    replicas.settled()

    def listen(message: MessageExt) -> None:
        notes(message)

    pushing = mq.push_consumer(f"{group}-push", consume_from=FIRST).subscribe(topic).on_message(listen)
    with pushing.start() as subscription, mq.pull_consumer(group, consume_from=FIRST) as consumer:
        consumer.subscribe(topic)
        send(mq, topic, 0, MORE)
        polled = poll_until(consumer, MORE)
        eventually(lambda: len(notes.lines()) == MORE, "the first messages at the listener")
        consumer.pause(consumer.assignment())
        subscription.suspend()
        send(mq, topic, MORE, MANY)
        replicas.equal_end()
        with nobody_leads(replicas):
            consumer.resume(consumer.assignment())
            subscription.resume()
            polled += poll_until(consumer, MANY)
            eventually(lambda: len(notes.lines()) == MORE + MANY, "the rest at the listener")
        replicas.settled()
        send(mq, topic, MORE + MANY, MORE)
        polled += poll_until(consumer, MORE)
        consumer.commit()
        assert sorted(int(message.body) for message in polled) == list(range(MANY + 2 * MORE))
        eventually(lambda: len(notes.lines()) >= MANY + 2 * MORE, "the last at the listener")
        eventually(lambda: lag(mq, group) == lag(mq, f"{group}-push") == 0, "everything committed")
    assert len(notes.lines()) == MANY + 2 * MORE
