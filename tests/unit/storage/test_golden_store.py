"""Tests of the golden facts of spec/storage.md §13 about a store's files."""

from __future__ import annotations

import numpy as np
import pytest

from raymq.common.config.store import StoreSettings
from raymq.common.errors import MessageIllegalError
from raymq.records.format.layout import UNIT_DTYPE, encode_blank
from raymq.records.logfiles.directory import file_name
from raymq.records.logfiles.log_reader import LogReader
from storage.files.damage import DamageNotes
from storage.files.write_handles import WriteHandles
from storage.log.commit_log import CommitLog
from storage.log.log_paths import LogPaths
from storage.queue.consume_queue import ConsumeQueue
from storage.recovery.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from tests.support.stores.stores import make_batch, open_store

RECORD_8 = bytes.fromhex(
    "00000065daa320a758932aac000000000000000000000000000000000000000000000000000000000000018bcfe568007f000001000030390000"
    "018bcfe568017f00000100002a9f0000000000000000000000000000000268690154000754414753014102"
)


def append_record_8(log: CommitLog) -> int:
    [[place]], end = log.plan_append([np.array([len(RECORD_8)], np.int32)])
    log.reserve(end)
    log.write(place.physical_offset, np.frombuffer(RECORD_8, np.uint8), 1)
    return place.physical_offset


@pytest.fixture
def queue(tmp_path):
    reader = LogReader(tmp_path, commit_log_file_size=1024, consume_queue_file_size=100)
    handles = WriteHandles(4)
    yield ConsumeQueue(tmp_path, "T", 0, 100, reader=reader, handles=handles)
    handles.close()


def unit_bytes(queue: ConsumeQueue) -> bytes:
    return queue.units(0, 5).tobytes()


def test_fact_12_a_blank_for_100_bytes():
    assert encode_blank(100).hex() == "00000064cbd43194"


def test_fact_13_three_records_in_files_of_256_bytes(tmp_path):
    log = CommitLog(LogPaths(tmp_path, 256), 256)
    log.open_for_append(0)
    assert [append_record_8(log) for _ in range(3)] == [0, 101, 256]
    log.close()
    first = (tmp_path / "commitlog" / "00000000000000000000").read_bytes()
    second = (tmp_path / "commitlog" / "00000000000000000256").read_bytes()
    assert first[:202] == RECORD_8 * 2
    assert first[202:210].hex() == "00000036cbd43194"
    assert second[:101] == RECORD_8
    assert len(first) == len(second) == 256


def test_fact_13_a_file_of_109_bytes_takes_one_such_record_and_one_of_108_none(tmp_path):
    log = CommitLog(LogPaths(tmp_path, 109), 109)
    log.open_for_append(0)
    assert [append_record_8(log) for _ in range(2)] == [0, 109]
    log.close()
    (tmp_path / "small").mkdir()
    small = CommitLog(LogPaths(tmp_path / "small", 108), 108)
    small.open_for_append(0)
    with pytest.raises(MessageIllegalError):
        append_record_8(small)
    small.close()


def test_fact_16_consume_queue_units(queue):
    queue.reserve(2)
    queue.append_units(0, np.array([101, 101], np.int32), np.array([65, 2598919], np.int64))
    assert unit_bytes(queue).hex() == (
        "0000000000000000000000650000000000000041000000000000006500000065000000000027a807"
    )


def test_fact_17_a_queue_that_does_not_start_at_0_is_filled_with_pre_blank_units(queue):
    queue.start_at(2)
    queue.reserve(1)
    queue.append_units(500, np.array([101], np.int32), np.array([65], np.int64))
    assert unit_bytes(queue)[:40].hex() == "00000000000000007fffffff0000000000000000" * 2
    assert (queue.min_offset, queue.next_offset) == (2, 3)


def test_fact_18_the_unit_of_a_delayed_message_holds_the_time_of_its_delivery(tmp_path):
    """Golden fact 18 of spec/storage.md: recovery computes the consume-queue entry (unit) from the record. The entry of
    a delayed message contains its delivery time. With delay level 3 (10 s), a message that was stored at 1700000000001
    ms is due at 1700000010001 ms."""
    root = tmp_path / "store"
    store = open_store(root, clock_ms=lambda: 1_700_000_000_001)
    store.append([make_batch([b"later"], topic="SCHEDULE_TOPIC_XXXX", queue_id=2, extra_properties={"DELAY": "3"})])
    store.close()
    [unit_file] = (root / "consumequeue" / "SCHEDULE_TOPIC_XXXX" / "2").iterdir()
    unit_file.unlink()
    unit_file.parent.rmdir()
    unit_file.parent.parent.rmdir()
    open_store(root).close()
    assert unit_file.read_bytes()[12:20].hex() == "0000018bcfe58f11"


def test_fact_20_names_and_sizes_of_files(tmp_path):
    gib = 1 << 30
    assert file_name(gib) == "00000000001073741824"
    assert file_name(5 * gib) == "00000000005368709120"
    assert file_name(6_000_000) == "00000000000006000000"
    rounded = StoreSettings(store_path_root_dir=tmp_path, mapped_file_size_consume_queue_bytes=6_000_001)
    assert rounded.mapped_file_size_consume_queue_bytes == 6_000_020


def test_fact_26_the_checkpoint_file(tmp_path):
    path = tmp_path / "checkpoint"
    write_checkpoint(path, Checkpoint(1, 2, 3, 0, 101))
    data = path.read_bytes()
    assert data[:40].hex() == "00000000000000010000000000000002000000000000000300000000000000000000000000000065"
    assert len(data) == 4096
    assert data[64:68] == b"RMQC"
    assert not any(data[40:64] + data[72:])
    assert read_checkpoint(path, DamageNotes()) == Checkpoint(1, 2, 3, 0, 101)
    assert Checkpoint(5000, 9000).min_timestamp == 2000
    assert Checkpoint(2000, 9000).min_timestamp == 0


def test_a_unit_has_20_bytes():
    assert UNIT_DTYPE.itemsize == 20
