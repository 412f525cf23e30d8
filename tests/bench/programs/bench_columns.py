"""Benchmark of the kernels that convert columns to records and records to columns, and of `send_table` without a store.

    python tests/bench/programs/bench_columns.py [--rows N] [--rounds N]

The program prints µs of CPU per row and rows per second, the best round of each. Bodies have 1 KiB. `plain` rows have
only a body. `rich` rows also have a tag, a key and two properties. `varied` rows have any subset of the tag, the key
and the properties. For comparison, "crc alone" only computes checksums.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from raymq.client.producer.table_rows import TableRows
from raymq.common.protocol.store import AppendResult
from raymq.records.format.crc import body_crcs
from raymq.records.format.encode import EncodedBatch, ProducerSequence
from raymq.records.format.message_id import IdRange
from raymq.records.kernels.columns import decode_columns
from raymq.records.kernels.encode import encode_columns
from raymq.records.kernels.message_columns import MessageColumns
from tests.support.clients.fakes import FakeStore, topic_route
from tests.support.clients.producers import producers_of_fakes

BODY_BYTES = 1024


class Sink(FakeStore):
    """Fake store that acknowledges every append and stores nothing."""

    def append(self, batches: Sequence[EncodedBatch], timeout_s: float) -> list[AppendResult]:
        return [AppendResult(self.status, 0, 0, 1, False) for _ in batches]


def tables(rows: int) -> dict[str, pa.Table]:
    """Return the Arrow tables that the benchmark sends, by name: plain, rich and varied. Each has `rows` rows."""
    source = random.Random(1)
    body = pa.array([source.randbytes(BODY_BYTES) for _ in range(rows)], pa.binary())
    kind = pa.map_(pa.string(), pa.string())
    rich = {
        "tags": [("paid", "open")[n % 2] for n in range(rows)],
        "keys": [f"order-{n:08d}" for n in range(rows)],
        "properties": pa.array([[("region", "eu"), ("n", f"{n:06d}")] for n in range(rows)], kind),
    }
    varied = {
        "tags": [("paid", "open", None)[n % 3] for n in range(rows)],
        "keys": [[f"k{number}" for number in range(n % 4)] for n in range(rows)],
        "properties": pa.array(
            [[("region", "e" * (n % 7 + 1)), ("n", f"{n * 37}")][: n % 3] for n in range(rows)], kind
        ),
    }
    keyed = {"sharding_key": [f"user-{n % 1000}" for n in range(rows)]}
    named = {"plain": {}, "rich": rich, "varied": varied, "keyed": keyed}
    return {name: pa.table({"body": body, **more}) for name, more in named.items()}


def measure(name: str, rows: int, rounds: int, work: Callable[[], object], clock: Callable[[], float]) -> None:
    """Run `work` `rounds` times, and print a line that begins with `name`. The line has the time per row and the rows
    per second of the fastest run. `rows`: the number of rows that `work` handles."""
    best_s = min(_seconds(work, clock) for _ in range(rounds))
    print(f"{name:42s} {best_s / rows * 1e6:7.3f} µs {rows / best_s / 1e6:7.2f}M/s", flush=True)


def _seconds(work: Callable[[], object], clock: Callable[[], float]) -> float:
    started_s = clock()
    work()
    return clock() - started_s


def encode(columns: MessageColumns) -> EncodedBatch:
    """Encode `columns`, which contain one message per row, as one batch."""
    return encode_columns(
        "bench", 3, columns.bodies, properties=columns.properties, tag_codes=columns.tag_codes,
        born_host=("127.0.0.1", 1), born_timestamp_ms=1_763_000_000_000,
        message_ids=IdRange("7F00000112340123456701234567", 7, len(columns)),
        producer=ProducerSequence("0123456789abcdef", 0, 100_000),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    rows, rounds = options.rows, options.rounds
    for name, table in tables(rows).items():
        read = TableRows("bench", table)
        columns, _, _ = read.read(0, rows)
        batch = encode(columns)
        data, starts = bytes(batch.records), np.cumsum(batch.sizes, dtype=np.int64) - batch.sizes
        if name == "plain":
            bodies, offsets = columns.bodies.data.data, columns.bodies.offsets
            measure(
                "crc alone", rows, rounds, lambda o=offsets, b=bodies: body_crcs(b, o[:-1], o[1:]), time.thread_time
            )
        if name != "keyed":
            measure(f"encode {name}", rows, rounds, lambda c=columns: encode(c), time.thread_time)
            for body_type in ("binary_view", "binary"):
                measure(
                    f"decode {name}, {body_type}, crc", rows, rounds,
                    lambda d=data, s=starts, t=body_type: decode_columns(
                        d, s, broker_name="b", body_type=t, check_crc=True
                    ),
                    time.thread_time,
                )  # fmt: skip
        measure(f"check {name}", rows, rounds, lambda r=read: r.check(0, rows, 1 << 22), time.thread_time)
        measure(f"read {name}", rows, rounds, lambda r=read: r.read(0, rows), time.thread_time)
    with producers_of_fakes() as make:
        producer = make(Sink(), route=topic_route(a=4))
        for name, table in tables(20 * rows).items():
            for clock in (time.process_time, time.perf_counter):
                label = f"send_table {name}, {clock.__name__}"
                measure(label, 20 * rows, 10, lambda t=table: producer.send_table("orders", t), clock)


if __name__ == "__main__":
    main()
