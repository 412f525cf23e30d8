"""Benchmark of sending messages: one by one, asynchronously, in batches and as columns. Compares raymq with its peers
(other queue systems)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, Final

import numpy as np
import pyarrow as pa

import raymq
from raymq.tools.bench.latencies import percentile
from tests.bench.cluster import new_topic
from tests.bench.figures import Figure, Goal, Sample
from tests.bench.machine import latencies_us, timed

SIZES: Final = {"100 B": 100, "1 KiB": 1024, "100 KiB": 100 * 1024}


def produce(client: raymq.Client, peers: dict[str, Any], *, sync: bool, rounds: int, scale: float) -> Iterator[Figure]:
    """Yield the measurements of producing, for each message size. `scale` multiplies the number of messages."""
    mode = "SYNC" if sync else "ASYNC"
    without = {peer.pid for peer in peers.values() if hasattr(peer, "pid")}
    topic = new_topic(client, f"produce-{mode}")
    for label, size in SIZES.items():
        body = np.random.default_rng(1).bytes(size)
        lone = int(max(20, min(1000, scale * 400_000 / size)))
        many = int(max(200, min(60_000, scale * 60_000 * 1024 / size)))
        usual = size == 1024
        with client.producer("bench") as producer:
            message = raymq.Message(topic, body)
            figure = Figure(
                f"produce {mode}", f"{label}, one send p50", "us", False, [Goal("<=", 1.0, "redis")] if usual else []
            )
            for _ in range(rounds):
                figure.add_round(
                    lambda: percentile(latencies_us(lambda: producer.send(message), lone), 50),
                    {
                        name: lambda peer=peer: percentile(latencies_us(lambda: peer.send(body), lone), 50)
                        for name, peer in peers.items()
                    },
                )
            yield figure
            ways: list[tuple[str, Callable[[int], None], list[Goal]]] = [
                (
                    "send_async, each result()",
                    lambda count: send_async_each(producer, topic, body, count),
                    [Goal(">=", 3.0, "redis"), Goal("<=", 5.0, "cpu")],
                ),
                (
                    "send_batch(500)",
                    lambda count: send_batches(producer, topic, body, count),
                    [Goal(">=", 3.0, "redis"), Goal("<=", 4.0, "cpu")],
                ),
                (
                    "send_table(5000)",
                    lambda count: send_tables(producer, topic, body, count),
                    [Goal(">=", 6.0, "redis"), Goal("<=", 2.0, "cpu")],
                ),
            ]
            for name, send, goals in ways:
                figure = Figure(
                    f"produce {mode}", f"{label}, {name}", "msg/s", True, goals if usual and not sync else []
                )
                send(min(many, 5000))
                for _ in range(rounds):
                    figure.add_round(
                        lambda: rate(lambda: send(many), many, without),
                        {
                            peer_name: lambda peer=peer: rate(lambda: peer.send_many(body, many), many)
                            for peer_name, peer in peers.items()
                        },
                    )
                yield figure
        for peer in peers.values():
            peer.clear()


def bounds(client: raymq.Client, *, rounds: int, scale: float) -> Iterator[Figure]:
    """Yield the speed of each kind of send to a bounded topic that never fills, compared with an unbounded topic. Both
    topics get the same sends in turn. Afterwards the backlog is at most half of the limit."""
    body, group = np.random.default_rng(1).bytes(1024), "bounds"
    lone, many, turns = max(50, int(1000 * scale)), max(500, int(20_000 * scale) // 500 * 500), 4 * rounds
    client.admin.create_group(group)
    plain, bounded = new_topic(client, "bounds-without"), "bounds-with"
    limit = 2 * (turns + 1) * (lone + 3 * many)
    client.admin.create_topic(bounded, queues=4, max_backlog=limit, max_backlog_bytes=1 << 40, backlog_groups=[group])
    ways: list[tuple[str, int, Callable[[Any, str, int], None]]] = [
        ("send_async, each result()", many, lambda *to: send_async_each(*to[:2], body, to[2])),
        ("send_batch(500)", many, lambda *to: send_batches(*to[:2], body, to[2])),
        ("send_table(500)", many, lambda *to: send_tables(*to[:2], body, to[2], 500)),
    ]
    with client.producer("bench") as producer:
        figure = Figure("bounds", "one send p50", "us", False, [Goal("<=", 1.03, "unbounded")])

        def median_us(topic: str) -> float:
            message = raymq.Message(topic, body)
            return percentile(latencies_us(lambda: producer.send(message), lone), 50)

        for _ in range(turns):
            figure.add_round(lambda: median_us(bounded), {"unbounded": lambda: median_us(plain)})
        yield figure
        for name, count, send in ways:
            figure = Figure("bounds", name, "msg/s", True, [Goal(">=", 0.97, "unbounded")])

            def measured(topic: str, send: Any = send, count: int = count) -> Sample:
                return rate(lambda: send(producer, topic, count), count)

            for topic in (bounded, plain):
                measured(topic)
            for _ in range(turns):
                figure.add_round(lambda: measured(bounded), {"unbounded": lambda: measured(plain)})
            yield figure


def rate(work: Callable[[], object], count: int, without: set[int] | None = None) -> Sample:
    """Run `work`, which handles `count` messages. Returns the messages per second, and the CPU time per message.

    The CPU time is of this process and its descendants, except the processes in `without`.
    """
    seconds, cpu_s = timed(work, without or set())
    return Sample(count / seconds, cpu_s / count * 1e6)


def send_async_each(producer: Any, topic: str, body: bytes, count: int) -> None:
    futures = [producer.send_async(raymq.Message(topic, body)) for _ in range(count)]
    for future in futures:
        future.result()


def send_batches(producer: Any, topic: str, body: bytes, count: int) -> None:
    for first in range(0, count, 500):
        producer.send_batch([raymq.Message(topic, body) for _ in range(min(500, count - first))])


@lru_cache(maxsize=1)
def table_of(body: bytes, rows: int) -> pa.Table:
    """Return a table of `rows` message bodies. The benchmark builds the table before timing, because a real program
    also has its table before it sends."""
    offsets = np.arange(rows + 1, dtype=np.int64) * len(body)
    column = pa.Array.from_buffers(pa.large_binary(), rows, [None, pa.py_buffer(offsets), pa.py_buffer(body * rows)])
    return pa.Table.from_batches([pa.RecordBatch.from_arrays([column], names=["body"])])


def send_tables(producer: Any, topic: str, body: bytes, count: int, rows: int = 5000) -> None:
    rows = min(rows, count)
    table = table_of(body, rows)
    for _ in range(count // rows):
        producer.send_table(topic, table)
