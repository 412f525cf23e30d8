"""Tests of dividing offset ranges among read tasks by bytes."""

from __future__ import annotations

from hypothesis import given, strategies as st

from raymq.client.scan.ranges import OffsetRange
from raymq.data.offsets import SizedRange, divide, sized


def a_range(queue_id: int, start: int, end: int, broker_name: str = "broker-a") -> OffsetRange:
    return OffsetRange("orders", broker_name, queue_id, start, end)


def test_a_long_queue_is_many_tasks_and_short_ones_share_one() -> None:
    long, *short = [a_range(0, 0, 1000), a_range(1, 0, 10), a_range(2, 0, 10), a_range(3, 5, 15)]
    parts = divide(sized([long, *short], [[400, 400, 400, 400], [10], [10], [10]]), 4)
    found = [[(one.range.queue_id, one.range.start_offset, one.range.end_offset) for one in part] for part in parts]
    assert found == [
        [(0, 0, 255)],
        [(0, 255, 510)],
        [(0, 510, 765)],
        [(0, 765, 1000), (1, 0, 10), (2, 0, 10), (3, 5, 15)],
    ]


def test_messages_of_uneven_size_are_cut_by_their_bytes() -> None:
    """Offset ranges are divided by bytes, not by offsets, if message sizes differ. In this test, the first half of the
    queue has nine tenths of the bytes."""
    parts = divide(sized([a_range(0, 0, 1000)], [[900, 100]]), 2)
    assert [(part[0].range.start_offset, part[0].range.end_offset) for part in parts] == [(0, 278), (278, 1000)]


def test_ranges_of_a_broker_group_come_together() -> None:
    ranges = [a_range(0, 0, 10, "broker-b"), a_range(0, 0, 10), a_range(1, 0, 10, "broker-b"), a_range(1, 0, 10)]
    parts = divide(sized(ranges, [[100]] * 4), 2)
    assert [{one.range.broker_name for one in part} for part in parts] == [{"broker-a"}, {"broker-b"}]


def test_nothing_is_no_task() -> None:
    assert divide([], 8) == []


@given(
    pieces=st.lists(st.tuples(st.integers(0, 50), st.integers(1, 40), st.lists(st.integers(0, 10_000), min_size=1))),
    tasks=st.integers(1, 30),
)
def test_each_offset_is_in_exactly_one_task_and_tasks_are_even(
    pieces: list[tuple[int, int, list[int]]], tasks: int
) -> None:
    ranges = [a_range(queue_id, start, start + size) for queue_id, (start, size, _) in enumerate(pieces)]
    found = sized(ranges, [profile for _, _, profile in pieces])
    parts = divide(found, tasks)
    assert len(parts) <= tasks
    assert all(parts)
    offsets = [
        (one.range.queue_id, offset)
        for part in parts
        for one in part
        for offset in range(one.range.start_offset, one.range.end_offset)
    ]
    assert offsets == [(one.queue_id, offset) for one in ranges for offset in range(one.start_offset, one.end_offset)]
    # A task may exceed its share of bytes by one message at each end, because messages cannot be split. Rounding may
    # add a few bytes.
    heaviest = max((piece.size_bytes / piece.range.size for piece in found), default=0.0)
    total = sum(piece.size_bytes for piece in found)
    for part in parts:
        assert sum(one.size_bytes for one in part) <= total / tasks + 2 * heaviest + len(part)


def test_the_bytes_of_a_piece_are_at_least_one() -> None:
    assert sized([a_range(0, 0, 2)], [[0, 0]]) == [SizedRange(a_range(0, 0, 1), 1), SizedRange(a_range(0, 1, 2), 1)]
