"""A bench of a whole cluster, beside the queue that people use instead: `ray.util.queue.Queue`, in the same run.

    python tests/bench/bench_cluster.py [--messages 50000]

Absolute times depend on the machine and its neighbours; the ratios in one run say something. raymq writes every message
to disk and waits for it (SYNC_FLUSH); the Ray queue keeps them in memory and loses them with its process.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from statistics import quantiles

from ray.util.queue import Queue
from rich.console import Console
from rich.table import Table

import raymq
from raymq.message import ConsumeFromWhere, Message

BODY = b"x" * 1024
ONE_BY_ONE = 1000
BATCH = 100


def main() -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=50_000, help="messages per throughput figure")
    count = parser.parse_args().messages
    with (
        tempfile.TemporaryDirectory(prefix="raymq-bench-") as directory,
        raymq.connect(embedded=True, data_dir=directory, broker_groups=1) as client,
    ):
        client.admin.create_topic("bench", queues=4)
        rows = [*_latency(client), *_throughput(client, count)]
    table = Table(title=f"1 KiB messages; {count:,} for throughput, {ONE_BY_ONE:,} for latency")
    for name in ("figure", "raymq, on disk", "ray.util.queue, in memory", "ratio"):
        table.add_column(name, justify="left" if name == "figure" else "right")
    for name, ours, theirs, unit in rows:
        table.add_row(name, f"{ours:,.2f} {unit}", f"{theirs:,.2f} {unit}", f"{ours / theirs:.2f}")
    Console().print(table)


def _latency(client: raymq.Client) -> list[tuple[str, float, float, str]]:
    queue = Queue()
    with client.producer("bench") as producer:
        message = Message("bench", BODY)
        producer.send(message)
        ours = _timed(lambda: producer.send(message))
    queue.put(BODY)
    theirs = _timed(lambda: queue.put(BODY))
    queue.shutdown()
    return [
        (f"one send, p{percent}", _percentile(ours, percent), _percentile(theirs, percent), "ms")
        for percent in (50, 99)
    ]


def _throughput(client: raymq.Client, count: int) -> list[tuple[str, float, float, str]]:
    queue = Queue()
    with client.producer("bench") as producer:
        message = Message("bench", BODY)
        started = time.perf_counter()
        futures = [producer.send_async(message) for _ in range(count)]
        for future in futures:
            future.result()
        produced = count / (time.perf_counter() - started)
    started = time.perf_counter()
    for _ in range(count // BATCH):
        queue.put_nowait_batch([BODY] * BATCH)
    put = count / (time.perf_counter() - started)
    with client.pull_consumer("bench", consume_from=ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET) as consumer:
        consumer.subscribe("bench")
        left = count + ONE_BY_ONE + 1 - len(consumer.poll(1, timeout_s=10.0))  # joined
        started, target = time.perf_counter(), left
        while left > 0:
            left -= len(consumer.poll(5000))
        consumed = target / (time.perf_counter() - started)
    pushed = _pushed(client, target)
    started = time.perf_counter()
    for _ in range(count // BATCH):
        queue.get_nowait_batch(BATCH)
    got = count / (time.perf_counter() - started)
    queue.shutdown()
    return [
        ("produced", produced / 1000, put / 1000, "k/s"),
        ("consumed", consumed / 1000, got / 1000, "k/s"),
        ("consumed by a listener", pushed / 1000, got / 1000, "k/s"),
    ]


def _pushed(client: raymq.Client, target: int) -> float:
    """Messages per second at a listener that does nothing, from its first to its last."""
    push = client.push_consumer("bench-push", consume_from=ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET)
    with push.subscribe("bench").on_message(lambda message: None).start() as subscription:
        first = 0
        while True:
            consumed = subscription.status()[0].consumed
            if consumed and not first:
                started, first = time.perf_counter(), consumed
            if consumed >= target:
                return (consumed - first) / (time.perf_counter() - started)
            time.sleep(0.01)


def _timed(call: Callable[[], object]) -> list[float]:
    times = []
    for _ in range(ONE_BY_ONE):
        started = time.perf_counter()
        call()
        times.append((time.perf_counter() - started) * 1000)
    return times


def _percentile(times: list[float], percent: int) -> float:
    return quantiles(times, n=100)[percent - 1]


if __name__ == "__main__":
    main()
