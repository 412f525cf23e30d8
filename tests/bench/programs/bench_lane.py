"""Benchmark of a store's lane (direct socket connection) without Ray: round trip of a single append, throughput, and
twenty producers at full speed.

    python -m tests.bench.programs.bench_lane             one client: Unix and TCP, both flush settings
    python -m tests.bench.programs.bench_lane overload    1 and 20 producer processes, with a small client beside them

The store has its own process, in a temporary directory. Each result comes from one run: run the program several times
on a quiet machine, and compare.
"""

from __future__ import annotations

import argparse
import os
import pickle
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from actors.core.replica.append_limit import AppendLimit
from actors.core.replica.deleted_topics import DeletedTopics
from actors.replica.data_plane import DataPlane
from actors.replica.sole_replica import SoleReplica
from raymq.common.config.store import FlushDiskType, StoreSettings
from raymq.common.errors import SystemBusyError
from raymq.common.message import Message
from raymq.common.protocol.store import FetchRequest, QueueBounds
from raymq.records.format.encode import EncodedBatch, encode_batch
from raymq.remoting.lane.address import LaneAddress
from raymq.remoting.storage_lane import EndsWatch, StorageLane
from storage.message_store import MessageStore

TIMEOUT_S = 60.0
OVERLOAD_S = 5.0


def serve(root: str, flush: str) -> None:
    """Run a storage process: print its address, answer requests, and exit at the end of its standard input."""
    sys.setswitchinterval(1e-4)
    settings = StoreSettings(store_path_root_dir=Path(root), flush_disk_type=FlushDiskType(flush))
    store = MessageStore.open(settings, broker_name="bench")
    deleted = DeletedTopics(store.read_config, store.write_config)
    methods = {"queue_bounds": store.queues.bounds}
    plane = DataPlane(
        "bench", SoleReplica(store), deleted=deleted, limit=AppendLimit(10_000), methods=methods, host="127.0.0.1"
    )
    print(pickle.dumps(plane.address).hex(), flush=True)
    sys.stdin.read()
    plane.close()
    store.close()


@contextmanager
def storage(flush: FlushDiskType, root: str | None = None) -> Iterator[LaneAddress]:
    """Run a storage process during the block. Its store is in `root`, by default in a temporary directory. Yields the
    process's address."""
    with tempfile.TemporaryDirectory() as own:
        command = [sys.executable, "-m", "tests.bench.programs.bench_lane", "serve", root or own, flush.value]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            yield pickle.loads(bytes.fromhex(process.stdout.readline()))
        finally:
            process.stdin.close()
            process.wait(TIMEOUT_S)
            process.stdout.close()


def batch(count: int, queue_id: int = 0) -> EncodedBatch:
    """Return a batch of `count` messages of 1 KiB."""
    return encode_batch(
        [Message("bench", os.urandom(1024)) for _ in range(count)],
        queue_id,
        born_host=("127.0.0.1", 1),
        born_timestamp_ms=1,
        message_ids=[f"{index:032X}" for index in range(count)],
    ).without_ids()


def percentiles(times_s: list[float]) -> str:
    """Return the median, the 99th percentile and the maximum of durations, as text."""
    times_s.sort()
    p50, p99 = times_s[len(times_s) // 2], times_s[len(times_s) * 99 // 100]
    return f"p50 {p50 * 1e6:8.1f} µs, p99 {p99 * 1e6:9.1f} µs, longest {times_s[-1] * 1e3:7.1f} ms"


def lone_appends(address: LaneAddress, *, remote: bool, count: int) -> str:
    """Measure the round-trip times of appends of one message. Returns their percentiles as text."""
    lane, one = StorageLane(address, remote=remote), [batch(1)]
    times_s = []
    for index in range(count + count // 4):
        start_s = time.perf_counter()
        lane.append(one, TIMEOUT_S)
        if index >= count // 4:
            times_s.append(time.perf_counter() - start_s)
    lane.close()
    return percentiles(times_s)


def throughput(address: LaneAddress, *, remote: bool, messages: int, total: int) -> str:
    """Append batches one after another, up to `total` bytes. Returns the throughput as text."""
    lane, frame = StorageLane(address, remote=remote), [batch(messages)]
    size = len(frame[0].records)
    start_s = time.perf_counter()
    for _ in range(total // size):
        lane.append(frame, TIMEOUT_S)
    took_s = time.perf_counter() - start_s
    lane.close()
    rounds = total // size
    speed = rounds * size / took_s / 1e9
    return f"{size >> 10:5d} KiB: {speed:5.2f} GB/s, {rounds * messages / took_s / 1e3:5.0f}k messages/s"


def watched_appends(address: LaneAddress, count: int) -> str:
    """Measure the time from an append to a queue until a client that watches the queue's end receives the new end.
    Returns the percentiles of `count` measured times as text."""
    lane, one, watch = StorageLane(address, remote=False), [batch(1, 1)], EndsWatch("bench", address)
    end = lane.call("queue_bounds", ("bench", 1), QueueBounds, TIMEOUT_S).max_offset
    times_s = []
    for _ in range(count):
        watch.ask([FetchRequest("bench", 1, end, 1)], 30.0)
        start_s = time.perf_counter()
        lane.append(one, TIMEOUT_S)
        select.select([watch], [], [], TIMEOUT_S)
        [ends] = watch.receive()
        times_s.append(time.perf_counter() - start_s)
        end = ends.max_offset
    watch.close()
    lane.close()
    return percentiles(times_s)


def produce(address: LaneAddress, queue_id: int, messages: int) -> None:
    """Send messages at full speed, as the program of a producer process. Starts after a line was read from standard
    input.

    Prints the number of messages, the duration of each append, and how often the store refused an append as busy.
    """
    lane, frame = StorageLane(address, remote=False), [batch(messages, queue_id)]
    lane.append(frame, TIMEOUT_S)
    print("ready", flush=True)
    sys.stdin.readline()
    times_s, busy, until_s = [], 0, time.monotonic() + OVERLOAD_S
    while time.monotonic() < until_s:
        start_s = time.perf_counter()
        while True:
            try:
                lane.append(frame, TIMEOUT_S)
                break
            except SystemBusyError as error:
                busy += 1
                time.sleep(error.retry_after_s or 0.05)
        times_s.append(time.perf_counter() - start_s)
    print(pickle.dumps((len(times_s) * messages, times_s, busy)).hex())


def overload(address: LaneAddress, producers: int, messages: int) -> None:
    """Run `producers` producer processes at full speed, and a client that appends one small message every 10 ms. Print
    the measurements of both."""
    data = pickle.dumps(address).hex()
    command = [sys.executable, "-m", "tests.bench.programs.bench_lane", "produce", data]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([*command, str(queue), str(messages)], **pipes) for queue in range(producers)]
    for process in processes:
        process.stdout.readline()
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    lane, small, times_s = StorageLane(address, remote=False), [batch(1, 999)], []
    until_s = time.monotonic() + OVERLOAD_S
    while time.monotonic() < until_s:
        start_s = time.perf_counter()
        lane.append(small, TIMEOUT_S)
        times_s.append(time.perf_counter() - start_s)
        time.sleep(0.01)
    lane.close()
    answers = [pickle.loads(bytes.fromhex(process.communicate(timeout=TIMEOUT_S)[0])) for process in processes]
    totals = [total for total, _, _ in answers]
    sends = [one for _, times, _ in answers for one in times]
    spent_s = max(sum(times) for _, times, _ in answers)
    print(
        f"{producers:3d} producers: {sum(totals) / spent_s / 1e3:6.0f}k messages/s, slowest/fastest "
        f"{min(totals) / max(totals):.2f}, told to wait {sum(busy for _, _, busy in answers)} times"
    )
    print(f"      a send of {messages}: {percentiles(sends)}")
    print(f"      the small client:  {percentiles(times_s)}", flush=True)


def main() -> None:
    """Run the measurements that the arguments select."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("alone", "overload", "serve", "produce"), default="alone")
    parser.add_argument("rest", nargs="*", help="of the programs that this one starts: serve, produce")
    options = parser.parse_args()
    if options.what == "serve":
        serve(*options.rest)
    elif options.what == "produce":
        produce(pickle.loads(bytes.fromhex(options.rest[0])), int(options.rest[1]), int(options.rest[2]))
    elif options.what == "overload":
        for messages in (1, 800, 6000):
            for producers in (1, 20):
                with storage(FlushDiskType.ASYNC_FLUSH) as address:
                    overload(address, producers, messages)
    else:
        one_client()


def one_client() -> None:
    """Measure a single client over Unix sockets and over TCP. The store flushes either synchronously or asynchronously
    (both values of FlushDiskType)."""
    for flush in FlushDiskType:
        with storage(flush) as address:
            for remote in (False, True):
                count = 4000 if flush is FlushDiskType.ASYNC_FLUSH else 500
                name = f"{flush.value} {'TCP' if remote else 'Unix'}"
                print(f"{name}: lone append {lone_appends(address, remote=remote, count=count)}", flush=True)
                for messages in (55, 900):
                    print(f"  {throughput(address, remote=remote, messages=messages, total=100 << 20)}", flush=True)
            print(f"{flush.value}: append and watch {watched_appends(address, 500)}", flush=True)


if __name__ == "__main__":
    main()
