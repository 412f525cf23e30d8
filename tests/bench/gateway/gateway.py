"""Benchmark of the gateway: clients of RocketMQ 5's protocol, compared with raymq's own client in the same rounds.

The clients are a lean program in a process of its own (`tests.bench.gateway.load`). The CPU time of a figure is the
gateway process's alone, for each message.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import psutil

import raymq
from placement.status import cluster_status
from raymq.tools.bench.latencies import percentile
from tests.bench.cluster import FROM_FIRST, new_topic
from tests.bench.figures import Figure, Goal, Sample
from tests.bench.machine import latencies_us, own_memory_mib, process_cpu_s
from tests.bench.produce import send_tables
from tests.support.gateway.gateways import running_gateway

BODY = b"x" * 1024
BATCH = 32
CONNECTIONS = 8
IDLE_CLIENTS = 1000
SETTLED_S = 31.0
"""Time in s after which the gateway no longer asks the stores for the ids of a connection's sends."""
_names = count()


class LoadProcess:
    """The program that makes the load."""

    def __init__(self) -> None:
        folder = Path(__file__).parents[3]
        command = [sys.executable, "-m", "tests.bench.gateway.load"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder)

    def call(self, name: str, /, **arguments: Any) -> Any:
        """Call a method of Load."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps((name, arguments)) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the load of the benchmark ended in {name}, see its errors above")
        return json.loads(line)

    def close(self) -> None:
        """End the program."""
        self._process.communicate(timeout=60)


@contextmanager
def loads(port: int) -> Iterator[Callable[..., Any]]:
    """Run the load's program, connected to a gateway, and yield its calls."""
    load = LoadProcess()
    try:
        load.call("connect", port=port, count=CONNECTIONS, name="bench")
        yield load.call
    finally:
        load.close()


def gateway(client: raymq.Client, *, rounds: int, scale: float) -> Iterator[Figure]:
    """Yield the figures of one gateway process: sends, receives, 1,000 idle clients, and a killed process."""
    name = f"gateway-{next(_names)}"
    topic = new_topic(client, name)
    with (
        tempfile.TemporaryDirectory() as folder,
        running_gateway(Path(folder)) as running,
        loads(port := int(running.endpoints.rpartition(":")[2])) as call,
        client.producer("bench") as producer,
    ):
        call("send", topic=topic, size=len(BODY), count=CONNECTIONS, per_request=1, in_flight=CONNECTIONS)
        young = max(200, int(scale * 5_000))
        figure = Figure("gateway", "one send each, 32 in flight, new connections", "msg/s", True)
        figure.add_round(lambda: _sent(call, topic, young, 1, 32), {})
        yield figure
        time.sleep(SETTLED_S)
        yield from _lone_sends(client, producer, call, topic, rounds, max(100, int(scale * 2_000)))
        many = max(320, int(scale * 10_000))
        for label, per_request, in_flight, goal in (
            ("one send each, 32 in flight", 1, 32, 3_000),
            (f"requests of {BATCH}, 8 in flight", BATCH, 8, 20_000),
        ):
            number = many * (1 if per_request == 1 else 4) // BATCH * BATCH
            figure = Figure("gateway", label, "msg/s", True, [Goal(">=", goal)])
            for _ in range(rounds):
                figure.add_round(
                    lambda number=number, each=per_request, flight=in_flight: _sent(call, topic, number, each, flight),
                    {
                        "own client": lambda number=number, each=per_request, flight=in_flight: asyncio.run(
                            _own_sends(client, topic, number, each, flight)
                        )
                    },
                )
            yield figure
        yield from _receives(client, producer, call, name, rounds, max(1, int(scale * 4)) * 5000)
        yield from _idle(client, call, port, name)
        call("connect", port=port, count=CONNECTIONS, name="after")
        yield _gap(call, port, topic)


def _pid() -> int:
    """Return the id of the gateway's process."""
    [one] = cluster_status().gateways
    return one.pid


def _measured(work: Callable[[], dict[str, Any]], messages: int) -> Sample:
    """Return the messages per second of `work`, and the gateway's CPU time per message."""
    pid = _pid()
    before_s = process_cpu_s(pid)
    seconds = work()["seconds"]
    return Sample(messages / seconds, (process_cpu_s(pid) - before_s) / messages * 1e6)


def _sent(call: Callable[..., Any], topic: str, number: int, per_request: int, in_flight: int) -> Sample:
    size = {"topic": topic, "size": len(BODY), "count": number, "per_request": per_request, "in_flight": in_flight}
    return _measured(lambda: call("send", **size), number)


async def _own_sends(client: raymq.Client, topic: str, number: int, per_request: int, in_flight: int) -> Sample:
    """Return the messages per second of an AsyncProducer with `in_flight` sends at a time."""
    message = raymq.Message(topic, BODY)
    left = number // per_request
    async with client.async_producer("bench") as producer:
        await producer.send(message)

        async def send() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                await (producer.send(message) if per_request == 1 else producer.send_batch([message] * per_request))

        start_s = time.perf_counter()
        await asyncio.gather(*(send() for _ in range(in_flight)))
        return Sample(number / (time.perf_counter() - start_s))


def _lone_sends(
    client: raymq.Client, producer: raymq.Producer, call: Callable[..., Any], topic: str, rounds: int, number: int
) -> Iterator[Figure]:
    """Yield the latency of one send at a time, and its difference to raymq's own client."""
    message = raymq.Message(topic, BODY)
    rate = Figure("gateway", "one send at a time", "msg/s", True)
    p50 = Figure("gateway", "one send at a time, p50", "us", False)
    more = Figure("gateway", "one send at a time, p50 above the own client's", "us", False, [Goal("<=", 1000)])
    for _ in range(rounds):
        found: dict[str, Any] = {}

        def work(found: dict[str, Any] = found) -> dict[str, Any]:
            found |= call("send", topic=topic, size=len(BODY), count=number, per_request=1, in_flight=1)
            return found

        rate.add_round(lambda work=work: _measured(work, number), {})
        own = percentile(latencies_us(lambda: producer.send(message), number), 50)
        ours = percentile(found["latencies_us"], 50)
        p50.add_round(lambda ours=ours: ours, {"own client": lambda own=own: own})
        more.add_round(lambda ours=ours, own=own: ours - own, {})
    yield from (rate, p50, more)


def _receives(
    client: raymq.Client, producer: raymq.Producer, call: Callable[..., Any], name: str, rounds: int, number: int
) -> Iterator[Figure]:
    """Yield the messages per second that clients receive and acknowledge."""
    for label, each, goal in (
        (f"receive {BATCH}, one acknowledgement", False, 5_000),
        (f"receive {BATCH}, acknowledge each", True, 2_500),
    ):
        figure = Figure("gateway", label, "msg/s", True, [Goal(">=", goal)])
        topic = new_topic(client, f"{name}-receive-{next(_names)}")
        for _ in range(rounds):
            send_tables(producer, topic, BODY, number)
            group = f"{topic}-group"
            figure.add_round(
                lambda topic=topic, group=group, each=each: _measured(
                    lambda: call("receive", topic=topic, group=group, count=number, in_flight=8, each=each), number
                ),
                {"own client": lambda topic=topic, group=f"{group}-own": _own_receives(client, topic, group, number)},
            )
        yield figure


def _own_receives(client: raymq.Client, topic: str, group: str, number: int) -> Sample:
    with client.simple_consumer(group, consume_from=FROM_FIRST) as consumer:
        consumer.subscribe(topic)
        left, start_s = number, time.perf_counter()
        while left > 0:
            messages = consumer.receive(BATCH, 60.0, wait_s=5.0)
            consumer.ack(messages)
            left -= len(messages)
        return Sample(number / (time.perf_counter() - start_s))


def _idle(client: raymq.Client, call: Callable[..., Any], port: int, name: str) -> Iterator[Figure]:
    """Yield the CPU time and the memory of a gateway with clients that wait for messages."""
    topic, pid = new_topic(client, f"{name}-idle"), _pid()
    before_mib = own_memory_mib(psutil.Process(pid))
    call("connect", port=port, count=IDLE_CLIENTS, name="idle")
    # the first time is for the connections and the first calls
    call("idle", topic=topic, group=f"{name}-idle-group", starts=True)
    before_s, start_s = process_cpu_s(pid), time.monotonic()
    call("idle", topic=topic, group=f"{name}-idle-group", starts=False)
    share = 100 * (process_cpu_s(pid) - before_s) / (time.monotonic() - start_s)
    memory_mib = own_memory_mib(psutil.Process(pid))
    label = f"{IDLE_CLIENTS:,} idle push consumers"
    for what, unit, goals, value in (
        (f"{label}, CPU of a core", "%", [Goal("<=", 5)], share),
        (f"{label}, memory", "MiB", [Goal("<=", 150)], memory_mib),
        (f"{label}, memory above an idle gateway's", "MiB", [], memory_mib - before_mib),
    ):
        yield Figure("gateway", what, unit, False, goals, ours=[Sample(value)])


def _gap(call: Callable[..., Any], port: int, topic: str) -> Figure:
    """Measure the time from a kill of the gateway's process to the first send at its successor."""
    figure = Figure("gateway", "killed process, until the next send", "s", False)
    os.kill(_pid(), signal.SIGKILL)
    start_s = time.monotonic()
    call("first_send", port=port, topic=topic, size=len(BODY))
    figure.add_round(lambda: time.monotonic() - start_s, {})
    return figure
