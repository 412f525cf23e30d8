"""Tests of a store whose log has inner batches, which RocketMQ writes for topics of `queue.type=BatchCQ`."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from raymq.client.scan.range_reader import RangeReader
from raymq.common.errors import DataLossError, MessageIllegalError
from raymq.common.message import MessageQueue, PullStatus
from raymq.common.protocol.store import Boundary, FetchRequest
from raymq.records.format.decode import decode_records
from raymq.records.format.hashing import tags_code
from raymq.records.format.inner_batch import BatchItem
from raymq.records.format.layout import BODY_OFFSET, encode_host, read_header
from raymq.records.format.memory_records import LocatedRecords
from raymq.records.format.places import RecordPlaces
from raymq.records.kernels.columns import decode_columns
from raymq.records.kernels.messages import read_messages
from raymq.records.kernels.stamp import stamp
from raymq.records.logfiles.log_reader import LogReader
from storage.message_store import MessageStore
from storage.replication import chunk_appender as raw_append
from storage.replication.log_chunks import truncate_log
from storage.retention import cleaner
from tests.support.clients.fakes import FakeRoutes, topic_route
from tests.support.stores.clocks import let_pass
from tests.support.stores.inner_batches import inner_batch_record
from tests.support.stores.stores import LOG_FILE_BYTES, bodies_of, killed_copy, make_batch, open_store, small_settings

pytestmark = pytest.mark.usefixtures("no_flushes")

BATCHES = 60
SIZES = [1 + index % 7 for index in range(BATCHES)]
BASES = [sum(SIZES[:index]) for index in range(BATCHES)]
COUNT = sum(SIZES)
BODIES = [b"%03d" % offset + b"x" * 600 for offset in range(COUNT)]
BATCH_FILE_BYTES = 10 * 46


def items(index: int) -> list[BatchItem]:
    offsets = range(BASES[index], BASES[index] + SIZES[index])
    return [BatchItem(BODIES[offset], {"TAGS": ("red", "blue")[offset % 2]}) for offset in offsets]


def open_batched(root: Path, **changes) -> MessageStore:
    return open_store(root, mapper_file_size_batch_consume_queue_bytes=BATCH_FILE_BYTES, **changes)


def add_batch(store: MessageStore, index: int) -> None:
    """Append an inner batch to the log in the same way as a slave appends a chunk of the master's log."""

    def record(physical_offset: int) -> bytes:
        return inner_batch_record(
            items(index),
            base_offset=BASES[index],
            physical_offset=physical_offset,
            store_timestamp_ms=1_700_000_000_000 + index,
            compressed=index % 3 == 0,
            keys=f"batch-{index}",
        )

    end = store.status().max_physical_offset
    left = LOG_FILE_BYTES - end % LOG_FILE_BYTES
    if len(record(end)) + 8 > left:
        store.chunks.append_chunk(end, left.to_bytes(4) + bytes.fromhex("cbd43194") + bytes(left - 8))
        end += left
    store.chunks.append_chunk(end, record(end))


@pytest.fixture
def root(tmp_path) -> Path:
    """Return the directory of a killed store. Its three log files have inner batches, and some messages of another
    topic between them."""
    store = open_batched(tmp_path / "original")
    for index in range(BATCHES):
        if index % 10 == 0:
            store.append([make_batch([b"plain %d" % index])])
        add_batch(store, index)
    check(store)
    root = killed_copy(tmp_path / "original", tmp_path / "store")
    store.close()
    return root


def fetch(
    store: MessageStore, offset: int, max_messages: int = 1000, max_bytes: int = 1 << 24, tags: str | None = None
):
    codes = None if tags is None else frozenset([tags_code(tags)])
    [result] = store.fetch([FetchRequest("batched", 0, offset, max_messages, codes)], max_bytes=max_bytes, wait_s=0)
    return result


def check(store: MessageStore, first: int = 0, end: int = COUNT) -> None:
    bounds = store.queues.bounds("batched", 0)
    assert (bounds.min_offset, bounds.max_offset) == (first, end)
    assert bodies_of(store, "batched") == BODIES[first:end]


def test_a_killed_store_serves_every_message_of_its_batches(root):
    for _ in range(2):
        store = open_batched(root)
        check(store)
        assert bodies_of(store) == [b"plain %d" % index for index in range(0, BATCHES, 10)]
        assert store.topics.queue_ids() == {"batched": [0], "orders": [0]}
        store.close()


def test_the_files_of_the_queue_are_rocketmqs(root):
    store = open_batched(root)
    directory = root / "batchconsumequeue" / "batched" / "0"
    assert [int(path.name) for path in sorted(directory.iterdir())] == list(range(0, BATCHES * 46, BATCH_FILE_BYTES))
    third = (directory / f"{0:020d}").read_bytes()[2 * 46 : 3 * 46]
    assert int.from_bytes(third[28:36]) == BASES[2]
    assert third[36:].hex() == "0003ffffffff00000000"
    store.close()


def test_a_fetch_starts_and_ends_at_any_message_of_a_batch(root):
    store = open_batched(root)
    for offset in range(0, COUNT, 5):
        result = fetch(store, offset, max_messages=9)
        expected = BODIES[offset : offset + 9]
        assert [message.body for message in decode_records(result.records)] == expected
        assert (result.count, result.next_offset) == (len(expected), offset + len(expected))
        assert fetch(store, offset, max_bytes=1).count == 1
        assert fetch(store, offset, max_bytes=0).next_offset == offset
    assert fetch(store, COUNT).status is PullStatus.NO_NEW_MESSAGE
    assert fetch(store, COUNT + 1).status is PullStatus.OFFSET_ILLEGAL
    store.close()


def test_each_message_is_chosen_by_its_own_tag(root):
    store = open_batched(root)
    for tag, parity in (("red", 0), ("blue", 1)):
        found = decode_records(fetch(store, 3, tags=tag).records)
        assert [message.queue_offset for message in found] == [n for n in range(3, COUNT) if n % 2 == parity]
    assert fetch(store, 4, max_bytes=0, tags="blue").next_offset == 5
    nothing = fetch(store, 0, tags="green")
    assert (nothing.status, nothing.next_offset) == (PullStatus.NO_MATCHED_MESSAGE, COUNT)
    store.close()


def test_one_fetch_looks_at_so_many_messages_for_its_tag(root):
    store = open_batched(root, max_filter_message_size_bytes=20)
    nothing = fetch(store, 0, max_messages=10, tags="green")
    after = next(base for base in BASES if base >= 10)
    assert (nothing.status, nothing.next_offset) == (PullStatus.NO_MATCHED_MESSAGE, after)
    some = fetch(store, 0, max_messages=10, tags="red")
    assert (some.count, some.next_offset) == (sum(n % 2 == 0 for n in range(after)), after)
    store.close()


def test_a_reader_beside_the_store_reads_the_same(root):
    store = open_batched(root)
    reader = LogReader(root, commit_log_file_size=LOG_FILE_BYTES, consume_queue_file_size=2000)
    request = FetchRequest("batched", 0, 17, 30)
    assert reader.fetch(request, 0, COUNT, 1 << 20) == fetch(store, 17, 30)
    assert reader.has_batches("batched", 0)
    assert not reader.has_batches("orders", 0)
    with pytest.raises(DataLossError):
        reader.fetch(FetchRequest("nothing", 0, 0, 1), 0, 1, 100)
    reader.close()
    store.close()


def test_a_range_is_read_near_the_files_as_far_from_them(root):
    """A read of an offset range returns the same rows from the store's files and through the store. Only plain queues
    can be read from the files. From a queue of inner batches a read returns the single messages, not the batches."""
    store = open_batched(root)
    near = LogReader(root, commit_log_file_size=LOG_FILE_BYTES, consume_queue_file_size=2000)
    for reader in (near, None):
        storage = SimpleNamespace(
            reader=lambda reader=reader: reader,
            fetch=lambda requests, max_bytes, wait_s, timeout_s: store.fetch(
                requests, max_bytes=max_bytes, wait_s=wait_s
            ),
        )
        client = SimpleNamespace(
            routes=FakeRoutes(replace(topic_route(a=1), topic="batched")),
            storages=SimpleNamespace(get=lambda name, storage=storage: storage),
        )
        rows = [
            (row["queue_offset"], row["body"])
            for data, starts, *_ in RangeReader(client.routes, client.storages).read(
                MessageQueue("batched", "a", 0), 10, 100
            )
            for row in decode_columns(data, starts, broker_name="a").to_pylist()
        ]
        assert rows == [(offset, BODIES[offset]) for offset in range(10, 100)]
    near.close()
    store.close()


def test_a_time_and_a_key_lead_into_the_queue(root):
    store = open_batched(root)
    for index in (0, 1, 31, BATCHES - 1):
        time_ms = 1_700_000_000_000 + index
        assert store.queues.offset_by_time("batched", 0, time_ms) == BASES[index]
        assert store.queues.offset_by_time("batched", 0, time_ms, Boundary.UPPER) == BASES[index]
        found = decode_records(store.queries.by_key("batched", f"batch-{index}").records)
        assert [message.queue_offset for message in found] == list(range(BASES[index], BASES[index] + SIZES[index]))
    assert store.queues.offset_by_time("batched", 0, 1_700_000_000_000 + BATCHES) == COUNT
    store.close()


@pytest.mark.parametrize("stopped", [True, False], ids=["after a clean stop", "after a crash"])
@pytest.mark.parametrize("lost", ["batchconsumequeue/batched/0", "consumequeue/orders/0", "last file", "dedup"])
def test_lost_queue_files_are_rebuilt(root, lost, stopped):
    if stopped:
        open_batched(root).close()
    path = root / lost
    if lost == "last file":
        path = sorted((root / "batchconsumequeue/batched/0").iterdir())[-1]
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    store = open_batched(root)
    check(store)
    assert len(bodies_of(store)) == BATCHES // 10
    store.close()


def test_a_cut_log_ends_the_queue_before_the_first_batch_that_is_not_whole(root):
    data = sorted(path for path in (root / "commitlog").iterdir() if any(path.read_bytes()))[-1]
    content = bytearray(data.read_bytes())
    end = len(content.rstrip(b"\0"))
    content[end - 100] ^= 1
    data.write_bytes(content)
    store = open_batched(root)
    check(store, end=BASES[-1])
    add_batch(store, BATCHES - 1)
    check(store)
    store.close()


def test_a_truncated_log_takes_its_batches_along(root):
    store = open_batched(root)
    unit = store._parts.queues.get("batched", 0).holder_of(BASES[20])
    store.close()
    settings = small_settings(root, mapper_file_size_batch_consume_queue_bytes=BATCH_FILE_BYTES)
    truncate_log(settings, unit.physical_offset)
    store = open_batched(root)
    check(store, end=BASES[20])
    for index in range(20, 30):
        add_batch(store, index)
    check(store, end=BASES[30])
    store.close()


def test_retention_deletes_old_batches_and_their_queue_files(root, monkeypatch):
    monkeypatch.setattr(cleaner, "DELETE_PAUSE_S", 0.0)
    store = open_batched(root)
    now = datetime(2023, 11, 15, 3)
    for path in sorted((root / "commitlog").iterdir())[:1]:
        os.utime(path, (now.timestamp() - 360_000,) * 2)
    store.cleaner._by_hand = 1
    let_pass(store)
    assert store.cleaner.run_once(now) == 1
    first = store.queues.bounds("batched", 0).min_offset
    assert 0 < first < COUNT
    assert first in BASES
    check(store, first)
    assert len(list((root / "batchconsumequeue/batched/0").iterdir())) < BATCHES * 46 // BATCH_FILE_BYTES
    assert fetch(store, first - 1).status is PullStatus.OFFSET_ILLEGAL
    killed = killed_copy(root, root.with_name("killed"))
    store.close()
    for path in (root, killed):
        store = open_batched(path)
        check(store, first)
        store.close()


def test_producers_cannot_send_to_such_a_queue(root):
    store = open_batched(root)
    with pytest.raises(MessageIllegalError, match="inner batches"):
        store.append([make_batch([b"plain"], topic="batched")])
    check(store)
    store.close()


def test_a_deleted_topic_is_gone_with_its_batches(root):
    store = open_batched(root)
    store.topics.delete("batched")
    for _ in range(2):
        assert store.topics.queue_ids() == {"orders": [0]}
        assert not (root / "batchconsumequeue" / "batched").exists()
        store.close()
        store = open_batched(root)
    store.close()


def test_offsets_may_be_higher_than_so_many_records_would_need_bytes(tmp_path):
    """A message of an inner batch needs only a few bytes. So a log with inner batches may contain higher queue offsets
    than a log of the same size with single records. Recovery must not treat such offsets as damage."""
    store = open_batched(tmp_path / "original")
    for index in range(20):
        end = store.status().max_physical_offset
        tiny = [BatchItem(b"", {})] * 100
        data = inner_batch_record(tiny, base_offset=100 * index, physical_offset=end, compressed=True)
        store.chunks.append_chunk(end, data)
    root = killed_copy(tmp_path / "original", tmp_path / "killed")
    store.close()
    store = open_batched(root)
    assert store.status().cut_bytes == 0
    assert store.queues.bounds("batched", 0).max_offset == 2000
    store.close()


def test_an_inner_batch_without_a_valid_count_is_in_no_queue(tmp_path):
    store = open_batched(tmp_path / "original")
    broken = inner_batch_record([BatchItem(b"x", {})], base_offset=0, physical_offset=0, num=0)
    store.chunks.append_chunk(0, broken)
    store.append([make_batch([b"plain"])])
    root = killed_copy(tmp_path / "original", tmp_path / "killed")
    store.close()
    store = open_batched(root)
    assert store.topics.queue_ids() == {"orders": [0]}
    assert bodies_of(store) == [b"plain"]
    store.close()


def queue_files(root: Path) -> dict[str, bytes]:
    paths = [path for path in root.glob("*consumequeue/*/*/*") if path.is_file()]
    return {str(path.relative_to(root)): path.read_bytes() for path in paths}


@pytest.mark.parametrize("max_bytes", [1, 3000, 1 << 20])
def test_a_slave_has_the_queues_that_its_master_recovered(root, tmp_path, monkeypatch, max_bytes):
    monkeypatch.setattr(raw_append, "BLOCK_RECORDS_MIN", 1)
    shutil.rmtree(root / "batchconsumequeue")
    master, slave = open_batched(root), open_batched(tmp_path / "slave")
    end = master.status().max_physical_offset
    while (position := slave.status().max_physical_offset) < end:
        slave.chunks.append_chunk(position, master.chunks.read_chunk(position, max_bytes))
    check(slave)
    master.close()
    slave.close()
    assert queue_files(tmp_path / "slave") == queue_files(root)


def plain_records(count: int, topic: str, queue_offset: int, physical_offset: int) -> bytes:
    batch = make_batch([b"x"] * count, topic=topic, producer=("p", 0, queue_offset))
    records = bytearray(batch.records)
    stamp(
        records,
        batch.sizes,
        first_queue_offset=queue_offset,
        first_physical_offset=physical_offset,
        store_timestamp_ms=1_700_000_000_001,
        store_host=encode_host("127.0.0.1", 10911),
    )
    return bytes(records)


def mixed_log() -> list[bytes]:
    """Return the records of a log in which topic "a" has single messages and "b" has inner batches, with misplaced
    records between them.

    Misplaced records are single messages of "b", inner batches of "a", and a batch of no messages.
    """
    log: list[bytes] = []

    def batch(topic: str, base_offset: int, num: int | None = None) -> None:
        two = [BatchItem(b"y", {})] * 2
        at = sum(map(len, log))
        log.append(inner_batch_record(two, base_offset=base_offset, physical_offset=at, topic=topic, num=num))

    def plain(count: int, topic: str, queue_offset: int) -> None:
        log.append(plain_records(count, topic, queue_offset, sum(map(len, log))))

    batch("a", 0, num=0)
    plain(3, "a", 0)
    batch("b", 0)
    batch("a", 3)
    plain(2, "b", 2)
    plain(2, "a", 3)
    batch("b", 2)
    plain(1, "b", 4)
    return log


@pytest.mark.parametrize("together", [False, True])
def test_records_of_the_wrong_queue_type_are_in_no_queue_of_a_slave(tmp_path, monkeypatch, together):
    monkeypatch.setattr(raw_append, "BLOCK_RECORDS_MIN", 1)
    slave = open_batched(tmp_path / "slave")
    for chunk in [b"".join(mixed_log())] if together else mixed_log():
        slave.chunks.append_chunk(slave.status().max_physical_offset, chunk)
    assert [slave.queues.bounds(topic, 0).max_offset for topic in "ab"] == [5, 4]
    root = killed_copy(tmp_path / "slave", tmp_path / "recovered")
    producers = slave._parts.dedup.rows()
    slave.close()
    for name in ("consumequeue", "batchconsumequeue"):
        shutil.rmtree(root / name)
    (root / "dedup").unlink(missing_ok=True)
    recovered = open_batched(root)
    assert recovered._parts.dedup.rows() == producers
    recovered.close()
    assert queue_files(root) == queue_files(tmp_path / "slave")


@pytest.mark.parametrize("index", [0, 13])
def test_the_messages_of_a_damaged_batch_are_damaged_and_the_others_come(root, index):
    """One bit of an inner batch's body is flipped. Each message of this batch is returned as a damaged record at its
    offset; all other messages are intact."""
    store = open_batched(root)
    [first] = store.fetch([FetchRequest("batched", 0, BASES[index], 1)], max_bytes=1, wait_s=0.0)
    place = read_header(first.records).physical_offset
    file = root / "commitlog" / f"{place - place % LOG_FILE_BYTES:020d}"
    with file.open("r+b") as log:
        log.seek(place % LOG_FILE_BYTES + BODY_OFFSET + 3)
        byte = log.read(1)[0]
        log.seek(place % LOG_FILE_BYTES + BODY_OFFSET + 3)
        log.write(bytes([byte ^ 1]))
    start, end = BASES[index], BASES[index + 3]
    [result] = store.fetch([FetchRequest("batched", 0, start, end - start)], max_bytes=1 << 20, wait_s=0.0)
    found = LocatedRecords.of_fetch(result.records, result.count, start, result.next_offset)
    places = RecordPlaces.of(MessageQueue("batched", "a", 0), found)
    messages = read_messages(found.data, found.starts, broker_name="a", places=places)
    assert [message.queue_offset for message in messages] == list(range(start, end))
    for message in messages:
        if message.queue_offset < BASES[index + 1]:
            assert message.record_damaged
        else:
            assert message.body == BODIES[message.queue_offset]
    store.close()
