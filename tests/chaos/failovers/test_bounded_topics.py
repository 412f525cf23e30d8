"""Test of a bounded topic over failovers: the master of three replicas is killed while producers wait for room and a
group consumes.

The limit holds at each look, no acknowledged message is lost, and no message is stored twice. RAYMQ_CHAOS_SEED repeats
the choices of a run.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter

import pytest

import raymq
from tests.support.cases import chaos_seed
from tests.support.clusters.cluster import one_group
from tests.support.history.waiting import eventually
from tests.support.replicas.ray_replicas import RayReplicas

SETTINGS = one_group("{replicas: 3, spread: false, min_in_sync_replicas: 2}")
TOPIC, GROUP = "bounded", "bounded-readers"
LIMIT = 50
KILLS = 2
PRODUCERS = 3
FIRST = raymq.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET


class WaitingSenders:
    """Threads that send numbered messages to a topic that is often full, until `stop`."""

    def __init__(self, mq: raymq.Client) -> None:
        self._mq = mq
        self._stopping = threading.Event()
        self.acknowledged: set[bytes] = set()
        self.unknown: set[bytes] = set()
        self.failures: list[Exception] = []
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(PRODUCERS)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive()

    def _run(self, number: int) -> None:
        with self._mq.producer(f"bounded-{number}", send_timeout_s=60.0) as producer:
            count = 0
            while not self._stopping.is_set():
                body = b"%d-%d" % (number, count)
                count += 1
                try:
                    producer.send(raymq.Message(TOPIC, body))
                except raymq.SendUnknownError:
                    self.unknown.add(body)
                except raymq.TopicFullError:
                    continue
                except Exception as error:
                    self.failures.append(error)
                    return
                else:
                    self.acknowledged.add(body)


@pytest.mark.long
def test_the_limit_holds_over_failovers_and_nothing_is_lost(mq: raymq.Client) -> None:
    chance = random.Random(chaos_seed())
    replicas = RayReplicas("broker-a", 3)
    replicas.settled()
    mq.admin.create_group(GROUP)
    mq.admin.create_topic(TOPIC, queues=1, max_backlog=LIMIT, backlog_groups=[GROUP])
    with mq.producer("filler", send_timeout_s=1.0) as producer:
        eventually(lambda: _is_full(producer), "the limit is in force")
    fillers = mq.admin.describe_topic(TOPIC)[0].max_offset
    received: dict[int, bytes] = {}
    backlogs: list[int] = []
    looks: list[int] = []
    senders = WaitingSenders(mq)
    senders.start()
    with mq.pull_consumer(GROUP, consume_from=FIRST, auto_commit=False) as consumer:
        consumer.subscribe(TOPIC)
        consume(mq, consumer, received, backlogs, fillers + 50, chance)
        for kill in range(KILLS):
            replicas.fail_over()
            consume(mq, consumer, received, backlogs, fillers + 50 + 200 * (kill + 1), chance)
        senders.stop()
        end = mq.admin.describe_topic(TOPIC)[0].max_offset
        consume(mq, consumer, received, backlogs, end, chance)
    assert senders.failures == []
    numbered = Counter(body for body in received.values() if body != b"filler")
    assert set(numbered.values()) == {1}, "a message is stored twice"
    assert senders.acknowledged <= set(numbered)
    assert set(numbered) <= senders.acknowledged | senders.unknown
    assert fillers == LIMIT
    assert max(backlogs) <= LIMIT, f"backlogs: {backlogs}; looks before the kills: {looks}"


def _is_full(producer: raymq.Producer) -> bool:
    try:
        producer.send(raymq.Message(TOPIC, b"filler"))
    except raymq.TopicFullError:
        return True
    return False


def consume(
    mq: raymq.Client,
    consumer: raymq.PullConsumer,
    received: dict[int, bytes],
    backlogs: list[int],
    total: int,
    chance: random.Random,
) -> None:
    """Consume and commit until `total` messages were received, and note the backlog at each look."""

    def step() -> bool:
        try:
            messages = consumer.poll(max_messages=chance.randrange(1, 40), timeout_s=0.5)
            received.update((message.queue_offset, message.body) for message in messages)
            consumer.commit()
            [queue] = [one for one in mq.admin.describe_group(GROUP) if one.queue.topic == TOPIC]
            backlogs.append(queue.max_offset - (queue.committed or 0))
        except raymq.RaymqError as error:
            if not error.retryable:
                raise
            time.sleep(0.1)
        return len(received) >= total

    eventually(step, f"{total} messages are received", 240.0)
