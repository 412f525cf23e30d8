"""Benchmark of push consumers in the mode "share": the rate with an empty listener beside the mode "queue", and
how busy listeners are if they outnumber the queues."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, Final

import raymq
from raymq.client.consumer.push.subscription import PushSubscription
from tests.bench.cluster import FROM_FIRST, new_topic
from tests.bench.figures import Figure, Goal
from tests.bench.produce import send_tables

EQUAL: Final = (1, 4)
"""Numbers of listeners, and of queues, for which both modes are measured."""
MORE: Final = ((4, 1), (16, 1), (16, 2))
"""Numbers of listeners and of queues, with more listeners than queues."""
MANY: Final = (50, 2)
"""A number of listeners that only a run of full scale starts, because each listener is a process."""
WORK_S: Final = 0.1
CALLS_EACH: Final = 40
"""Number of calls that each listener makes if all listeners get equally many."""
_groups = count()


def share(client: raymq.Client, *, rounds: int, scale: float) -> Iterator[Figure]:
    """Yield the rates of both modes with `scale` × 100,000 messages of 1 KiB, and the busy time of many listeners."""
    total = max(5000, int(scale * 100_000) // 5000 * 5000)
    for listeners in EQUAL:
        topic = new_topic(client, f"share-{listeners}", queues=listeners)
        with client.producer("bench") as producer:
            send_tables(producer, topic, b"x" * 1024, total)
        name = f"{listeners} empty listeners, {listeners} queues"
        figure = Figure("share", name, "msg/s", True, [Goal(">=", 0.7, "queue")])
        for _ in range(rounds):
            figure.add_round(
                lambda: _rate(client, topic, total, listeners, "share"),
                {"queue": lambda: _rate(client, topic, total, listeners, "queue")},
            )
        yield figure
    for listeners, queues in (*MORE, MANY) if scale >= 1 else MORE:
        name = f"{listeners} listeners, {queues} queues, calls of {WORK_S * 1000:g} ms: busy"
        figure = Figure("share", name, "of their time", True, [Goal(">=", 0.7)])
        for _ in range(rounds):
            figure.add_round(lambda: _busy(client, listeners, queues), {})
        yield figure


def _rate(client: raymq.Client, topic: str, total: int, listeners: int, mode: str) -> float:
    """Return the number of messages per second that empty listeners consume, from the first message to the last."""
    with _started(client, topic, mode, listeners, lambda message: None, threads=20) as running:
        first, started_s = 0, 0.0
        while (consumed := _consumed(running)) < total:
            if consumed and not first:
                first, started_s = consumed, time.perf_counter()
            time.sleep(0.02)
        return (consumed - first) / (time.perf_counter() - started_s) if first else 0.0


def _busy(client: raymq.Client, listeners: int, queues: int) -> float:
    """Return which part of the time from the first send to the end of the last call the listeners work, on average."""
    topic, calls = new_topic(client, f"share-busy-{next(_groups)}", queues=queues), listeners * CALLS_EACH

    def work(message: raymq.MessageExt) -> None:
        time.sleep(WORK_S)

    with _started(client, topic, "share", listeners, work, threads=1) as running, client.producer("bench") as producer:
        started_s = time.perf_counter()
        for _ in range(calls):
            producer.send_async(raymq.Message(topic, b"work"))
        while _consumed(running) < calls:
            time.sleep(0.02)
        return calls * WORK_S / (time.perf_counter() - started_s) / listeners


def _started(
    client: raymq.Client, topic: str, mode: Any, listeners: int, listener: Callable[[Any], None], *, threads: int
) -> PushSubscription:
    """Start the instances of a new group that reads a topic from its first message."""
    options: dict[str, Any] = {"consume_mode": mode, "threads": threads}
    push = client.push_consumer(f"share-{next(_groups)}", consume_from=FROM_FIRST, **options)
    return push.subscribe(topic).on_message(listener).start(instances=listeners, print_output=False)


def _consumed(running: PushSubscription) -> int:
    return sum(instance.consumed for instance in running.status())
