"""Benchmark of replication: the speed of copying a log, the speed of appends that wait for copies, and the duration of
a failover.

    python tests/bench/programs/bench_replication.py [--directory DIR] [--mib 400] [--seconds 5] [--cluster]
        [--kills 10] [--node-kills 3]

Without `--cluster` all replicas are in this process, on one disk and under one interpreter lock. No data passes between
processes, but the replicas share one core. With `--cluster` the replicas are actors of a Ray cluster on this machine,
with one node or three nodes. Numbers vary by machine and by minute; compare ratios, and run the program twice.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from itertools import count, cycle, pairwise
from pathlib import Path
from statistics import median, quantiles

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import raymq
from actors.core.replica.rules import ReplicaRules
from actors.replica.log_carrier import LogCarrier
from raymq.common.config.store import FlushDiskType
from raymq.common.errors import SystemBusyError
from raymq.common.message import Message
from raymq.records.format.encode import EncodedBatch, ProducerSequence, encode_batch
from raymq.remoting.lane.client import Lane
from storage.message_store import MessageStore
from storage.replication.log_chunks import CHUNK_MAX_BYTES
from tests.bench.machine import touch_memory
from tests.support.clusters.cluster import sandbox
from tests.support.clusters.nodes import nodes
from tests.support.replicas.local_replicas import GROUP, LocalReplicas
from tests.support.replicas.placed_group import PlacedGroup
from tests.support.replicas.ray_replicas import RayReplicas
from tests.support.stores.stores import small_settings

BODY = b"x" * 1024
BATCH = 100
PRODUCERS = 4
ONE_BY_ONE = 500
NODES = ("head", "left", "right")
LONG_POLL_S = 2.0
FILES = {
    "mapped_file_size_commit_log_bytes": 256 << 20,
    "mapped_file_size_consume_queue_bytes": 6_000_000,
    "max_hash_slot_num": 500_000,
    "max_index_num": 2_000_000,
}


def row(name: str, value: str, aim: str = "") -> None:
    print(f"{name:62s} {value:>34s}   {aim}", flush=True)


def make_batch(producer: int, number: int, messages: int = BATCH) -> EncodedBatch:
    """Return the batch with number `number` for the queue of producer `producer`. Each producer has its own
    queue."""
    return encode_batch(
        [Message("bench", BODY, tags="even" if index % 2 else "odd") for index in range(messages)],
        producer,
        born_host=("127.0.0.1", 1),
        born_timestamp_ms=1,
        message_ids=[f"{index:032X}" for index in range(messages)],
        producer=ProducerSequence(f"producer-{producer}", 0, number * messages),
    )


def bench_copy(directory: Path, mib: int) -> None:
    """Measure copying a master's log of `mib` MiB to an empty slave, chunk by chunk."""
    touch_memory(directory, (2 * mib + 400) << 20)
    settings = [
        small_settings(directory / name, **FILES, flush_disk_type=flush)
        for name, flush in (("master", FlushDiskType.ASYNC_FLUSH), ("slave", FlushDiskType.SYNC_FLUSH))
    ]
    master, slave = (MessageStore.open(one, broker_name=GROUP) for one in settings)
    number = 0
    while master.log.end_offset < mib << 20:
        master.append([make_batch(number % PRODUCERS, number // PRODUCERS)])
        number += 1
    end = master.gate.flush_all()
    started, started_cpu = time.perf_counter(), time.thread_time()
    while slave.log.end_offset < end:
        # Append a chunk to the slave's log without waiting for its flush. The disk then writes one chunk while the next
        # chunk is read, as on a slave with a large lag.
        chunk = master.chunks.read_chunk(slave.log.end_offset, CHUNK_MAX_BYTES, end)
        slave.chunks.append_chunk(slave.log.end_offset, chunk, wait=False)
    slave.gate.flush_all()
    seconds, cpu = time.perf_counter() - started, time.thread_time() - started_cpu
    row(
        f"{mib} MiB copied to an empty slave, flushed",
        f"{end / seconds / 1e6:,.0f} MB/s ({end / cpu / 1e6:,.0f} per CPU s)",
        ">= 150 MB/s",
    )
    for store, one in ((master, settings[0]), (slave, settings[1])):
        store.close()
        shutil.rmtree(one.store_path_root_dir)


class Carriers:
    """Threads that copy the master's log to the slaves, as Replicator actors do."""

    def __init__(self, group: LocalReplicas) -> None:
        self._group, self._stopping = group, threading.Event()
        others = [name for name in group.names if group.replicas[name] is not group.master]
        self._threads = [threading.Thread(target=self._carry, args=(name,)) for name in others]
        for thread in self._threads:
            thread.start()

    def _carry(self, name: int) -> None:
        following = self._group.replicas[name].following(LONG_POLL_S)
        assert following is not None
        planes = self._group.planes
        with closing(Lane(planes[following.master].address)) as master, closing(Lane(planes[name].address)) as slave:
            LogCarrier(
                *(master, slave, following, name, following.position or 0),
                is_followed=lambda: True,
                on_copied=lambda copied_bytes: None,
                stopping=self._stopping,
            ).run()

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()


def append_rate(directory: Path, replicas: int, seconds: float) -> tuple[float, float]:
    """Measure a broker group whose replicas are all in this process. Returns the messages per second of four producer
    threads, and the median (p50) duration of a single append in ms."""
    touch_memory(directory, 600 << 20)
    group = LocalReplicas(directory, replicas, ReplicaRules(lease_s=600.0), **FILES)
    group.settle()
    carriers, counts = Carriers(group), [0] * PRODUCERS
    until = time.perf_counter() + seconds

    def produce(producer: int) -> None:
        while time.perf_counter() < until:
            try:
                group.master.append([make_batch(producer, counts[producer])])
            except SystemBusyError:
                # The store was busy and stored nothing. The thread appends the batch again, as a producer does.
                continue
            counts[producer] += 1

    threads = [threading.Thread(target=produce, args=(producer,)) for producer in range(PRODUCERS)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rate = sum(counts) * BATCH / (time.perf_counter() - started)
    numbers = count(1)
    alone = timed(lambda: group.master.append([make_batch(PRODUCERS, next(numbers), 1)]), ONE_BY_ONE // 5)
    carriers.stop()
    group.end()
    for name in group.names:
        shutil.rmtree(group.directory(name))
    return rate, median(alone)


def timed(call: Callable[[], object], calls: int) -> list[float]:
    """Run `call` `calls` times. Returns the duration of each call in ms."""
    times = []
    for _ in range(calls):
        started = time.perf_counter()
        call()
        times.append((time.perf_counter() - started) * 1000)
    return times


def print_rates(where: str, rates: dict[int, tuple[float, float]]) -> None:
    """Print the append rates for each number of copies, and compare them with the rates for one copy."""
    one, alone_ms = rates[1]
    for copies, (rate, _) in rates.items():
        share, aim = f" ({rate / one:.2f} of one copy)" if copies > 1 else "", ">= 0.5" if copies == 2 else ""
        row(f"{where}: 100 x 1 KiB, {PRODUCERS} producers, copies: {copies}", f"{rate:,.0f}/s{share}", aim)
    for copies, (_, p50_ms) in rates.items():
        share = f" ({p50_ms / alone_ms:.1f} of one copy)" if copies > 1 else ""
        row(f"{where}: one 1 KiB message acknowledged, p50, copies: {copies}", f"{p50_ms:.2f} ms{share}")


@contextmanager
def cluster(directory: Path, replicas: int) -> Iterator[raymq.Client]:
    """Run a raymq with one broker group of `replicas` replicas. Yields a client after all replicas are in sync."""
    config = directory / "raymq.yaml"
    config.write_text(
        f"broker_groups: 1\nreplication: {{replicas: {replicas}, spread: false}}\n"
        f"store: {{mapped_file_size_commit_log_bytes: {256 << 20}}}\n"
    )
    with raymq.connect(embedded=True, config=config, data_dir=directory / f"data-{replicas}") as client:
        client.admin.create_topic("bench", queues=PRODUCERS)
        if replicas > 1:
            RayReplicas("broker-a", replicas).settled()
        yield client
    shutil.rmtree(directory / f"data-{replicas}")


def cluster_rate(client: raymq.Client, seconds: float) -> tuple[float, float]:
    """Measure a cluster. Returns the messages per second of four producers, and the median (p50) duration of a single
    send in ms."""
    counts = [0] * PRODUCERS
    until = time.perf_counter() + seconds

    def produce(number: int) -> None:
        with client.producer(f"bench-{number}") as producer:
            while time.perf_counter() < until:
                for future in [producer.send_async(Message("bench", BODY)) for _ in range(BATCH * 10)]:
                    future.result()
                counts[number] += BATCH * 10

    threads = [threading.Thread(target=produce, args=(number,)) for number in range(PRODUCERS)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rate = sum(counts) / (time.perf_counter() - started)
    with client.producer("bench") as producer:
        alone = timed(lambda: producer.send(Message("bench", BODY)), ONE_BY_ONE)
    return rate, median(alone)


def failover_gaps(client: raymq.Client, kills: int, prepare: Callable[[], Callable[[], None]]) -> list[float]:
    """Kill the master `kills` times while a producer sends. Returns, for each kill, the longest time in s between two
    acknowledgements.

    `prepare` waits until all replicas are in sync, and returns a function that kills the master.
    """
    acknowledged, stopping = [time.perf_counter()], threading.Event()

    def produce() -> None:
        with client.producer("bench") as producer:
            while not stopping.is_set():
                producer.send(Message("bench", BODY))
                acknowledged.append(time.perf_counter())

    thread = threading.Thread(target=produce)
    thread.start()
    gaps = []
    try:
        for _ in range(kills):
            kill_master = prepare()
            time.sleep(1.0)
            before = len(acknowledged) - 1
            kill_master()
            killed = time.perf_counter()
            while acknowledged[-1] < killed + 0.5:
                time.sleep(0.01)
            times = acknowledged[before:]
            gaps.append(max(later - earlier for earlier, later in pairwise(times)))
    finally:
        stopping.set()
        thread.join()
    return gaps


def bench_failover(client: raymq.Client, group: RayReplicas, kills: int) -> None:
    """Measure how long a producer gets no acknowledgement after the master's process is killed."""
    gaps = failover_gaps(client, kills, lambda: partial(os.kill, group.pid(group.settled()["master"]), signal.SIGKILL))
    p50, p99 = median(gaps), quantiles(gaps, n=100, method="inclusive")[98]
    row(
        f"gap when the master's process is killed, {kills} kills", f"p50 {p50:.2f} s, p99 {p99:.2f} s", "<= 3 s, <= 6 s"
    )


def bench_node_failover(kills: int) -> None:
    """Measure how long a producer receives no acknowledgement after the master's node is killed, in a cluster of three
    nodes.

    To kill a node means to kill its raylet and all its processes.
    """
    settings = "broker_groups: 1\nreplication: {replicas: 3, min_in_sync_replicas: 2}\n"
    with sandbox(settings) as box, nodes(box, NODES) as machines, raymq.connect(embedded=True) as client:
        client.admin.create_topic("bench", queues=PRODUCERS)
        group = PlacedGroup("broker-a", len(NODES), machines)
        leading = cycle(NODES[1:])  # Never kill the head node, because the Ray cluster cannot run without it.

        def prepare() -> Callable[[], None]:
            for name in NODES:
                if not machines.runs(name):
                    machines.add(name)
            group.wait_for_homes(set(NODES))
            name = next(leading)
            group.lead_from(name)
            return partial(machines.kill, name)

        gaps = failover_gaps(client, kills, prepare)
    row(
        f"gap when the master's node is killed, {kills} kills",
        f"p50 {median(gaps):.2f} s, max {max(gaps):.2f} s",
        "<= 6 s",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, help="where to make the stores; default: a temporary directory")
    parser.add_argument("--mib", type=int, default=400, help="how much is copied")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long each case of appending runs")
    parser.add_argument("--cluster", action="store_true", help="with Ray, too")
    parser.add_argument("--kills", type=int, default=10, help="how often the master is killed")
    parser.add_argument("--node-kills", type=int, default=3, help="how often its node is killed")
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="bench-replication-", dir=options.directory))
    try:
        bench_copy(directory, options.mib)
        print_rates("in one process", {copies: append_rate(directory, copies, options.seconds) for copies in (1, 2, 3)})
        if options.cluster:
            rates = {}
            for copies in (1, 2, 3):
                with cluster(directory, copies) as client:
                    rates[copies] = cluster_rate(client, options.seconds)
                    if copies == 3:
                        bench_failover(client, RayReplicas("broker-a", copies), options.kills)
            print_rates("cluster", rates)
            bench_node_failover(options.node_kills)
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
