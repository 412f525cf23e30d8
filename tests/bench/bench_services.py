"""The cost of consumer groups: many groups, many idle consumers, and the rate of a push consumer.

    python tests/bench/bench_services.py groups 1000     each group with a member: time until all have queues, memory
    python tests/bench/bench_services.py idle 200        idle pull consumers of one program: CPU of servers and program
    python tests/bench/bench_services.py push 2000000    a push consumer whose listener does nothing: messages/s

Starts a raymq of its own in a temporary directory.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from contextlib import ExitStack

import psutil

import raymq
from raymq.message import MessageQueue
from raymq.protocol.membership import GroupAssignment, GroupHeartbeat

FIRST = raymq.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET
WAIT_S = 120.0
MEASURE_S = 20.0
PAYLOAD = b"x" * 100
SERVERS = ("Rebalance", "Pull", "Listener", "Storage", "Broker", "NameServer")


def servers() -> dict[str, list[psutil.Process]]:
    """The processes of this raymq's actors, by class."""
    found: dict[str, list[psutil.Process]] = {name: [] for name in SERVERS}
    for process in psutil.process_iter():
        try:
            title = " ".join(process.cmdline()[:1])
        except psutil.Error:
            continue
        for name in SERVERS:
            if title.startswith(f"ray::{name}"):
                found[name].append(process)
    return found


def memory_mib(processes: list[psutil.Process]) -> float:
    """What the processes have for themselves, in MiB."""
    return sum(process.memory_full_info().uss for process in processes) / (1 << 20)


def cpu_s(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


class Member:
    """A member without messages."""

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self.held: frozenset[MessageQueue] = frozenset()

    def next_heartbeat(self) -> GroupHeartbeat:
        return GroupHeartbeat(f"m{id(self)}", frozenset({self.topic}), self.held)

    def assigned(self, assignment: GroupAssignment, sent_s: float) -> None:
        self.held = assignment.queues

    def unanswered(self, error: raymq.RaymqError) -> None:
        print("no answer:", error)


def groups(mq: raymq.Client, count: int) -> None:
    """Join `count` groups with a member each."""
    mq.admin.create_topic("orders", queues=4)
    rebalances = servers()["Rebalance"]
    before = memory_mib(rebalances)
    members = [Member("orders") for _ in range(count)]
    started_s = time.monotonic()
    for index, member in enumerate(members):
        mq.rebalance.join(f"group-{index}", member)
    while not all(member.held for member in members):
        if time.monotonic() - started_s > WAIT_S:
            raise SystemExit(f"{sum(not member.held for member in members)} groups have no queues after {WAIT_S} s")
        time.sleep(0.01)
    joined_s = time.monotonic() - started_s
    time.sleep(5.0)
    used_mib = memory_mib(rebalances) - before
    each_kib = used_mib / count * 1024
    print(f"{count} groups joined in {joined_s:.2f} s; {each_kib:.1f} KiB each at {len(rebalances)} servers")
    measure("heartbeats", servers())


def idle(mq: raymq.Client, count: int) -> None:
    """Have `count` consumers wait for messages, in groups of their own."""
    mq.admin.create_topic("orders", queues=4)
    with ExitStack() as stack:
        consumers = []
        started_s = time.monotonic()
        for index in range(count):
            consumer = stack.enter_context(mq.pull_consumer(f"group-{index}", consume_from=FIRST))
            consumer.subscribe("orders")
            consumers.append(consumer)
        while not all(consumer.assignment() for consumer in consumers):
            time.sleep(0.05)
        print(f"{count} consumers have their queues after {time.monotonic() - started_s:.1f} s")
        time.sleep(5.0)
        measure(f"{count} idle consumers", servers())


def measure(what: str, processes: dict[str, list[psutil.Process]]) -> None:
    """Print the shares of a core that the servers and this program take."""
    me = [psutil.Process(os.getpid())]
    before = {name: cpu_s(some) for name, some in processes.items()} | {"program": cpu_s(me)}
    time.sleep(MEASURE_S)
    after = {name: cpu_s(some) for name, some in processes.items()} | {"program": cpu_s(me)}
    shares = {name: (after[name] - before[name]) / MEASURE_S for name in before}
    print(f"{what}: " + ", ".join(f"{name} {share:.1%} of a core" for name, share in shares.items() if share))


def listen(messages: list[raymq.MessageExt]) -> None:
    """Do nothing."""


def listen_one(message: raymq.MessageExt) -> None:
    """Do nothing."""


def push(mq: raymq.Client, count: int) -> None:
    """Consume `count` messages of 100 bytes, one at a time and in lists."""
    mq.admin.create_topic("orders", queues=8)
    with mq.producer() as producer:
        for first in range(0, count, 1000):
            producer.send_batch([raymq.Message("orders", PAYLOAD) for _ in range(first, min(first + 1000, count))])
    for name, listener in (("single", listen_one), ("lists", listen)):
        consumer = mq.push_consumer(f"group-{name}", consume_from=FIRST).subscribe("orders")
        described = consumer.on_message(listener) if name == "single" else consumer.on_messages(listener)
        with described.start() as subscription:
            begun: tuple[float, int] | None = None
            while (consumed := subscription.status()[0].consumed) < count:
                if begun is None and consumed > count // 10:
                    begun = time.monotonic(), consumed
                    before = {kind: cpu_s(some) for kind, some in servers().items()}
                time.sleep(0.05)
            assert begun is not None
            took_s = time.monotonic() - begun[0]
            after = {kind: cpu_s(some) for kind, some in servers().items()}
        shares = ", ".join(f"{kind} {(after[kind] - before[kind]) / took_s:.0%}" for kind in after if after[kind])
        print(f"push, {name}: {(count - begun[1]) / took_s:,.0f} messages/s ({shares})")


def main() -> None:
    what, count = sys.argv[1], int(sys.argv[2])
    with tempfile.TemporaryDirectory(prefix="svc") as data_dir, raymq.connect(embedded=True, data_dir=data_dir) as mq:
        {"groups": groups, "idle": idle, "push": push}[what](mq, count)


if __name__ == "__main__":
    main()
