"""Benchmark of the verification of a store's files: the rates of produce and consume with and without it, in turn.

A store verifies its files within a week, so it reads a small log slowly. The benchmark lets the storage actor read at
the highest rate that the default settings allow (5 MB/s and 2 % of a core).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any, Final

import ray

import raymq
from raymq.common.names import NAMESPACE, StorageName
from tests.bench.cluster import joined_consumer, new_topic
from tests.bench.figures import Figure, Goal, Sample
from tests.bench.produce import send_tables

WINDOW_S: Final = 2.0
"""Time in s of one sample. The verification reads a part of the log about once in a second."""
FILLED: Final = 200_000
CALL_TIMEOUT_S: Final = 60.0
_groups = count()


def scrub(client: raymq.Client, *, rounds: int, scale: float) -> Iterator[Figure]:
    """Yield the rates of produce and consume while the store verifies its files. The peer `idle` is the same store
    without a verification. Each round measures both, and every second round begins with `idle`."""
    topic, body = new_topic(client, "scrub"), b"x" * 1024
    storage = ray.get_actor(str(StorageName("broker-a", 0)), namespace=NAMESPACE)
    with client.producer("bench") as producer, joined_consumer(client, f"scrub-{next(_groups)}", topic) as consumer:
        total = max(5000, int(scale * FILLED) // 5000 * 5000)
        send_tables(producer, topic, body, total)
        left = total
        messages = [raymq.Message(topic, body)] * 500

        def produce() -> int:
            producer.send_batch(messages)
            return len(messages)

        def consume() -> int:
            nonlocal left
            if left <= 0:
                left = total
                for queue in consumer.assignment():
                    consumer.seek_to_begin(queue)
            rows = int(consumer.poll_table().num_rows)
            left -= rows
            return rows

        read_bytes, read_s = 0, 0.0
        for name, work in (("poll_table()", consume), ("send_batch(500), 1 KiB", produce)):
            figure = Figure("scrub", name, "msg/s", True, [Goal(">=", 0.97, "idle")])
            idle = figure.peers.setdefault("idle", [])
            _rate(work, scale)
            for number in range(rounds):
                for verifies in (number % 2 == 0, number % 2 == 1):
                    before = _switch(storage, verifies=verifies)
                    began_s = time.perf_counter()
                    (figure.ours if verifies else idle).append(Sample(_rate(work, scale)))
                    if verifies:
                        read_s += time.perf_counter() - began_s
                        read_bytes += _switch(storage, verifies=False) - before
            yield figure
        yield Figure("scrub", "bytes that the store verified", "MB/s", True, ours=[Sample(read_bytes / read_s / 1e6)])


def _rate(work: Callable[[], int], scale: float) -> float:
    """Return the messages per second of `work`, which is repeated for a while."""
    began_s, done = time.perf_counter(), 0
    while (passed_s := time.perf_counter() - began_s) < WINDOW_S * min(scale, 1.0):
        done += work()
    return done / passed_s


def _switch(storage: Any, *, verifies: bool) -> int:
    """Begin or end a verification of the store. Returns the number of bytes that verifications have read so far."""
    call = storage.__ray_call__.remote(partial(_switch_in_actor, verifies=verifies))
    read: int = ray.get(call, timeout=CALL_TIMEOUT_S)
    return read


def _switch_in_actor(actor: Any, *, verifies: bool) -> int:
    """Begin or end a verification of the files of a storage actor's store. Runs in the actor's process."""
    from storage.scrub import scrubber as module

    vars(module)["even_rate"] = lambda left_bytes, elapsed_ms, period_hours, rate_max_bytes: float(rate_max_bytes)
    scrubber = actor._real._open().any_store.scrubber
    with scrubber._lock:
        if verifies:
            scrubber._begin(time.time_ns() // 1_000_000)
        else:
            scrubber._progress.section = ""
            scrubber._progress.began_ms = time.time_ns() // 1_000_000
    scrubber._wake.set()
    return int(scrubber.status().read_bytes)
