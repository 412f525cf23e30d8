"""How fast the store appends, reads and recovers, beside a loop that copies the same bytes into a warm mapped file.

    python tests/bench/bench_store.py [--directory DIR] [--seconds S] [--large]

Prints a table: what is measured, the number, the number aimed at. Everything runs in this process, one after another.
Numbers vary by machine and by minute; compare ratios, and run it twice. `--large` also writes 10 GiB and looks at the
memory the process holds beyond the page cache.
"""

from __future__ import annotations

import argparse
import mmap
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from raymq.columns import decode_columns
from raymq.config import FlushDiskType, StoreSettings
from raymq.message import Message
from raymq.record import EncodedBatch, encode_batch
from storage.message_store import MessageStore

GIB = 1 << 30
BODY = b"x" * 1024
ASYNC, SYNC = FlushDiskType.ASYNC_FLUSH, FlushDiskType.SYNC_FLUSH


def make_batch(count: int, queue_id: int = 0) -> EncodedBatch:
    """A batch of messages with bodies of 1 KiB, as a producer ships it."""
    messages = [Message("bench", BODY, tags="even" if index % 2 else "odd") for index in range(count)]
    ids = [f"{index:032d}" for index in range(count)]
    batch = encode_batch(messages, queue_id, born_host=("127.0.0.1", 1), born_timestamp_ms=1, message_ids=ids)
    return batch.without_ids()


@contextmanager
def open_store(directory: Path, flush: FlushDiskType, **changes: int | bool) -> Iterator[MessageStore]:
    settings = StoreSettings(store_path_root_dir=directory, flush_disk_type=flush, **changes)
    store = MessageStore.open(settings, broker_name="bench")
    try:
        yield store
    finally:
        store.close()
        shutil.rmtree(directory)


def row(name: str, value: str, aim: str = "") -> None:
    print(f"{name:62s} {value:>24s}   {aim}", flush=True)


def timed(seconds: float, action: Callable[[], object]) -> float:
    """How often `action` ran per second."""
    runs, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        action()
        runs += 1
    return runs / elapsed


def copies_per_second(directory: Path, seconds: float, data: bytes) -> float:
    """The same bytes copied into a mapped file whose pages are all there."""
    path, position = directory / "baseline", 0
    with path.open("w+b") as file:
        file.truncate(256 << 20)
        mapped = mmap.mmap(file.fileno(), 256 << 20)
        for page in range(0, len(mapped), 4096):
            mapped[page] = 1

        def copy() -> None:
            nonlocal position
            if position + len(data) > len(mapped):
                position = 0
            mapped[position : position + len(data)] = data
            position += len(data)

        try:
            return timed(seconds, copy)
        finally:
            mapped.close()
            path.unlink()


def bench_append(directory: Path, seconds: float, count: int, aim: str) -> None:
    batch = make_batch(count)
    copies = copies_per_second(directory, seconds, bytes(batch.records))
    row(f"copying {count} x 1 KiB into a warm map", f"{copies * count:,.0f} messages/s")
    for flush in (ASYNC, SYNC):
        with open_store(directory / "store", flush) as store:
            rate = timed(seconds, lambda store=store: store.append([batch]))  # type: ignore[misc]
        share = f"{rate * count:,.0f}/s = {rate / copies:.2f}"
        row(f"append {count} x 1 KiB, {flush.value}", share, aim if flush is ASYNC else "")


def bench_rolls(directory: Path, seconds: float) -> None:
    """The slowest appends of single batches, with files that roll often and with one that never does."""
    batch = make_batch(10)
    for name, size in (("no roll", 2 * GIB), ("a roll each 16 MiB", 16 << 20)):
        times: list[float] = []
        with open_store(directory / "store", ASYNC, mapped_file_size_commit_log_bytes=size) as store:
            end = time.perf_counter() + seconds
            while (start := time.perf_counter()) < end:
                store.append([batch])
                times.append(time.perf_counter() - start)
        p50, p999 = np.percentile(times, (50, 99.9)) * 1e6
        row(f"append 10 x 1 KiB, {name}: p50, p99.9", f"{p50:,.0f} us, {p999:,.0f} us")


def bench_columns(directory: Path, seconds: float) -> None:
    """Read one queue as Arrow batches over the mapped files, in steps of 20,000 messages."""
    total, step = 200_000, 20_000
    batch = make_batch(100)
    with open_store(directory / "store", ASYNC) as store:
        for _ in range(total // 100):
            store.append([batch])
        reader = store._reader

        def read() -> None:
            for offset in range(0, total, step):
                units = reader.units("bench", 0, offset, step)
                for view in reader.views(units):
                    starts = units["physical_offset"].astype(np.int64)
                    decode_columns(view, starts - starts[0], broker_name="b", body_type="binary_view")

        read()
        row("read a queue as Arrow views", f"{timed(seconds, read) * total:,.0f} messages/s", ">= 3,000,000 messages/s")


def bench_recovery(directory: Path) -> None:
    """Open what SIGKILL leaves of a store: with its snapshot, and without one, when the whole log must be walked."""
    batch = make_batch(100)
    for gib in (0.25, 1.0):
        with open_store(directory / "store", ASYNC, mapped_file_size_commit_log_bytes=GIB) as store:
            while store.status().max_physical_offset < gib * GIB * 0.97:
                store.append([batch])
            shutil.copytree(directory / "store", directory / "killed")
        shutil.copytree(directory / "killed", directory / "walked")
        (directory / "walked" / "dedup").unlink(missing_ok=True)
        shutil.rmtree(directory / "walked" / "consumequeue")
        for name, case in (("killed", "as SIGKILL leaves it"), ("walked", "its queues and snapshot gone")):
            start = time.perf_counter()
            with open_store(directory / name, ASYNC) as store:
                seconds = time.perf_counter() - start
                assert store.queue_bounds("bench", 0).max_offset
            row(f"recovery of {gib:g} GiB, {case}", f"{seconds:.2f} s", "<= 3 s per GiB walked")


def bench_memory(directory: Path) -> None:
    """What the process holds beyond the page cache once it has written and read 10 GiB."""
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
    parser.add_argument("--seconds", type=float, default=2.0, help="how long each case runs")
    parser.add_argument("--large", action="store_true", help="also write 10 GiB")
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="bench-store-", dir=options.directory))
    try:
        bench_append(directory, options.seconds, 100, ">= 0.4 and >= 1,000,000 messages/s")
        bench_append(directory, options.seconds, 1, ">= 50,000 messages/s")
        bench_rolls(directory, options.seconds)
        bench_columns(directory, options.seconds)
        bench_recovery(directory)
        if options.large:
            bench_memory(directory)
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
