"""Tests of retention: first its rules alone, then stores to which the rules are applied (spec/storage.md §9)."""

from __future__ import annotations

import json
import os
import shutil
import threading
from datetime import datetime
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest

from raymq.common.config.store import StoreOptions
from raymq.common.errors import StoreNotWritableError
from raymq.common.message import PullStatus
from raymq.common.protocol.store import FetchRequest
from raymq.records.format.decode import decode_records
from storage.files import disk
from storage.files.disk_usage import disk_usage, usage_ratio
from storage.index.index_service import IndexService
from storage.message_store import MessageStore
from storage.replication.log_chunks import truncate_log
from storage.retention import cleaner
from storage.retention.rules import HOUR_MS, LogFile, RetentionDecision, RetentionRules, decide
from tests.support.stores.clocks import let_pass
from tests.support.stores.power import LossyDisk
from tests.support.stores.stores import LOG_FILE_BYTES, bodies_of, killed_copy, make_batch, open_store, small_settings

NOW = 1_700_000_000_000
RULES = RetentionRules.from_settings(StoreOptions())


def files(*ages_hours: float) -> list[LogFile]:
    return [LogFile(i * 100, i * 100 + 100, NOW - int(age * HOUR_MS)) for i, age in enumerate(ages_hours)]


def decided(log: list[LogFile], rules: RetentionRules = RULES, **changes) -> RetentionDecision:
    arguments = {"local_hour": 4, "usages": [0.5], "by_hand": False, "disk_full": False, "keep_from": 10**9, **changes}
    arguments.setdefault("reserved_from", 10**9)
    return decide(log, rules, now_ms=NOW, **arguments)


def starts(decision: RetentionDecision) -> list[int]:
    return [file.start for file in decision.delete]


@pytest.mark.parametrize(
    ("ages", "changes", "expected"),
    [
        ((80, 73, 10, 1), {}, [0, 100]),
        ((80, 73, 10, 1), {"local_hour": 5}, []),
        ((80, 73, 10, 1), {"local_hour": 5, "by_hand": True}, [0, 100]),
        ((80, 73, 10, 1), {"local_hour": 5, "usages": [0.5, 0.76]}, [0, 100]),
        ((80, 73, 10, 1), {"local_hour": 5, "usages": [0.75]}, []),
        ((80, 73, 10, 1), {"local_hour": 5, "usages": [-1.0]}, [0, 100]),
        ((80, 73, 10, 1), {"local_hour": 5, "usages": [0.86]}, [0, 100]),
        ((80, 73, 10, 1), {"local_hour": 5, "usages": [0.99]}, [0, 100]),
        ((10, 80, 80), {}, []),
        ((80,), {}, []),
        ((72, 71.9, 0), {}, [0]),
        ((80, 80, 80, 80), {"keep_from": 250}, [0, 100]),
        ((80, 80, 80, 80), {"keep_from": 250, "usages": [0.99]}, [0, 100]),
        ((80, 80, 80, 80), {"reserved_from": 250}, [0, 100]),
        ((80, 80, 80, 80), {"reserved_from": 250, "usages": [0.99]}, [0, 100]),
        ((80,) * 30, {}, [index * 100 for index in range(10)]),
        ((), {}, []),
    ],
)
def test_rules_decide_which_files_are_deleted(ages, changes, expected):
    assert starts(decided(files(*ages), **changes)) == expected


def test_a_full_disk_deletes_files_whatever_their_age_only_where_that_is_switched_on():
    rules = RetentionRules.from_settings(StoreOptions(clean_file_forcibly_enable=True))
    decision = decided(files(80, 73, 10, 1), rules, local_hour=5, usages=[0.86])
    assert (starts(decision), decision.young_from) == ([0, 100, 200], 200)
    assert decided(files(80, 73, 10, 1), usages=[0.95]).young_from is None
    longer = decided(files(80, 80, 80, 1), rules, usages=[0.86], reserved_from=150)
    assert (starts(longer), longer.young_from) == ([0, 100, 200], 100)


def test_a_disk_counts_as_full_until_it_is_below_the_ratio_for_forcing():
    full = [False]
    for usage in (0.89, 0.90, 0.91, 0.90, 0.86, 0.85, 0.89):
        full.append(decided(files(1), usages=[usage], disk_full=full[-1]).disk_full)
    assert full[1:] == [False, False, True, True, True, False, False]


def test_ratios_are_kept_in_rocketmqs_bounds():
    low = RetentionRules.from_settings(
        StoreOptions(disk_max_used_space_ratio=0, disk_space_clean_forcibly_ratio=0, disk_space_warning_level_ratio=0)
    )
    high = RetentionRules.from_settings(
        StoreOptions(
            disk_max_used_space_ratio=100, disk_space_clean_forcibly_ratio=100, disk_space_warning_level_ratio=100
        )
    )
    assert (low.max_used_ratio, low.clean_forcibly_ratio, low.warning_ratio) == (0.10, 0.30, 0.35)
    assert (high.max_used_ratio, high.clean_forcibly_ratio, high.warning_ratio) == (0.95, 0.85, 0.90)


def test_usage_is_rounded_up_to_whole_percent():
    assert usage_ratio(1, 999) == 0.01
    assert usage_ratio(750, 250) == 0.75
    assert usage_ratio(751, 249) == 0.76
    assert usage_ratio(0, 0) == -1


# Tests of retention in a store

BODIES = [b"%04d" % index + b"x" * 300 for index in range(900)]
THREE_O_CLOCK = datetime(2023, 11, 15, 3)


@pytest.fixture
def root(tmp_path, no_flushes, monkeypatch) -> Path:
    monkeypatch.setattr(cleaner, "DELETE_PAUSE_S", 0.0)
    return tmp_path / "store"


def filled_store(root: Path, **changes) -> MessageStore:
    store = open_store(root, **changes)
    store.append([make_batch([b"early"] * 3, queue_id=1)])
    for first in range(0, len(BODIES), 20):
        store.append([make_batch(BODIES[first : first + 20])])
    return store


def age(root: Path, count: int, now: datetime, hours: float = 100) -> None:
    """Make the first `count` log files old: set their modification times to `hours` before `now`."""
    for path in sorted((root / "commitlog").iterdir())[:count]:
        os.utime(path, (now.timestamp() - hours * 3600,) * 2)


def clean_by_hand(store: MessageStore) -> int:
    store.cleaner._by_hand = 1
    let_pass(store)
    return store.cleaner.run_once(THREE_O_CLOCK)


def check_shortened(store: MessageStore, root: Path, removed: int) -> None:
    assert store.status().min_physical_offset == removed * LOG_FILE_BYTES
    bounds = store.queues.bounds("orders", 0)
    assert 0 < bounds.min_offset < bounds.max_offset == len(BODIES)
    assert bodies_of(store) == BODIES[bounds.min_offset :]
    assert store.queues.bounds("orders", 1).min_offset == store.queues.bounds("orders", 1).max_offset == 3
    assert len(list((root / "consumequeue/orders/0").iterdir())) == 9 - bounds.min_offset // 100
    assert store.queues.offset_by_time("orders", 0, 0) == bounds.min_offset


def test_log_queues_and_index_get_shorter_together_and_stay_so_over_a_restart(root):
    store = filled_store(root, max_index_num=100)
    age(root, 2, THREE_O_CLOCK)
    index_files = len(list((root / "index").iterdir())) if store.queries.by_key("orders", "none").complete else 0
    assert clean_by_hand(store) == 2
    check_shortened(store, root, 2)
    assert len(list((root / "index").iterdir())) < index_files
    assert store.status().retention.files_deleted == 2
    assert store.status().retention.disk_free_bytes > 0
    assert store.queries.by_unique_id("orders", f"{0:032X}").count > 0
    killed = killed_copy(root, root.with_name("killed"))
    store.close()
    for path in (root, killed):
        store = open_store(path, max_index_num=100)
        check_shortened(store, path, 2)
        assert store.append([make_batch([b"more"], queue_id=1)])[0].queue_offset == 3
        assert bodies_of(store, queue_id=1) == [b"more"]
        store.close()


def test_a_lost_empty_queue_continues_at_its_end(root):
    store = filled_store(root)
    age(root, 2, THREE_O_CLOCK)
    assert clean_by_hand(store) == 2
    store.close()
    shutil.rmtree(root / "consumequeue/orders/1")  # Delete the directory of a queue, as a power failure may.
    (root / "abort").touch()
    store = open_store(root)
    check_shortened(store, root, 2)
    assert store.append([make_batch([b"more"], queue_id=1)])[0].queue_offset == 3
    assert bodies_of(store, queue_id=1) == [b"more"]
    store.close()


def test_nothing_is_deleted_outside_of_the_configured_hour(root, monkeypatch):
    monkeypatch.setattr(cleaner, "disk_usage", lambda path: 0.5)
    store = filled_store(root)
    age(root, 2, THREE_O_CLOCK)
    let_pass(store)
    assert store.cleaner.run_once(THREE_O_CLOCK) == 0
    let_pass(store)
    assert store.cleaner.run_once(THREE_O_CLOCK.replace(hour=4)) == 2
    store.close()


def test_a_full_disk_refuses_appends_keeps_reading_and_recovers(root, monkeypatch):
    usage = 0.5
    monkeypatch.setattr(cleaner, "disk_usage", lambda path: usage)
    store = filled_store(root, clean_file_forcibly_enable=False)
    usage = 0.95
    let_pass(store)
    store.cleaner.run_once(THREE_O_CLOCK)
    with pytest.raises(StoreNotWritableError, match="95% full"):
        store.append([make_batch([b"x"])])
    assert bodies_of(store) == BODIES
    assert store.status().running_flags == 16
    assert "95% full" in store.status().not_writable_reason
    usage = 0.80
    let_pass(store)
    store.cleaner.run_once(THREE_O_CLOCK)
    assert store.append([make_batch([b"x"])])[0].queue_offset == len(BODIES)
    store.close()


def test_a_full_disk_refuses_appends_and_keeps_young_messages(root, monkeypatch):
    """If the disk is full, the store refuses appends but deletes no young messages. Other programs may have filled the
    disk, so a full disk alone is no reason to delete unread messages."""
    store = filled_store(root)
    monkeypatch.setattr(cleaner, "disk_usage", lambda path: 0.99)
    for hour in (3, 4):
        let_pass(store)
        assert store.cleaner.run_once(datetime.now().replace(hour=hour)) == 0
    with pytest.raises(StoreNotWritableError, match="99% full"):
        store.append([make_batch([b"x"])])
    assert bodies_of(store) == BODIES
    assert store.cleaner.deleted_young() is None
    store.close()


def test_blocks_that_are_reserved_for_others_do_not_count_as_room(monkeypatch):
    """Space that is reserved for root does not count as free. The simulated disk of 100 GiB has 60 GiB used, 30 GiB
    available, and 10 GiB reserved for root."""
    gib = SimpleNamespace(f_frsize=4096, f_blocks=100 << 18, f_bfree=40 << 18, f_bavail=30 << 18)
    monkeypatch.setattr(os, "statvfs", lambda path: gib)
    assert disk_usage(Path("/")) == 0.67


def test_a_disk_over_85_percent_deletes_young_files_too_where_that_is_switched_on_and_says_which(
    root, monkeypatch, caplog
):
    monkeypatch.setattr(cleaner, "disk_usage", lambda path: 0.87)
    store = filled_store(root, clean_file_forcibly_enable=True)
    before = len(list((root / "commitlog").iterdir()))
    age(root, 1, datetime.now())
    let_pass(store)
    count = store.cleaner.run_once(datetime.now())
    assert count > 2
    bounds = store.queues.bounds("orders", 0)
    [lost] = store.cleaner.deleted_young()
    assert (lost.topic, lost.queue_id, lost.end_offset) == ("orders", 0, bounds.min_offset)
    # The lost range begins after the messages of the first deleted log file. This file had reached its age limit, so
    # its messages do not count as deleted too early.
    assert 100 < lost.begin_offset < lost.end_offset
    assert store.status().retention.young_files_deleted == count - 1
    assert store.statistics().runtime["commitLogYoungFilesDeleted"] == str(count - 1)
    assert f"orders:0 {lost.begin_offset} to {lost.end_offset - 1}" in caplog.text
    assert len(list((root / "commitlog").iterdir())) < before
    assert store.append([make_batch([b"x"])])[0].queue_offset == len(BODIES)
    store.close()


def test_a_hold_keeps_its_files(root):
    store = filled_store(root)
    age(root, 9, THREE_O_CLOCK)
    store.write_config(cleaner.HOLDS_FILE, '{"orders": {"1": 2, "7": 0}}')
    assert clean_by_hand(store) == 0
    store.write_config(cleaner.HOLDS_FILE, '{"orders": {"0": 400, "1": 3}}')
    assert clean_by_hand(store) > 0
    assert 0 < store.queues.bounds("orders", 0).min_offset <= 400
    store.close()


def test_a_view_of_a_deleted_file_stays_readable_and_old_offsets_are_refused(root):
    store = filled_store(root)
    view = store._parts.reader.views(store._parts.reader.units("orders", 0, 0, 1))[0]
    age(root, 2, THREE_O_CLOCK)
    clean_by_hand(store)
    [message] = decode_records(view)
    assert message.body == BODIES[0]
    [result] = store.fetch([FetchRequest("orders", 0, 0, 10)], max_bytes=1000, wait_s=0)
    assert result.status is PullStatus.OFFSET_ILLEGAL
    assert result.next_offset == store.queues.bounds("orders", 0).min_offset
    store.close()


def test_readers_and_writers_continue_while_files_are_deleted(root):
    store = filled_store(root)
    failures: list[BaseException] = []
    stop = threading.Event()

    def read() -> None:
        try:
            while not stop.is_set():
                offset = store.queues.bounds("orders", 0).min_offset
                for at in (0, offset, offset + 50):
                    [result] = store.fetch([FetchRequest("orders", 0, at, 50)], max_bytes=50_000, wait_s=0)
                    for message in decode_records(result.records):
                        assert message.body[4:] == b"x" * 300
        except BaseException as error:
            failures.append(error)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for _ in range(20):
        store.append([make_batch(BODIES[:40])])
        age(root, 2, THREE_O_CLOCK)
        clean_by_hand(store)
    stop.set()
    for reader in readers:
        reader.join()
    assert failures == []
    store.close()


def test_a_store_without_records_keeps_the_ends_of_its_queues(root):
    """A store without any record still finds the ends of its queues after a restart. Its log was truncated at the start
    of a file, so that file has no record, and retention has deleted all earlier files."""
    store = filled_store(root)
    store.close()
    truncate_log(small_settings(root), LOG_FILE_BYTES)
    store = open_store(root)
    end = store.queues.bounds("orders", 0).max_offset
    age(root, 1, THREE_O_CLOCK)
    assert clean_by_hand(store) == 1
    killed = killed_copy(root, root.with_name("killed"))
    store.close()
    for path in (root, killed):
        store = open_store(path)
        assert store.queues.bounds("orders", 0).min_offset == store.queues.bounds("orders", 0).max_offset == end > 0
        assert store.append([make_batch([b"next"])])[0].queue_offset == end
        store.close()


def test_a_recreated_topic_without_records_keeps_its_offsets(root):
    """A topic was deleted and created again. One queue of the new topic is empty, and retention has deleted the records
    of the other queue. The store must not treat these queues as queues of the deleted topic."""
    store = open_store(root)
    store.append([make_batch([b"deleted"])])
    store.topics.delete("orders")
    store.append([make_batch(BODIES[:200]), make_batch([b"cut"], queue_id=1)])
    end = store.queues.bounds("orders", 0).max_offset
    physical_offset = store.status().max_physical_offset - len(make_batch([b"cut"]).records)
    store.close()
    truncate_log(small_settings(root), physical_offset)
    store = open_store(root)
    age(root, 1, THREE_O_CLOCK)
    assert clean_by_hand(store) == 1
    for _ in range(2):
        store.close()
        truncate_log(small_settings(root), LOG_FILE_BYTES)
        store = open_store(root)
        bounds = store.queues.bounds("orders", 0)
        assert 0 < bounds.min_offset == bounds.max_offset <= end
    store.close()


def test_index_files_may_go_while_the_index_still_looks_where_it_ended(root, monkeypatch):
    """After a store was opened, the index thread checks all index files. If retention deletes the first index files
    during this check, queries and appends still work afterwards."""
    store = filled_store(root, max_index_num=100)
    assert store.queries.by_key("orders", "none").complete
    store.close()
    age(root, 2, THREE_O_CLOCK)
    looking, cleaned = threading.Event(), threading.Event()
    after = IndexService._first_with_key

    def waiting(service: IndexService, position: int, limit: int) -> int | None:
        looking.set()
        assert cleaned.wait(60)
        return after(service, position, limit)

    monkeypatch.setattr(IndexService, "_first_with_key", waiting)
    store = open_store(root, max_index_num=100)
    before = len(list((root / "index").iterdir()))
    assert looking.wait(60)
    assert clean_by_hand(store) == 2
    cleaned.set()
    assert store.queries.by_key("orders", "none").complete
    assert store.status().not_writable_reason == ""
    assert store.status().index_files == len(list((root / "index").iterdir())) < before
    store.append([make_batch(BODIES[:300])])
    assert store.queries.by_key("orders", "none").complete
    store.close()


def test_a_queues_end_is_on_disk_before_its_last_record_is_deleted(tmp_path, monkeypatch):
    monkeypatch.setattr(cleaner, "DELETE_PAUSE_S", 0.0)
    root = tmp_path / "0" / "store"
    root.parent.mkdir()
    lossy = LossyDisk(root.parent, Random(0), lose_at=-1, on_loss=lambda: None)
    with lossy.installed():
        store = open_store(root, flush_interval_consume_queue_ms=60_000)
        store.append([make_batch([b"early"] * 3, queue_id=1)])
        store.append([make_batch(BODIES[:400])])
        age(root, 1, THREE_O_CLOCK)
        assert clean_by_hand(store) == 1
        lossy.lose_now()
        store.close()
    after = tmp_path / "1"
    after.mkdir()
    lossy.write_image(after)
    store = open_store(after / "store")
    assert store.queues.bounds("orders", 1).max_offset == 3
    store.close()


def test_a_deletion_is_not_forgotten_before_the_records_are_gone_from_the_disk(root, monkeypatch):
    """The list of deleted topics keeps a topic until its records are deleted from the disk. A power failure during the
    deletion may restore the log files, and with them the topic's messages."""
    store = open_store(root)
    store.append([make_batch(BODIES[:50], topic="deleted"), make_batch([b"x"], topic="passing")])
    store.topics.delete("deleted")
    store.append([make_batch(BODIES[:200])])
    age(root, 1, THREE_O_CLOCK)
    unlink = disk.unlink

    def deleting_unlink(path: Path) -> None:
        if path.parent.name == "commitlog":
            store.topics.delete("passing")
        unlink(path)

    monkeypatch.setattr(disk, "unlink", deleting_unlink)
    assert clean_by_hand(store) == 1
    monkeypatch.undo()
    assert set(json.loads(store.read_config("deletedTopics.json"))) == {"deleted", "passing"}
    store.topics.delete("orders")
    store.close()
