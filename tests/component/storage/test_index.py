"""Tests of the index: its files byte for byte (spec/storage.md §3), its query results, and its state after log files
were deleted."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from raymq.common.errors import InvalidArgumentError, StoreNotWritableError
from raymq.common.message import Message
from raymq.records.format.check import record_starts
from raymq.records.format.decode import decode_records
from raymq.records.format.dispatch import dispatch_view
from raymq.records.format.encode import EncodedBatch, encode_batch
from raymq.records.format.hashing import index_key_hash
from raymq.records.format.layout import SYS_FLAG_OFFSET, SYS_FLAG_TRANSACTION_ROLLBACK
from storage.files import disk
from storage.index import index_service
from storage.index.index_file import IndexEntries, IndexFile, IndexShape, find_entries, read_header
from storage.index.index_keys import index_entries
from tests.support.history.waiting import eventually
from tests.support.stores.stores import LOG_FILE_BYTES, killed_copy, open_store

FOREVER = (0, 2**63 - 1)
SHAPE = IndexShape(3, 4)
HASH_1, HASH_2 = index_key_hash("T", "k1"), index_key_hash("T", "k2")


def make_file(tmp_path: Path, shape: IndexShape = SHAPE, previous: Path | None = None, name: str = "1") -> IndexFile:
    header = read_header(previous.read_bytes()) if previous else None
    return IndexFile.create(tmp_path / name, shape, header, scratch=tmp_path / "scratch")


def entries(*rows: tuple[int, int, int]) -> IndexEntries:
    hashes, offsets, times = zip(*rows, strict=True)
    return IndexEntries(np.array(hashes, np.int32), np.array(offsets, np.int64), np.array(times, np.int64))


FACT_21 = [(HASH_1, 0, 1700000000001), (HASH_2, 101, 1700000002500), (HASH_1, 202, 1700000009999)]
FACT_21_BYTES = (
    "0000018bcfe568010000018bcfe58f0f000000000000000000000000000000ca0000000200000004000000020000000000000003000000000000"
    "00000000000000000000000000000026bfb5000000000000000000000000000000000026bfb600000000000000650000000200000000"
    "0026bfb500000000000000ca0000000900000001"
)


@pytest.mark.parametrize("sizes", [[3], [1, 1, 1], [1, 2], [2, 1]], ids=str)
def test_fact_21_an_index_file_however_the_entries_come(tmp_path, sizes):
    assert (HASH_1, HASH_2) == (2539445, 2539446)
    file = make_file(tmp_path)
    rest = entries(*FACT_21)
    for size in sizes:
        part = IndexEntries(rest.key_hashes[:size], rest.physical_offsets[:size], rest.store_timestamps[:size])
        assert file.put_entries(part) == size
        rest = rest.from_entry(size)
    assert file.is_full
    assert file.put_entries(entries((HASH_2, 303, 1700000010000))) == 0
    file.close()
    assert (tmp_path / "1").read_bytes().hex() == FACT_21_BYTES


def test_fact_22_times_are_rounded_down_to_a_second(tmp_path):
    file = make_file(tmp_path)
    file.put_entries(entries(*FACT_21))
    file.close()
    data = memoryview((tmp_path / "1").read_bytes())
    assert [found.physical_offset for found in find_entries(data, SHAPE, HASH_2, 1700000002001, 2**62)] == [101]
    assert list(find_entries(data, SHAPE, HASH_2, 1700000002002, 2**62)) == []
    assert [found.physical_offset for found in find_entries(data, SHAPE, HASH_1, 0, 2**62)] == [202, 0]


def test_the_first_entry_of_a_rolled_file_holds_the_gap_to_the_file_before(tmp_path):
    """The seconds field of an entry counts from the file's begin timestamp. But in the first entry of a new index file
    it counts from the previous file's last timestamp. The reason: RocketMQ computes this field before it sets the new
    file's begin timestamp."""
    file = make_file(tmp_path)
    file.put_entries(entries(*FACT_21))
    file.close()
    rolled = make_file(tmp_path, previous=tmp_path / "1", name="2")
    assert rolled.header[:4] == (1700000009999, 1700000009999, 202, 202)
    rolled.put_entries(entries((HASH_1, 303, 1700000012345), (HASH_2, 404, 1700000014345)))
    rolled.close()
    data = (tmp_path / "2").read_bytes()
    header = read_header(data)
    assert (header.begin_timestamp, header.begin_physical_offset) == (1700000012345, 303)
    times = [
        found.timestamp_ms for key in (HASH_1, HASH_2) for found in find_entries(memoryview(data), SHAPE, key, *FOREVER)
    ]
    assert times == [1700000012345 + 2000, 1700000012345 + 2000]


def test_seconds_before_the_begin_count_as_0_and_the_longest_are_capped(tmp_path):
    file = make_file(tmp_path)
    file.put_entries(entries((1, 0, 10_000), (1, 1, 5_000), (1, 2, 2**62)))
    file.close()
    data = memoryview((tmp_path / "1").read_bytes())
    assert [found.timestamp_ms for found in find_entries(data, SHAPE, 1, 0, 2**63)] == [
        10_000 + (2**31 - 1) * 1000, 10_000, 10_000]  # fmt: skip


def test_a_chain_that_leads_nowhere_or_in_circles_ends(tmp_path):
    shape = IndexShape(1, 10)
    file = make_file(tmp_path, shape)
    file.put_entries(entries(*[(7, offset, 1) for offset in range(5)]))
    file.close()
    good = bytearray((tmp_path / "1").read_bytes())
    for previous in (3, 4, 9, -1, 2**31 - 1):
        data = good.copy()
        at = shape.entry_at(3) + 16
        data[at : at + 4] = previous.to_bytes(4, signed=True)
        found = [entry.physical_offset for entry in find_entries(memoryview(data), shape, 7, *FOREVER)]
        assert found == [4, 3, 2], previous
    data = good.copy()
    data[40:44] = (11).to_bytes(4)
    assert list(find_entries(memoryview(data), shape, 7, *FOREVER)) == []


def test_a_file_is_sparse(tmp_path):
    file = make_file(tmp_path, IndexShape(1000, 20_000_000))
    file.close()
    stat = (tmp_path / "1").stat()
    assert stat.st_size == 40 + 4000 + 20 * 20_000_000
    assert stat.st_blocks * 512 < 100_000


def keyed_batch(
    keys: list[tuple[str, ...]], *, ids: list[str] | None = None, topic: str = "orders", **more
) -> EncodedBatch:
    return encode_batch(
        [Message(topic, b"body \x02UNIQ_KEY\x01no\x02", keys=key, tags="消息", properties={"ä": "ü"}) for key in keys],
        0,
        born_host=more.pop("born_host", ("127.0.0.1", 5000)),
        born_timestamp_ms=1,
        message_ids=ids or [f"{topic}-{index:04d}" for index in range(len(keys))],
        **more,
    )


ODD_KEYS = {
    "plain": [("a", "b"), ("c",), ()],
    "one message": [("k",)],
    "not ASCII": [("消息", "ok"), ("😀",), ("é",)],
    "many lengths": [(("x" * length),) for length in range(1, 200)],
    "no keys": [(), ()],
}


@pytest.mark.parametrize("born_host", [("127.0.0.1", 1), ("::1", 1)], ids=str)
@pytest.mark.parametrize("name", ODD_KEYS)
def test_hashes_of_a_batch_equal_hashes_of_single_records(name, born_host):
    batch = keyed_batch(ODD_KEYS[name], born_host=born_host)
    check_entries(batch.records)


def test_a_long_topic_and_a_record_that_has_a_property_twice_are_hashed_right():
    check_entries(keyed_batch([("a",), ("b",)], topic="%RETRY%" + "g" * 150).records)
    records = keyed_batch([("first", "x")], topic="KEYS").records.replace(
        b"UNIQ_KEY\x01KEYS-0000", b"KEYS\x01the last ones"
    )
    assert dispatch_view(records).keys == ["the", "last", "ones"]
    check_entries(records)


def test_messages_without_an_id_and_rolled_back_ones_are_left_out():
    batch = keyed_batch([("a",), ("b",), ()], ids=["", "id", ""])
    check_entries(batch.records)
    data = np.frombuffer(bytearray(batch.records), np.uint8)
    starts = record_starts(data.data)
    data[int(starts[1]) + SYS_FLAG_OFFSET + 3] = SYS_FLAG_TRANSACTION_ROLLBACK
    assert index_entries(data, starts, 0).physical_offsets.tolist() == [0]


def check_entries(records: bytes) -> None:
    starts = record_starts(records)
    found = index_entries(np.frombuffer(records, np.uint8), starts, 1000)
    expected = [
        (start + 1000, index_key_hash(view.topic, key))
        for start in starts.tolist()
        for view in [dispatch_view(records, start)]
        for key in view.keys
    ]
    assert list(zip(found.physical_offsets.tolist(), found.key_hashes.tolist(), strict=True)) == expected


# Tests of the index in a store


def append_keyed(store, first: int, count: int) -> None:
    """Append `count` messages numbered from `first`. Each message has its number as a key; every tenth also has a
    common key."""
    for start in range(first, first + count, 20):
        numbers = range(start, min(start + 20, first + count))
        keys = [(f"n{number}", f"ten{number % 10}") for number in numbers]
        store.append([keyed_batch(keys, ids=[f"ID{number:06d}" for number in numbers])])


def found_numbers(store, key: str, **arguments) -> list[int]:
    result = store.queries.by_key("orders", key, **arguments)
    assert result.complete
    messages = decode_records(result.records)
    assert len(messages) == result.count
    return [int(message.keys[0][1:]) for message in messages]


def check_all(store, count: int) -> None:
    for number in range(0, count, 7):
        assert found_numbers(store, f"n{number}") == [number], number
        assert store.queries.by_unique_id("orders", f"ID{number:06d}").count == 1
    assert found_numbers(store, "ten3", max_num=5) == [n for n in range(count) if n % 10 == 3][-5:]


def index_files(root: Path) -> list[Path]:
    return sorted((root / "index").iterdir())


@pytest.mark.usefixtures("no_flushes")
class TestIndexOfAStore:
    def test_messages_are_found_at_once_and_over_many_files_and_restarts(self, tmp_path):
        for first in (0, 300, 600):
            store = open_store(tmp_path / "store")
            append_keyed(store, first, 300)
            check_all(store, first + 300)
            store.close()
        assert len(index_files(tmp_path / "store")) == 7

    def test_nothing_is_indexed_twice_over_a_restart(self, tmp_path):
        root = tmp_path / "store"
        store = open_store(root, max_index_num=10_000)
        append_keyed(store, 0, 30)
        store.close()
        [path] = index_files(root)
        before = path.read_bytes()
        open_store(root, max_index_num=10_000).close()
        assert path.read_bytes() == before

    def test_keys_are_compared_and_not_only_their_hashes(self, tmp_path):
        """A query compares the keys themselves: the keys Aa and BB have equal hashes in Java."""
        store = open_store(tmp_path / "store")
        assert index_key_hash("orders", "Aa") == index_key_hash("orders", "BB")
        store.append([keyed_batch([("Aa",), ("BB",), ("Aa", "BB")])])
        assert [m.queue_offset for m in decode_records(store.queries.by_key("orders", "Aa").records)] == [0, 2]
        assert [m.queue_offset for m in decode_records(store.queries.by_key("orders", "BB").records)] == [1, 2]
        assert store.queries.by_unique_id("orders", "Aa").count == 0
        assert store.queries.by_key("other", "Aa").count == 0
        store.close()

    def test_a_time_range_selects(self, tmp_path):
        times = iter(range(1_700_000_000_000, 1_800_000_000_000, 10_000))
        store = open_store(tmp_path / "store", clock_ms=lambda: next(times), max_index_num=10)
        for _ in range(30):
            store.append([keyed_batch([("k",)])])
        every = [m.store_timestamp_ms for m in decode_records(store.queries.by_key("orders", "k").records)]
        assert len(every) == 30
        found = store.queries.by_key("orders", "k", begin_ms=every[7], end_ms=every[19])
        stored = [m.store_timestamp_ms for m in decode_records(found.records)]
        assert set(every[8:19]) <= set(stored) <= set(every[6:21])
        store.close()

    def test_bad_questions_are_refused(self, tmp_path):
        store = open_store(tmp_path / "store")
        for arguments in (("orders", ""), ("orders", "k", 0), ("orders", "k", 1, 5, 4), ("a b", "k")):
            with pytest.raises(InvalidArgumentError):
                store.queries.by_key(*arguments)
        store.close()
        without = open_store(tmp_path / "store", message_index_enable=False)
        with pytest.raises(InvalidArgumentError, match="message_index_enable"):
            without.queries.by_key("orders", "k")
        without.close()

    def test_at_most_64_messages_are_returned(self, tmp_path):
        store = open_store(tmp_path / "store")
        store.append([keyed_batch([("k",)] * 100)])
        assert store.queries.by_key("orders", "k", 1000).count == 64
        store.close()

    @pytest.mark.parametrize("crashed", [False, True], ids=["clean stop", "crash"])
    @pytest.mark.parametrize("doomed", ["all", "first", "middle", "last", "cut", "header", "stranger"])
    def test_damaged_and_deleted_files_are_made_again(self, tmp_path, doomed, crashed):
        root = tmp_path / "original"
        store = open_store(root)
        append_keyed(store, 0, 600)
        check_all(store, 600)
        if crashed:
            killed_copy(root, tmp_path / "store")
            store.close()
        else:
            store.close()
            root.rename(tmp_path / "store")
        root = tmp_path / "store"
        files = index_files(root)
        assert len(files) == 5
        if doomed == "all":
            shutil.rmtree(root / "index")
        elif doomed == "stranger":
            (root / "index" / "notes.txt").write_text("x")
        elif doomed == "cut":
            with files[2].open("r+b") as file:
                file.truncate(100)
        elif doomed == "header":
            files[1].write_bytes(bytes(40) + files[1].read_bytes()[40:])
        else:
            files[{"first": 0, "middle": 2, "last": -1}[doomed]].unlink()
        store = open_store(root)
        check_all(store, 600)
        append_keyed(store, 600, 50)
        check_all(store, 650)
        store.close()

    def test_after_a_crash_files_that_may_not_be_on_disk_are_made_again(self, tmp_path):
        store = open_store(tmp_path / "original")
        append_keyed(store, 0, 200)
        check_all(store, 200)
        root = killed_copy(tmp_path / "original", tmp_path / "store")
        store.close()
        last = index_files(root)[-1]
        last.write_bytes(last.read_bytes()[:40] + bytes(last.stat().st_size - 40))
        store = open_store(root)
        check_all(store, 200)
        store.close()

    def test_records_cut_from_the_log_leave_the_index(self, tmp_path):
        store = open_store(tmp_path / "store")
        append_keyed(store, 0, 700)
        store.close()
        log_files = sorted((tmp_path / "store" / "commitlog").iterdir())
        log_files[-1].write_bytes(bytes(LOG_FILE_BYTES))
        store = open_store(tmp_path / "store")
        left = store.queues.bounds("orders", 0).max_offset
        assert 100 < left < 700
        assert found_numbers(store, f"n{left - 1}") == [left - 1]
        assert found_numbers(store, f"n{left}") == []
        append_keyed(store, left, 50)
        check_all(store, left + 50)
        store.close()

    def test_queries_run_beside_appends(self, tmp_path):
        store = open_store(tmp_path / "store")
        writer = threading.Thread(target=append_keyed, args=(store, 0, 2000))
        writer.start()
        while writer.is_alive():
            end = store.queues.bounds("orders", 0).max_offset
            if end:
                assert found_numbers(store, f"n{end - 1}") == [end - 1]
        writer.join()
        check_all(store, 2000)
        store.close()

    def test_a_disk_that_fails_the_index_makes_the_store_read_only_and_the_next_open_makes_it_again(
        self, tmp_path, monkeypatch
    ):
        monkeypatch.setattr("storage.index.index_service.INDEX_RETRY_S", 0.0)
        preallocate = disk.preallocate

        def fail(descriptor: int, size: int) -> None:
            if size < LOG_FILE_BYTES and "index" in os.readlink(f"/proc/self/fd/{descriptor}"):
                raise OSError(28, "No space left on device")
            preallocate(descriptor, size)

        monkeypatch.setattr(disk, "preallocate", fail)
        store = open_store(tmp_path / "store")
        append_keyed(store, 0, 20)
        assert not store.queries.by_key("orders", "n3").complete
        with pytest.raises(StoreNotWritableError, match="the index cannot be written"):
            append_keyed(store, 20, 20)
        assert store.status().running_flags == 8
        store.close()
        assert (tmp_path / "store" / "abort").exists()
        monkeypatch.undo()
        store = open_store(tmp_path / "store")
        append_keyed(store, 20, 20)
        check_all(store, 40)
        store.close()


class FullDisk:
    """A disk that is full for index files: while `full` is True, the disk call `kind` fails with `error` for these
    files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: str, error: int) -> None:
        self.full, self.met = True, 0
        real = getattr(disk, kind)

        def call(descriptor: int, *rest: object) -> None:
            if self.full and "/index" in os.readlink(f"/proc/self/fd/{descriptor}"):
                self.met += 1
                raise OSError(error, os.strerror(error))
            real(descriptor, *rest)

        monkeypatch.setattr(disk, kind, call)
        monkeypatch.setattr(index_service, "INDEX_RETRY_S", 0.01)


def keyed(first: int, count: int) -> EncodedBatch:
    messages = [Message("T", b"%d" % number, keys=[f"k{number}"]) for number in range(first, first + count)]
    ids = [f"{number:032X}" for number in range(first, first + count)]
    return encode_batch(messages, 0, born_host=("127.0.0.1", 1), born_timestamp_ms=1, message_ids=ids)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EMFILE], ids=["disk full", "no descriptor"])
@pytest.mark.parametrize("kind", ["preallocate", "pwrite_all", "flush"])
def test_an_index_without_disk_space_continues_when_space_is_free(tmp_path, no_flushes, monkeypatch, kind, error):
    monkeypatch.setattr(index_service, "DRAIN_S", 60.0)
    store = open_store(tmp_path / "store", max_index_num=20)
    full = FullDisk(monkeypatch, kind, error)
    store.append([keyed(0, 50)])
    eventually(lambda: os.strerror(error) in store.status().not_writable_reason, "the store says so")
    assert not store.queries.by_key("T", "k49").complete
    with pytest.raises(StoreNotWritableError, match="the index cannot be written"):
        store.append([keyed(50, 1)])
    met = full.met
    eventually(lambda: full.met > met, "it is tried again")
    full.full = False
    eventually(lambda: store.status().writable, "the store takes appends again")
    store.append([keyed(50, 50)])
    for number in range(100):
        found = store.queries.by_key("T", f"k{number}")
        assert (found.complete, found.count) == (True, 1), number
    store.close()
    assert not (tmp_path / "store" / "abort").exists()
    store = open_store(tmp_path / "store", max_index_num=20)
    assert [store.queries.by_key("T", f"k{number}").count for number in range(100)] == [1] * 100
    store.close()


def test_an_index_stopped_by_a_short_log_file_continues_when_the_file_is_back(tmp_path, no_flushes, monkeypatch):
    """A log file was truncated, so the index thread cannot read its records. The index continues after the file has its
    bytes again. Until then queries do not wait for the index, and the store accepts appends, because the index itself
    has not failed."""
    monkeypatch.setattr(index_service, "INDEX_RETRY_S", 0.01)
    # The index thread then runs only when it is requested to, because its interval is longer than the test.
    monkeypatch.setattr(index_service, "INDEX_INTERVAL_S", 3600.0)
    root = tmp_path / "store"
    store = open_store(root)
    store.append([keyed(0, 20)])
    log = root / "commitlog" / f"{0:020d}"
    whole = log.read_bytes()
    os.truncate(log, 1000)
    assert not store.queries.by_key("T", "k0").complete
    assert store.status().writable
    log.write_bytes(whole)
    eventually(lambda: store.queries.by_key("T", "k19").complete, "the index goes on")
    assert store.queries.by_key("T", "k19").count == 1
    store.close()
