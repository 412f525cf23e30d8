"""Tests of a store that appends to a buffer pool. Messages become visible in order, after they are committed to the
files. No message is lost when the store stops."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raymq.common.config.store import FlushDiskType
from raymq.common.errors import SystemBusyError
from raymq.common.message import Message, SendStatus
from raymq.common.names import SCHEDULE_TOPIC
from raymq.records.format.dispatch import dispatch_view
from raymq.records.format.encode import EncodedBatch, WaitingBatch, encode_batch
from storage.files.mapped_file import MappedFile
from storage.log import transient_store_pool
from storage.message_store import MessageStore
from tests.support.history.waiting import eventually
from tests.support.replicas.local_replicas import LocalReplicas
from tests.support.stores.stores import LOG_FILE_BYTES, bodies_of, killed_copy, make_batch, open_store

pytestmark = pytest.mark.usefixtures("no_flushes")

POOL: dict[str, Any] = {
    "flush_disk_type": FlushDiskType.ASYNC_FLUSH,
    "transient_store_pool_enable": True,
    "flush_interval_consume_queue_ms": 60_000,
}
NO_COMMITS: dict[str, Any] = {
    "commit_interval_commit_log_ms": 60_000,
    "commit_commit_log_least_pages": 1 << 20,
    "flush_interval_commit_log_ms": 60_000,
}
"""Settings that prevent the store's regular commits and flushes during a test."""


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transient_store_pool, "BUFFER_BYTES", 20_000)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


def open_pooled(root: Path, **changes: Any) -> MessageStore:
    return open_store(root, clock_ms=lambda: 1_700_000_000_000, **{**POOL, **changes})


def append(store: MessageStore, first: int, count: int = 1, length: int = 100) -> None:
    bodies = [(b"%d." % index).ljust(length, b"x") for index in range(first, first + count)]
    [result] = store.append([make_batch(bodies, producer=("p", 0, first))])
    assert (result.status, result.queue_offset) == (SendStatus.SEND_OK, first)


def numbers(store: MessageStore) -> list[int]:
    return [int(body.split(b".")[0]) for body in bodies_of(store)]


def shown(store: MessageStore) -> list[int]:
    """Wait until consumers can see all messages in the log. Returns the numbers in the bodies of the visible
    messages."""
    eventually(lambda: store.visible_offset == store.log.end_offset, "all is shown")
    return numbers(store)


def test_a_message_is_acknowledged_at_once_and_shown_once_it_is_committed(root):
    store = open_pooled(root, **NO_COMMITS)
    append(store, 0, 3)
    assert store.log.end_offset > 0
    assert (store.gate.stored_offset, store.visible_offset) == (0, 0)
    assert bodies_of(store) == []
    assert store.chunks.read_chunk(0, 1000) == b""
    assert (root / "commitlog" / f"{0:020d}").read_bytes() == bytes(LOG_FILE_BYTES)
    assert store.gate.flush_all() == store.gate.stored_offset == store.log.end_offset
    store.gate._commit._wake.set()
    assert shown(store) == [0, 1, 2]
    store.close()


def test_a_few_messages_are_shown_by_themselves(root):
    store = open_pooled(root)
    append(store, 0)
    assert shown(store) == [0]
    store.close()


def test_enough_of_them_are_shown_before_the_interval_is_over(root):
    store = open_pooled(root, **NO_COMMITS | {"commit_commit_log_least_pages": 2})
    append(store, 0, 50, length=200)
    assert shown(store) == list(range(50))
    store.close()


@pytest.mark.parametrize("count", [2, 5])
def test_the_files_equal_the_files_of_a_store_without_a_pool(root, count):
    stores = [
        open_pooled(root / "pool", transient_store_pool_size=count),
        open_pooled(root / "plain", transient_store_pool_enable=False),
    ]
    for store in stores:
        first = 0
        for index in range(40):
            size = index % 7 + 1
            append(store, first, size, length=37 * index + 1)
            first += size
        # The batch is longer than a buffer of the pool, and longer than a log file.
        append(store, first, 300, length=400)
        append(store, first + 300, 1, length=25_000)
    [pooled, plain] = stores
    assert shown(pooled) == numbers(plain)
    for store in stores:
        store.close()
    files = [path.relative_to(root / "plain") for path in (root / "plain").glob("*/**/0*") if path.is_file()]
    assert len(files) > 5
    for file in files:
        assert (root / "pool" / file).read_bytes() == (root / "plain" / file).read_bytes()


def test_a_clean_stop_keeps_all_that_was_acknowledged(root):
    store = open_pooled(root, **NO_COMMITS)
    for first in range(0, 2000, 10):
        append(store, first, 10)
    store.close()
    assert not (root / "abort").exists()
    store = open_pooled(root)
    assert numbers(store) == list(range(2000))
    assert store.status().cut_bytes == 0
    append(store, 2000)
    store.close()


def test_a_kill_leaves_the_beginning_and_the_rest_can_be_sent_again(root, tmp_path):
    store = open_pooled(root, **NO_COMMITS)
    append(store, 0, 20)
    store.gate.flush_all()
    append(store, 20, 20)
    killed = killed_copy(root, tmp_path / "killed")
    store.close()
    survivor = open_pooled(killed)
    assert numbers(survivor) == list(range(20))
    append(survivor, 20, 20)
    assert shown(survivor) == list(range(40))
    survivor.close()


def test_a_repeat_of_messages_in_the_pool_is_recognised(root):
    store = open_pooled(root, **NO_COMMITS)
    batch = make_batch([b"a", b"b"], producer=("p", 0, 0))
    [first] = store.append([batch])
    [again] = store.append([batch])
    assert again.duplicate
    assert (again.queue_offset, again.physical_offset, again.store_timestamp_ms) == (
        first.queue_offset,
        first.physical_offset,
        first.store_timestamp_ms,
    )
    store.close()


def test_delayed_messages_in_the_pool_are_delivered(root):
    clock = [1_700_000_000_000]
    store = open_store(root, clock_ms=lambda: clock[0], **POOL, **NO_COMMITS)
    store.append([waiting_batch()])
    clock[0] += 2000
    store.schedule.start_delivery()
    eventually(lambda: (s := store.status().schedule) is not None and s.delivered == 1, "the delivery")
    store.close()
    store = open_store(root, **POOL)
    assert bodies_of(store) == [b"later"]
    store.close()


def waiting_batch() -> EncodedBatch:
    return encode_batch(
        [Message("orders", b"later", delay_level=1)],
        0,
        born_host=("127.0.0.1", 5000),
        born_timestamp_ms=1_700_000_000_000,
        message_ids=[f"{1:032X}"],
        waiting=WaitingBatch(SCHEDULE_TOPIC, [0]),
    )


def test_committed_messages_are_found_by_key_and_expire(root):
    store = open_pooled(root, transient_store_pool_size=2)
    for first in range(0, 3000, 50):
        append(store, first, 50)
    assert shown(store) == list(range(3000))
    assert store.queries.by_unique_id("orders", f"{0:032X}").count
    found = dispatch_view(store.queries.by_physical_offset(0))
    assert found.queue_offset == 0
    store.gate.flush_all()
    assert store.cleaner._delete_log_files(2 * LOG_FILE_BYTES, "a test") == 2
    assert store.log.min_offset == 2 * LOG_FILE_BYTES
    assert numbers(store)[-1] == 2999
    store.close()


class SlowDisk:
    """Fake disk: when a commit begins to write, it sets `begun`, and then waits until the test sets `goes_on`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.goes_on = threading.Event(), threading.Event()
        real = MappedFile.write_whole

        def waiting(file: MappedFile, position: int, data: memoryview) -> None:
            self.begun.set()
            assert self.goes_on.wait(60.0)
            real(file, position, data)

        monkeypatch.setattr(MappedFile, "write_whole", waiting)


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    disk = SlowDisk(monkeypatch)
    yield disk
    disk.goes_on.set()


def test_without_a_free_buffer_appends_are_refused_as_busy_if_asked_for(root, slow_disk):
    store = open_pooled(root, transient_store_pool_size=2, fast_fail_if_no_buffer_in_store_pool=True)
    for sent in range(0, 40, 10):
        append(store, sent, 10, length=500)
    for _ in range(2):
        with pytest.raises(SystemBusyError, match="nothing was stored"):
            append(store, 40, 30, length=500)
    assert store.status().writable
    slow_disk.goes_on.set()

    def taken() -> bool:
        try:
            append(store, 40, 30, length=500)
        except SystemBusyError:
            return False
        return True

    eventually(taken, "a free buffer")
    assert shown(store) == list(range(70))
    store.close()


def test_appends_during_a_commit_wait_for_the_commit_threshold(root, slow_disk):
    lazy = {"commit_commit_log_least_pages": 2, "commit_commit_log_thorough_interval_ms": 60_000}
    store = open_pooled(root, **NO_COMMITS | lazy)
    append(store, 0, 10, length=1000)
    assert slow_disk.begun.wait(60.0)  # The commit has started, so it does not include later appends.
    first_end = store.log.end_offset
    append(store, 10)
    assert store.gate._commit._wake.is_set()
    slow_disk.goes_on.set()
    eventually(lambda: store.gate.stored_offset >= first_end and not store.gate._commit._wake.is_set(), "it is done")
    assert store.gate.stored_offset == store.visible_offset == first_end
    append(store, 11, 10, length=1000)
    assert shown(store) == list(range(21))
    store.close()


def test_an_append_without_a_free_buffer_waits_for_the_disk(root, slow_disk):
    store = open_pooled(root, transient_store_pool_size=2)
    appending = threading.Thread(target=lambda: [append(store, first, 10, length=500) for first in range(0, 300, 10)])
    appending.start()
    eventually(lambda: store.log.end_offset > 20_000, "the first buffer is full")
    assert appending.is_alive()
    slow_disk.goes_on.set()
    appending.join(60.0)
    assert shown(store) == list(range(300))
    store.close()


def test_replicas_copy_committed_messages_and_a_new_master_continues(tmp_path):
    group = LocalReplicas(tmp_path, **POOL)
    try:
        group.settle()
        group.start()
        for first in range(0, 1000, 100):
            [result] = group.master.append([make_batch([b"%06d" % (first + n) for n in range(100)])])
            assert result.status is SendStatus.SEND_OK
        assert len({replica.account().end_offset for replica in group.replicas.values()}) == 1
        old = group.control_state.record.master
        group.close(old)
        group.control_state._lease_until_s = 0.0  # Simulate that the master's lease has expired.
        group.control_state._accounts.pop(old)
        group.settle()
        assert group.control_state.record.master != old
        assert group.master.append([make_batch([b"%06d" % 1000])])[0].queue_offset == 1000
        group.open(old)
        group.settle()
        for replica in group.replicas.values():
            assert bodies_of(replica.store) == [b"%06d" % number for number in range(1001)]
    finally:
        group.end()


def units_on_disk(root: Path) -> int:
    return len((root / "consumequeue/orders/0" / ("0" * 20)).read_bytes().rstrip(b"\0"))


def test_a_kill_leaves_no_unit_of_a_record_that_was_not_committed(root, tmp_path):
    store = open_pooled(root, **NO_COMMITS)
    append(store, 0, 10)
    store.log.commit()
    committed = units_on_disk(root)
    assert 9 * 20 < committed <= 10 * 20
    append(store, 10, 40)
    assert units_on_disk(killed_copy(root, tmp_path / "killed")) == committed
    again = open_pooled(tmp_path / "killed")
    assert numbers(again) == [*range(10)]
    again.close()
    store.close()
    assert units_on_disk(root) > 49 * 20


def test_a_unit_is_returned_whether_or_not_it_was_committed(root):
    store = open_pooled(root, **NO_COMMITS)
    append(store, 0, 10)
    queue = store._parts.queues.get_plain("orders", 0)
    assert queue._first_at_or_after(1) == 1
    append(store, 10, 10)
    [repeat] = store.append([make_batch([b"11."], producer=("p", 0, 11))])
    assert (repeat.duplicate, repeat.queue_offset) == (True, 11)
    assert queue.units(0, 100)["size"].all()
    store.close()


def test_the_bookkeeping_flushes_units_with_their_records(root, tmp_path):
    store = open_pooled(root, **NO_COMMITS)
    append(store, 0, 10)
    store._checkpoints.flush_queues()
    assert store.log.committed_offset == store.log.end_offset
    assert units_on_disk(root) > 9 * 20
    store.close()


def test_units_of_a_topic_that_is_deleted_before_the_commit_are_not_written(root):
    store = open_pooled(root, **NO_COMMITS)
    append(store, 0, 10)
    store.topics.delete("orders")
    store.log.commit()
    assert not (root / "consumequeue/orders").exists()
    assert store.status().writable
    store.close()
