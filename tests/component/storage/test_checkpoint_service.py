"""Tests of flushes of consume-queue files: regularly if a queue has enough new pages, and always before a checkpoint
covers them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from storage.files import disk
from storage.files.damage import DamageNotes
from storage.message_store import MessageStore
from storage.recovery.checkpoint import read_checkpoint
from tests.support.stores.stores import PowerCuts, bodies_of, make_batch, open_store

pytestmark = pytest.mark.usefixtures("no_flushes")

UNITS_PER_FILE = 1000
PAGES_OF_UNITS = 2 * 4096 // 20 + 1


@pytest.fixture
def flushed(monkeypatch) -> list[str]:
    """Return a list that records each flush of a queue file, as the queue's id, in order."""
    paths: list[str] = []

    def flush_path(path: Path) -> None:
        if path.is_file() and path.parent.parent.name == "orders":
            paths.append(path.parent.name)

    monkeypatch.setattr(disk, "flush_path", flush_path)
    return paths


def opened(root: Path, **changes: Any) -> MessageStore:
    """Open a store that has just written a snapshot. It flushes its queues only when the test calls the flush."""
    sizes = {"mapped_file_size_consume_queue_bytes": UNITS_PER_FILE * 20, "mapped_file_size_commit_log_bytes": 1 << 20}
    store = open_store(root, flush_interval_consume_queue_ms=60_000, **sizes, **changes)
    send(store, 0, 1)
    store._checkpoints.flush_queues()
    return store


def send(store: MessageStore, queue_id: int, count: int) -> None:
    store.append([make_batch([b"x"] * count, queue_id=queue_id)])


def test_a_queue_waits_until_it_has_so_many_pages_to_flush(tmp_path, flushed):
    store = opened(tmp_path)
    flushed.clear()
    send(store, 0, 10)
    send(store, 1, PAGES_OF_UNITS)
    store._checkpoints.flush_queues(thorough=False)
    assert flushed == ["1"]
    send(store, 1, 10)
    store._checkpoints.flush_queues(thorough=False)
    assert flushed == ["1"]
    store._checkpoints.flush_queues()
    assert sorted(flushed[1:]) == ["0", "1"]
    store.close()


def test_a_file_that_is_full_does_not_wait(tmp_path, flushed):
    store = opened(tmp_path)
    send(store, 0, UNITS_PER_FILE - 11)
    store._checkpoints.flush_queues(thorough=False)
    flushed.clear()
    send(store, 0, 10)
    store._checkpoints.flush_queues(thorough=False)
    assert flushed == ["0"]
    store.close()


@pytest.mark.parametrize(
    "changes", [{"flush_consume_queue_least_pages": 0}, {"flush_consume_queue_thorough_interval_ms": 1}]
)
def test_with_these_settings_every_flush_is_of_all_queues(tmp_path, flushed, changes):
    store = opened(tmp_path, **changes)
    for queue_id in (0, 1, 0):
        flushed.clear()
        send(store, queue_id, 1)
        store._checkpoints._thorough_s -= 1
        store._checkpoints.flush_queues(thorough=False)
        assert flushed == [str(queue_id)]
    store.close()


def test_the_checkpoint_covers_only_records_on_disk_in_all_queues(tmp_path):
    now_ms = [1_700_000_000_000]
    store = opened(tmp_path, clock_ms=lambda: now_ms[0])
    now_ms[0] += 5000
    send(store, 0, 1)
    store._checkpoints.flush_queues(thorough=False)
    checkpoint = read_checkpoint(tmp_path / "checkpoint", DamageNotes())
    assert checkpoint.logics_msg_timestamp == 1_700_000_000_000
    store._checkpoints.flush_queues()
    assert read_checkpoint(tmp_path / "checkpoint", DamageNotes()).logics_msg_timestamp == now_ms[0]
    store.close()


@pytest.mark.parametrize("count", [1, 10, PAGES_OF_UNITS, UNITS_PER_FILE])
def test_a_power_cut_takes_no_message_whose_unit_still_waited(tmp_path, monkeypatch, count):
    root = tmp_path / "store"
    cuts = PowerCuts(root)
    monkeypatch.setattr(os, "fdatasync", cuts.fdatasync)
    store = opened(root)
    for queue_id in range(3):
        send(store, queue_id, count)
        send(store, queue_id, 5)
        store._checkpoints.flush_queues(thorough=False)
    copy = cuts.copy_after_cut(tmp_path / "copy")
    expected = [len(bodies_of(store, queue_id=queue_id)) for queue_id in range(3)]
    store.close()
    sizes = {"mapped_file_size_consume_queue_bytes": UNITS_PER_FILE * 20, "mapped_file_size_commit_log_bytes": 1 << 20}
    again = open_store(copy, **sizes)
    assert [len(bodies_of(again, queue_id=queue_id)) for queue_id in range(3)] == expected
    again.close()


def test_each_disk_has_a_figure_of_its_own(tmp_path, monkeypatch):
    store = opened(tmp_path)
    asked = []
    monkeypatch.setattr("storage.reports.disk_usage", lambda path: asked.append(path) or 0.25)
    assert store.statistics().runtime["consumeQueueDiskRatio"] == "0.25"
    assert asked == [tmp_path / "consumequeue"]
    store.close()
