"""Benchmark of delayed messages: how late they are delivered, and the cost of a million messages that wait for
delivery.

    python tests/bench/programs/bench_schedule.py [--directory DIR] [--pending N] [--due N] [--over SECONDS]

The program stores `--pending` messages with delivery times spread over the next day. It also stores `--due` messages
with delivery times spread evenly over the next seconds. For the second kind it prints how late each message was
delivered, by its store time. It also prints the growth of the process's memory, and the time to open such a store.
Numbers vary by machine; run the program twice.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from raymq.common.config.store import FlushDiskType, StoreSettings
from raymq.common.delay import TIMER_TOPIC, timer_queue
from raymq.common.message import Message
from raymq.common.protocol.store import FetchRequest
from raymq.records.format.decode import decode_records
from raymq.records.format.encode import EncodedBatch, WaitingBatch, encode_batch
from storage.message_store import MessageStore

BATCH = 1000
QUEUES = 8
DAY_MS = 86_400_000


def open_store(directory: Path) -> MessageStore:
    settings = StoreSettings(store_path_root_dir=directory, flush_disk_type=FlushDiskType.SYNC_FLUSH)
    return MessageStore.open(settings, broker_name="bench")


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def anonymous_bytes() -> int:
    """Return the memory of this process without mapped files, in bytes."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) << 10


def make_batches(topic: str, times_ms: list[int], dice: random.Random) -> list[EncodedBatch]:
    """Return messages with the delivery times `times_ms`, as one batch for each delay queue in which messages of these
    times wait."""
    by_queue: dict[int, list[int]] = {}
    for due_ms in times_ms:
        by_queue.setdefault(timer_queue(due_ms, now_ms()), []).append(due_ms)
    return [
        encode_batch(
            [Message(topic, b"x" * 240, deliver_at_ms=due_ms) for due_ms in dues],
            queue_id,
            born_host=("127.0.0.1", 1),
            born_timestamp_ms=now_ms(),
            message_ids=[f"{index:032d}" for index in range(len(dues))],
            waiting=WaitingBatch(TIMER_TOPIC, [dice.randrange(QUEUES) for _ in dues]),
        )
        for queue_id, dues in by_queue.items()
    ]


def fill(store: MessageStore, pending: int, due: int, over_s: float, dice: random.Random) -> None:
    """Append `pending` messages that are due within the next day, then `due` messages that are due within the next
    seconds.

    The delivery times of the `due` messages are spread evenly, in random order. They begin 3 s after the append of
    these messages begins, and extend over `over_s` seconds.
    """
    start_ms = now_ms() + 120_000
    for _ in range(pending // BATCH):
        store.append(make_batches("later", [start_ms + dice.randrange(DAY_MS) for _ in range(BATCH)], dice))
    start_ms = now_ms() + 3000
    times_ms = [start_ms + int(index * over_s * 1000 / due) for index in range(due)]
    dice.shuffle(times_ms)
    for first in range(0, due, BATCH):
        store.append(make_batches("soon", times_ms[first : first + BATCH], dice))


def lateness_ms(store: MessageStore, due: int, timeout_s: float) -> np.ndarray:
    """Wait until all `due` messages of the topic `soon` are delivered. Returns how late each message was delivered, in
    ms."""
    deadline_s = time.monotonic() + timeout_s
    while sum(store.queues.bounds("soon", queue_id).max_offset for queue_id in range(QUEUES)) < due:
        if time.monotonic() > deadline_s:
            raise SystemExit("not all messages were delivered in time")
        time.sleep(0.2)
    late = []
    for queue_id in range(QUEUES):
        offset, end = 0, store.queues.bounds("soon", queue_id).max_offset
        while offset < end:
            [result] = store.fetch([FetchRequest("soon", queue_id, offset, 1000)], max_bytes=1 << 20, wait_s=0)
            offset = result.next_offset
            late += [
                message.store_timestamp_ms - int(message.system_properties["TIMER_DELIVER_MS"])
                for message in decode_records(result.records)
            ]
    return np.array(late)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, help="where to make the store; default: a temporary directory")
    parser.add_argument("--pending", type=int, default=1_000_000)
    parser.add_argument("--due", type=int, default=50_000)
    parser.add_argument("--over", type=float, default=20.0, help="seconds over which those are due")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}")
    dice = random.Random(arguments.seed)
    directory = Path(tempfile.mkdtemp(prefix="bench-schedule-", dir=arguments.directory))
    try:
        store = open_store(directory / "store")
        store.schedule.start_delivery()
        before = anonymous_bytes()
        start_s = time.monotonic()
        fill(store, arguments.pending, arguments.due, arguments.over, dice)
        print(f"storing {arguments.pending + arguments.due:,} messages took {time.monotonic() - start_s:.1f} s")
        late = lateness_ms(store, arguments.due, arguments.over + 60)
        grown = (anonymous_bytes() - before) / (1 << 20)
        print(f"due {arguments.due / arguments.over:,.0f} messages/s; late p50 {np.percentile(late, 50):.0f} ms, "
              f"p99 {np.percentile(late, 99):.0f} ms, most {late.max()} ms, least {late.min()} ms")  # fmt: skip
        print(
            f"memory of the process itself, beside mapped files: {grown:+.0f} MiB; waiting: {store.status().schedule}"
        )
        store.close()
        start_s = time.monotonic()
        store = open_store(directory / "store")
        store.schedule.start_delivery()
        opened_s = time.monotonic() - start_s
        while not (schedule := store.status().schedule) or schedule.pending.get("deliver_at", 0) < arguments.pending:
            time.sleep(0.01)
        print(f"opening: {opened_s:.2f} s; knowing what waits: {time.monotonic() - start_s:.2f} s")
        store.close()
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
