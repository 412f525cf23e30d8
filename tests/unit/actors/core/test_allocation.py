"""Sharing queues by averagely: the golden facts, and what it refuses."""

from __future__ import annotations

import pytest

from actors.core.allocation import allocate_averagely
from raymq.errors import InvalidArgumentError
from raymq.message import MessageQueue


def shares(queue_count: int, member_count: int) -> list[list[int]]:
    queues = [MessageQueue("orders", "broker-a", number) for number in range(queue_count)]
    members = [f"c{number}" for number in range(member_count)]
    allocated = allocate_averagely(queues, members)
    return [[queue.queue_id for queue in allocated[member]] for member in members]


def test_golden_fact_1_ten_queues_and_four_members():
    assert shares(10, 4) == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]


@pytest.mark.parametrize(
    ("queues", "members", "expected"),
    [
        (8, 3, [[0, 1, 2], [3, 4, 5], [6, 7]]),
        (9, 4, [[0, 1, 2], [3, 4], [5, 6], [7, 8]]),
        (2, 3, [[0], [1], []]),
    ],
)
def test_golden_fact_2(queues, members, expected):
    assert shares(queues, members) == expected


def test_no_queues_give_every_member_an_empty_share():
    assert shares(0, 2) == [[], []]


def test_queues_cannot_be_shared_among_nobody():
    with pytest.raises(InvalidArgumentError):
        allocate_averagely([MessageQueue("orders", "broker-a", 0)], [])
