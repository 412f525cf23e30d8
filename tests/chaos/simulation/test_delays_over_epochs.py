"""Test of delayed messages over changes of the master: old and new masters deliver the same messages at the same time,
and the deliveries of the old masters are cut.

Three replicas with real stores, real schedulers and the real replication run in this process. A master is closed, or is
cut off for a while, and may lead again soon afterwards. At the end each replica has each acknowledged message once in
its queue, and none was stored there before its time.

RAYMQ_CHAOS_FAILOVERS (default 16, 400 by `make soak`) is the number of changes of the master. RAYMQ_CHAOS_SEED repeats
the choices of a run.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest

from actors.replica.replica import Replica
from raymq.common.delay import TIMER_TOPIC, timer_queue
from raymq.common.message import Message, SendStatus
from raymq.common.names import SCHEDULE_TOPIC
from raymq.records.format.encode import EncodedBatch, ProducerSequence, WaitingBatch, encode_batch
from tests.support.cases import chaos_seed
from tests.support.history.waiting import eventually
from tests.support.replicas.local_replicas import LocalReplicas, settle_append
from tests.support.stores.stores import read_queue

pytestmark = pytest.mark.usefixtures("no_flushes")

FAILOVERS = int(os.environ.get("RAYMQ_CHAOS_FAILOVERS", "400" if os.environ.get("RAYMQ_SOAK") == "1" else "16"))
LEVEL_MS = 1000
LATEST_MS = 1500
"""Longest delay of a message with a delivery time, in ms."""
BETWEEN_FAULTS = (3, 15)
SLOW = 0.6
"""Probability that the new master of a group whose master is cut off delivers nothing."""
HOST = ("127.0.0.1", 5000)


class Sender:
    """Sends delayed messages to a broker group. `due_ms`: by body, the time before which a message must not be
    delivered, for each acknowledged message."""

    def __init__(self, group: LocalReplicas, dice: random.Random) -> None:
        self._group, self.dice, self._number = group, dice, 0
        self.due_ms: dict[bytes, int] = {}

    def next_batch(self) -> tuple[bytes, int, EncodedBatch]:
        """Return a new delayed message: its body, the time in ms when it is due, and its batch."""
        self._number += 1
        body, now_ms = b"%06d" % self._number, time.time_ns() // 1_000_000
        timed = self.dice.random() < 0.5
        due_ms = now_ms + (self.dice.randint(1, LATEST_MS) if timed else LEVEL_MS)
        delay = {"deliver_at_ms": due_ms} if timed else {"delay_level": 1}
        batch = encode_batch(
            [Message("orders", body, **delay)],
            timer_queue(due_ms, now_ms) if timed else 0,
            born_host=HOST,
            born_timestamp_ms=now_ms,
            message_ids=[body.hex().zfill(32)],
            producer=ProducerSequence(body.decode(), 0, 0),
            waiting=WaitingBatch(TIMER_TOPIC if timed else SCHEDULE_TOPIC, [0]),
        )
        return body, due_ms, batch

    def send(self) -> None:
        body, due_ms, batch = self.next_batch()
        settle_append(self._group, batch)
        self.due_ms[body] = due_ms

    def send_to(self, old: Replica) -> None:
        """Send a message to an old master, which can never acknowledge the message."""
        started = old.start_append([self.next_batch()[2]])
        results = started.settle(time.monotonic())
        assert results is None or results[0].status is not SendStatus.SEND_OK


def kill_master(group: LocalReplicas, sender: Sender, count: int) -> None:
    """Close the master. It returns with all its records and deliveries, also records that no other replica has."""
    del sender, count
    group.open(group.fail_over())


def cut_off_master(group: LocalReplicas, sender: Sender, count: int) -> None:
    """Cut off the master, which continues to deliver messages. Then the old master returns.

    The new master's clock may be slow. The old master can then lead again before the new master has delivered a
    message.
    """
    old = group.cut_off[group.cut_off_master()]
    is_slow = sender.dice.random() < SLOW
    if is_slow:
        group.master.store.schedule.stop_delivery()
    for number in range(count):
        if number % 2:
            sender.send_to(old)
        else:
            sender.send()
    group.rejoin()
    if is_slow:
        group.settle()
        kill_master(group, sender, count)


@pytest.mark.timeout(300 + 5 * FAILOVERS)
def test_each_delayed_message_is_delivered_once_over_changes_of_the_master() -> None:
    dice, faults = random.Random(chaos_seed()), Counter[str]()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        group = LocalReplicas(
            Path(directory), flush_interval_consume_queue_ms=10, message_delay_level=f"{LEVEL_MS // 1000}s"
        )
        try:
            group.settle()
            sender = Sender(group, dice)
            for _ in range(FAILOVERS):
                for _ in range(dice.randint(*BETWEEN_FAULTS)):
                    sender.send()
                fault = dice.choice((kill_master, cut_off_master))
                faults[fault.__name__] += 1
                fault(group, sender, dice.randint(*BETWEEN_FAULTS))
                group.settle()
            eventually(lambda: delivered_on_all(group, set(sender.due_ms)), "each delivery at each replica")
            print(f"{len(sender.due_ms)} messages", dict(faults))
            stored = [read_queue(replica.any_store, "orders", 0) for replica in group.replicas.values()]
        finally:
            group.end()
    for messages in stored:
        assert Counter(one.body for one in messages).most_common(1)[0][1] == 1
        times = {one.body: one.store_timestamp_ms for one in messages}
        assert set(sender.due_ms) <= set(times)
        assert {body: due for body, due in sender.due_ms.items() if times[body] < due} == {}


def delivered_on_all(group: LocalReplicas, bodies: set[bytes]) -> bool:
    group.settle()
    return all(
        bodies <= {one.body for one in read_queue(replica.any_store, "orders", 0)}
        for replica in group.replicas.values()
    )
