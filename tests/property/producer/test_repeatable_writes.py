"""Tests of several attempts to write the same table to topics. Each row is stored once, and each queue has its rows in
order.

The attempts run at the same time. Some attempts are killed and repeated, and their requests fail or get lost.
"""

from __future__ import annotations

import random
import threading
import time

import pyarrow as pa
import pytest

from raymq.client.producer.repeatable import placement
from raymq.common.delay import TIMER_TOPIC
from raymq.common.errors import (
    ClientStateError,
    MessageIllegalError,
    RaymqError,
    RequestTimeoutError,
    ServiceNotAvailableError,
    SystemBusyError,
)
from tests.support.clients.dedup_store import DedupStore, Writers
from tests.support.clients.fakes import topic_route

SEEDS = 60
NOW_MS = time.time_ns() // 1_000_000


class KilledError(Exception):
    """Raised in the thread that makes an attempt of a repeatable write. It simulates that the process of this attempt
    was killed."""


def random_table(chance: random.Random, count: int) -> pa.Table:
    columns: dict[str, pa.Array] = {"body": pa.array([b"%d" % n for n in range(count)])}
    if chance.random() < 0.5:
        columns["sharding_key"] = pa.array([chance.choice(["a", "b", "c", "d", None]) for _ in range(count)])
    if chance.random() < 0.3:
        times = [
            chance.choice([None, 0, NOW_MS - 1, NOW_MS + 3_600_000 * chance.randint(1, 100)]) for _ in range(count)
        ]
        columns["deliver_time"] = pa.array(times, pa.timestamp("ms", "UTC"))
    return pa.table(columns)


class Attempts:
    """Concurrent attempts to write `table` with epoch `epoch`. Each attempt runs in a thread and writes to fake stores
    that fail at random."""

    def __init__(self, chance: random.Random, writers: Writers, table: pa.Table, epoch: int) -> None:
        self.chance, self.writers, self.table, self.epoch = chance, writers, table, epoch
        self.unexpected: list[BaseException] = []
        self.lock = threading.Lock()

    def start(self) -> threading.Thread:
        with self.lock:
            seed = self.chance.random()
        thread = threading.Thread(target=self.run, args=(random.Random(seed),))
        thread.start()
        return thread

    def run(self, chance: random.Random) -> None:
        """Run one attempt to write the table. The attempt may be killed after any slice of rows."""
        try:
            self.write(chance, kill_share=0.3)
        except (KilledError, RaymqError):
            pass
        except BaseException as error:
            self.unexpected.append(error)

    def write(self, chance: random.Random, kill_share: float) -> int:
        writer = self.writers.make(
            "write/0", self.epoch, now_ms=NOW_MS, first_queue=1, send_timeout_s=20.0, max_buffered_messages=64
        )
        with writer:
            at = 0
            while at < self.table.num_rows:
                count = chance.choice([1, 3, 10, 50])
                writer.write(self.table.slice(at, count))
                at += count
                if chance.random() < kill_share:
                    raise KilledError
            return writer.finish().count


def fault(chance: random.Random) -> object:
    """Return a random outcome of an append at a fake store: None for success, or an error."""
    lost = RequestTimeoutError("append", 1.0)
    return chance.choice(
        [
            *[None] * 6,
            ("lost", lost),
            lost,
            SystemBusyError("full", 0.0),
            ServiceNotAvailableError("away"),
            MessageIllegalError("a fault of the test"),
        ]
    )


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(placement, "BLOCK_ROWS", 4)
    monkeypatch.setattr(placement, "PART_MAX_ROWS", 3)


def expected(writers: Writers, table: pa.Table) -> dict[tuple[str, str, int], list[bytes]]:
    """Return the message bodies in each queue, in order, after one write of `table` without failures."""
    stores = [DedupStore(name) for name in writers.stores]
    alone = Writers(writers.route, *stores)
    with alone.make("write/0", 0, now_ms=NOW_MS, first_queue=1) as writer:
        writer.write(table)
        writer.finish()
    return contents(alone)


def contents(writers: Writers) -> dict[tuple[str, str, int], list[bytes]]:
    return {
        (name, topic, queue_id): [message.body for message in messages]
        for name, store in writers.stores.items()
        for (topic, queue_id), messages in store.queues.items()
    }


@pytest.mark.parametrize("seeds", [range(first, first + 10) for first in range(0, SEEDS, 10)])
def test_each_row_is_stored_once_and_in_order(seeds):
    for seed in seeds:
        print("seed", seed)
        chance = random.Random(seed)
        writers = Writers(topic_route(a=2, b=1), DedupStore("storage-a-0"), DedupStore("storage-b-0"))
        before: dict[tuple[str, str, int], list[bytes]] = {}
        for epoch in range(chance.randint(1, 3)):
            table = random_table(chance, chance.choice([1, 20, 120]))
            attempts = Attempts(chance, writers, table, epoch)
            for store in writers.stores.values():
                store.script = [fault(chance) for _ in range(chance.choice([0, 10, 60]))]
            threads = [attempts.start() for _ in range(chance.choice([1, 2, 3]))]
            for thread in threads:
                thread.join(60)
            for store in writers.stores.values():
                store.script = []
            assert not attempts.unexpected
            assert attempts.write(chance, kill_share=0.0) == table.num_rows
            # A further attempt without failures succeeds, and stores no row a second time.
            assert attempts.write(chance, kill_share=0.0) == table.num_rows
            for queue, bodies in expected(writers, table).items():
                before[queue] = [*before.get(queue, []), *bodies]
            assert contents(writers) == before
        if epoch:
            zombie = Attempts(chance, writers, table, epoch - 1)
            if table.num_rows == 120 and TIMER_TOPIC not in {topic for _, topic, _ in before}:
                with pytest.raises(ClientStateError):
                    zombie.write(chance, kill_share=0.0)
                assert contents(writers) == before
        writers.close()
