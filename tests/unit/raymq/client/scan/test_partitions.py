"""Tests of dividing the offset ranges of a read into partitions by bytes. No message is lost or read twice, and the
partitions have the requested sizes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, strategies as st

from raymq.client.scan.partitions import ScanPartition, plan_partitions
from raymq.client.scan.ranges import OffsetRange
from raymq.common.errors import InvalidArgumentError
from tests.support.clients.scan_source import Queues

MIB = 1 << 20


class Sizes:
    """Fake cluster that returns a given list of byte counts (size profile) for each offset range."""

    def __init__(self, *profiles: Sequence[int]) -> None:
        self._profiles = profiles

    def range_bytes(self, ranges: Sequence[OffsetRange]) -> Sequence[Sequence[int]]:
        return self._profiles[: len(ranges)]


def queue(number: int, size: int, broker: str = "broker-a") -> OffsetRange:
    return OffsetRange("orders", broker, number, 100, 100 + size)


def spans(parts: list[ScanPartition]) -> list[list[tuple[int, int, int]]]:
    return [[(one.queue_id, one.start_offset - 100, one.end_offset - 100) for one in part.ranges] for part in parts]


def test_a_large_queue_is_cut_where_its_bytes_are() -> None:
    """A large queue is divided by its bytes, not by its offsets. In this test, the first half of the queue's offsets
    has only a tenth of the bytes."""
    parts = plan_partitions(Sizes([MIB, 9 * MIB]), [queue(0, 1000)], partition_bytes=5 * MIB)
    assert spans(parts) == [[(0, 0, 722)], [(0, 722, 1000)]]
    assert all(abs(part.size_bytes - 5 * MIB) < 0.01 * MIB for part in parts)


def test_small_queues_are_joined_only_within_a_broker_group() -> None:
    ranges = [queue(0, 10), queue(1, 10), queue(0, 10, "broker-b"), queue(2, 10)]
    parts = plan_partitions(Queues({}), ranges, partition_bytes=MIB)
    assert spans(parts) == [[(0, 0, 10), (1, 0, 10), (2, 0, 10)], [(0, 0, 10)]]
    assert [part.broker_name for part in parts] == ["broker-a", "broker-b"]


def test_queues_come_together_up_to_the_bytes_of_a_part() -> None:
    ranges = [queue(number, 10) for number in range(6)]
    parts = plan_partitions(Queues({}), ranges, partition_bytes=2000)
    assert [len(part.ranges) for part in parts] == [2, 2, 2]


def test_by_default_a_small_read_keeps_as_many_tasks_busy_as_are_worth_it() -> None:
    ranges = [queue(number, 1000) for number in range(8)]
    large = Queues({}, size=8 * 1024)  # each of the eight queues that are read has 8 MiB, so the read has 64 MiB
    assert len(plan_partitions(large, ranges, parallelism=4)) == 4
    assert len(plan_partitions(large, ranges, parallelism=1)) == 1
    assert len(plan_partitions(Queues({}, size=100), ranges, parallelism=4)) == 1


def test_a_read_of_small_columns_counts_a_message_only_so_much() -> None:
    ranges = [queue(0, 100_000)]
    assert len(plan_partitions(Queues({}, size=10_000), ranges)) == 7
    assert len(plan_partitions(Queues({}, size=10_000), ranges, message_bytes_max=256)) == 1


def test_of_more_parts_that_are_asked_for_the_largest_queue_gets_most_in_equal_pieces() -> None:
    parts = plan_partitions(Queues({}), [queue(0, 90), queue(1, 30)], min_partitions=4)
    assert spans(parts) == [[(0, 0, 30)], [(0, 30, 60)], [(0, 60, 90)], [(1, 0, 30)]]


@pytest.mark.parametrize("option", ["partition_bytes", "min_partitions"])
@pytest.mark.parametrize("value", [0, True, 1.5])
def test_numbers_below_one_are_refused(option: str, value: object) -> None:
    with pytest.raises(InvalidArgumentError, match=option):
        plan_partitions(Queues({}), [queue(0, 1)], **{option: value})  # type: ignore[arg-type]  # the test's point


def test_nothing_has_no_parts() -> None:
    assert plan_partitions(Queues({}), []) == []


profiles = st.lists(st.integers(0, 10**6), min_size=1, max_size=8)


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 500), profiles), min_size=1, max_size=8),
    st.integers(1, 10**7) | st.none(),
    st.integers(1, 60) | st.none(),
)
def test_every_offset_is_in_exactly_one_part_in_order(
    queues: list[tuple[str, int, list[int]]], partition_bytes: int | None, min_partitions: int | None
) -> None:
    ranges = [queue(number, size, f"broker-{broker}") for number, (broker, size, _) in enumerate(queues)]
    sizes = Sizes(*[profile for _, _, profile in queues])
    parts = plan_partitions(sizes, ranges, partition_bytes=partition_bytes, min_partitions=min_partitions)
    for one in ranges:
        pieces = [piece for part in parts for piece in part.ranges if piece.queue == one.queue]
        assert [offset for piece in pieces for offset in range(piece.start_offset, piece.end_offset)] == list(
            range(one.start_offset, one.end_offset)
        )
    assert all({piece.broker_name for piece in part.ranges} == {part.broker_name} for part in parts)
    offsets = sum(one.size for one in ranges)
    assert len(parts) >= min(min_partitions or 1, offsets)
