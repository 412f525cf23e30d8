"""Tests of recovering the consume queue of single messages: which entries (units) recovery keeps, and which part of the
queue's files it reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from raymq.common.config.values import CONSUME_QUEUE_UNIT_BYTES
from raymq.records.logfiles.log_reader import LogReader
from storage.files.write_handles import WriteHandles
from storage.queue.consume_queue import ConsumeQueue

UNITS_PER_FILE = 5_000
FILE_BYTES = UNITS_PER_FILE * CONSUME_QUEUE_UNIT_BYTES
RECORD_BYTES = 100


class CountingReader(LogReader):
    """LogReader that counts the consume-queue entries (units) that its method `units` has returned."""

    units_asked = 0

    def units(self, topic, queue_id, from_offset, count):
        found = super().units(topic, queue_id, from_offset, count)
        self.units_asked += len(found)
        return found


def open_queue(root: Path) -> tuple[ConsumeQueue, CountingReader]:
    reader = CountingReader(root, commit_log_file_size=1 << 20, consume_queue_file_size=FILE_BYTES)
    return ConsumeQueue(root, "T", 0, FILE_BYTES, reader=reader, handles=WriteHandles(4)), reader


def write(root: Path, begins: list[int]) -> None:
    """Append one entry (unit) to the consume queue for each physical offset in `begins`. Each entry points to a record
    of 100 bytes."""
    queue, _ = open_queue(root)
    queue.reserve(len(begins))
    count = len(begins)
    queue.append_scattered(
        np.array(begins, np.int64), np.full(count, RECORD_BYTES, np.int32), np.zeros(count, np.int64)
    )


def recovered(root: Path, physical_limit: int = 1 << 40) -> ConsumeQueue:
    queue, _ = open_queue(root)
    queue.recover_until(physical_limit)
    return queue


def places(count: int) -> list[int]:
    return [index * RECORD_BYTES for index in range(count)]


def test_recovery_looks_at_the_units_that_are_there_not_at_the_whole_file(tmp_path):
    write(tmp_path, places(3))
    queue, reader = open_queue(tmp_path)
    queue.recover_until(1 << 40)
    assert queue.next_offset == 3
    assert reader.units_asked < UNITS_PER_FILE / 10


@pytest.mark.parametrize("count", [1, 255, 256, 257, 1023, 1024, 1025, 4999, 5000, 5001, 12_345])
def test_all_units_of_queues_of_any_length_are_kept(tmp_path, count):
    write(tmp_path, places(count))
    queue = recovered(tmp_path)
    assert queue.next_offset == count
    assert queue.max_physical_offset == count * RECORD_BYTES
    assert not queue.out_of_order


@pytest.mark.parametrize(("bad", "count"), [(2, 9), (255, 999), (256, 999), (257, 999), (4_998, 5_000), (5_001, 6_000)])
def test_a_queue_ends_before_a_unit_that_points_back(tmp_path, bad, count):
    begins = places(count)
    begins[bad] = begins[bad - 1] - 1
    write(tmp_path, begins)
    queue = recovered(tmp_path)
    assert queue.next_offset == bad
    assert not queue.out_of_order


def test_a_file_whose_first_unit_points_back_is_out_of_order(tmp_path):
    begins = places(6_000)
    begins[UNITS_PER_FILE] = begins[UNITS_PER_FILE - 1]
    write(tmp_path, begins)
    queue, _ = open_queue(tmp_path)
    queue.recover()
    assert (queue.next_offset, queue.out_of_order) == (UNITS_PER_FILE, True)


@pytest.mark.parametrize("limit", [1, 256, 300, 5_000, 5_500])
def test_units_of_records_after_the_limit_are_removed(tmp_path, limit):
    write(tmp_path, places(6_000))
    queue = recovered(tmp_path, limit * RECORD_BYTES)
    assert queue.next_offset == limit
    assert not queue.out_of_order
