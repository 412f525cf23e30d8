"""Tests of a disk that is too full for messages, or completely full: which calls the store refuses, and which calls
still work."""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from raymq.common.errors import StoreNotWritableError
from raymq.common.names import STATE_TOPIC
from storage import reports
from storage.files import disk
from storage.files.reserve import RESERVE_FILE
from storage.message_store import MessageStore
from storage.retention import cleaner
from tests.support.stores.small_disk import SmallDisk, small_disk
from tests.support.stores.stores import bodies_of, make_batch, open_store

pytestmark = pytest.mark.usefixtures("no_flushes")

WARNING, CRITICAL = 0.93, 0.97
Fill = Callable[[float], None]


@pytest.fixture
def fill(monkeypatch: pytest.MonkeyPatch) -> Fill:
    """Return a function that sets the disk usage, as a ratio, that the store measures for every disk."""

    def set_usage(usage: float) -> None:
        monkeypatch.setattr(cleaner, "disk_usage", lambda path: usage)

    set_usage(0.5)
    return set_usage


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Callable[..., MessageStore]]:
    opened: list[MessageStore] = []

    def make(name: str = "store", **changes: object) -> MessageStore:
        opened.append(open_store(tmp_path / name, **changes))
        return opened[-1]

    yield make
    for store in opened:
        store.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def state(body: bytes) -> object:
    return make_batch([body], topic=STATE_TOPIC)


def test_a_store_opened_on_a_full_disk_refuses_appends(stores, fill):
    fill(WARNING)
    store = stores(clean_resource_interval_ms=10)
    with pytest.raises(StoreNotWritableError, match="93% full"):
        store.append([make_batch([b"x"])])
    assert not store.status().writable
    assert "93% full" in store.status().not_writable_reason
    assert store.status().retention.disk_ratio == WARNING
    fill(0.5)  # The store accepts messages again before retention deletes any file.
    wait_until(lambda: store.status().writable)
    store.append([make_batch([b"x"])])
    assert bodies_of(store) == [b"x"]


def test_above_the_warning_level_the_brokers_state_is_stored_and_topics_are_deleted(stores, fill):
    store = stores()
    store.append([make_batch([b"old"], topic="old")])
    fill(CRITICAL)
    store.cleaner.look_at_disk()
    store.append([state(b"a commit"), state(b"a member")])
    for batches in ([make_batch([b"x"])], [state(b"y"), make_batch([b"x"])]):
        with pytest.raises(StoreNotWritableError, match="97% full"):
            store.append(batches)
    store.topics.delete("old")
    assert "old" not in store.topics.queue_ids()
    assert bodies_of(store, topic=STATE_TOPIC) == [b"a commit", b"a member"]


def test_a_slave_whose_disk_is_fuller_than_its_masters_takes_chunks_from_half_of_the_rest(stores, fill):
    master, slave = stores("master"), stores("slave")
    slave.fence("it follows")

    def copy() -> None:
        end = slave.log.end_offset
        slave.chunks.append_chunk(end, master.chunks.read_chunk(end, 1 << 20))

    master.append([make_batch([b"1"])])
    fill(WARNING)
    slave.cleaner.look_at_disk()
    copy()
    fill(CRITICAL)
    slave.cleaner.look_at_disk()
    master.append([state(b"a commit")])
    # The slave copies this chunk of the log although its disk is almost full, because the chunk holds only records of
    # the broker's state.
    copy()
    master.append([make_batch([b"2"]), state(b"another")])
    with pytest.raises(StoreNotWritableError, match="97% full"):
        copy()
    fill(0.5)
    slave.cleaner.look_at_disk()
    copy()
    assert slave.log.end_offset == master.log.end_offset


def no_room(monkeypatch: pytest.MonkeyPatch, kind: str, part: str) -> None:
    """Make disk calls of one kind fail with ENOSPC (no space left), for files with `part` in their path."""
    real = getattr(disk, kind)

    def call(first: Path | int, *rest: object) -> object:
        path = os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else str(first)
        if part in path:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(first, *rest)

    monkeypatch.setattr(disk, kind, call)


def fill_log(store: MessageStore, size: int = 1000) -> int:
    """Append messages until the store refuses one, because the disk has no space for another log file. Returns the
    number of stored messages."""
    refused = ""
    for count in range(1000):
        try:
            store.append([make_batch([b"%03d" % count + b"." * size])])
        except StoreNotWritableError as error:
            refused = str(error)
            break
    assert re.search("no space for another file .*MiB are free.*mapped_file_size", refused)
    return count


def test_without_room_for_another_log_file_appends_are_refused_and_nothing_has_failed(stores, monkeypatch):
    store = stores()
    store.append([make_batch([b"first"], topic="other")])
    with monkeypatch.context() as patch:
        no_room(patch, "preallocate", "/commitlog")
        count = fill_log(store)
        assert count > 10
        with monkeypatch.context() as full:
            full.setattr(reports, "disk_free_bytes", lambda path: 0)
            assert "no space for another file" in store.status().not_writable_reason
        # The store reports that it is writable as soon as the disk has space, before any append is tried.
        assert store.status().writable
        assert store.gate.failure == ""
        assert len(bodies_of(store)) == count
    store.append([make_batch([b"room again"])])
    assert store.status().writable
    assert len(bodies_of(store)) == count + 1


def test_a_disk_too_small_for_the_first_log_file_is_named_by_the_first_append(stores, monkeypatch, tmp_path):
    no_room(monkeypatch, "preallocate", "/commitlog")
    store = stores()
    with pytest.raises(StoreNotWritableError, match=f"the disk of {tmp_path}/store has no space"):
        store.append([state(b"a topic")])


def test_a_slave_without_disk_space_refuses_a_chunk_and_continues_later(stores, monkeypatch):
    master, slave = stores("master"), stores("slave")
    slave.fence("it follows")
    for number in range(200):
        master.append([make_batch([b"%03d" % number + b"." * 1000])])

    def copy_all() -> None:
        while slave.log.end_offset < master.log.end_offset:
            slave.chunks.append_chunk(slave.log.end_offset, master.chunks.read_chunk(slave.log.end_offset, 1 << 14))

    with monkeypatch.context() as patch:
        no_room(patch, "preallocate", "/slave/commitlog")
        with pytest.raises(StoreNotWritableError, match="no space for another file"):
            copy_all()
        assert slave.gate.failure == ""
    copy_all()
    assert slave.log.end_offset == master.log.end_offset


def test_a_store_without_space_for_a_snapshot_loses_no_message(stores, monkeypatch, tmp_path):
    store = stores(flush_interval_consume_queue_ms=10)
    with monkeypatch.context() as patch:
        no_room(patch, "write_file", "/store/")
        store.append([make_batch([b"1"])])
        with pytest.raises(OSError, match="no space for the recovery snapshot"):
            store._checkpoints.flush_queues()
        store.append([make_batch([b"2"])])
        wait_until(lambda: store._checkpoints._is_out_of_room)  # The checkpoint thread finds that the disk is full.
        store.append([make_batch([b"3"])])
        assert store.gate.failure == ""
    store.close()
    assert bodies_of(stores()) == [b"1", b"2", b"3"]


DISK_MIB, LOG_FILE = 24, 1 << 20
ALONE = {"clean_resource_interval_ms": 3_600_000, "message_index_enable": False}
"""Store settings that turn off the regular disk check and the index, so that only appends find that the disk is
full."""
STATE_RECORDS = 300
"""Number of records of the broker's state that a test appends.

These records need three more consume-queue files, and a third of the space that the log reserves for broker state.
"""


@pytest.fixture
def small(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", DISK_MIB) as made:
        yield made


def on_small_disk(small: SmallDisk, **changes: object) -> MessageStore:
    return open_store(small.path / "store", mapped_file_size_commit_log_bytes=LOG_FILE, **changes)


def states(store: MessageStore) -> int:
    return len(bodies_of(store, topic=STATE_TOPIC))


def append_states(store: MessageStore, count: int = STATE_RECORDS) -> None:
    before = states(store)
    for number in range(count):
        store.append([state(b"commit %d" % number)])
    assert states(store) == before + count


@pytest.mark.parametrize("share", [0.92, 1.0])
def test_on_a_real_full_disk_state_is_stored_and_messages_are_read_also_after_a_restart(small, share):
    store = on_small_disk(small)
    try:
        store.append([make_batch([b"%03d" % number for number in range(100)])])
        store.append([make_batch([b"old"], topic="old")])
        store.append([state(b"before")])
        store.write_config("topics.json", '{"old": 1}')
        for life in range(2):
            small.fill(share)
            store.cleaner.look_at_disk()
            with pytest.raises(StoreNotWritableError, match=r"[0-9]% full"):
                store.append([make_batch([b"x"])])
            assert "% full" in store.status().not_writable_reason
            assert len(bodies_of(store)) == 100
            append_states(store, STATE_RECORDS if life else 50)
            if not life:
                # Closing the store deletes the preallocated next log file, so the test must fill the disk again.
                store.close()
                small.fill(share)
                store = on_small_disk(small)
        store.write_config("topics.json", '{"new": 1}')
        store.topics.delete("old")
        assert store.read_config("topics.json") == '{"new": 1}'
        assert store.gate.failure == ""
        small.make_room()
        store.cleaner.look_at_disk()
        store.append([make_batch([b"x"])])
        assert (small.path / "store" / RESERVE_FILE).exists(), "it is made again"
        assert store.status().writable
    finally:
        store.close()


def test_messages_leave_the_end_of_the_last_log_file_to_the_brokers_state(small):
    store = on_small_disk(small, **ALONE)
    try:
        store.append([make_batch([b"first"])])
        small.fill(1.0)
        count = fill_log(store, size=30_000)
        assert count > 20
        refused_at = store.log.end_offset
        append_states(store)
        assert store.log.end_offset > refused_at
        # The store refuses even a small message, because the remaining space is for the broker's state.
        for _ in range(3):
            with pytest.raises(StoreNotWritableError, match="no space for another file"):
                store.append([make_batch([b"x"])])
        append_states(store, 10)
        assert not (small.path / "store" / RESERVE_FILE).exists(), "the queue of the state needed it"
        small.make_room()
        store.append([make_batch([b"x"])])
        store.cleaner.look_at_disk()
        assert (small.path / "store" / RESERVE_FILE).exists()
        assert len(bodies_of(store)) == count + 2
    finally:
        store.close()


def test_a_slave_on_a_full_disk_takes_state_to_the_end_of_its_last_log_file(small, stores):
    master = stores("master", mapped_file_size_commit_log_bytes=LOG_FILE)
    slave = on_small_disk(small, **ALONE)
    try:
        slave.fence("it follows")

        def copy() -> None:
            end = slave.log.end_offset
            slave.chunks.append_chunk(end, master.chunks.read_chunk(end, 1 << 16))

        master.append([make_batch([b"." * 1000])])
        copy()
        wait_until(lambda: slave.log._allocator.is_ready(LOG_FILE))
        small.fill(1.0)
        while master.log.end_offset < 2 * LOG_FILE - LOG_FILE // 8 - 35_000:
            master.append([make_batch([b"." * 30_000])])
        while slave.log.end_offset < master.log.end_offset:
            copy()
        append_states(master)
        assert master.log.end_offset > 2 * LOG_FILE - LOG_FILE // 8
        while slave.log.end_offset < master.log.end_offset:
            copy()
        master.append([make_batch([b"x"])])
        with pytest.raises(StoreNotWritableError, match="no space for another file"):
            copy()
        assert slave.gate.failure == ""
        small.make_room()
        copy()
        assert slave.log.end_offset == master.log.end_offset
        assert states(master) == STATE_RECORDS
    finally:
        slave.close()
