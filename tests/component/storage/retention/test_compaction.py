"""Tests of compaction topics. The newest message of each key is kept, whatever retention deletes and whenever the
store's process is killed."""

from __future__ import annotations

import json
import os
from datetime import datetime
from pathlib import Path
from random import Random

import numpy as np
import pytest

from raymq.client.consumer.pull_once import read_fetched
from raymq.common.errors import DataLossError
from raymq.common.message import Message, MessageQueue, PullStatus
from raymq.common.protocol.store import Boundary, FetchRequest
from raymq.records.format.check import record_starts
from raymq.records.format.decode import decode_records, read_record
from raymq.records.format.encode import encode_batch
from raymq.records.format.hashing import tags_code
from raymq.records.format.layout import BODY_OFFSET, read_header
from raymq.records.format.places import RecordPlace
from raymq.records.logfiles.log_reader import LogReader
from storage.compaction import compactor
from storage.compaction.compactor import TOMBSTONE_KEPT_MS
from storage.files import disk
from storage.message_store import MessageStore
from storage.queue import compacted_log
from storage.queue.topic_attributes import SETTLED_MS, TOPICS_FILE
from storage.retention import cleaner
from tests.support.stores.clocks import let_pass
from tests.support.stores.damage import flip
from tests.support.stores.power import LossyDisk
from tests.support.stores.stores import LOG_FILE_BYTES, QUEUE_FILE_UNITS, killed_copy, make_batch, open_store

NOW_MS = 1_700_000_000_000
LATER_MS = NOW_MS + SETTLED_MS + 1
TOPICS = json.dumps({"topicConfigTable": {"orders": {"attributes": {"cleanup.policy": "COMPACTION"}}}})


@pytest.fixture
def root(tmp_path, no_flushes, monkeypatch) -> Path:
    monkeypatch.setattr(cleaner, "DELETE_PAUSE_S", 0.0)
    monkeypatch.setattr(cleaner, "disk_usage", lambda path: 0.5)
    monkeypatch.setattr("storage.compaction.compaction_service.PAUSE_MAX_S", 0.0)
    return tmp_path / "store"


class Compacted:
    """A store with the compaction topic `orders`, and the messages sent to its queue 0."""

    def __init__(self, root: Path, **changes) -> None:
        self.root, self.changes = root, changes
        self.now_ms = NOW_MS
        self.sent: list[tuple[str | None, bytes]] = []
        self.open()

    def open(self) -> None:
        self.store: MessageStore = open_store(self.root, clock_ms=lambda: self.now_ms, **self.changes)
        self.store.write_config(TOPICS_FILE, TOPICS)

    def send(self, *messages: tuple[str | None, bytes], tags: str | None = None, **properties: str) -> None:
        batch = encode_batch(
            [Message("orders", body, tags, [key] if key else (), properties) for key, body in messages],
            0,
            born_host=("127.0.0.1", 5000),
            born_timestamp_ms=NOW_MS,
            message_ids=[f"{len(self.sent) + n:032X}" for n in range(len(messages))],
        )
        self.store.append([batch])
        self.sent += messages

    def compact(self, now_ms: int = LATER_MS) -> int:
        return self.store.compaction.run_once(now_ms)

    def newest(self) -> dict[int, bytes]:
        """Return the messages that compaction must keep, by offset: the newest message of each key, and all messages
        without a key."""
        last = {key: offset for offset, (key, _) in enumerate(self.sent) if key}
        return {offset: body for offset, (key, body) in enumerate(self.sent) if key is None or last[key] == offset}

    def drop_log(self) -> None:
        """Delete all log files that are old and that retention may delete."""
        for path in sorted((self.root / "commitlog").iterdir()):
            os.utime(path, (0, 0))
        while True:
            let_pass(self.store)
            self.store.cleaner._by_hand = 1
            if not self.store.cleaner.run_once(datetime(2026, 1, 1, 4)):
                return


def read(store: MessageStore, start: int = 0, max_messages: int = 7, max_bytes: int = 4000) -> dict[int, bytes]:
    """Return the messages that a consumer reads from offset `start` to the queue's end, by offset."""
    found: dict[int, bytes] = {}
    offset, end = start, store.queues.bounds("orders", 0).max_offset
    while offset < end:
        [result] = store.fetch([FetchRequest("orders", 0, offset, max_messages)], max_bytes=max_bytes, wait_s=0)
        assert result.status in (PullStatus.FOUND, PullStatus.NO_MATCHED_MESSAGE)
        assert result.next_offset > offset
        messages = decode_records(result.records, broker_name="a")
        assert len(messages) == result.count <= max_messages
        assert all(offset <= message.queue_offset < result.next_offset for message in messages)
        found |= {message.queue_offset: message.body for message in messages}
        offset = result.next_offset
    assert list(found) == sorted(found)
    return found


def random_messages(random: Random, count: int, keys: int = 40) -> list[tuple[str | None, bytes]]:
    names = [f"key-{n}" for n in range(keys)]
    return [(random.choice(names), b"%d " % n + b"x" * random.randrange(1, 300)) for n in range(count)]


def test_the_newest_message_of_each_key_stays_at_its_offset_with_its_bytes(root):
    it = Compacted(root)
    it.send(("a", b"1"), (None, b"2"), ("a", b"3"), (None, b"4"), ("c", b"5"), ("c", b"6"))
    before = read(it.store)
    assert it.compact() == 1
    assert read(it.store) == it.newest() == {1: b"2", 2: b"3", 3: b"4", 5: b"6"}
    assert before == {offset: body for offset, (_, body) in enumerate(it.sent)}
    bounds = it.store.queues.bounds("orders", 0)
    assert (bounds.min_offset, bounds.max_offset) == (0, 6)
    assert read(it.store, 3) == {3: b"4", 5: b"6"}
    assert it.compact() == 0
    it.store.close()


@pytest.mark.parametrize("field", ["queue id", "queue offset", "physical offset", "topic"])
def test_a_damaged_record_of_the_compacted_log_is_never_another_message(root, field):
    """If damage makes a record of the compacted log name another queue or offset, the store returns the record as
    damaged. The compacted log's entry (unit) for the record has the right queue and offset."""
    it = Compacted(root)
    it.send(*[(f"key-{n}", b"%d" % n) for n in range(4)], ("key-1", b"newest"))
    it.compact()
    [path] = (root / "compaction" / "orders" / "0").glob("*.log")
    position = {"queue id": 15, "queue offset": 27, "physical offset": 35, "topic": BODY_OFFSET + 1 + 1 + 2}[field]
    with path.open("r+b") as file:
        data = bytearray(file.read())
        data[record_starts(bytes(data))[1] + position] ^= 4
        file.seek(0)
        file.write(data)
    log = it.store._parts.queues.get_plain("orders", 0).compacted
    result = log.fetch(FetchRequest("orders", 0, 0, 10), 0, 5, 10**6)
    found = read_fetched(result.records, MessageQueue("orders", "a", 0), 0, result.next_offset)
    assert [one.message.record_damaged for one in found] == [False, True, False, False]
    assert [one.message.body for one in found if not one.message.record_damaged] == [b"0", b"3", b"newest"]
    it.store.close()


def test_other_topics_and_messages_that_are_new_are_left_alone(root):
    it = Compacted(root)
    it.send(("a", b"1"), ("a", b"2"))
    it.store.append([make_batch([b"x", b"y"], topic="bills")])
    assert it.compact(NOW_MS + SETTLED_MS) == 0
    assert list(read(it.store)) == [0, 1]
    it.now_ms = LATER_MS
    it.send(("a", b"3"))
    assert it.compact() == 1
    assert list(read(it.store)) == [1, 2]
    assert it.store.queues.bounds("bills", 0).max_offset == 2
    it.store.close()


def test_messages_outlive_the_log_files_that_had_them(root):
    it = Compacted(root)
    random = Random(7)
    for _ in range(30):
        it.send(*random_messages(random, 50))
    it.drop_log()
    assert it.store.log.min_offset == 0, "what is not compacted stays in the log"
    it.compact()
    it.drop_log()
    assert it.store.log.min_offset > 0
    assert read(it.store) == it.newest()
    assert read(it.store, max_bytes=1) == it.newest()
    killed = killed_copy(root, root.with_name("killed"))
    it.store.close()
    for it.root in (root, killed):
        it.open()
        assert read(it.store) == it.newest()
        it.store.close()
    it.open()
    it.send(*random_messages(random, 500, keys=60))
    it.now_ms = LATER_MS
    it.compact(LATER_MS + SETTLED_MS)
    assert read(it.store) == it.newest()
    it.store.close()


def test_readers_of_mapped_files_skip_superseded_and_fetch_compacted_messages(root):
    it = Compacted(root)
    for n in range(300):
        it.send((f"k{n % 200}", b"%d" % n + b"x" * 300))
    reader = LogReader(root, commit_log_file_size=LOG_FILE_BYTES, consume_queue_file_size=QUEUE_FILE_UNITS * 20)
    request = FetchRequest("orders", 0, 0, 1000)
    found, _ = reader.find(request, 300, 10**9)
    assert np.concatenate([part.offsets for part in found]).tolist() == list(range(300))
    it.compact()
    found, next_offset = reader.find(request, 300, 10**9)
    assert np.concatenate([part.offsets for part in found]).tolist() == list(range(100, 300))
    assert next_offset == 300
    it.drop_log()
    with pytest.raises(DataLossError):
        reader.find(request, 300, 10**9)
    reader.close()
    it.store.close()


def test_a_fetch_with_tags_or_without_bytes_looks_into_the_compacted_log(root):
    it = Compacted(root)
    for n in range(300):
        it.send((f"k{n % 200}", b"%d" % n + b"x" * 300), tags="even" if n % 2 == 0 else "odd")
    it.compact()
    it.drop_log()
    assert it.store.log.min_offset > 0
    even = frozenset([tags_code("even")])
    [result] = it.store.fetch([FetchRequest("orders", 0, 0, 10, even)], max_bytes=100_000, wait_s=0)
    assert [m.queue_offset for m in decode_records(result.records, broker_name="a")] == list(range(100, 120, 2))
    assert result.next_offset == 120
    none = frozenset([tags_code("none")])
    [result] = it.store.fetch([FetchRequest("orders", 0, 0, 10, none)], max_bytes=100_000, wait_s=0)
    assert (result.status, result.next_offset) == (PullStatus.NO_MATCHED_MESSAGE, 300)
    [result] = it.store.fetch([FetchRequest("orders", 0, 0, 10)], max_bytes=0, wait_s=0)
    assert (result.status, result.next_offset, result.records) == (PullStatus.FOUND, 100, b"")
    it.store.close()


@pytest.mark.parametrize("scan_bytes", [4 << 20, 1000, 1])
def test_a_filter_expression_chooses_in_the_compacted_log_as_in_the_commit_log(root, monkeypatch, scan_bytes):
    monkeypatch.setattr(compacted_log, "_SCAN_BYTES", scan_bytes)
    it = Compacted(root)
    for n in range(300):
        it.send((f"k{n % 200}", b"%d" % n + b"x" * 300), price=str(n % 10))
    wanted = {offset: body for offset, body in it.newest().items() if offset % 10 > 6}
    it.compact()
    for dropped in (False, True):
        if dropped:
            it.drop_log()
            assert it.store.log.min_offset > 0
        found: dict[int, bytes] = {}
        offset = 0
        while offset < 300:
            request = FetchRequest("orders", 0, offset, 7, sql="price > 6")
            [result] = it.store.fetch([request], max_bytes=3000, wait_s=0)
            assert result.next_offset > offset
            found |= {m.queue_offset: m.body for m in decode_records(result.records, broker_name="a")}
            offset = result.next_offset
        assert found == wanted
    it.store.close()


def test_a_time_before_the_log_is_found_in_the_compacted_log(root):
    it = Compacted(root)
    for n in range(300):
        it.now_ms = NOW_MS + n
        it.send((f"k{n % 200}", b"x" * 300))
    it.compact(it.now_ms + SETTLED_MS + 1)
    it.drop_log()
    assert it.store.queues.offset_by_time("orders", 0, 0) == 100
    assert it.store.queues.offset_by_time("orders", 0, NOW_MS + 120) == 120
    assert it.store.queues.offset_by_time("orders", 0, NOW_MS + 120, Boundary.UPPER) == 120
    assert it.store.queues.offset_by_time("orders", 0, NOW_MS + 298) == 298
    it.store.close()


def test_a_tombstone_takes_its_key_away_and_goes_itself_a_day_later(root):
    it = Compacted(root)
    it.send(("a", b"1"), ("b", b"2"))
    it.send(("a", b"gone"), TOMBSTONE="true")
    it.compact()
    assert list(read(it.store)) == [1, 2]
    it.now_ms = NOW_MS + TOMBSTONE_KEPT_MS
    it.send(("c", b"3"))
    let_pass(it.store, TOMBSTONE_KEPT_MS / 3_600_000)
    it.compact(it.now_ms + SETTLED_MS + 1)
    assert list(read(it.store)) == [1, 3]
    it.send(("a", b"4"))
    assert read(it.store)[4] == b"4"
    it.store.close()


def test_a_deleted_topic_leaves_nothing_to_a_topic_of_its_name(root):
    it = Compacted(root)
    it.send(("a", b"1"), ("a", b"2"), ("b", b"3"))
    it.compact()
    left = killed_copy(root / "compaction", root.with_name("left"))
    it.store.topics.delete("orders")
    assert not (root / "compaction/orders").exists()
    it.sent.clear()
    it.send(("a", b"new"))
    assert read(it.store) == {0: b"new"}
    it.store.close()
    left.rename(root / "compaction2")
    (root / "compaction").rmdir()
    # Put the deleted directory of the compacted topic back. A crash in the middle of the topic's deletion may leave the
    # directory in place.
    (root / "compaction2").rename(root / "compaction")
    it.open()
    assert read(it.store) == {0: b"new"}
    assert it.compact() == 1
    assert read(it.store) == {0: b"new"}
    it.store.close()


def test_the_log_keeps_records_that_other_replicas_lack(root):
    it = Compacted(root)
    it.store.close()
    it.store = MessageStore.open(
        it.store._settings, broker_name="broker-a", clock_ms=lambda: it.now_ms, on_stored=lambda end: None
    )
    random = Random(3)
    for n in range(40):
        it.send(*random_messages(random, 50))
        if n == 20:
            it.send(("once", b"long ago"))
    it.store.gate.flush_all()
    it.store.show(it.store.gate.stored_offset)
    it.send(("not-shown", b"not shown"))
    it.compact()
    it.drop_log()
    [queue] = it.store._parts.queues.plain
    assert 0 < queue.min_offset <= 21 * 50
    assert queue.compacted.end_offset == 2001
    it.store.close()


def test_a_replica_compacts_nothing_that_may_be_cut_when_another_one_leads(root):
    it = Compacted(root)
    it.send(("a", b"1"), ("a", b"2"))
    it.store.close()
    it.store = MessageStore.open(
        it.store._settings, broker_name="broker-a", clock_ms=lambda: it.now_ms, on_stored=lambda end: None
    )
    assert it.compact() == 0
    it.store.show(it.store.gate.stored_offset)
    assert it.compact() == 1
    it.store.close()


# Tests of compaction with damaged records


def places(store: MessageStore) -> list[int]:
    """Return the physical offsets of all records to which the first file of the queue points."""
    [queue] = store._parts.queues.plain
    return queue.units(0, QUEUE_FILE_UNITS)["physical_offset"].tolist()


def intact(store: MessageStore) -> dict[int, bytes | None]:
    """Return the bodies of a queue, by offset, as a consumer reads them one message at a time. The body of a damaged
    record is None."""
    found: dict[int, bytes | None] = {}
    offset, end = 0, store.queues.bounds("orders", 0).max_offset
    while offset < end:
        [result] = store.fetch([FetchRequest("orders", 0, offset, 1)], max_bytes=1, wait_s=0)
        if result.count:
            message = read_record(result.records, 0, RecordPlace(MessageQueue("orders", "broker-a", 0)))
            found[read_header(result.records).queue_offset] = None if message.body_error else message.body
        offset = result.next_offset
    return found


@pytest.mark.parametrize("field", ["magic", "queue offset", "physical offset", "body size", "body", "topic size"])
def test_a_damaged_record_is_not_copied_and_stays_in_the_log_until_it_is_mended(root, caplog, field):
    it = Compacted(root)
    for n in range(300):
        it.send((f"k{n % 60}" if n < 100 else f"m{n}", b"%d" % n + b"x" * 300))
    at, before = places(it.store)[90], (root / "commitlog" / ("0" * 20)).read_bytes()
    assert at + 500 < len(before), "the record is in the first file"
    flip(root, at, field)
    assert it.compact() == 1
    # The record at offset 90 is damaged, so the newest readable message of its key is at offset 30.
    kept = {**it.newest(), 30: it.sent[30][1]}
    damaged = {90: None}
    assert intact(it.store) == kept | damaged
    assert "orders:0 at offset 90 (physical" in caplog.text
    it.drop_log()
    assert it.store.log.min_offset <= at
    it.send(("new", b"new" + b"x" * 300))
    it.now_ms = LATER_MS
    it.compact(LATER_MS + SETTLED_MS)
    it.store.close()
    it.open()
    assert intact(it.store) == kept | damaged | {300: it.sent[300][1]}
    it.compact(LATER_MS + 2 * SETTLED_MS)
    with (root / "commitlog" / ("0" * 20)).open("r+b") as file:
        file.write(before)  # Restore the intact bytes of the record, as a repair with another replica's bytes does.
    it.send(("last", b"last"))
    it.now_ms = LATER_MS + 2 * SETTLED_MS
    assert it.compact(LATER_MS + 4 * SETTLED_MS) == 1
    assert read(it.store) == it.newest()
    it.drop_log()
    assert read(it.store) == it.newest()
    it.store.close()


def test_a_unit_that_leads_nowhere_stops_compaction_only_until_a_reader_meets_it(root):
    it = Compacted(root)
    it.send(*[(f"k{n % 3}", b"%d" % n) for n in range(9)])
    [queue] = it.store._parts.queues.plain
    at = places(it.store)[4]
    with it.store._parts.append_lock:
        queue.put_unit_at(4, at + (1 << 40), 300, 0)
    it.compact()
    assert read(it.store).items() >= it.newest().items()
    it.compact()
    assert read(it.store) == it.newest()
    it.store.close()


def test_a_copy_that_the_disk_has_damaged_holds_up_no_other(root):
    it = Compacted(root)
    for n in range(300):
        it.send((f"k{n % 200}", b"%d" % n + b"x" * 300))
    it.compact()
    it.drop_log()
    assert it.store.log.min_offset > 0
    [path] = (root / "compaction/orders/0").glob("*.log")
    [queue] = it.store._parts.queues.plain
    unit = queue.compacted.units[3]
    with path.open("r+b", buffering=0) as file:
        file.seek(int(unit["position"]) + 2)
        file.write(b"\xff")  # Damage the size field of the record in the compacted log.
    wrong = int(unit["queue_offset"])
    found = intact(it.store)
    assert {offset: body for offset, body in found.items() if offset != wrong} == {
        offset: body for offset, body in it.newest().items() if offset != wrong
    }
    assert found[wrong] in (None, it.newest()[wrong])
    [result] = it.store.fetch([FetchRequest("orders", 0, 0, 10)], max_bytes=1 << 20, wait_s=0)
    assert len(record_starts(result.records)) == result.count == 10
    it.store.close()


def test_a_unit_that_is_blanked_during_a_fetch_damages_no_record(root, monkeypatch):
    it = Compacted(root)
    it.send(*[(f"k{n % 3}", b"%d" % n) for n in range(9)])
    [queue] = it.store._parts.queues.plain
    reader = it.store._parts.reader
    real = reader.views

    def views(units):
        found = real(units)
        with it.store._parts.append_lock:
            queue.blank(np.array([4]))
        return found

    monkeypatch.setattr(reader, "views", views)
    [result] = it.store.fetch([FetchRequest("orders", 0, 0, 9)], max_bytes=10_000, wait_s=0)
    assert [message.body for message in decode_records(result.records)] == [body for _, body in it.sent]
    monkeypatch.undo()
    it.store.close()


class Died(BaseException):
    """Exception that simulates a kill of the store's process."""


@pytest.mark.parametrize("seed", range(3))
def test_whenever_the_store_dies_the_newest_of_each_key_is_there(root, monkeypatch, seed):
    """The store is killed during a compaction, once at each of its disk calls. Afterwards the newest message of each
    key can still be read."""
    random = Random(seed)
    monkeypatch.setattr(compactor, "CHUNK_BYTES", 2000)
    monkeypatch.setattr(compactor, "BLANKED_AT_ONCE", 50)
    base = Compacted(root)
    for _ in range(8):
        base.send(*random_messages(random, 25))
    base.compact()
    base.drop_log()
    base.now_ms = LATER_MS
    base.send(*random_messages(random, 100))
    base.store.close()
    cut = 0
    while True:
        it = Compacted(killed_copy(root, root.with_name(f"copy{seed}-{cut}")))
        it.sent, it.now_ms = list(base.sent), base.now_ms
        finished = _compact_until(it, monkeypatch, cut, LATER_MS + SETTLED_MS + 1)
        killed = killed_copy(it.root, root.with_name(f"killed{seed}-{cut}"))
        it.store.close()
        it.root = killed
        it.open()
        found = read(it.store)
        assert found.items() >= it.newest().items(), f"seed {seed}, cut {cut}"
        assert all(it.sent[offset][1] == body for offset, body in found.items())
        it.compact(LATER_MS + SETTLED_MS + 1)
        it.store.compaction.blank_again()
        assert read(it.store) == it.newest(), f"seed {seed}, cut {cut}"
        it.store.close()
        if finished:
            return
        cut += 1


def _compact_until(it: Compacted, monkeypatch: pytest.MonkeyPatch, cut: int, now_ms: int) -> bool:
    """Run a compaction, and simulate a kill at disk call number `cut`. Returns False after a kill, True if the
    compaction finished before this call."""
    calls = iter(range(cut))
    with monkeypatch.context() as patch:
        for name in ("pwrite_all", "write_file", "rename", "sync_directory", "unlink", "flush"):
            real = getattr(disk, name)

            def call(*arguments, real=real):
                if next(calls, None) is None:
                    raise Died
                return real(*arguments)

            patch.setattr(disk, name, call)
        try:
            it.compact(now_ms)
        except Died:
            return False
    return True


@pytest.mark.parametrize("seed", range(8))
def test_a_power_cut_while_topics_are_compacted_and_log_files_go_loses_no_key(tmp_path, root, monkeypatch, seed):
    random = Random(seed)
    base = Compacted(root)
    for _ in range(12):
        base.send(*random_messages(random, 50))
    base.store.close()
    calls = 0
    for lose_at in (-1, random.random(), random.random(), random.random()):
        directory = tmp_path / f"{seed}-{lose_at}"
        directory.mkdir()
        killed_copy(root, directory / "store")
        at = -1 if lose_at == -1 else int(lose_at * calls)
        lossy = LossyDisk(directory, Random(seed), lose_at=at, on_loss=lambda: None)
        with lossy.installed():
            it = Compacted(directory / "store")
            it.sent = list(base.sent)
            it.compact()
            it.drop_log()
            it.store.close()
        if lose_at == -1:
            calls = lossy._calls
            continue
        after = tmp_path / f"{seed}-{lose_at}-after"
        after.mkdir()
        lossy.write_image(after)
        it.root = after / "store"
        it.open()
        assert read(it.store).items() >= it.newest().items(), f"seed {seed}, call {at} of {calls}"
        it.store.close()
