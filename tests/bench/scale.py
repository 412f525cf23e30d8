"""Benchmarks with many producers, consumer groups, queues, topics and waiting consumers, and of an overloaded
cluster."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from itertools import count

import ray

import raymq
from raymq.tools.bench.latencies import percentile
from tests.bench.cluster import joined_consumer, new_topic, workers
from tests.bench.consuming.consume import drain_objects
from tests.bench.figures import Figure, Goal, Sample
from tests.bench.machine import (
    cpu_of,
    latencies_us,
    own_memory_mib,
    processes,
    server_name,
)
from tests.bench.produce import rate, send_async_each, send_tables

BODY = b"x" * 1024
SERVERS = frozenset(("NameServer", "Controller", "Broker", "Storage", "Replicator", "Rebalance", "Pull", "Listener"))
"""Class names of raymq's server actors."""
_names = count()


def producers(client: raymq.Client, *, rounds: int, scale: float) -> Iterator[Figure]:
    """Yield the acknowledged messages per second, in total, of 1, 4 and 16 producer processes that send at the same
    time."""
    topic = new_topic(client, f"producers-{next(_names)}")
    each = max(2000, int(scale * 40_000))
    for number in (1, 4, 16):
        figure = Figure("producers", f"{number} processes, send_async", "msg/s", True)
        with workers(number) as sending:
            for _ in range(rounds):
                start_s = time.time() + 1.0
                asked = [worker.produce.remote(topic, BODY, each, start_s) for worker in sending]
                spans = ray.get(asked, timeout=300)
                begin, end = min(span[0] for span in spans), max(span[1] for span in spans)
                figure.add_round(lambda: number * each / (end - begin), {})
        yield figure


def overload(client: raymq.Client, *, scale: float) -> Iterator[Figure]:
    """Yield the measurements of an overloaded cluster: 20 producer processes at full speed, compared with one producer
    process.

    During the measurement a consumer polls and commits continuously.
    """
    topic = new_topic(client, f"overload-{next(_names)}", queues=8)
    seconds = max(3.0, scale * 10)
    with workers(20) as sending, joined_consumer(client, f"{topic}-group", topic) as consumer:
        commits: list[float] = []
        stop = threading.Event()

        def commit() -> None:
            while not stop.is_set():
                consumer.poll(100)
                start = time.perf_counter()
                consumer.commit()
                commits.append((time.perf_counter() - start) * 1000)

        def produced_by(number: int) -> tuple[list[int], list[list[float]]]:
            start_s = time.time() + 1.0
            asked = [worker.produce_for.remote(topic, BODY, start_s, seconds) for worker in sending[:number]]
            counts, times = zip(*ray.get(asked, timeout=300), strict=True)
            return list(counts), list(times)

        committing = threading.Thread(target=commit)
        committing.start()
        [alone], _ = produced_by(1)
        commits.clear()
        counts, times = produced_by(20)
        stop.set()
        committing.join(60)
    slowest = sorted(took * 1000 for one in times for took in one)
    for name, unit, more, goal, value in (
        ("20 processes beside one alone", "", True, Goal(">=", 0.8), sum(counts) / alone),
        ("slowest beside fastest of 20", "", True, Goal(">=", 0.3), min(counts) / max(counts)),
        ("send_batch(500) of 20, p99", "ms", False, Goal("<=", 1000), percentile(slowest, 99)),
        ("a consumer's commits in the overload, p99", "ms", False, Goal("<=", 100), percentile(sorted(commits), 99)),
    ):
        yield Figure("overload", name, unit, more, [goal], ours=[Sample(value)])


def fan_out(client: raymq.Client, *, rounds: int, scale: float) -> Iterator[Figure]:
    """Yield the total number of messages per second that 1, 4 and 16 consumer groups receive. All groups read the same
    messages, each in one thread."""
    total = max(5000, int(scale * 50_000) // 5000 * 5000)
    topic = new_topic(client, f"fan-out-{next(_names)}")
    with client.producer("bench") as producer:
        send_tables(producer, topic, BODY, total)
    for number in (1, 4, 16):
        figure = Figure("fan-out", f"{number} groups, poll + commit", "msg/s", True)
        consumers = [joined_consumer(client, f"{topic}-{number}-{index}", topic) for index in range(number)]
        for _ in range(rounds):
            for consumer in consumers:
                for queue in consumer.assignment():
                    consumer.seek_to_begin(queue)
            threads = [threading.Thread(target=drain_objects, args=(consumer, total)) for consumer in consumers]
            start = time.perf_counter()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            seconds = time.perf_counter() - start
            figure.add_round(lambda: number * total / seconds, {})
        for consumer in consumers:
            consumer.close()
        yield figure


def queues(client: raymq.Client, *, rounds: int, scale: float) -> Iterator[Figure]:
    """Yield the CPU time per message of sending messages asynchronously and polling them, with 1, 8 and 1,000
    queues."""
    total = max(10_000, int(scale * 50_000) // 5000 * 5000)
    cpu: dict[int, float] = {}
    for number in (1, 8, 1000):
        topic = new_topic(client, f"queues-{number}-{next(_names)}", queues=number)
        figure = Figure("queues", f"{number} queues, send_async and poll + commit", "msg/s", True)
        with client.producer("bench") as producer, joined_consumer(client, f"{topic}-group", topic) as consumer:
            for _ in range(rounds):
                figure.add_round(
                    lambda: rate(
                        lambda: (send_async_each(producer, topic, BODY, total), drain_objects(consumer, total)), total
                    ),
                    {},
                )
        cpu[number] = figure.cpu_us or 0.0
        yield figure
    yield Figure(
        "queues", "CPU of 1,000 queues beside 8", "", False, [Goal("<=", 1.3)], ours=[Sample(cpu[1000] / cpu[8])]
    )


def waiting(client: raymq.Client, *, scale: float) -> Iterator[Figure]:
    """Yield the cost of 0, 100 and 200 idle consumers that wait for messages, each in its own group.

    The measurements are the time of a single send, the CPU use of raymq's servers, and the CPU use of the consumers'
    program. The CPU use of Ray's own processes is measured separately.
    """
    topic, other = new_topic(client, f"waiting-{next(_names)}"), new_topic(client, f"sent-{next(_names)}")
    seconds = max(5.0, 20 * scale)
    with client.producer("bench") as producer, workers(2) as holders:
        message = raymq.Message(other, BODY)
        producer.send(message)
        idle = {0: None, 100: holders[0], 200: holders[1]}
        for number, holder in idle.items():
            pid = None
            if holder is not None:
                pid = ray.get(holder.wait_for_messages.remote(topic, 100, f"{topic}-{number}"), timeout=300)
            time.sleep(5)  # Wait until all consumers have joined their groups, and their first polls have ended.
            servers, rays = _servers_and_rays()
            of_servers, of_rays, of_program = _cpu_percent(servers, rays, [pid] if pid else [], seconds=seconds)
            times = latencies_us(lambda: producer.send(message), 500, 0.001)
            who = f"{number or 'no'} consumers wait"
            goals = {100: 2.0, 200: 3.0}
            goal = [Goal("<=", goals[number])] if number else []
            yield Figure("waiting", f"one send, {who}, p50", "us", False, ours=[Sample(percentile(times, 50))])
            yield Figure("waiting", f"raymq's servers, {who}", "% of a core", False, goal, ours=[Sample(of_servers)])
            yield Figure("waiting", f"Ray's own processes, {who}", "% of a core", False, ours=[Sample(of_rays)])
            if pid:
                name = f"the program of 100 of {number}"
                yield Figure("waiting", name, "% of a core", False, [Goal("<=", 5.0)], ours=[Sample(of_program)])
        ray.get([holder.leave.remote() for holder in holders], timeout=300)


def _servers_and_rays() -> tuple[list[int], list[int]]:
    """Return the process ids of raymq's servers, and of Ray's own processes."""
    servers, rays = list[int](), list[int]()
    for process in processes():
        kind = server_name(process).removeprefix("ray::").split(".")[0].split(":")[-1]
        if kind in SERVERS:
            servers.append(process.pid)
        elif process.pid != os.getpid() and "Worker" not in kind:
            rays.append(process.pid)
    return servers, rays


def _cpu_percent(*groups: list[int], seconds: float) -> list[float]:
    """Return the CPU use of each group of processes during `seconds`, in % of a core. Processes that end during the
    measurement do not count."""
    before = {pid: used for pids in groups for pid in pids if (used := cpu_of(pid)) is not None}
    time.sleep(seconds)
    after = {pid: used for pid in before if (used := cpu_of(pid)) is not None}
    return [sum(after[pid] - before[pid] for pid in pids if pid in after) / seconds * 100 for pids in groups]


def topics(client: raymq.Client, *, scale: float) -> Iterator[Figure]:
    """Yield the time of creating 2,000 topics of 8 queues, and the time in which a consumer reads one message from each
    of 1,600 queues."""
    number = max(200, int(2000 * min(scale, 1.0)))
    start = time.perf_counter()
    names = [new_topic(client, f"many-{index}-{next(_names)}", queues=8) for index in range(number)]
    seconds = (time.perf_counter() - start) * 2000 / number
    yield Figure("topics", "2,000 topics of 8 queues created", "s", False, [Goal("<=", 10)], ours=[Sample(seconds)])
    wanted = names[:200]
    with client.producer("bench") as producer:
        futures = [
            producer.send_async(raymq.Message(topic, BODY), queue=queue)
            for topic in wanted
            for queue in client.routes.get(topic).publish_queues
        ]
        for future in futures:
            future.result()
    start = time.perf_counter()
    consumer = client.pull_consumer("many-queues", consume_from=raymq.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET)
    with consumer:
        for topic in wanted:
            consumer.subscribe(topic)
        left = len(futures)
        while left > 0:
            left -= len(consumer.poll(5000, timeout_s=30))
        seconds = time.perf_counter() - start
    yield Figure(
        "topics",
        f"a message of each of {len(futures):,} queues read",
        "s",
        False,
        [Goal("<=", 2)],
        ours=[Sample(seconds)],
    )


def groups(client: raymq.Client, *, scale: float) -> Iterator[Figure]:
    """Yield the time until 1,000 groups with one consumer each have formed, and the servers' memory per group."""
    number = max(100, int(1000 * min(scale, 1.0)))
    topic = new_topic(client, f"groups-{next(_names)}", queues=1)
    servers = [process for process in processes() if process.pid != os.getpid()]
    before = sum(map(own_memory_mib, servers))
    start = time.perf_counter()
    consumers = []
    for index in range(number):
        consumer = client.pull_consumer(f"group-{index}-{topic}")
        consumer.subscribe(topic)
        consumers.append(consumer)
    waiting_for = list(consumers)
    while waiting_for:
        waiting_for = [consumer for consumer in waiting_for if not consumer.assignment()]
        time.sleep(0.05)
        if time.perf_counter() - start > 300:
            break
    seconds = time.perf_counter() - start
    servers = [process for process in processes() if process.pid != os.getpid()]
    memory = (sum(map(own_memory_mib, servers)) - before) / number
    for consumer in consumers:
        consumer.close()
    yield Figure("groups", f"{number:,} groups joined", "s", False, [Goal("<=", 30)], ours=[Sample(seconds)])
    yield Figure("groups", "servers' memory per group", "MiB", False, [Goal("<=", 1)], ours=[Sample(memory)])
