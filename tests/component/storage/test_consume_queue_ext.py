"""Tests of the extension files of consume queues. The store writes them only if the option is enabled, but always reads
them (spec/storage.md §2, fact 30)."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from raymq.common.errors import StoreCorruptError
from raymq.common.message import PullStatus
from raymq.common.protocol.store import FetchRequest
from raymq.records.format.decode import decode_records
from raymq.records.format.hashing import tags_code
from raymq.records.logfiles.ext_units import (
    EXT_ADDRESS_MAX,
    EXT_UNIT_DTYPE,
    addresses_of,
    are_units,
    offsets_of,
    units_at,
)
from raymq.records.logfiles.log_reader import LogReader
from storage.message_store import MessageStore
from storage.queue.consume_queue_ext import ConsumeQueueExt
from storage.retention import cleaner
from storage.schedule.delay_queue_reader import DelayQueueReader
from tests.support.stores.stores import LOG_FILE_BYTES, PowerCuts, bodies_of, killed_copy, make_batch, open_store

pytestmark = pytest.mark.usefixtures("no_flushes")

EXT_FILE_BYTES = 1000
"""Size of an extension file in bytes. It holds 49 entries (units), an end mark, and 18 unused bytes."""
ON = {"enable_consume_queue_ext": True, "mapped_file_size_consume_queue_ext_bytes": EXT_FILE_BYTES}
OFF = {**ON, "enable_consume_queue_ext": False}
CODES = {tag: tags_code(tag) for tag in ("even", "odd")}


@pytest.fixture
def root(tmp_path) -> Path:
    return tmp_path / "store"


def fill(store: MessageStore, first: int, count: int, size: int = 10) -> None:
    """Append `count` messages numbered from `first`, in one to three append calls. A message's tag is "odd" or "even",
    as its number is."""
    number, runs = first, 0
    while number < first + count:
        runs += 1
        for _ in range(min(1 + runs % 3, first + count - number)):
            tag = "odd" if number % 2 else "even"
            store.append([make_batch([b"%d" % number + b"x" * size], tags=tag)])
            number += 1


def ext_of(root: Path, topic: str = "orders") -> bytes:
    """Return the bytes of all extension files of the topic's queue 0."""
    return b"".join(path.read_bytes() for path in sorted((root / "consumequeue_ext" / topic / "0").iterdir()))


def queues_of(root: Path) -> dict[str, bytes]:
    """Return the bytes of the files of all consume queues and of their extensions, by path."""
    paths = [path for name in ("consumequeue", "consumequeue_ext") for path in (root / name).rglob("*")]
    return {str(path.relative_to(root)): path.read_bytes() for path in paths if path.is_file()}


def codes_in(root: Path, count: int, first: int = 0) -> list[int]:
    """Return the values of the tag-code field of `count` consume-queue entries (units). If the extension is used, a
    value is an address in the extension."""
    reader = LogReader(root, commit_log_file_size=LOG_FILE_BYTES, consume_queue_file_size=2000)
    codes = []
    while len(codes) < count:
        codes += reader.units("orders", 0, first + len(codes), count - len(codes))["tags_code"].tolist()
    reader.close()
    return codes


def tagged(store: MessageStore, tag: str, offset: int = 0) -> list[int]:
    """Return the queue offsets of the messages that a fetch with the filter `tag` returns, from `offset` on."""
    request = FetchRequest("orders", 0, offset, 10_000, frozenset([CODES[tag]]))
    [result] = store.fetch([request], max_bytes=1 << 20, wait_s=0)
    return [message.queue_offset for message in decode_records(result.records)]


def log_of(root: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted((root / "commitlog").iterdir()))


# Tests of the bytes in the extension files of consume queues


def test_fact_30_addresses_and_units(root):
    assert addresses_of(np.array([22])).tolist() == [-9223372036854775786]
    assert offsets_of(np.array([-9223372036854775786])).tolist() == [22]
    unit = bytes.fromhex("001c00000000000000410000018bcfe568010008") + b"bitmap 8"
    data = np.frombuffer(unit + b"\xff\xff", np.uint8)
    units = units_at(data, np.array([0, 28, 11, 1000]))
    assert are_units(units).tolist() == [True, False, False, False]
    assert units[0].item() == (28, 65, 1_700_000_000_001, 8)
    store = open_store(root, clock_ms=lambda: 1_700_000_000_001, **ON)
    store.append([make_batch([b"hi"], tags="A")])
    assert ext_of(root)[:22].hex() == "001400000000000000410000018bcfe5680100000000"
    assert codes_in(root, 1) == [-(2**63)]
    store.close()


def test_no_hash_is_an_address():
    assert EXT_ADDRESS_MAX == -2147483649 < tags_code("zzzzzzzz") == -1910022912


def test_every_message_has_a_unit_and_files_roll_with_a_mark(root):
    store = open_store(root, **ON)
    store.append([make_batch([b"x"] * 60, tags="even")])
    fill(store, 60, 40)
    data = ext_of(root)
    assert len(data) == 3 * EXT_FILE_BYTES
    positions = np.array([EXT_FILE_BYTES * (i // 49) + 20 * (i % 49) for i in range(100)])
    units = units_at(np.frombuffer(data, np.uint8), positions)
    assert are_units(units).all()
    assert units["tags_code"].tolist() == [CODES["odd" if i >= 60 and i % 2 else "even"] for i in range(100)]
    stored = decode_records(store.fetch([FetchRequest("orders", 0, 0, 999)], max_bytes=1 << 20, wait_s=0)[0].records)
    assert units["store_timestamp"].tolist() == [message.store_timestamp_ms for message in stored]
    assert codes_in(root, 100) == addresses_of(positions).tolist()
    assert (data[980:982], data[1980:1982]) == (b"\xff\xff", b"\xff\xff")
    assert data[982:1000] == bytes(18)
    store.close()


def test_messages_that_wait_have_none(root):
    store = open_store(root, **ON)
    extra = {"DELAY": "3", "REAL_TOPIC": "orders", "REAL_QID": "0"}
    store.append([make_batch([b"x"], topic="SCHEDULE_TOPIC_XXXX", queue_id=2, extra_properties=extra)])
    assert not (root / "consumequeue_ext").exists()
    store.close()


# Tests of fetches whose tag codes are in the consume queue's extension files


def test_tags_are_compared_with_the_codes_in_the_extension(root):
    store = open_store(root, **ON)
    fill(store, 0, 130)
    assert tagged(store, "odd") == list(range(1, 130, 2))
    request = FetchRequest("orders", 0, 0, 10, frozenset([tags_code("other")]))
    [result] = store.fetch([request], max_bytes=1 << 20, wait_s=0)
    assert (result.status, result.next_offset) == (PullStatus.NO_MATCHED_MESSAGE, 130)
    store.close()


def test_a_reader_that_cannot_find_the_extension_leaves_the_tags_to_the_client(root):
    store = open_store(root, **ON)
    fill(store, 0, 120)
    request = FetchRequest("orders", 0, 0, 1000, frozenset([CODES["odd"]]))
    sizes = {"commit_log_file_size": LOG_FILE_BYTES, "consume_queue_file_size": 2000}
    for file_size, found in ((EXT_FILE_BYTES, 60), (48 << 20, 110), (500, 120)):
        reader = LogReader(root, **sizes, consume_queue_ext_file_size=file_size)
        result = reader.fetch(request, 0, 120, 1 << 20)
        offsets = {message.queue_offset for message in decode_records(result.records)}
        assert offsets >= set(range(1, 120, 2))
        assert result.count <= found
        reader.close()
    store.close()


def test_a_lost_extension_hides_nothing_and_its_addresses_are_not_used_again(root):
    store = open_store(root, **ON)
    fill(store, 0, 60)
    store.close()
    shutil.rmtree(root / "consumequeue_ext")
    store = open_store(root, **ON)
    assert tagged(store, "odd") == list(range(60))
    fill(store, 60, 10)
    assert tagged(store, "odd") == [*range(60), *range(61, 70, 2)]
    assert min(codes_in(root, 10, first=60)) == addresses_of(np.array([2 * EXT_FILE_BYTES]))[0]
    store.close()


def test_the_scheduler_finds_the_times_that_rocketmq_put_into_an_extension(root):
    store = open_store(root)
    extra = {"DELAY": "18", "REAL_TOPIC": "orders", "REAL_QID": "0"}
    source = ("SCHEDULE_TOPIC_XXXX", 17)
    store.append([make_batch([b"x"], topic=source[0], queue_id=source[1], extra_properties=extra)])
    path = root / "consumequeue" / source[0] / "17" / f"{0:020d}"
    unit = bytearray(path.read_bytes())
    unit[12:20] = (-(2**63)).to_bytes(8, signed=True)
    path.write_bytes(unit)
    extension = root / "consumequeue_ext" / source[0] / "17" / f"{0:020d}"
    extension.parent.mkdir(parents=True)
    extension.write_bytes(np.array((20, 1_800_000_000_000, 1, 0), EXT_UNIT_DTYPE).tobytes() + bytes(980))
    reader = DelayQueueReader(store._parts, store._appender)
    assert reader.delivery_times(source, 0, 1).tolist() == [1_800_000_000_000]
    store.close()


# Tests of reopening a store whose consume queues have extension files


def test_a_clean_stop_changes_nothing_and_the_next_unit_follows(root):
    store = open_store(root, **ON)
    fill(store, 0, 49)
    before = queues_of(root)
    store.close()
    store = open_store(root, **ON)
    assert queues_of(root) == before
    fill(store, 49, 1)
    assert codes_in(root, 1, first=49) == addresses_of(np.array([EXT_FILE_BYTES])).tolist()
    store.close()


@pytest.mark.parametrize("cut", [False, True])
def test_the_extension_is_unchanged_after_a_crash(root, tmp_path, monkeypatch, cut):
    cuts = PowerCuts(root)
    monkeypatch.setattr(os, "fdatasync", cuts.fdatasync)
    store = open_store(root, **ON)
    fill(store, 0, 70)
    store._checkpoints.flush_queues()
    fill(store, 70, 70)
    copy = cuts.copy_after_cut(tmp_path / "copy") if cut else killed_copy(root, tmp_path / "copy")
    before = queues_of(root)
    again = open_store(copy, **ON)
    assert queues_of(copy) == before
    assert tagged(again, "even") == list(range(0, 140, 2))
    again.close()
    store.close()


def test_extension_units_after_the_last_address_are_deleted_after_a_crash(root, tmp_path):
    """A crash loses the ends of the log and of the queue. Recovery then deletes extension entries (units) that no
    consume-queue entry references."""
    store = open_store(root, **ON)
    fill(store, 0, 30)
    store._checkpoints.flush_queues()
    end = store.log.end_offset
    before = queues_of(root)
    fill(store, 30, 90)
    copy = killed_copy(root, tmp_path / "copy")
    store.close()
    log = copy / "commitlog" / f"{0:020d}"
    log.write_bytes(log.read_bytes()[:end].ljust(LOG_FILE_BYTES, b"\0"))
    again = open_store(copy, **ON)
    assert again.log.end_offset == end
    assert {name: data for name, data in queues_of(copy).items() if data.strip(b"\0")} == before
    fill(again, 30, 1)
    assert tagged(again, "even") == list(range(0, 31, 2))
    again.close()


@pytest.mark.parametrize("lost", [["consumequeue"], ["consumequeue", "consumequeue_ext"]])
def test_the_extension_is_rebuilt_with_the_queue_from_the_log(root, lost):
    store = open_store(root, **ON)
    store.append([make_batch([b"first"] * 7, tags="even")])
    fill(store, 7, 900, size=100)
    before = queues_of(root)
    assert len(list((root / "commitlog").iterdir())) > 2
    store.close()
    for name in lost:
        shutil.rmtree(root / name)
    store = open_store(root, **ON)
    assert queues_of(root) == before
    store.close()


def test_switched_off_and_on_again_old_addresses_stay_good(root):
    store = open_store(root, **ON)
    fill(store, 0, 60)
    store.close()
    store = open_store(root, **OFF)
    fill(store, 60, 250)
    assert set(codes_in(root, 250, first=60)) == set(CODES.values())
    assert tagged(store, "odd") == list(range(1, 310, 2))
    store.close()
    store = open_store(root, **ON)
    fill(store, 310, 10)
    assert codes_in(root, 1, first=310) == addresses_of(np.array([EXT_FILE_BYTES + 11 * 20])).tolist()
    assert tagged(store, "odd") == list(range(1, 320, 2))
    store.close()


def test_files_of_another_size_are_named_where_it_is_written_and_left_alone_where_not(root):
    store = open_store(root, **ON)
    fill(store, 0, 60)
    store.close()
    other = {"mapped_file_size_consume_queue_ext_bytes": 600}
    with pytest.raises(StoreCorruptError, match="mapped_file_size_consume_queue_ext_bytes"):
        open_store(root, **{**ON, **other})
    before = ext_of(root)
    store = open_store(root, **{**OFF, **other})
    assert set(tagged(store, "odd")) >= set(range(1, 60, 2))
    assert ext_of(root) == before
    store.close()


def test_units_with_bitmaps_are_read_and_new_units_follow_them(root):
    """Extension entries (units) with bitmaps are read, and new entries follow them. RocketMQ writes such bitmaps for
    SQL filters."""
    store = open_store(root, **ON)
    fill(store, 0, 3)
    store.close()
    path = root / "consumequeue_ext" / "orders" / "0" / f"{0:020d}"
    old = path.read_bytes()
    units = [b"\0\x1c" + old[20 * i + 2 : 20 * i + 18] + b"\0\x08" + b"bitmap 8" for i in range(3)]
    path.write_bytes(b"".join(units).ljust(EXT_FILE_BYTES, b"\0"))
    queue = root / "consumequeue" / "orders" / "0" / f"{0:020d}"
    data = bytearray(queue.read_bytes())
    for i in range(3):
        data[20 * i + 12 : 20 * i + 20] = (28 * i - 2**63).to_bytes(8, signed=True)
    queue.write_bytes(data)
    store = open_store(root, **ON)
    fill(store, 3, 1)
    assert codes_in(root, 4) == addresses_of(np.array([0, 28, 56, 84])).tolist()
    assert tagged(store, "odd") == [1, 3]
    store.close()


# Tests of extension files with retention, deletion and replicas


def test_files_go_with_the_messages_that_they_are_about(root, monkeypatch):
    monkeypatch.setattr(cleaner, "DELETE_PAUSE_S", 0.0)
    store = open_store(root, file_reserved_time_hours=0, **ON)
    fill(store, 0, 1500, size=100)
    for _ in range(3):
        store.cleaner.request_run()
        store.cleaner.run_once(cleaner.datetime.now())
    first = store.queues.bounds("orders", 0).min_offset
    assert first > 500
    names = sorted(path.name for path in (root / "consumequeue_ext" / "orders" / "0").iterdir())
    assert names[0] == f"{first // 49 * EXT_FILE_BYTES:020d}"
    assert tagged(store, "odd", first) == [i for i in range(first, 1500) if i % 2]
    store.close()
    store = open_store(root, **ON)
    assert tagged(store, "odd", first) == [i for i in range(first, 1500) if i % 2]
    store.close()


def test_the_extension_is_deleted_with_its_topic(root):
    store = open_store(root, **ON)
    fill(store, 0, 60)
    store.topics.delete("orders")
    assert not (root / "consumequeue_ext" / "orders").exists()
    fill(store, 0, 3)
    assert codes_in(root, 3) == addresses_of(np.array([0, 20, 40])).tolist()
    assert tagged(store, "odd") == [1]
    store.close()


def test_a_replica_writes_the_same_extension(root, tmp_path):
    store, slave = open_store(root, **ON), open_store(tmp_path / "slave", **ON)
    store.append([make_batch([b"x"] * 200, tags="odd")])
    fill(store, 200, 60)
    while slave.log.end_offset < store.log.end_offset:
        slave.chunks.append_chunk(slave.log.end_offset, store.chunks.read_chunk(slave.log.end_offset, 10_000))
    assert log_of(tmp_path / "slave") == log_of(root)
    assert queues_of(tmp_path / "slave") == queues_of(root)
    slave.close()
    store.close()


def test_a_disk_that_does_not_take_it_costs_nothing_but_the_extension(root, monkeypatch, caplog):
    store = open_store(root, **ON)
    fill(store, 0, 5)

    def fail(self, units):
        raise OSError(errno.ENOSPC, "disk full")

    with monkeypatch.context() as patch:
        patch.setattr(ConsumeQueueExt, "_append", fail)
        fill(store, 5, 5)
    fill(store, 10, 5)
    assert [record.levelname for record in caplog.records if "contain tag codes" in record.message] == ["WARNING"]
    assert codes_in(root, 10, first=5) == [CODES["odd" if i % 2 else "even"] for i in range(5, 15)]
    assert tagged(store, "odd") == list(range(1, 15, 2))
    assert len(bodies_of(store)) == 15
    store.close()
