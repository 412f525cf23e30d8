"""Benchmark of the store: appends, reads and recovery, compared with a loop that copies the bytes into a prefaulted
mapped file.

    python tests/bench/programs/bench_store.py [--directory DIR] [--seconds S] [--rounds N] [--large]

The program prints a table: the measurement, its value, and the goal. All measurements run in this process, one after
another. Numbers vary by machine and by minute; compare ratios, and run the program twice. `--large` also writes 10 GiB
and measures the process's memory without the page cache.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from raymq.common.config.store import FlushDiskType, StoreSettings
from raymq.common.message import Message
from raymq.records.format.encode import EncodedBatch, encode_batch
from raymq.records.format.message_id import IdRange
from raymq.records.kernels.columns import decode_columns
from raymq.records.logfiles.log_reader import LogReader
from storage.message_store import MessageStore
from tests.bench.machine import copy_bytes_per_s, touch_memory

GIB = 1 << 30
BODY = b"x" * 1024
ROUND_BYTES = 400 << 20
TOUCHED_MORE = 200 << 20
ASYNC, SYNC = FlushDiskType.ASYNC_FLUSH, FlushDiskType.SYNC_FLUSH


def make_batch(count: int, queue_id: int = 0, *, mixed: bool = False) -> EncodedBatch:
    """Return a batch of messages with bodies of 1 KiB, encoded as a producer sends it. `mixed`: give each message one
    to four properties."""
    messages = [
        Message(
            "bench",
            BODY,
            tags="even" if index % 2 else "odd",
            properties={f"name-{number}": "v" * (index % 7 + 1) for number in range(index % 4 + 1)} if mixed else {},
        )
        for index in range(count)
    ]
    ids = IdRange(f"{0:028d}", 0, count)
    batch = encode_batch(messages, queue_id, born_host=("127.0.0.1", 1), born_timestamp_ms=1, message_ids=ids)
    return replace(batch, message_ids=ids)


@contextmanager
def open_store(
    directory: Path, flush_disk_type: FlushDiskType, *, keep: bool = False, **changes: int | bool
) -> Iterator[MessageStore]:
    settings = StoreSettings(store_path_root_dir=directory, flush_disk_type=flush_disk_type, **changes)
    store = MessageStore.open(settings, broker_name="bench")
    try:
        yield store
    finally:
        store.close()
        if not keep:
            shutil.rmtree(directory)


def row(name: str, value: str, aim: str = "") -> None:
    print(f"{name:62s} {value:>24s}   {aim}", flush=True)


def timed(seconds: float, action: Callable[[], object]) -> float:
    """Call `action` repeatedly for `seconds`. Returns the number of calls per second."""
    runs, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        action()
        runs += 1
    return runs / elapsed


class AppendRound(NamedTuple):
    """The times of one round, which appends one batch repeatedly to a new store."""

    # The duration in s of each append in this round.
    times: list[float]
    # Time in s from the round's last append until the index thread has indexed all messages.
    index_s: float
    # CPU time in s that this process uses for the appends and the index, but not for opening the store.
    cpu_s: float


def append_round(directory: Path, batch: EncodedBatch, size: int, **changes: Any) -> AppendRound:
    """Append `batch` to a new store repeatedly, up to `size` bytes in all. Returns the duration of each append, the
    index's time after the last append, and the processor time."""
    touch_memory(directory, size + TOUCHED_MORE)
    times = []
    with open_store(directory / "store", **changes) as store:
        cpu = time.process_time()
        end = time.perf_counter()
        for _ in range(size // len(batch.records)):
            start = end
            store.append([batch])
            end = time.perf_counter()
            times.append(end - start)
        store.queries.by_key("bench", "none")
        return AppendRound(times, time.perf_counter() - end, time.process_time() - cpu)


def bench_append(directory: Path, rounds: int, count: int, aim: str) -> None:
    """Measure appends in `rounds` rounds of a fixed size. Compare each round with a loop that copies the bytes. Print
    the median round and the best round."""
    batch = make_batch(count)
    size = ROUND_BYTES if count > 1 else ROUND_BYTES // 16
    for name, changes in (
        ("ASYNC_FLUSH", {"flush_disk_type": ASYNC}),
        ("ASYNC_FLUSH, warm-up", {"flush_disk_type": ASYNC, "warm_mapped_file_enable": True}),
        ("ASYNC_FLUSH, pool", {"flush_disk_type": ASYNC, "transient_store_pool_enable": True}),
        ("SYNC_FLUSH", {"flush_disk_type": SYNC}),
    ):
        rates, with_index, shares = [], [], []
        for _ in range(rounds):
            copies = copy_bytes_per_s(directory, bytes(batch.records)) / len(batch.records)
            times, index_s, _ = append_round(directory, batch, size if name != "SYNC_FLUSH" else size // 8, **changes)
            rates.append(len(times) / sum(times) * count)
            with_index.append(len(times) / (sum(times) + index_s) * count)
            shares.append(rates[-1] / count / copies)
        value = f"{np.median(rates):,.0f}/s = {np.median(shares):.2f}"
        row(f"append {count} x 1 KiB, {name}", value, aim if name == "ASYNC_FLUSH" else "")
        row("  best round", f"{max(rates):,.0f}/s = {max(shares):.2f}")
        row("  until the index has all of it", f"{np.median(with_index):,.0f}/s")


def bench_rolls(directory: Path, rounds: int) -> None:
    """Measure the slowest appends. Alternate between a store with small log files, which often begins a new file, and a
    store with one large log file."""
    batch = make_batch(10)
    for _ in range(rounds):
        for name, size in (("no roll", 2 * GIB), ("a roll each 16 MiB", 16 << 20)):
            changes = {"flush_disk_type": ASYNC, "mapped_file_size_commit_log_bytes": size}
            times, *_ = append_round(directory, batch, ROUND_BYTES, **changes)
            p50, p999 = np.percentile(times, (50, 99.9)) * 1e6
            row(f"append 10 x 1 KiB, {name}: p50, p99.9", f"{p50:,.0f} us, {p999:,.0f} us")


def bench_columns(directory: Path, seconds: float) -> None:
    """Measure reading a queue as Arrow batches from the mapped files, 20,000 messages per batch."""
    total, step = 200_000, 20_000
    mixed = make_batch(100, mixed=True)
    for batch, what, aim in ((make_batch(100), "alike", ">= 3,000,000 messages/s"), (mixed, "of all shapes", "")):
        with open_store(directory / "store", ASYNC) as store:
            for _ in range(total // 100):
                store.append([batch])
            reader = store._parts.reader

            def read(reader: LogReader = reader) -> None:
                for offset in range(0, total, step):
                    units = reader.units("bench", 0, offset, step)
                    for view in reader.views(units):
                        starts = units["physical_offset"].astype(np.int64)
                        decode_columns(view, starts - starts[0], broker_name="b", body_type="binary_view")

            read()
            row(f"read a queue as Arrow views, messages {what}", f"{timed(seconds, read) * total:,.0f} messages/s", aim)


def fill_and_be_killed(directory: Path, gib: float) -> None:
    """Fill a store with `gib` GiB of messages, then kill this process with SIGKILL. The caller must run this function
    in a separate process."""
    settings = StoreSettings(
        store_path_root_dir=directory, flush_disk_type=ASYNC, mapped_file_size_commit_log_bytes=GIB
    )
    store, batch = MessageStore.open(settings, broker_name="bench"), make_batch(100)
    while store.status().max_physical_offset < gib * GIB * 0.97:
        store.append([batch])
    os.kill(os.getpid(), signal.SIGKILL)


def lose_queues_and_snapshot(root: Path) -> None:
    """Delete the consume queues and the snapshot of a closed store, so that only its log remains. This is the worst
    state after a crash."""
    (root / "dedup").unlink(missing_ok=True)
    (root / "abort").touch()
    shutil.rmtree(root / "consumequeue")


def bench_recovery(directory: Path) -> None:
    """Measure how long a store takes to open after SIGKILL, after a clean stop, and with only its log."""
    root = directory / "store"
    for gib in (0.25, 1.0):
        subprocess.run([sys.executable, __file__, "--fill", f"{gib}", "--directory", str(root)], check=False)
        for case in ("as SIGKILL leaves it", "after a clean stop", "its queues and snapshot gone"):
            if case.startswith("its"):
                lose_queues_and_snapshot(root)
            start = time.perf_counter()
            with open_store(root, ASYNC, keep=True, mapped_file_size_commit_log_bytes=GIB) as store:
                seconds = time.perf_counter() - start
                assert store.queues.bounds("bench", 0).max_offset
            row(f"recovery of {gib:g} GiB, {case}", f"{seconds:.2f} s", "<= 3 s per GiB walked")
        shutil.rmtree(root)


def bench_memory(directory: Path) -> None:
    """Measure the process's memory without the page cache, after the process has written and read 10 GiB."""
    batch = make_batch(1000)
    with open_store(directory / "store", ASYNC) as store:
        while store.status().max_physical_offset < 10 * GIB:
            store.append([batch])
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon"):
                row(
                    "memory of a store of 10 GiB beyond page cache",
                    f"{int(line.split()[1]) / 1024:,.0f} MiB",
                    "<= 600 MiB",
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, help="where to make the stores; default: a temporary directory")
    parser.add_argument("--seconds", type=float, default=2.0, help="how long each case of reading runs")
    parser.add_argument("--rounds", type=int, default=3, help="how often each case of appending runs")
    parser.add_argument("--large", action="store_true", help="also write 10 GiB")
    parser.add_argument(
        "--fill", type=float, metavar="GIB", help="only fill a store at DIR, and die (see bench_recovery)"
    )
    options = parser.parse_args()
    if options.fill:
        fill_and_be_killed(options.directory, options.fill)
    directory = Path(tempfile.mkdtemp(prefix="bench-store-", dir=options.directory))
    try:
        bench_append(directory, options.rounds, 100, ">= 0.4 and >= 1,000,000 messages/s")
        bench_append(directory, options.rounds, 1, ">= 50,000 messages/s")
        bench_rolls(directory, options.rounds)
        bench_columns(directory, options.seconds)
        bench_recovery(directory)
        if options.large:
            bench_memory(directory)
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
