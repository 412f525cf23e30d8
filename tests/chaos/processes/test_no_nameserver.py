"""Tests of a cluster whose NameServers have ended permanently: clients and brokers continue with their cached
routes."""

from __future__ import annotations

import time

import ray

import raymq
from raymq.common.names import NAMESPACE
from tests.support.clusters import cluster
from tests.support.history.waiting import eventually

SETTINGS = f"{cluster.SETTINGS}name_servers: 2\n"
FIRST = raymq.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET
WAIT_S = 60.0


def test_producing_and_consuming_continue_without_any_nameserver(mq: raymq.Client, topic: str, group: str) -> None:
    with mq.producer() as producer, mq.pull_consumer(group, consume_from=FIRST) as consumer:
        consumer.subscribe(topic)
        sent, got = 0, set()

        def both(seconds: float) -> None:
            nonlocal sent
            until_s = time.monotonic() + seconds
            while time.monotonic() < until_s or len(got) < sent:
                assert time.monotonic() < until_s + WAIT_S, f"{sent} sent, {len(got)} received"
                if time.monotonic() < until_s:
                    producer.send(raymq.Message(topic, b"%d" % sent))
                    sent += 1
                got.update(int(message.body) for message in consumer.poll(timeout_s=0.2))

        eventually(lambda: len(consumer.assignment()) == 4, "the queues", WAIT_S)
        both(2.0)
        for index in range(2):
            ray.kill(ray.get_actor(f"nameserver-{index}", namespace=NAMESPACE), no_restart=True)
        both(35.0)
        assert got == set(range(sent))
