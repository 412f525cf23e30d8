"""How fast the store appends, fetches and recovers, beside what the disk and the interpreter allow.

    python tests/bench/bench_store.py [--directory DIR] [--seconds S]

Prints a line per case, with the ratio to a baseline where there is one: the same bytes written to a file by pwrite and
nothing else. Numbers vary by machine and by minute; compare ratios, and run it twice.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from raymq.config import FlushDiskType, StoreSettings
from raymq.message import Message
from raymq.record import EncodedBatch, encode_batch
from raymq.store_api import FetchRequest
from storage.message_store import MessageStore

BATCH = 100
RECORD_BYTES = 400


def make_batch(queue_id: int) -> EncodedBatch:
    """A batch of 100 messages whose records have about 400 bytes."""
    messages = [Message("bench", b"x" * 240, tags="even" if index % 2 else "odd") for index in range(BATCH)]
    ids = [f"{index:032d}" for index in range(BATCH)]
    return encode_batch(messages, queue_id, born_host=("127.0.0.1", 1), born_timestamp_ms=1, message_ids=ids)


def open_store(directory: Path, flush: FlushDiskType) -> MessageStore:
    return MessageStore.open(StoreSettings(store_path_root_dir=directory, flush_disk_type=flush), broker_name="bench")


def timed(seconds: float, action: Callable[[], int]) -> float:
    """Repeat `action` for about `seconds`; what it returned, summed, per second."""
    done, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        done += action()
    return done / elapsed


def baseline_pwrite(directory: Path, seconds: float, *, flush: bool) -> float:
    """Messages per second if appending were only writing the bytes."""
    data, position = bytes(make_batch(0).records), 0
    descriptor = os.open(directory / "baseline", os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(descriptor, 0, 1 << 30)

    def write() -> int:
        nonlocal position
        os.pwrite(descriptor, data, position % ((1 << 30) - len(data)))
        position += len(data)
        if flush:
            os.fdatasync(descriptor)
        return BATCH

    try:
        return timed(seconds, write)
    finally:
        os.close(descriptor)
        (directory / "baseline").unlink()


def bench_append(directory: Path, seconds: float, flush: FlushDiskType, *, threads: int, queues: int) -> float:
    """Messages per second from `threads` appenders, each call with a batch for each of `queues` queues."""
    store = open_store(directory / "store", flush)
    rates: list[float] = []

    def run() -> None:
        batches = [make_batch(queue_id) for queue_id in range(queues)]
        rates.append(timed(seconds, lambda: BATCH * len(store.append(batches))))

    workers = [threading.Thread(target=run) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    store.close()
    shutil.rmtree(directory / "store")
    return sum(rates)


def bench_fetch_and_recovery(directory: Path, seconds: float) -> None:
    """Fill a store with 200,000 messages, read it, then open a copy of it that was not stopped."""
    store = open_store(directory / "store", FlushDiskType.ASYNC_FLUSH)
    batch = make_batch(0)
    for _ in range(2000):
        store.append([batch])
    shutil.copytree(directory / "store", directory / "crashed")
    for name, tags in (("all", None), ("half, by tag", frozenset(batch.tag_codes[:1].tolist()))):
        offset = 0

        def read(tags: frozenset[int] | None = tags) -> int:
            nonlocal offset
            [result] = store.fetch([FetchRequest("bench", 0, offset, 1000, tags)], max_bytes=1 << 20, wait_s=0)
            offset = result.next_offset if result.next_offset < result.max_offset else 0
            return result.count

        print(f"fetch, {name:36s} {timed(seconds, read):12,.0f} messages/s")
    store.close()
    start = time.perf_counter()
    crashed = open_store(directory / "crashed", FlushDiskType.ASYNC_FLUSH)
    print(
        f"recovery after a crash, 200,000 messages {time.perf_counter() - start:14.2f} s, {crashed.status().recovered}"
    )
    crashed.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, help="where to make the stores; default: a temporary directory")
    parser.add_argument("--seconds", type=float, default=2.0, help="how long each case runs")
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="bench-store-", dir=options.directory))
    try:
        for flush in (FlushDiskType.ASYNC_FLUSH, FlushDiskType.SYNC_FLUSH):
            base = baseline_pwrite(directory, options.seconds, flush=flush is FlushDiskType.SYNC_FLUSH)
            print(f"{flush.value + ': the bytes by themselves':44s} {base:12,.0f} messages/s")
            for threads, queues in ((1, 1), (1, 8), (4, 1)):
                rate = bench_append(directory, options.seconds, flush, threads=threads, queues=queues)
                case = f"{flush.value}: {threads} appender(s), {queues} batch(es) a call"
                print(f"{case:44s} {rate:12,.0f} messages/s   {rate / base:5.2f} of the baseline")
        bench_fetch_and_recovery(directory, options.seconds)
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
