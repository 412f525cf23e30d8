"""Tests of producer sequences: a store returns the sequence number up to which it has stored a producer's rows. The
result is also right after a restart, a crash, a failover, and retention."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raymq.common.errors import ClientStateError
from storage.files import disk
from storage.message_store import MessageStore
from tests.support.stores.stores import killed_copy, make_batch, open_store

pytestmark = pytest.mark.usefixtures("no_flushes")

SMALL_FILES = {"mapped_file_size_commit_log_bytes": 8192}
QUEUES = [("orders", 0), ("orders", 1), ("orders", 7), ("nowhere", 0)]


def fill(store: MessageStore) -> None:
    """Store rows of producer "p" with epoch 3: 60 rows in queue 0, with rows of another producer between them, and 5
    rows in queue 1."""
    for first in range(0, 60, 6):
        store.append([make_batch([b"x"] * 6, producer=("p", 3, first))])
        store.append([make_batch([b"other"], producer=("q", 0, first))])
    store.append([make_batch([b"y"] * 5, queue_id=1, producer=("p", 3, 0))])


@pytest.fixture
def filled(tmp_path):
    store = open_store(tmp_path / "store")
    fill(store)
    yield store
    store.close()


def test_the_store_returns_the_next_sequence_of_each_queue(filled):
    assert filled.queues.next_sequences("p", 3, QUEUES) == [60, 5, 0, 0]
    assert filled.queues.next_sequences("nobody", 3, QUEUES) == [0, 0, 0, 0]


def test_a_newer_epoch_has_stored_nothing_and_an_older_one_is_fenced(filled):
    assert filled.queues.next_sequences("p", 4, QUEUES) == [0, 0, 0, 0]
    with pytest.raises(ClientStateError, match="is fenced, because an instance with epoch 3"):
        filled.queues.next_sequences("p", 2, QUEUES)


@pytest.mark.parametrize("snapshot", [True, False])
@pytest.mark.parametrize("stopped", ["closed", "killed"])
def test_the_next_sequences_survive_a_restart(tmp_path, filled, stopped, snapshot):
    root = tmp_path / "store"
    if stopped == "killed":
        root = killed_copy(root, tmp_path / "killed")
    else:
        filled.close()
    if not snapshot:
        (root / "dedup").unlink(missing_ok=True)
    store = open_store(root)
    assert store.queues.next_sequences("p", 3, QUEUES) == [60, 5, 0, 0]
    store.close()


def test_another_replica_returns_the_same_sequences(tmp_path, filled):
    copy = open_store(tmp_path / "copy")
    while data := filled.chunks.read_chunk(copy.status().max_physical_offset, 3000):
        assert copy.chunks.append_chunk(copy.status().max_physical_offset, data)
    assert copy.queues.next_sequences("p", 3, QUEUES) == [60, 5, 0, 0]
    copy.close()


def test_rows_that_consumers_may_not_read_yet_do_not_count(filled):
    queue = filled._parts.queues.get("orders", 0)
    seen = queue.visible_offset
    for invisible, expected in ((0, 60), (1, 60), (2, 59), (7, 54), (8, 54), (9, 53)):
        queue.visible_offset = seen - invisible
        assert filled.queues.next_sequences("p", 3, [("orders", 0)]) == [expected]
    queue.visible_offset = 0
    # For each producer the store keeps only the five newest offset ranges. If consumers may not read any of these
    # ranges yet, `next_sequences` returns the sequence number at the start of the oldest range.
    assert filled.queues.next_sequences("p", 3, [("orders", 0)]) == [30]
    queue.visible_offset = seen


def test_a_deleted_topic_has_none(filled):
    filled.topics.delete("orders")
    assert filled.queues.next_sequences("p", 3, QUEUES) == [0, 0, 0, 0]


def test_a_producer_that_was_forgotten_has_none(tmp_path):
    store = open_store(tmp_path / "small", dedup_producers_max=2)
    fill(store)
    assert store.queues.next_sequences("p", 3, QUEUES) == [0, 5, 0, 0]
    store.close()
    shutil.rmtree(tmp_path / "small")
    assert not Path(tmp_path / "small").exists()


DISK_CALLS = ("open_file", "pwrite_all", "flush", "rename", "unlink", "sync_directory")


def test_a_crash_while_the_snapshot_is_replaced_forgets_no_idle_producer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copy the store before each disk call that replaces the snapshot, as a crash at this moment leaves it. In each
    copy the store knows the producer whose records are only in old log files."""
    root, copies, clock_ms = tmp_path / "store", tmp_path / "copies", [1_700_000_000_000]
    store = open_store(root, clock_ms=lambda: clock_ms[0], **SMALL_FILES)
    fill(store)
    store._checkpoints.rewrite()
    for first in range(0, 200, 10):
        # The checkpoint follows by seconds. So a recovery without a snapshot reads the newest log files only.
        clock_ms[0] += 10_000
        store.append([make_batch([b"z" * 100] * 10, queue_id=2, producer=("busy", 0, first))])
    store._checkpoints.flush_queues(thorough=True)
    assert len(list((root / "commitlog").iterdir())) > 4
    copies.mkdir()
    with monkeypatch.context() as patch:
        for name in DISK_CALLS:
            patch.setattr(disk, name, copying_before(getattr(disk, name), root, copies))
        store._checkpoints.rewrite()
    store.close()
    assert len(list(copies.iterdir())) > 5
    for copy in sorted(copies.iterdir()):
        opened = open_store(copy, **SMALL_FILES)
        assert opened.queues.next_sequences("p", 3, QUEUES) == [60, 5, 0, 0], copy
        assert not (copy / "dedup.new").exists()
        opened.close()


def copying_before(call: Callable[..., Any], root: Path, copies: Path) -> Callable[..., Any]:
    """Return a function that copies the directory `root` into a new directory in `copies`, and then does `call`."""

    def copying(*arguments: Any, **options: Any) -> Any:
        killed_copy(root, copies / f"{len(list(copies.iterdir())):03}")
        return call(*arguments, **options)

    return copying
