"""Tests of a store whose commit log is in several directories: log files are created in turn in these directories,
recovered, deleted by retention, and read by other processes."""

from __future__ import annotations

import os
import shutil
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from raymq.common.errors import StoreCorruptError, StoreLockedError
from raymq.common.protocol.store import FetchRequest
from raymq.records.logfiles.directory import file_name
from raymq.records.logfiles.log_reader import LogReader
from storage.log import log_paths
from storage.message_store import MessageStore
from storage.replication.log_chunks import truncate_log
from tests.support.replicas.local_replicas import LocalReplicas
from tests.support.stores.clocks import let_pass
from tests.support.stores.stores import (
    LOG_FILE_BYTES,
    QUEUE_FILE_UNITS,
    bodies_of,
    intact_bodies,
    killed_copy,
    make_batch,
    open_store,
    small_settings,
)

pytestmark = pytest.mark.usefixtures("no_flushes")

BODIES = [b"%06d" % number + b"." * 994 for number in range(400)]


class Disks:
    """A store's root directory and its two log directories, which stand for two disks. All three are below
    `top`."""

    def __init__(self, top: Path) -> None:
        self.top, self.root, self.logs = top, top / "store", [top / "a", top / "b"]

    def settings(self, **changes: Any) -> dict[str, Any]:
        return {"store_path_commit_log": tuple(self.logs), "flush_interval_consume_queue_ms": 60_000, **changes}

    def open(self, **changes: Any) -> MessageStore:
        return open_store(self.root, **self.settings(**changes))

    def filled(self, **changes: Any) -> MessageStore:
        store = self.open(**changes)
        for first in range(0, len(BODIES), 10):
            store.append([make_batch(BODIES[first : first + 10], producer=("p", 0, first))])
        return store

    def files(self) -> list[list[int]]:
        """Return, for each log directory, the numbers of its log files, including a preallocated file."""
        return [sorted(int(path.name) // LOG_FILE_BYTES for path in log.glob("0*")) for log in self.logs]

    def copied(self, top: Path) -> Disks:
        """Copy all files to `top`, in the state in which a kill of the process at this moment would leave them. Returns
        a Disks object for the copies."""
        return Disks(killed_copy(self.top, top))


@pytest.fixture
def disks(tmp_path: Path) -> Disks:
    return Disks(tmp_path / "machine")


def test_files_take_turns_and_are_found_again(disks):
    store = disks.filled()
    assert bodies_of(store) == BODIES
    store.close()
    count = sum(map(len, disks.files()))
    assert count > 6
    assert disks.files() == [list(range(0, count, 2)), list(range(1, count, 2))]
    assert not (disks.root / "commitlog").exists()
    store = disks.open()
    assert bodies_of(store) == BODIES
    assert store.append([make_batch([b"more"])])[0].queue_offset == len(BODIES)
    store.close()


def test_the_same_bytes_as_in_one_directory(disks):
    one = open_store(disks.top / "one", clock_ms=lambda: 1, flush_interval_consume_queue_ms=60_000)
    two = open_store(disks.root, clock_ms=lambda: 1, **disks.settings())
    for store in (one, two):
        for first in range(0, len(BODIES), 10):
            store.append([make_batch(BODIES[first : first + 10])])
        store.close()
    together = sorted((path for log in disks.logs for path in log.glob("0*")), key=lambda path: path.name)
    alone = sorted((disks.top / "one" / "commitlog").iterdir())
    assert [path.name for path in together] == [path.name for path in alone]
    assert [path.read_bytes() for path in together] == [path.read_bytes() for path in alone]


def test_a_log_directory_belongs_to_one_store(disks):
    store, root = disks.filled(), disks.top / "other"
    of_another = {"store_path_commit_log": (disks.top / "c", disks.logs[1])}
    for _ in range(2):
        with pytest.raises(StoreLockedError, match=f"{disks.logs[1]} is in use by another store"):
            open_store(root, **of_another)
    with pytest.raises(StoreLockedError):
        truncate_log(small_settings(root, **of_another), 0)
    open_store(root, store_path_commit_log=(disks.top / "c",)).close()
    assert bodies_of(store) == BODIES
    store.close()


def test_a_full_disk_gets_no_more_files(disks, monkeypatch):
    monkeypatch.setattr(log_paths, "disk_usage", lambda path: 0.87 if path.name == "b" else 0.5)
    store = disks.filled()
    assert bodies_of(store) == BODIES
    store.close()
    assert disks.files()[1] == []
    monkeypatch.undo()
    store = disks.open()
    assert bodies_of(store) == BODIES
    store.close()


def test_a_read_only_directory_keeps_its_files_and_gets_no_more(disks):
    disks.filled().close()
    before = disks.files()
    store = disks.open(read_only_commit_log_store_paths=(disks.logs[0],))
    for number in range(200):
        store.append([make_batch([BODIES[number]])])
    assert bodies_of(store) == BODIES + BODIES[:200]
    store.close()
    assert disks.files()[0] == before[0]
    assert len(disks.files()[1]) > len(before[1])


def test_files_that_were_moved_from_disk_to_disk_are_found(disks):
    disks.filled().close()
    for path in list(disks.logs[0].glob("0*")):
        shutil.move(path, disks.logs[1])
    store = disks.open()
    assert bodies_of(store) == BODIES
    store.close()


@pytest.mark.parametrize("gone", [0, 1])
def test_without_one_of_the_disks_the_store_does_not_open_and_nothing_is_changed(disks, gone):
    disks.filled().close()
    away = disks.top / "away"
    os.rename(disks.logs[gone], away)
    for _ in range(2):
        with pytest.raises(StoreCorruptError, match="is missing; check that all disks of store_path_commit_log are"):
            disks.open()
    shutil.rmtree(disks.logs[gone])
    os.rename(away, disks.logs[gone])
    store = disks.open()
    assert bodies_of(store) == BODIES
    store.close()


@pytest.mark.parametrize("both", [False, True])
def test_without_the_disk_of_the_last_file_the_store_does_not_open_either(disks, both):
    store = disks.open()
    for number in range(100):
        store.append([make_batch([BODIES[number]], producer=("p", 0, number))])
    store.close()
    assert disks.files() == [[0], [1]]
    for log in disks.logs[0 if both else 1 :]:
        log.rename(disks.top / f"{log.name} away")
    with pytest.raises(StoreCorruptError, match=r"the log reached physical offset .* are mounted"):
        disks.open()
    for log in disks.logs[0 if both else 1 :]:
        shutil.rmtree(log)
        (disks.top / f"{log.name} away").rename(log)
    store = disks.open()
    assert bodies_of(store) == BODIES[:100]
    store.close()


def test_old_files_go_from_every_disk(disks, tmp_path):
    store = disks.filled()
    store._checkpoints.flush_queues()
    cleaner = store.cleaner
    let_pass(store)
    cleaner._by_hand = 1
    assert cleaner.run_once(datetime.now() + timedelta(hours=100)) > 3
    kept = bodies_of(store)
    assert 0 < len(kept) < len(BODIES)
    assert kept == BODIES[-len(kept) :]
    starts = sorted(number for numbers in disks.files() for number in numbers)
    assert starts[0] == store.log.min_offset // LOG_FILE_BYTES > 3
    copy = disks.copied(tmp_path / "killed")
    store.close()
    for one in (disks, copy):
        store = one.open()
        assert bodies_of(store) == kept
        store.close()


@pytest.mark.parametrize(("usages", "refused"), [({"a": 0.95, "b": 0.5}, False), ({"a": 0.95, "b": 0.91}, True)])
def test_the_store_is_full_when_all_the_disks_of_its_log_are(disks, monkeypatch, usages, refused):
    store = disks.filled(clean_file_forcibly_enable=False)
    monkeypatch.setattr("storage.retention.cleaner.disk_usage", lambda path: usages.get(path.name, 0.5))
    store.cleaner.run_once(datetime.now().replace(hour=3))
    assert store.status().writable is not refused
    store.close()


def test_a_reader_beside_the_store_maps_the_files_of_all_disks(disks):
    store = disks.filled()
    reader = LogReader(
        disks.root,
        commit_log_file_size=LOG_FILE_BYTES,
        consume_queue_file_size=QUEUE_FILE_UNITS * 20,
        commit_log_directories=[str(log) for log in disks.logs],
    )
    offset, found = 0, 0
    while offset < len(BODIES):
        result = reader.fetch(FetchRequest("orders", 0, offset, 1000), 0, len(BODIES), 1 << 20)
        offset, found = result.next_offset, found + result.count
    assert found == len(BODIES)
    mapped = {Path(path).parent for path in reader.maps._maps}
    assert mapped >= set(disks.logs)
    reader.close()
    store.close()


def test_a_store_on_several_disks_is_recovered_after_a_kill(disks, tmp_path):
    store = disks.filled()
    copy = disks.copied(tmp_path / "killed")
    end = store.log.end_offset
    store.close()
    store = copy.open()
    assert store.log.end_offset == end
    assert bodies_of(store) == BODIES
    [again] = store.append([make_batch(BODIES[-10:], producer=("p", 0, len(BODIES) - 10))])
    assert again.duplicate
    store.close()


def test_damage_in_the_middle_keeps_later_files_on_every_disk(disks):
    disks.filled().close()
    (disks.root / "abort").touch()
    (disks.root / "dedup").unlink()
    with open(disks.logs[1] / file_name(3 * LOG_FILE_BYTES), "r+b") as file:
        file.seek(LOG_FILE_BYTES // 2)
        file.write(b"\xff" * 2000)
    files = disks.files()
    store = disks.open()
    [hole] = store.mender.holes
    assert 0 <= hole.offset - 3 * LOG_FILE_BYTES - LOG_FILE_BYTES // 2 < 2000 < hole.size
    store.append([make_batch([b"more"])])
    found = intact_bodies(store)
    assert [body for body in found if body is not None] == [
        body for body, kept in zip([*BODIES, b"more"], found, strict=True) if kept is not None
    ]
    assert 1 <= found.count(None) <= 3
    store.close()
    assert disks.files() == files


def test_a_log_that_is_cut_on_purpose_opens(disks):
    store = disks.filled()
    last_offset = store.append([make_batch([b"last"])])[0].physical_offset
    for body in BODIES[:100]:
        store.append([make_batch([body])])
    store.close()
    assert truncate_log(small_settings(disks.root, **disks.settings()), last_offset) > LOG_FILE_BYTES
    store = disks.open()
    assert bodies_of(store) == BODIES
    store.close()


def test_a_replica_with_another_log_is_emptied_on_all_disks_and_refilled(tmp_path):
    group = LocalReplicas(tmp_path, log_disks=2)
    try:
        group.settle()
        group.start()
        for first in range(0, 300, 10):
            group.master.append([make_batch(BODIES[first : first + 10])])
        name = next(name for name, replica in group.replicas.items() if replica is not group.master)
        group.close(name)
        settings = group.settings(name)
        for directory in (settings.store_path_root_dir, *settings.commit_log_directories):
            shutil.rmtree(directory)
        other = MessageStore.open(settings, broker_name="broker-a")
        for _ in range(500):
            other.append([make_batch([b"other" * 100], topic="other")])
        other.close()
        group.open(name)
        group.settle()
        assert bodies_of(group.replicas[name].store) == BODIES[:300]
        logs = [[path.name for path in sorted(log.glob("0*"))] for log in settings.commit_log_directories]
        assert all(len(files) > 1 for files in logs)
        assert "other" not in group.replicas[name].store.topics.queue_ids()
    finally:
        group.end()


def test_nothing_but_the_log_s_files_is_left_beside_them(tmp_path):
    """A log directory contains only log files: the store deletes what a kill during the creation of a file has left.
    RocketMQ 4.9 refuses a log directory that contains anything else, even an empty directory."""
    disks = (tmp_path / "disk-1", tmp_path / "disk-2")
    for directory in disks:
        # Create the files that exist if the store is killed while it creates a log file.
        (directory / ".new").mkdir(parents=True)
        (directory / ".new/commitlog").write_bytes(b"x")
    store = open_store(tmp_path / "store", store_path_commit_log=disks)
    for _ in range(3):
        store.append([make_batch([bytes(40_000)])])
    store.close()
    names = [path.name for directory in disks for path in directory.iterdir()]
    assert len(names) == 3
    assert all(name.isdecimal() for name in names)
    again = open_store(tmp_path / "store", store_path_commit_log=disks)
    assert len(bodies_of(again)) == 3
    again.close()
