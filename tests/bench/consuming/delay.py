"""Benchmark of the delay from the send to the poll of a message, at 1,000 messages a second. The consumer commits after
each poll.

The producer runs in its own process; the consumer runs in this process.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import count
from typing import Any, Final

import ray

import raymq
from raymq.tools.bench.latencies import percentile
from tests.bench.cluster import joined_consumer, new_topic, workers
from tests.bench.figures import Figure, Goal

PER_S: Final = 1000
_groups = count()


def delays(client: raymq.Client, peers: dict[str, Any], *, sync: bool, rounds: int, scale: float) -> Iterator[Figure]:
    """Yield the median (p50) and the 99th percentile (p99) of the delay from send to poll, for messages of 1
    KiB."""
    mode, seconds = "SYNC" if sync else "ASYNC", max(1.0, 4 * scale)
    topic = new_topic(client, f"delay-{mode}")
    middle = Figure(f"delay {mode}", "1,000/s, commit each poll, p50", "us", False, [Goal("<=", 1.2, "redis")])
    high = Figure(f"delay {mode}", "1,000/s, commit each poll, p99", "us", False)
    redis = peers.get("redis")
    with workers(1) as [pacer], joined_consumer(client, f"{topic}-group", topic) as consumer:
        for _ in range(rounds):
            times = _ours(pacer, consumer, topic, seconds)
            theirs = _redis(redis, seconds) if redis else []
            for figure, percent in ((middle, 50.0), (high, 99.0)):
                peer = {"redis": lambda percent=percent: percentile(theirs, percent)} if redis else {}
                figure.add_round(lambda percent=percent: percentile(times, percent), peer)
    yield middle
    yield high


def _ours(pacer: Any, consumer: Any, topic: str, seconds: float) -> list[float]:
    total, times = int(PER_S * seconds), list[float]()
    done = pacer.pace.remote(topic, 1024, PER_S, seconds)
    while len(times) < total:
        messages = consumer.poll(500, timeout_s=5.0)
        now_ns = time.time_ns()
        times += [(now_ns - int.from_bytes(message.body[:8])) / 1000 for message in messages]
        consumer.commit()
    ray.get(done, timeout=60)
    return sorted(times)


def _redis(peer: Any, seconds: float) -> list[float]:
    total, times, group = int(PER_S * seconds), list[float](), f"delay-{next(_groups)}"
    client = peer.connect()
    client.xgroup_create("delay", group, "$", mkstream=True)
    pacer = subprocess.Popen([sys.executable, "-m", "tests.bench.consuming.delay", peer.socket, str(seconds)])
    while len(times) < total:
        entries = client.xreadgroup(group, "reader", {"delay": ">"}, count=500, block=5000)
        now_ns = time.time_ns()
        for _, found in entries:
            times += [(now_ns - int.from_bytes(fields[b"b"][:8])) / 1000 for _, fields in found]
            client.xack("delay", group, *[entry_id for entry_id, _ in found])
    pacer.wait(30)
    client.close()
    return sorted(times)


def _pace_redis(socket: str, seconds: float) -> None:
    """Send messages to Redis (XADD) at the same rate as `Worker.pace`, in a separate process."""
    import redis

    client, filler = redis.Redis(unix_socket_path=socket, protocol=2), b"x" * 1016
    next_s = time.perf_counter()
    for _ in range(int(PER_S * seconds)):
        wait_s = next_s - time.perf_counter()
        if wait_s > 0:
            time.sleep(wait_s)
        client.xadd("delay", {b"b": time.time_ns().to_bytes(8) + filler})
        next_s += 1 / PER_S


if __name__ == "__main__":
    _pace_redis(sys.argv[1], float(sys.argv[2]))
