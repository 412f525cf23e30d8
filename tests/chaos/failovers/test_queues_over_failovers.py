"""Test of raymq.Queue over a failover: the master of three replicas is killed while two tasks put and two tasks get.

Each item whose put returned is got. No item is got twice, except if a `get` has logged that the answer to its removal
was lost. RAYMQ_CHAOS_SEED repeats the choices of a run.
"""

from __future__ import annotations

import logging
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import ray

import raymq
from raymq.queue import Empty, Queue
from tests.support.cases import chaos_seed
from tests.support.clusters.cluster import one_group
from tests.support.history.waiting import eventually
from tests.support.replicas.ray_replicas import RayReplicas

SETTINGS = one_group("{replicas: 3, spread: false, min_in_sync_replicas: 2}")
TASKS = 2
TIMEOUT_S = 240.0
DRAIN_S = 120.0
"""Timeout for items whose `get` lost the answer to its request for a lease: the lease lasts for 30 s."""


def start_put(queue: Queue, number: int, stop: str) -> Any:
    """Start a task that puts numbered items until the file `stop` exists. The task returns the items whose put
    returned, and the items that may be stored."""

    @ray.remote(num_cpus=0, max_retries=0)
    def put_items() -> tuple[list[str], list[str]]:
        stored, unknown, count = [], [], 0
        while not os.path.exists(stop):
            item = f"{number}-{count}"
            try:
                queue.put(item, timeout=120)
            except (raymq.SendUnknownError, raymq.RequestTimeoutError):
                unknown.append(item)
            except raymq.RaymqError as error:
                if not error.retryable:
                    raise
                continue
            else:
                stored.append(item)
            count += 1
        return stored, unknown

    return put_items.remote()


def start_get(queue: Queue, notes: str) -> Any:
    """Start a task that gets items until it gets None, and writes each item to the file `notes`. The task returns the
    number of removals whose outcome stayed unknown."""

    @ray.remote(num_cpus=0, max_retries=0)
    def get_items() -> int:
        unknown = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = unknown.append  # type: ignore[method-assign]  # it counts the records
        logging.getLogger("raymq.queue.link").addHandler(handler)
        with open(notes, "a") as file:
            while (item := queue.get(timeout=240)) is not None:
                file.write(f"{item}\n")
                file.flush()
        return len(unknown)

    return get_items.remote()


def drained(queue: Queue) -> list[str]:
    """Return the items that are left."""
    items: list[str] = []
    while True:
        try:
            items.append(queue.get(timeout=0.5))
        except Empty:
            return items


@pytest.mark.long
def test_each_item_is_got_once_over_a_failover(mq: raymq.Client, group: str, tmp_path: Path) -> None:
    chance = random.Random(chaos_seed())
    replicas = RayReplicas("broker-a", 3)
    replicas.settled()
    queue = Queue(group[:100], maxsize=20)
    stop, notes = tmp_path / "stop", [tmp_path / f"got-{number}" for number in range(TASKS)]

    def got() -> list[str]:
        return [line for file in notes if file.exists() for line in file.read_text().split("\n")[:-1]]

    gets = [start_get(queue, str(file)) for file in notes]
    puts = [start_put(queue, number, str(stop)) for number in range(TASKS)]
    enough = chance.randrange(20, 120)
    eventually(lambda: len(got()) >= enough, f"{enough} items are got", TIMEOUT_S)
    replicas.fail_over()
    enough = len(got()) + chance.randrange(20, 120)
    eventually(lambda: len(got()) >= enough, f"{enough} items are got after the failover", TIMEOUT_S)
    stop.touch()
    results = ray.get(puts, timeout=TIMEOUT_S)
    stored = {item for found, _ in results for item in found}
    unknown = {item for _, found in results for item in found}
    for _ in gets:
        queue.put(None, timeout=TIMEOUT_S)
    lost_answers = sum(ray.get(gets, timeout=TIMEOUT_S))
    left: list[str] = []

    def all_got() -> bool:
        left.extend(drained(queue))
        return stored <= {*got(), *left}

    eventually(all_got, "each stored item is got", DRAIN_S)
    counts = Counter([*got(), *left])
    print(f"{len(counts)} items, {len(unknown)} unknown puts, {lost_answers} lost answers, {len(left)} items left")
    assert set(counts) <= stored | unknown
    assert counts.total() - len(counts) <= lost_answers, [item for item, count in counts.items() if count > 1]
    queue.shutdown()
