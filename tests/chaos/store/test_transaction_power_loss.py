"""Test of power losses: the power fails while transactions begin, end and are checked, on a simulated disk that loses
unflushed data.

Each seed drives one store directory with several power losses. After each loss, messages that were acknowledged as
committed are in their queue exactly once, and rolled-back messages are not. Transactions that had begun can be ended.
The table of half messages from the snapshot equals the table from the whole log. RAYMQ_SOAK=1 runs 50 times as many
seeds, and RAYMQ_POWER_SEED repeats one seed.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import pytest

from raymq.common.errors import RaymqError, TransactionError
from raymq.common.message import Message
from raymq.records.format.encode import ProducerSequence
from storage.message_store import MessageStore
from tests.support.stores.power import LossyDisk
from tests.support.stores.stores import intact_bodies, open_store
from tests.support.stores.transactions import GROUP, Clock, Transaction, half_batch

SOAK = os.environ.get("RAYMQ_SOAK") == "1"
ONE_SEED = os.environ.get("RAYMQ_POWER_SEED")
SEEDS = 4000 if SOAK else 80
LIVES = 3
PARTS = 4


class Life:
    """One store directory, the steps that the test runs on it, and the outcomes of transactions that its clients
    expect. One seed determines all steps."""

    def __init__(self, seed: int, directory: Path) -> None:
        self.dice, self.directory, self.clock = random.Random(seed), directory, Clock()
        self.changes = {
            "mapped_file_size_commit_log_bytes": self.dice.choice((8192, 65536)),
            "flush_interval_consume_queue_ms": 60_000,
            "transaction_op_msg_max_size": self.dice.choice((32, 4096)),
            "transaction_check_max": 3,
        }
        self.store: MessageStore | None = None
        self.serial = 0
        # The acknowledged steps of each transaction, by transaction id. `begun`: the queue offset and physical offset
        # of the half message. `ended`: the outcome.
        self.begun: dict[str, tuple[int, int]] = {}
        self.ended: dict[str, str] = {}
        self.tried: dict[str, set[str]] = {}
        self.at_loss: tuple[dict[str, tuple[int, int]], dict[str, str]] = ({}, {})

    def run(self) -> None:
        root = self.directory / "0" / "store"
        root.parent.mkdir()
        for life in range(LIVES):
            self.compare_tables(root)
            following = self.directory / str(life + 1)
            following.mkdir()
            self.live_until_power_loss(root).write_image(following)
            shutil.rmtree(root.parent)
            root = following / "store"
        self.open_and_check(root)
        assert self.store is not None
        self.store.close()

    def compare_tables(self, root: Path) -> None:
        """Check that the snapshot, if one exists, and the whole log give the same table of half messages."""
        if not root.exists():
            return
        tables = []
        for name in ("with", "without"):
            copy = root.parent / name
            shutil.copytree(root, copy)
            if name == "without":
                (copy / "dedup").unlink(missing_ok=True)
            store = open_store(copy, clock_ms=self.clock, **self.changes)
            tables.append(store._parts.halves.rows())
            store.close()
            shutil.rmtree(copy)
        assert tables[0] == tables[1]

    def live_until_power_loss(self, root: Path) -> LossyDisk:
        lose_at = self.dice.choice((self.dice.randrange(30), self.dice.randrange(100), self.dice.randrange(300)))
        disk = LossyDisk(root.parent, self.dice, lose_at=lose_at, on_loss=self.note)
        with disk.installed():
            self.open_and_check(root)
            steps = [self.begin] * 4 + [self.end] * 4 + [self.check, self.snapshot]
            for _ in range(self.dice.randrange(60)):
                if disk.lost:
                    break
                self.clock.now_ms += self.dice.choice((1, 7000))
                self.dice.choice(steps)()
            assert self.store is not None
            self.store.close()
            disk.lose_now()
            self.store = None
        return disk

    def note(self) -> None:
        if self.store is not None:
            self.at_loss = dict(self.begun), dict(self.ended)

    def begin(self) -> None:
        assert self.store is not None
        self.serial += 1
        name = f"T{self.serial}"
        producer = ProducerSequence("p", 0, self.serial)
        message = Message("orders", name.encode())
        batch = half_batch([message], ids=[name], queue_id=0, born_ms=self.clock(), producer=producer)
        [result] = self.store.append([batch])
        self.begun[name] = result.queue_offset, result.physical_offset

    def end(self) -> None:
        if not self.begun:
            return
        assert self.store is not None
        name = self.dice.choice(sorted(self.begun))
        wanted = self.dice.choice(("commit", "rollback"))
        self.tried.setdefault(name, set()).add(wanted)
        try:
            getattr(Transaction(self.store, name, *self.begun[name]), wanted)(from_transaction_check=True)
        except TransactionError:
            # The store refuses the requested commit or rollback, because the transaction already has the other outcome,
            # or has failed too many checks.
            return
        assert self.ended.setdefault(name, wanted) == wanted

    def check(self) -> None:
        assert self.store is not None
        self.store.transactions.check([GROUP])

    def snapshot(self) -> None:
        assert self.store is not None
        self.store._checkpoints._snapshot_s = -1e9
        self.store._checkpoints._flush(thorough=True)

    def open_and_check(self, root: Path) -> None:
        self.store, (begun, ended) = None, self.at_loss
        store = open_store(root, clock_ms=self.clock, **self.changes)
        found = Counter(body.decode() for body in intact_bodies(store) if body is not None)
        assert set(found.values()) <= {1}
        for name, outcome in ended.items():
            assert found[name] == (outcome == "commit"), f"{name} was acknowledged: {outcome}"
            again = getattr(Transaction(store, name, *begun[name]), outcome)(from_transaction_check=True)
            assert again.duplicate
        for name in found:
            assert "commit" in self.tried[name]
        table = store._parts.halves
        for name in begun:
            assert name in table.open or table.ended(name) is not None
        # Remove the half messages without an acknowledgement from the test's own list: the power loss may have removed
        # them from the store. Later transactions reuse the sequence numbers and ids of these half messages.
        self.begun, self.ended = dict(begun), dict(ended)
        self.store = store


@pytest.mark.parametrize("part", range(PARTS))
def test_each_transaction_has_one_outcome_after_any_cut(part: int) -> None:
    seeds = [int(ONE_SEED)] if ONE_SEED else range(part, SEEDS, PARTS)
    for seed in seeds:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
            try:
                Life(seed, Path(directory)).run()
            except (AssertionError, RaymqError) as error:
                error.add_note(f"RAYMQ_POWER_SEED={seed}")
                raise
