"""Benchmark of the store alone, in this process: appends compared with a copy of the same bytes, appends and fetches
while the store verifies its files, and the opening of a store after a crash."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from raymq.common.message import Message
from raymq.common.protocol.store import FetchRequest
from raymq.records.format.encode import EncodedBatch, encode_batch
from storage.message_store import MessageStore
from storage.scrub.scrubber import Scrubber
from tests.bench.figures import Figure, Goal, Sample
from tests.bench.machine import copy_bytes_per_s
from tests.bench.programs.bench_store import (
    ASYNC,
    GIB,
    ROUND_BYTES,
    SYNC,
    append_round,
    lose_queues_and_snapshot,
    make_batch,
    open_store,
)

ROCKETMQ_SINGLE_PUTS: int = 164_000
"""Number of messages of 1 KiB per second that RocketMQ's own store appended one by one. It was measured with log files
of the size that this benchmark uses, and on two cores of the same kind."""


def stores(directory: Path, *, rounds: int, scale: float) -> Iterator[Figure]:
    """Yield the measurements of appends of 1 and of 100 messages of 1 KiB. Also yield the time to open a store of 1 GiB
    without queues and snapshot."""
    for each, goals in ((1, [Goal(">=", 120_000), Goal("<=", 8, "cpu")]), (100, [Goal(">=", 1_000_000)])):
        for name, flush in (("ASYNC", ASYNC), ("SYNC", SYNC)):
            batch = make_batch(each)
            size = int(ROUND_BYTES * min(scale, 1.0)) // (1 if each > 1 else 2) // (8 if flush is SYNC else 1)
            what = "single puts" if each == 1 else f"appends of {each}"
            figure = Figure("store", f"{what} x 1 KiB, {name}", "msg/s", True, goals if flush is ASYNC else [])
            for _ in range(rounds):
                figure.add_round(
                    lambda: _append(directory, batch, size, flush, each),
                    {"copy": lambda: copy_bytes_per_s(directory, bytes(batch.records)) * each / len(batch.records)},
                )
            yield figure
    yield from _verified(directory, rounds, min(scale, 1.0))
    yield _opening(directory, min(scale, 1.0))


def _append(directory: Path, batch: object, size: int, flush: object, each: int) -> Sample:
    times, _, cpu_s = append_round(directory, batch, size, flush_disk_type=flush)  # type: ignore[arg-type]
    return Sample(len(times) / sum(times) * each, cpu_s / (len(times) * each) * 1e6)


WEEK_MS = 7 * 86_400_000
VERIFIED_BYTES = 256 << 20
RATE_BYTES = 5_000_000
TURN_S = 5.0
"""Duration of one turn of appends or fetches, in s. A turn with the verification and a turn without it make a round."""


def _verified(directory: Path, rounds: int, scale: float) -> Iterator[Figure]:
    """Yield the rates of appends and of fetches while the store verifies its files at its maximum rate. The peer "off"
    is the same without the verification."""
    for size in (100, 1024):
        root = directory / "verified"
        batch = _messages(size)
        with open_store(root, ASYNC) as store:
            while store.log.end_offset < VERIFIED_BYTES * scale:
                store.append([batch])
            for name, work in (("appends of 100", _append_once), ("fetches", _fetch_once)):
                figure = Figure("store", f"{name} x {size} B, verified", "msg/s", True, [Goal(">=", 0.97, "off")])
                for _ in range(rounds):
                    figure.add_round(
                        lambda work=work: _turn(store, batch, work, scale, verify=True),  # type: ignore[misc]
                        {"off": lambda work=work: _turn(store, batch, work, scale, verify=False)},  # type: ignore[misc]
                    )
                yield figure
            share = Figure("store", f"verification, {size} B, at 5 MB/s", "% of a core", False, [Goal("<=", 3)])
            for _ in range(rounds):
                share.add_round(lambda store=store: _verification_share(store), {})  # type: ignore[misc]
            yield share
        shutil.rmtree(root, ignore_errors=True)


def _messages(size: int) -> EncodedBatch:
    return encode_batch(
        [Message("orders", bytes([number]) * size) for number in range(100)],
        0,
        born_host=("127.0.0.1", 5000),
        born_timestamp_ms=1_700_000_000_000,
        message_ids=[f"{number:032X}" for number in range(100)],
    )


def _append_once(store: MessageStore, batch: EncodedBatch, number: int) -> int:
    store.append([batch])
    return 100


def _fetch_once(store: MessageStore, batch: EncodedBatch, number: int) -> int:
    offset = number * 1000 % (store.queues.bounds("orders", 0).max_offset - 1000)
    [result] = store.fetch([FetchRequest("orders", 0, offset, 1000)], max_bytes=1 << 24, wait_s=0)
    return result.count


def _turn(store: MessageStore, batch: EncodedBatch, work: object, scale: float, *, verify: bool) -> Sample:
    """Append or fetch for TURN_S, with or without a verification of the store. Returns messages per second, and the
    processor time of the whole process per message."""
    with _verification(store) if verify else contextmanager(lambda: iter([None]))():
        begun_s, cpu_s, messages = time.perf_counter(), time.process_time(), 0
        for number in count():
            messages += work(store, batch, number)  # type: ignore[operator]
            if time.perf_counter() - begun_s >= TURN_S * scale:
                break
        seconds, cpu_s = time.perf_counter() - begun_s, time.process_time() - cpu_s
    return Sample(messages / seconds, cpu_s / messages * 1e6)


def _verification_share(store: MessageStore) -> float:
    """Verify all files of a store. Returns the processor time of this thread as percent of a core, if the verification
    read RATE_BYTES a second."""
    sections = list(store.scrubber._sections.values())
    scrubber = Scrubber(store._parts, store.gate, sections, clock_ms=lambda: WEEK_MS)
    number = scrubber.verify_now()
    cpu_s = time.thread_time()
    while scrubber.status().completed < number:
        scrubber.tick()
    return 100 * (time.thread_time() - cpu_s) / (scrubber.status().read_bytes / RATE_BYTES)


@contextmanager
def _verification(store: MessageStore) -> Iterator[None]:
    """Verify the files of a store in a thread, as the store's own thread does, always at the maximum rate: by its
    clock, the verification is late."""
    weeks = count(1_000)
    sections = list(store.scrubber._sections.values())
    scrubber = Scrubber(store._parts, store.gate, sections, clock_ms=lambda: next(weeks) * WEEK_MS)
    stop = threading.Event()

    def run() -> None:
        pause_s = 0.0
        while not stop.wait(pause_s):
            pause_s = scrubber.tick()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        print(f"verified {scrubber.status().read_bytes / 1e6:.1f} MB", file=sys.stderr)


def _opening(directory: Path, scale: float) -> Figure:
    figure = Figure("store", "opened without queues and snapshot", "GB/s", True, [Goal(">=", 1.0)])
    root, gib = directory / "opened", max(0.25, scale)
    program = Path(__file__).parent / "programs" / "bench_store.py"
    subprocess.run([sys.executable, str(program), "--fill", f"{gib}", "--directory", str(root)], check=False)
    for _ in range(3):
        lose_queues_and_snapshot(root)
        start = time.perf_counter()
        with open_store(root, ASYNC, keep=True, mapped_file_size_commit_log_bytes=GIB) as store:
            seconds = time.perf_counter() - start
            figure.add_round(lambda: store.log.end_offset / seconds / 1e9, {})
    shutil.rmtree(root)
    return figure
