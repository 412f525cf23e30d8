"""Benchmark of filters that pass 1 in 1,000 messages of 1 KiB, without Ray: over a TCP connection to a store, and in
the store's mapped files.

    python -m tests.bench.programs.bench_filters [--messages 1000000] [--rounds 3]

Each filter is compared with a client that reads all messages in the same way, and filters them by the same condition.
The store has a process of its own, in a temporary directory. With Ray: `make bench BENCH="--only filter"`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import raymq
from raymq.client.predicates.process import PredicateProcess
from raymq.client.predicates.scan import PredicateScan
from raymq.common.config.store import FlushDiskType, StoreSettings
from raymq.common.message import MessageExt, PullStatus
from raymq.common.protocol.store import FetchRequest, FetchResult
from raymq.records.format.check import record_starts
from raymq.records.format.encode import EncodedBatch, encode_batch
from raymq.records.kernels.messages import read_messages
from raymq.records.logfiles.log_reader import LogReader, StoreFiles
from raymq.remoting.storage_client import FoundInPlace
from raymq.remoting.storage_lane import StorageLane
from tests.bench.programs.bench_lane import storage

TIMEOUT_S: Final = 60.0
ONE_IN: Final = 1000
SQL: Final = f"price > {ONE_IN - 2}"
MAX_MESSAGES: Final = 5000
MAX_BYTES: Final = 8 << 20


class Read(NamedTuple):
    """The result of a read: the number of messages that passed the filter, and the bytes of records that reached the
    client."""

    passed: int
    moved_bytes: int


class Files:
    """Reads the mapped files of the store below `root`, as a client on the store's node does. `end`: the end offset of
    queue 0, the only queue that is read."""

    def __init__(self, root: str, end: int) -> None:
        settings = StoreSettings(store_path_root_dir=Path(root))
        sizes = settings.mapped_file_size_commit_log_bytes, settings.mapped_file_size_consume_queue_bytes
        self.files = StoreFiles(root, *sizes)
        self.reader = LogReader(root, commit_log_file_size=sizes[0], consume_queue_file_size=sizes[1])
        self.end = end

    def find(self, requests: list[FetchRequest], max_bytes: int, wait_s: float, timeout_s: float) -> list[FetchResult]:
        """Find records in the store's mapped files. PredicateScan calls this method to get records."""
        [request] = requests
        mapped, next_offset = self.reader.find(request, self.end, max_bytes)
        count = sum(len(part.starts) for part in mapped)
        places = (next_offset, 0, self.end, b"", count)
        return [FoundInPlace(PullStatus.FOUND, *places, mapped=tuple(mapped), files=self.files)]


def thousand() -> EncodedBatch:
    """Return a batch of ONE_IN messages whose prices are 0, 1, 2 and so on."""
    messages = [
        raymq.Message("bench", b"x" * 1024, properties={"price": str(price), "region": "eu"}) for price in range(ONE_IN)
    ]
    ids = [f"{index:032X}" for index in range(ONE_IN)]
    return encode_batch(messages, 0, born_host=("127.0.0.1", 1), born_timestamp_ms=1, message_ids=ids).without_ids()


def is_dear(message: MessageExt) -> bool:
    return float(message.properties["price"]) > ONE_IN - 2


def over_lane(lane: StorageLane, end: int, sql: str | None) -> Read:
    """Read queue 0 with fetches over a lane (direct socket connection). The store filters by `sql`. If `sql` is None,
    the store returns all messages, and this function filters them."""
    offset, passed, moved_bytes = 0, 0, 0
    while offset < end:
        request = FetchRequest("bench", 0, offset, MAX_MESSAGES, None, sql)
        [result] = lane.fetch([request], MAX_BYTES, 0.0, TIMEOUT_S)
        offset, moved_bytes = result.next_offset, moved_bytes + len(result.records)
        if result.count:
            messages = read_messages(result.records, record_starts(result.records), broker_name="bench")
            passed += sum(map(is_dear, messages)) if sql is None else len(messages)
    return Read(passed, moved_bytes)


def in_place(files: Files, sql: str | None) -> Read:
    """Read queue 0 from the mapped files. The reader filters by `sql`. If `sql` is None, the reader returns all
    messages, and this function filters them."""
    offset, passed = 0, 0
    while offset < files.end:
        request = FetchRequest("bench", 0, offset, MAX_MESSAGES, None, sql)
        parts, offset = files.reader.find(request, files.end, MAX_BYTES)
        for part in parts:
            messages = read_messages(part.data, part.starts, broker_name="bench")
            passed += sum(map(is_dear, messages)) if sql is None else len(messages)
    return Read(passed, 0)


def by_predicate(files: Files, process: PredicateProcess) -> Read:
    """Read queue 0 with a predicate (a Python filter function) that runs in its own process, as a
    PredicateRunner does."""
    scan = PredicateScan(
        files,  # type: ignore[arg-type]  # it is asked for lists
        lambda records, until_s, log: process.evaluate(records, "bench", until_s, log),
        name="is_dear",
        broker_name="bench",
        in_place=True,
    )
    offset, passed, moved_bytes = 0, 0, 0
    while offset < files.end:
        [result] = scan.fetch([FetchRequest("bench", 0, offset, MAX_MESSAGES)], MAX_BYTES, 0.0, TIMEOUT_S)
        offset, passed, moved_bytes = result.next_offset, passed + result.count, moved_bytes + len(result.records)
    return Read(passed, moved_bytes)


def timed(read: Callable[[], Read], end: int) -> tuple[float, int]:
    """Measure a read of `end` messages. Returns the number of messages checked per second, and the bytes of records
    that reach the client."""
    start_s = time.perf_counter()
    found = read()
    took_s = time.perf_counter() - start_s
    assert found.passed == end // ONE_IN, found
    return end / took_s, found.moved_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    end = options.messages // ONE_IN * ONE_IN
    with tempfile.TemporaryDirectory() as root, storage(FlushDiskType.ASYNC_FLUSH, root) as address:
        lane, batch = StorageLane(address, remote=True), thousand()
        for _ in range(end // ONE_IN):
            lane.append([batch], TIMEOUT_S)
        files, process = Files(root, end), PredicateProcess(raymq.predicate(is_dear))
        ways: dict[str, tuple[Callable[[], Read], Callable[[], Read]]] = {
            "raymq.sql, TCP lane": (partial(over_lane, lane, end, SQL), partial(over_lane, lane, end, None)),
            "raymq.sql, in place": (partial(in_place, files, SQL), partial(in_place, files, None)),
            "raymq.predicate beside the store": (
                partial(by_predicate, files, process),
                partial(over_lane, lane, end, None),
            ),
        }
        for name, (filtered, everything) in ways.items():
            rounds = [(timed(filtered, end), timed(everything, end)) for _ in range(options.rounds)]
            ratio = median(ours[0] / theirs[0] for ours, theirs in rounds)
            ours, theirs = (max(figures) for figures in zip(*rounds, strict=True))
            print(
                f"{name}: {ours[0] / 1e6:.2f} M messages/s, {ours[1] / 1e6:.1f} MB; all, filtered in the client: "
                f"{theirs[0] / 1e6:.2f} M messages/s, {theirs[1] / 1e6:.1f} MB; ratio {ratio:.1f}",
                flush=True,
            )
        process.close()
        lane.close()


if __name__ == "__main__":
    main()
