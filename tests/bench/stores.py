"""Benchmark of the store alone, in this process: appends compared with a copy of the same bytes, and the opening of a
store after a crash."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

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
    for count, goals in ((1, [Goal(">=", 120_000), Goal("<=", 8, "cpu")]), (100, [Goal(">=", 1_000_000)])):
        for name, flush in (("ASYNC", ASYNC), ("SYNC", SYNC)):
            batch = make_batch(count)
            size = int(ROUND_BYTES * min(scale, 1.0)) // (1 if count > 1 else 2) // (8 if flush is SYNC else 1)
            what = "single puts" if count == 1 else f"appends of {count}"
            figure = Figure("store", f"{what} x 1 KiB, {name}", "msg/s", True, goals if flush is ASYNC else [])
            for _ in range(rounds):
                figure.add_round(
                    lambda: _append(directory, batch, size, flush, count),
                    {"copy": lambda: copy_bytes_per_s(directory, bytes(batch.records)) * count / len(batch.records)},
                )
            yield figure
    yield _opening(directory, min(scale, 1.0))


def _append(directory: Path, batch: object, size: int, flush: object, count: int) -> Sample:
    times, _, cpu_s = append_round(directory, batch, size, flush_disk_type=flush)  # type: ignore[arg-type]
    return Sample(len(times) / sum(times) * count, cpu_s / (len(times) * count) * 1e6)


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
