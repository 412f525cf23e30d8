"""Benchmark of consuming messages: polls that return objects or columns, each with a commit; a listener; the commit
alone; and receives of a simple consumer."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any, Final

import raymq
from raymq.tools.bench.latencies import percentile
from tests.bench.cluster import FROM_FIRST, joined_consumer, new_topic
from tests.bench.figures import Figure, Goal, Sample
from tests.bench.machine import cpu_s
from tests.bench.produce import rate, send_tables

_groups = count()
RECEIVED: Final = 512


def consume(client: raymq.Client, peers: dict[str, Any], *, sync: bool, rounds: int, scale: float) -> Iterator[Figure]:
    """Yield the measurements of consuming `scale` × 100,000 messages of 1 KiB from 4 queues."""
    total = max(5000, int(scale * 100_000) // 5000 * 5000)
    mode, body = "SYNC" if sync else "ASYNC", b"x" * 1024
    topic = new_topic(client, f"consume-{mode}")
    with client.producer("bench") as producer:
        send_tables(producer, topic, body, total)
    for peer in peers.values():
        peer.send_many(body, total)
    read_peers = {
        name: lambda peer=peer: rate(lambda: peer.read_all(f"g{next(_groups)}", total), total)
        for name, peer in peers.items()
        if name != "ray"
    }
    without = {peer.pid for peer in peers.values() if hasattr(peer, "pid")}
    for name, poll, goal in (
        ("poll(5000), each .body, commit", drain_objects, 4.0),
        ("poll_table(), commit", drain_columns, 8.0),
    ):
        figure = Figure(f"consume {mode}", name, "msg/s", True, [Goal(">=", goal, "redis")])
        with joined_consumer(client, f"{topic}-{next(_groups)}", topic) as consumer:
            for _ in range(rounds):
                for queue in consumer.assignment():
                    consumer.seek_to_begin(queue)
                figure.add_round(lambda: rate(lambda: poll(consumer, total), total, without), read_peers)
        yield figure
    figure = Figure(f"consume {mode}", "push, an empty listener", "msg/s", True, [Goal(">=", 2.0, "redis")])
    for _ in range(rounds):
        figure.add_round(lambda: push_to_listener(client, topic, total, without), read_peers)
    yield figure
    yield _commits(client, topic, mode, rounds)
    for peer in peers.values():
        peer.clear()


def drain_objects(consumer: Any, total: int) -> None:
    left, read_bytes = total, 0
    while left > 0:
        messages = consumer.poll(5000)
        for message in messages:
            read_bytes += len(message.body)
        consumer.commit()
        left -= len(messages)


def drain_columns(consumer: Any, total: int) -> None:
    left = total
    while left > 0:
        table = consumer.poll_table()
        consumer.commit()
        left -= table.num_rows


def push_to_listener(client: raymq.Client, topic: str, total: int, without: set[int]) -> Sample:
    """Return the number of messages per second that a consumer passes to a listener that does nothing. The time counts
    from the listener's first message to its last."""
    push = client.push_consumer(f"{topic}-push-{next(_groups)}", consume_from=FROM_FIRST)
    with push.subscribe(topic).on_message(lambda message: None).start() as subscription:
        first, started, cpu = 0, 0.0, 0.0
        while True:
            consumed = subscription.status()[0].consumed
            if consumed and not first:
                first, started, cpu = consumed, time.perf_counter(), cpu_s(without)
            if consumed >= total:
                seconds = time.perf_counter() - started
                return Sample((consumed - first) / seconds, (cpu_s(without) - cpu) / max(consumed - first, 1) * 1e6)
            time.sleep(0.02)  # Pause, because each status call takes a millisecond of the Pull actor's time.


def _commits(client: raymq.Client, topic: str, mode: str, rounds: int) -> Figure:
    """Measure the median (p50) time of a commit after a poll of one message."""
    goals = [Goal("<=", 1000)] if mode == "SYNC" else []
    figure = Figure(f"consume {mode}", "commit() p50", "us", False, goals)
    with joined_consumer(client, f"{topic}-{next(_groups)}", topic) as consumer:
        for _ in range(rounds):
            times = []
            for _ in range(200):
                consumer.poll(1)
                start = time.perf_counter()
                consumer.commit()
                times.append((time.perf_counter() - start) * 1e6)
            figure.add_round(lambda: percentile(sorted(times), 50), {})
    return figure


def receive(client: raymq.Client, *, rounds: int, scale: float) -> Iterable[Figure]:
    """Yield the measurements of a simple consumer that receives `scale` × 100,000 messages of 1 KiB from 4 queues.

    The measurements are compared with a pull consumer that reads the same messages.
    """
    total = max(5000, int(scale * 100_000) // 5000 * 5000)
    topic = new_topic(client, "receive")
    with client.producer("bench") as producer:
        send_tables(producer, topic, b"x" * 1024, total)
    figure = Figure("receive", f"receive({RECEIVED}), each .body, ack", "msg/s", True, [Goal(">=", 0.5, "poll")])
    for _ in range(rounds):
        group = f"receive-{next(_groups)}"
        with (
            client.simple_consumer(group, consume_from=FROM_FIRST) as consumer,
            joined_consumer(client, f"{group}-pull", topic) as pull,
        ):
            consumer.subscribe(topic)
            figure.add_round(
                lambda: rate(lambda: _receive(consumer, total), total),
                {"poll": lambda: rate(lambda: _poll_batches(pull, total), total)},
            )
    yield figure


def _receive(consumer: Any, total: int) -> None:
    left, read_bytes = total, 0
    while left > 0:
        messages = consumer.receive(RECEIVED, 60)
        for message in messages:
            read_bytes += len(message.body)
        left -= consumer.ack(messages)


def _poll_batches(consumer: Any, total: int) -> None:
    left, read_bytes = total, 0
    while left > 0:
        messages = consumer.poll(RECEIVED)
        for message in messages:
            read_bytes += len(message.body)
        consumer.commit()
        left -= len(messages)
