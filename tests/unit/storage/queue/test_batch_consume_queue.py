"""Tests of the consume queue of inner batches: records that hold many messages each (spec/storage.md §2 "Batch
unit")."""

from __future__ import annotations

from pathlib import Path

import pytest

from raymq.common.protocol.store import Boundary
from raymq.records.logfiles.log_reader import LogReader
from storage.files.write_handles import WriteHandles
from storage.queue.batch_consume_queue import BatchConsumeQueue, BatchUnit

FILE_BYTES = 4 * 46


def unit(index: int) -> BatchUnit:
    """Return the consume-queue entry (unit) of record `index`. The record has 100 bytes at physical offset 1000 + 100 ·
    index and store time 10 · index ms. Its first message has offset 3 · index."""
    return BatchUnit(1000 + 100 * index, 100, 65, 10 * index, 3 * index, 3)


def open_queue(root: Path) -> BatchConsumeQueue:
    reader = LogReader(root, commit_log_file_size=1 << 20, consume_queue_file_size=100)
    return BatchConsumeQueue(root, "T", 0, FILE_BYTES, reader=reader, handles=WriteHandles(4))


@pytest.fixture
def queue(tmp_path) -> BatchConsumeQueue:
    """Return a consume queue with ten entries (units) in three files."""
    made = open_queue(tmp_path)
    for index in range(10):
        made.append_unit(unit(index))
    return made


def names(queue: BatchConsumeQueue) -> list[int]:
    return sorted(int(path.name) // 46 for path in queue.directory.iterdir())


def state(queue: BatchConsumeQueue) -> tuple[int, int, int]:
    return queue.min_offset, queue.next_offset, queue.max_physical_offset


def test_fact_28_a_batch_unit(tmp_path):
    fact = BatchUnit(0, 101, 65, 1_700_000_000_001, 10, 3)
    text = "00000000000000000000006500000000000000410000018bcfe56801000000000000000a0003ffffffff00000000"
    assert fact.encode().hex() == text
    assert len(fact.encode()) == 46
    queue = open_queue(tmp_path)
    queue.append_unit(fact)
    assert (queue.directory / "00000000000000000000").read_bytes()[:46].hex() == text
    assert queue.holder_of(12) == fact


def test_a_queue_is_found_again_as_it_was(tmp_path, queue):
    again = open_queue(tmp_path)
    again.recover()
    assert state(again) == state(queue) == (0, 30, 2000)
    again.append_unit(unit(10))
    assert again.holder_of(32) == unit(10)
    assert names(again) == [0, 4, 8]


def test_the_record_that_holds_an_offset_is_found(queue):
    for offset in range(30):
        assert queue.holder_of(offset) == unit(offset // 3)
    assert queue.holder_of(30) is None


def test_an_offset_that_no_record_holds_is_not_found(tmp_path):
    queue = open_queue(tmp_path)
    queue.append_unit(unit(1))
    queue.append_unit(unit(4))
    assert queue.holder_of(2) is None
    assert queue.holder_of(6) is None
    assert queue.holder_of(13) == unit(4)


@pytest.mark.parametrize(
    ("time_ms", "lower", "upper"),
    [(-5, 0, 0), (0, 0, 0), (1, 3, 0), (45, 15, 12), (50, 15, 15), (90, 27, 27), (91, 30, 27)],
)
def test_a_time_leads_to_the_first_message_of_a_record(queue, time_ms, lower, upper):
    assert queue.offset_by_time(time_ms, Boundary.LOWER) == lower
    assert queue.offset_by_time(time_ms, Boundary.UPPER) == upper


def test_a_lookup_by_time_never_returns_deleted_offsets(queue):
    queue.correct_min_offset(1500)
    assert queue.offset_by_time(0, Boundary.LOWER) == queue.offset_by_time(0, Boundary.UPPER) == 15


@pytest.mark.parametrize(
    ("limit", "left", "last_file"),
    [(2000, 10, 8), (1950, 10, 8), (1900, 9, 8), (1801, 9, 8), (1800, 8, 8), (1700, 7, 4), (1000, 0, 0), (0, 0, 0)],
)
def test_truncation_leaves_the_records_before_a_place(tmp_path, queue, limit, left, last_file):
    assert queue.truncate_from(limit) == 10 - left
    assert state(queue) == (0, 3 * left, 1000 + 100 * left if left else -1)
    assert names(queue) == list(range(0, last_file + 1, 4))
    again = open_queue(tmp_path)
    again.recover()
    assert state(again) == state(queue)


def test_the_log_starts_later_and_files_go(tmp_path, queue):
    queue.correct_min_offset(1550)
    assert state(queue) == (18, 30, 2000)
    assert queue.first_at_or_after(0) == 18
    assert queue.first_at_or_after(1801) == 27
    assert queue.first_at_or_after(5000) == 30
    for path in queue.drop_files_before_min():
        path.unlink()
    assert names(queue) == [4, 8]
    assert queue.holder_of(18) == unit(6)
    again = open_queue(tmp_path)
    again.recover()
    again.correct_min_offset(1550)
    assert state(again) == (18, 30, 2000)


def test_a_queue_all_of_whose_records_are_gone_keeps_its_end(queue):
    queue.correct_min_offset(9999)
    assert state(queue) == (30, 30, 2000)
    assert len(queue.drop_files_before_min()) == 2


@pytest.mark.parametrize("limit", [2000, 1600, 1400, 1350])
def test_after_a_crash_only_units_before_the_checkpoint_count(tmp_path, queue, limit):
    last = queue.directory / "00000000000000000368"
    last.write_bytes(bytes(FILE_BYTES))
    again = open_queue(tmp_path)
    again.recover_until(limit)
    units = min(8, -(-(limit - 1000) // 100))
    assert state(again) == (0, 3 * units, 1000 + 100 * units)


@pytest.mark.parametrize(
    "damage", [unit(5)._replace(physical_offset=0), unit(5)._replace(size=0), unit(5)._replace(messages=0),
               unit(5)._replace(base_offset=2), unit(5)._replace(physical_offset=-1)]
)  # fmt: skip
def test_a_queue_ends_before_a_unit_that_cannot_be(tmp_path, queue, damage):
    path = queue.directory / f"{184:020d}"
    data = bytearray(path.read_bytes())
    data[46:92] = damage.encode()
    path.write_bytes(data)
    again = open_queue(tmp_path)
    again.recover()
    assert state(again) == (0, 15, 1500)
    assert names(again) == [0, 4]
