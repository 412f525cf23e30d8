"""Tests of the names of archive files, and of how a run derives its plan from these names."""

from __future__ import annotations

from pathlib import Path

import pytest

from raydp_jobs.jobs.archive_files import (
    SPLIT_MESSAGES,
    ArchiveFile,
    check_cover,
    find_pieces,
    next_offsets,
    plan_round,
    problems_of,
)
from raymq.client.scan.ranges import OffsetRange
from raymq.common.errors import DataLossError, StoreCorruptError
from raymq.common.message import MessageQueue
from raymq.common.protocol.store import QueueBounds

DAY = "2026-03-01"


def piece(start: int, end: int, queue_id: int = 3, day: str = DAY) -> ArchiveFile:
    return ArchiveFile("broker-a", queue_id, start, end, day)


def bounds(low: int, high: int, queue_id: int = 3) -> dict[MessageQueue, QueueBounds]:
    return {MessageQueue("orders", "broker-a", queue_id): QueueBounds(low, high, low)}


def spans(ranges: tuple[OffsetRange, ...]) -> list[tuple[int, int, int]]:
    return [(item.queue_id, item.start_offset, item.end_offset) for item in ranges]


@pytest.mark.parametrize(
    "one", [piece(0, 1), piece(17, 2**62), piece(5, 6, day=""), ArchiveFile("%RETRY%-b|1", 0, 0, 9, DAY)]
)
def test_a_path_encodes_all_fields_of_its_file(one: ArchiveFile) -> None:
    assert ArchiveFile.parse(one.path) == one


@pytest.mark.parametrize(
    "path",
    [
        "day=2026-03-01/notes.txt",
        "day=2026-03-01/broker-a.3.0-17.parquet",
        "day=2026-03-01/broker-a.3.00000000000000000017-00000000000000000017.parquet",
        "day=2026-03-01/broker-a.3.00000000000000000000-00000000000000000017.absent",
        "_absent/broker-a.3.00000000000000000000-00000000000000000017.parquet",
        "others/broker-a.3.00000000000000000000-00000000000000000017.parquet",
    ],
)
def test_any_other_path_is_refused(path: str) -> None:
    with pytest.raises(StoreCorruptError, match="not a file of an archive"):
        ArchiveFile.parse(Path(path))


def test_pieces_are_found_by_queue_and_offset_and_hidden_files_and_staging_are_not(tmp_path: Path) -> None:
    pieces = [piece(0, 9), piece(9, 12, day="2026-03-02"), piece(12, 20, day=""), piece(0, 3, queue_id=4)]
    for one in pieces:
        path = tmp_path / one.path
        path.parent.mkdir(exist_ok=True)
        path.touch()
    (tmp_path / ".lock").touch()
    (tmp_path / "day=2026-03-01/.partial").touch()
    (tmp_path / "_staging/x").mkdir(parents=True)
    (tmp_path / "_staging/x/junk").touch()
    assert find_pieces(tmp_path) == pieces
    assert find_pieces(tmp_path / "nothing") == []


def test_the_next_offset_of_a_queue_is_the_end_of_its_last_piece() -> None:
    pieces = [piece(4, 9), piece(9, 12, day=""), piece(0, 3, queue_id=4)]
    assert next_offsets(pieces) == {("broker-a", 3): 12, ("broker-a", 4): 3}
    assert problems_of(pieces) == []


def test_a_gap_and_an_overlap_are_damage() -> None:
    assert problems_of([piece(0, 9), piece(10, 12)]) == ["queue broker-a:3: no file has offsets 9 to 9"]
    [problem] = problems_of([piece(0, 9), piece(8, 12)])
    assert problem.startswith("queue broker-a:3: offsets from 8 on are both in file day=2026-03-01/")
    with pytest.raises(StoreCorruptError, match="no file has offsets 9 to 9"):
        next_offsets([piece(0, 9), piece(10, 12)])


def test_a_round_continues_after_the_archive_and_includes_new_queues() -> None:
    queues = {**bounds(0, 100), **bounds(40, 50, queue_id=4)}
    part = plan_round(queues, {("broker-a", 3): 90}, most=1000)
    assert (spans(part.ranges), part.absent) == ([(3, 90, 100), (4, 40, 50)], ())
    assert not plan_round(queues, {("broker-a", 3): 100, ("broker-a", 4): 50}, most=1000)


def test_a_round_shares_its_messages_between_the_queues_that_have_some() -> None:
    queues = {**bounds(0, 100), **bounds(0, 100, queue_id=4), **bounds(7, 7, queue_id=5)}
    assert spans(plan_round(queues, {}, most=60).ranges) == [(3, 0, 30), (4, 0, 30)]
    assert spans(plan_round(queues, {}, most=1).ranges) == [(3, 0, 1), (4, 0, 1)]


def test_large_ranges_are_divided_between_tasks_and_small_ones_are_not() -> None:
    large = bounds(0, 3 * SPLIT_MESSAGES)
    assert len(plan_round(large, {}, most=10**9, parallelism=8).ranges) == 3
    assert len(plan_round(large, {}, most=10**9, parallelism=2).ranges) == 2
    assert len(plan_round(bounds(0, 100), {}, most=10**9, parallelism=8).ranges) == 1


def test_messages_that_were_deleted_first_are_an_error_or_absent() -> None:
    with pytest.raises(DataLossError, match="offsets 5 to 29 were deleted before they were archived"):
        plan_round(bounds(30, 100), {("broker-a", 3): 5}, most=1000)
    part = plan_round(bounds(30, 100), {("broker-a", 3): 5}, most=1000, skip_lost=True)
    assert (spans(part.ranges), part.absent) == ([(3, 30, 100)], (piece(5, 30, day=""),))
    emptied = plan_round(bounds(30, 30), {("broker-a", 3): 5}, most=1000, skip_lost=True)
    assert (emptied.ranges, emptied.absent) == ((), (piece(5, 30, day=""),))


def test_a_recreated_topic_is_refused() -> None:
    with pytest.raises(StoreCorruptError, match="the topic was deleted and created again"):
        plan_round(bounds(0, 10), {("broker-a", 3): 11}, most=1000)


RANGE = OffsetRange("orders", "broker-a", 3, 10, 20)


def test_pieces_that_are_the_ranges_cover_them() -> None:
    check_cover([RANGE], [piece(15, 20), piece(10, 15)])
    check_cover([OffsetRange("orders", "broker-a", 3, 20, 30), RANGE], [piece(10, 20), piece(20, 30)])


@pytest.mark.parametrize(
    "pieces",
    [
        [],
        [piece(10, 19)],
        [piece(11, 20)],
        [piece(10, 15), piece(16, 20)],
        [piece(10, 15), piece(14, 20)],
        [piece(10, 20), piece(20, 21)],
        [piece(10, 20), piece(0, 1, queue_id=4)],
        [piece(10, 21)],
    ],
)
def test_pieces_that_are_not_the_ranges_are_refused(pieces: list[ArchiveFile]) -> None:
    with pytest.raises(StoreCorruptError):
        check_cover([RANGE], pieces)
