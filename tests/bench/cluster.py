"""Runs an embedded raymq for a benchmark, and worker processes: Ray actors that connect to this raymq."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import ray

import raymq
from raymq.common.message import ConsumeFromWhere

FROM_FIRST: Final = ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET
TOPIC: Final = "bench"


@contextmanager
def embedded(directory: Path, *, sync: bool, replicas: int = 1) -> Iterator[raymq.Client]:
    """Run an embedded raymq with one broker group on this machine during a `with` block. Yields a connected
    client."""
    config = directory / "raymq.yaml"
    spread = "\n  spread: false" if replicas > 1 else ""
    config.write_text(
        f"store:\n  flush_disk_type: {'SYNC' if sync else 'ASYNC'}_FLUSH\n"
        f"replication:\n  replicas: {replicas}\n  min_in_sync_replicas: {replicas}{spread}\n"
    )
    with raymq.connect(embedded=True, config=config, data_dir=directory / "store") as client:
        yield client


def new_topic(client: raymq.Client, name: str, queues: int = 4) -> str:
    """Create a topic. Returns its name."""
    client.admin.create_topic(name, queues=queues)
    return name


def joined_consumer(client: raymq.Client, group: str, topic: str, **options: Any) -> Any:
    """Return a pull consumer to which its queues are already assigned. It reads `topic` from the first message."""
    consumer = client.pull_consumer(group, consume_from=FROM_FIRST, auto_commit=False, **options)
    consumer.subscribe(topic)
    deadline_s = time.monotonic() + 60
    while not consumer.assignment():
        consumer.poll(1, timeout_s=0.05)
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{group} got no queues within a minute")
    for queue in consumer.assignment():
        consumer.seek_to_begin(queue)
    return consumer


@ray.remote(num_cpus=0)
class Worker:
    """A worker process with a raymq client, for work that must not share a Python interpreter with the
    benchmark."""

    def __init__(self) -> None:
        self._client = raymq.connect()

    def ready(self) -> None:
        """Do nothing. The call returns only after the worker process has started and its client is connected."""

    def produce(self, topic: str, body: bytes, count: int, start_s: float) -> tuple[float, float]:
        """Send `count` messages with send_async, starting at the time `start_s`.

        Returns the time at which the first message was sent, and the time of the last acknowledgement, in s since 1970.
        """
        with self._client.producer("bench") as producer:
            message = raymq.Message(topic, body)
            producer.send(message)
            time.sleep(max(0.0, start_s - time.time()))
            start = time.time()
            futures = [producer.send_async(message) for _ in range(count)]
            for future in futures:
                future.result()
            return start, time.time()

    def produce_for(self, topic: str, body: bytes, start_s: float, seconds: float) -> tuple[int, list[float]]:
        """Send batches of 500 messages for `seconds`. Each batch is sent after the previous batch was acknowledged.

        Returns the number of messages acknowledged within this time, and the duration of each batch's send in seconds.
        """
        times: list[float] = []
        with self._client.producer("bench") as producer:
            messages = [raymq.Message(topic, body)] * 500
            producer.send(messages[0])
            time.sleep(max(0.0, start_s - time.time()))
            while (begin := time.time()) < start_s + seconds:
                producer.send_batch(messages)
                times.append(time.time() - begin)
        return sum(begin <= seconds for begin in _cumulative(times)) * 500, times

    def pace(self, topic: str, size: int, per_s: int, seconds: float) -> None:
        """Send messages of `size` bytes one by one, `per_s` per second. Each body begins with the message's
        send time."""
        filler = b"x" * (size - 8)
        with self._client.producer("bench") as producer:
            next_s = time.perf_counter()
            for _ in range(int(per_s * seconds)):
                wait_s = next_s - time.perf_counter()
                if wait_s > 0:
                    time.sleep(wait_s)
                producer.send(raymq.Message(topic, time.time_ns().to_bytes(8) + filler))
                next_s += 1 / per_s

    def flow(self, topic: str, size: int, per_s: int, seconds: float) -> None:
        """Send messages of `size` bytes, `per_s` per second, in bursts every 20 ms. Returns after all messages are
        stored."""
        batch = [raymq.Message(topic, b"x" * size)] * (per_s // 50)
        with self._client.producer("bench") as producer:
            start = time.perf_counter()
            for number in range(int(50 * seconds)):
                time.sleep(max(0.0, start + number / 50 - time.perf_counter()))
                for message in batch:
                    producer.send_async(message)
            producer.flush()

    def wait_for_messages(self, topic: str, consumers: int, group: str) -> int:
        """Make this worker process poll a topic without messages until `leave` is called. Each of `consumers` pull
        consumers is in its own group and polls in its own thread.

        Returns the id of this process.
        """
        import os
        import threading

        self._stop = threading.Event()
        self._waiting = []
        for number in range(consumers):
            consumer = self._client.pull_consumer(f"{group}-{number}")
            consumer.subscribe(topic)
            thread = threading.Thread(target=self._poll, args=(consumer,), daemon=True)
            thread.start()
            self._waiting.append((consumer, thread))
        return os.getpid()

    def _poll(self, consumer: Any) -> None:
        while not self._stop.is_set():
            consumer.poll(1, timeout_s=5.0)

    def leave(self) -> None:
        """Stop and close the consumers that `wait_for_messages` opened."""
        self._stop.set()
        for consumer, thread in self._waiting:
            thread.join(30)
            consumer.close()

    def close(self) -> None:
        """Close the client."""
        self._client.close()


def _cumulative(times: list[float]) -> list[float]:
    total, result = 0.0, []
    for one in times:
        total += one
        result.append(total)
    return result


@contextmanager
def workers(count: int) -> Iterator[list[Any]]:
    """Start `count` worker processes that are connected to raymq, for the duration of a `with` block. Yields the worker
    processes."""
    made = [Worker.remote() for _ in range(count)]
    try:
        ray.get([worker.ready.remote() for worker in made], timeout=180)
        yield made
        ray.get([worker.close.remote() for worker in made], timeout=60)
    finally:
        for worker in made:
            ray.kill(worker)
