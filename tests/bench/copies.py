"""Benchmark of replication, with SYNC_FLUSH and four producers. It compares two copies (replicas) of each message with
one copy. Also measures a single send while a store rebuilds its index."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import ray

import raymq
from raymq.tools.bench.latencies import percentile
from tests.bench.cluster import embedded, new_topic, workers
from tests.bench.figures import Figure, Goal, Sample
from tests.bench.machine import latencies_us
from tests.bench.produce import send_tables

BODY = b"x" * 1024


def copies(directory: Path, *, rounds: int, scale: float) -> Iterator[Figure]:
    """Yield the number of messages per second that four producers send, with one and with two copies of each message.
    Each message is flushed to disk before it is acknowledged."""
    rates: dict[int, list[float]] = {}
    for replicas in (1, 2):
        with (
            tempfile.TemporaryDirectory(dir=directory) as home,
            embedded(Path(home), sync=True, replicas=replicas) as client,
            workers(4) as sending,
        ):
            topic, each = new_topic(client, "copies"), max(2000, int(20_000 * scale))
            for _ in range(rounds):
                start_s = time.time() + 1.0
                spans = ray.get([worker.produce.remote(topic, BODY, each, start_s) for worker in sending], timeout=300)
                seconds = max(span[1] for span in spans) - min(span[0] for span in spans)
                rates.setdefault(replicas, []).append(4 * each / seconds)
        figure = Figure("copies", f"{replicas} of each message, 4 producers, SYNC", "msg/s", True)
        figure.ours = [Sample(rate) for rate in rates[replicas]]
        yield figure
    yield Figure("copies", "two beside one", "", True, [Goal(">=", 0.9)], ours=[Sample(max(rates[2]) / max(rates[1]))])


def lone_send_beside_index(client: raymq.Client, *, scale: float) -> Iterator[Figure]:
    """Yield the time of a single send, first in an idle cluster, then while a restarted store rebuilds its
    index."""
    topic, quiet = new_topic(client, "beside-index"), new_topic(client, "lone")
    with client.producer("bench") as producer:
        send_tables(producer, topic, BODY, max(50_000, int(400_000 * scale) // 5000 * 5000))
        message = raymq.Message(quiet, BODY)
        producer.send(message)
        before = latencies_us(lambda: producer.send(message), 500, 0.001)
        storage = client.storages.get("storage-broker-a-0")
        description = storage.describe()
        os.kill(description.pid, signal.SIGKILL)
        shutil.rmtree(Path(description.root) / "index")
        producer.send(message)  # The send returns only after the killed store has restarted.
        beside: list[float] = []
        while storage.control("status", timeout_s=10)["index_behind_bytes"]:
            beside += latencies_us(lambda: producer.send(message), 100, 0.001)
            if len(beside) > 20_000:
                break
    for name, times in (("quiet", before), ("beside an index that catches up", sorted(beside) or [0.0])):
        for percent in (50, 99):
            value = percentile(times, percent)
            yield Figure("lone send", f"1 ms between, {name}, p{percent}", "us", False, ours=[Sample(value)])
