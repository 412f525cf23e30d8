"""Receiving: a simple consumer beside the pull consumer, each acknowledges durably after every 512 messages."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from typing import Any

import raymq
from tests.bench.cluster import FROM_FIRST, joined_consumer, new_topic
from tests.bench.figures import Figure, Goal
from tests.bench.produce import rate, send_tables

BATCH = 512
_groups = count()


def receive(client: raymq.Client, *, rounds: int, scale: float) -> Iterable[Figure]:
    """The figures of receiving `scale` × 100,000 messages of 1 KiB from 4 queues; the peer is the pull consumer."""
    total = max(5000, int(scale * 100_000) // 5000 * 5000)
    topic = new_topic(client, "receive")
    with client.producer("bench") as producer:
        send_tables(producer, topic, b"x" * 1024, total)
    figure = Figure("receive", f"receive({BATCH}), each .body, ack", "msg/s", True, [Goal(">=", 0.5, "poll")])
    for _ in range(rounds):
        group = f"receive-{next(_groups)}"
        with (
            client.simple_consumer(group, consume_from=FROM_FIRST) as consumer,
            joined_consumer(client, f"{group}-pull", topic) as pull,
        ):
            consumer.subscribe(topic)
            figure.add_round(
                lambda: rate(lambda: _receive(consumer, total), total),
                {"poll": lambda: rate(lambda: _poll(pull, total), total)},
            )
    yield figure


def _receive(consumer: Any, total: int) -> None:
    left, read_bytes = total, 0
    while left > 0:
        messages = consumer.receive(BATCH, 60)
        for message in messages:
            read_bytes += len(message.body)
        left -= consumer.ack(messages)


def _poll(consumer: Any, total: int) -> None:
    left, read_bytes = total, 0
    while left > 0:
        messages = consumer.poll(BATCH)
        for message in messages:
            read_bytes += len(message.body)
        consumer.commit()
        left -= len(messages)
