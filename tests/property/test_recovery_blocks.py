"""Tests that recovery in blocks gives the same damage reports and the same store as recovery record by record, for
random logs with damage.

125 logs. RAYMQ_SOAK=1 tests 5,000 logs; RAYMQ_RECOVERY_SEED repeats a single log.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import storage.dispatch.record_blocks
import storage.recovery.log_files
from storage.files.age_marks import AGES_FILE
from storage.message_store import MessageStore
from tests.support.stores.random_logs import FILE_BYTES, Log
from tests.support.stores.stores import killed_copy, open_store

SOAK = os.environ.get("RAYMQ_SOAK") == "1"
ONE_SEED = os.environ.get("RAYMQ_RECOVERY_SEED")
SEEDS = 5000 if SOAK else 125
PARTS = 5


def settings(dice: random.Random) -> dict[str, int | bool]:
    return {
        "mapped_file_size_commit_log_bytes": FILE_BYTES,
        "mapped_file_size_consume_queue_bytes": 400,
        "mapper_file_size_batch_consume_queue_bytes": 460,
        "message_index_enable": False,
        "dedup_producers_max": dice.choice((2, 100)),
        "check_crc_on_recover": dice.random() < 0.9,
    }


def make_store(dice: random.Random, root: Path, changes: dict[str, int | bool]) -> None:
    """Write the files of a store that needs recovery: a log, and queue files. The queue files have units for all
    records of the log, for some, or for none."""
    log = Log(dice)
    log.write(dice.choice((0, 3, 30, 100)))
    log.put(root)
    if dice.random() < 0.7:
        with one_by_one():
            store = open_store(root, **changes)
        if dice.random() < 0.4:
            store.topics.delete(dice.choice(log.topics).decode("utf-8", "replace"))
        store.close()
    log.write(dice.choice((0, 3, 30, 100)))
    for _ in range(dice.choice((0, 0, 1, 3))):
        log.damage()
    log.put(root)
    if dice.random() < 0.7:
        (root / "abort").write_text("1")
    for name in ("dedup", "checkpoint"):
        if dice.random() < 0.3:
            (root / name).unlink(missing_ok=True)
    queues = sorted(root.glob("*consumequeue/*/*"))
    if queues and dice.random() < 0.3:
        shutil.rmtree(dice.choice(queues))
    if dice.random() < 0.1:
        shutil.rmtree(root / "consumequeue", ignore_errors=True)
    topics = sorted(root.glob("*consumequeue/*"))
    if topics and dice.random() < 0.2:
        shutil.rmtree(dice.choice(topics))
    for files in [sorted(queue.iterdir()) for queue in queues if queue.exists()]:
        if len(files) > 1 and dice.random() < 0.3:
            files[0].unlink()


def one_by_one() -> Any:
    return mock.patch.object(storage.recovery.log_files, "read_block", return_value=None)


def state_of(store: MessageStore, root: Path) -> dict[str, object]:
    files = {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.name not in ("abort", "lock") and not path.name.startswith(AGES_FILE)
    }
    queues = [
        (queue.topic, queue.queue_id, queue.min_offset, queue.next_offset, queue.max_physical_offset)
        for queue in store._parts.queues
    ]
    return {
        "recovered": store._recovered,
        "queues": queues,
        "producers": store._parts.dedup.rows(),
        "deliveries": store._parts.deliveries._table,
        "end": store.log.end_offset,
        "files": files,
    }


def outcomes(root: Path, changes: dict[str, int | bool]) -> dict[str, object]:
    """Open the store, which recovers its files. Returns the state of the store after the recovery."""
    store = open_store(root, **changes, flush_interval_consume_queue_ms=60_000)
    try:
        return state_of(store, root)
    finally:
        store.close()


def seeds(part: int) -> Iterator[int]:
    return iter(range(part * SEEDS // PARTS, (part + 1) * SEEDS // PARTS))


@pytest.fixture
def directory() -> Iterator[Path]:
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="recovery-blocks-", dir=base) as name:
        yield Path(name)


@pytest.mark.parametrize("part", range(PARTS))
def test_recovery_by_blocks_equals_recovery_by_single_records(
    part: int, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = mock.Mock(side_effect=storage.dispatch.record_blocks.read_block)
    for seed in [int(ONE_SEED)] if ONE_SEED else seeds(part):
        dice = random.Random(seed)
        changes = settings(dice)
        made = directory / "made"
        make_store(dice, made, changes)
        block_bytes = dice.choice((1, 300, 2000, 4 << 20))
        monkeypatch.setattr(storage.dispatch.record_blocks, "BLOCK_BYTES", block_bytes)
        monkeypatch.setattr(storage.recovery.log_files, "BLOCK_BYTES", block_bytes)
        with one_by_one():
            singly = outcomes(killed_copy(made, directory / "singly"), changes)
        with mock.patch.object(storage.recovery.log_files, "read_block", taken):
            together = outcomes(killed_copy(made, directory / "together"), changes)
        assert together == singly, f"seed {seed}; RAYMQ_RECOVERY_SEED repeats it"
        for name in ("made", "singly", "together"):
            shutil.rmtree(directory / name)
    assert taken.call_count > SEEDS // PARTS or ONE_SEED
