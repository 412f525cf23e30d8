"""Tests of the strategies that assign one topic's queues to the members of a group: the golden facts, and settings that
are refused."""

from __future__ import annotations

import pytest

from actors.core.rebalance.allocation import (
    allocate_averagely,
    allocate_by_circle,
    allocate_by_config,
    allocate_by_consistent_hash,
    allocate_by_machine_room,
    allocate_nearby,
)
from actors.core.rebalance.sticky import allocate_sticky
from raymq.common.errors import InvalidArgumentError
from raymq.common.message import MessageQueue


def queues_of(*broker_names: str, count: int, first: int = 0) -> list[MessageQueue]:
    return [MessageQueue("orders", name, first + number) for name in broker_names for number in range(count)]


def ids(shares: dict[str, list[MessageQueue]]) -> list[list[int]]:
    return [[queue.queue_id for queue in shares[member]] for member in sorted(shares)]


def names(count: int) -> list[str]:
    return [f"c{number}" for number in range(count)]


@pytest.mark.parametrize(
    ("queues", "members", "expected"),
    [
        # golden fact 1 of spec/messaging.md: 10 queues and 4 members; the next cases are golden fact 2
        (10, 4, [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]),
        (8, 3, [[0, 1, 2], [3, 4, 5], [6, 7]]),
        (9, 4, [[0, 1, 2], [3, 4], [5, 6], [7, 8]]),
        (2, 3, [[0], [1], []]),
    ],
)
def test_averagely_gives_blocks_and_the_first_members_take_the_larger_ones(queues, members, expected):
    assert ids(allocate_averagely(queues_of("broker-a", count=queues), names(members))) == expected


@pytest.mark.parametrize(
    ("queues", "members", "expected"),
    [
        (10, 4, [[0, 4, 8], [1, 5, 9], [2, 6], [3, 7]]),  # golden fact 3 of spec/messaging.md: 10 queues, 4 members
        (8, 3, [[0, 3, 6], [1, 4, 7], [2, 5]]),  # golden fact 4 of spec/messaging.md: 8 queues, 3 members
    ],
)
def test_by_circle_deals_queues_out(queues, members, expected):
    shares = allocate_by_circle(queues_of("broker-a", count=queues), names(members))
    assert ids(shares) == expected
    assert "a stranger" not in shares


def test_machine_room_shares_only_the_queues_of_its_rooms():
    """Golden fact 5 of spec/messaging.md: the strategy MACHINE_ROOM divides only the queues of the machine rooms that
    the consumer names."""
    queues = queues_of("room1@broker-a", count=5) + queues_of("room2@broker-b", count=5, first=5)
    assert ids(allocate_by_machine_room(queues, names(2), {"room1"})) == [[0, 1, 4], [2, 3]]


def test_machine_room_adds_the_queues_left_over_to_the_first_members():
    """If the strategy MACHINE_ROOM cannot divide the queues evenly, each of the first members gets one of the remaining
    queues. Golden fact 6 about RocketMQ (spec/messaging.md)."""
    queues = queues_of("room1@broker-a", count=8)
    assert ids(allocate_by_machine_room(queues, names(3), {"room1"})) == [[0, 1, 6], [2, 3, 7], [4, 5]]


@pytest.mark.parametrize("broker_name", ["room1", "room1@broker@a", "room2@broker-a", "@broker-a"])
def test_machine_room_takes_no_queue_of_a_broker_that_does_not_name_its_room(broker_name):
    assert ids(allocate_by_machine_room(queues_of(broker_name, count=2), names(2), {"room1"})) == [[], []]


ROOMS = {"broker-a": "A", "broker-b": "B"}


def nearby(member_rooms: dict[str, str]) -> dict[str, list[str]]:
    shares = allocate_nearby(queues_of("broker-a", "broker-b", count=4), member_rooms, ROOMS, member_rooms)
    return {name: [f"{queue.broker_name[-1]}{queue.queue_id}" for queue in share] for name, share in shares.items()}


def test_nearby_shares_a_room_without_members_among_all():
    """First half of golden fact 7 of spec/messaging.md: the queues of a machine room without members are assigned to
    all members."""
    assert nearby({"A1": "A", "A2": "A"}) == {"A1": ["a0", "a1", "b0", "b1"], "A2": ["a2", "a3", "b2", "b3"]}


def test_nearby_gives_a_rooms_queues_to_its_own_members():
    """If a machine room has members, its queues are assigned only to these members. This is the second half of golden
    fact 7 in spec/messaging.md."""
    shares = nearby({"A1": "A", "A2": "A", "B1": "B"})
    assert shares == {"A1": ["a0", "a1"], "A2": ["a2", "a3"], "B1": ["b0", "b1", "b2", "b3"]}


def test_nearby_refuses_a_member_or_a_broker_without_a_room():
    queues = queues_of("broker-a", "broker-c", count=1)
    with pytest.raises(InvalidArgumentError, match="broker broker-c has no machine room"):
        allocate_nearby(queues, ["m"], ROOMS, {"m": "A"})
    with pytest.raises(InvalidArgumentError, match="member m has no machine room"):
        allocate_nearby(queues[:1], ["m"], ROOMS, {"m": " "})


def test_config_assigns_each_member_exactly_the_requested_queues():
    queues = queues_of("broker-a", count=4)
    elsewhere = MessageQueue("other", "broker-a", 0)
    shares = allocate_by_config(queues, ["a", "b", "c"], {"a": {queues[3], elsewhere}, "b": {queues[0]}}, {})
    assert shares == {"a": [queues[3]], "b": [queues[0]], "c": []}


def test_config_gives_a_queue_that_two_request_to_its_holder():
    queue = MessageQueue("orders", "broker-a", 0)
    requests = {"a": {queue}, "b": {queue}}
    assert allocate_by_config([queue], ["a", "b"], requests, {queue: "b"}) == {"a": [], "b": [queue]}
    assert allocate_by_config([queue], ["a", "b"], requests, {queue: "gone"}) == {"a": [queue], "b": []}


def test_config_refuses_nothing():
    assert allocate_by_config([], [], {}, {}) == {}


STRATEGIES = {
    "AVG": allocate_averagely,
    "AVG_BY_CIRCLE": allocate_by_circle,
    "MACHINE_ROOM": lambda queues, members: allocate_by_machine_room(queues, members, {"room"}),
    "MACHINE_ROOM_NEARBY": lambda queues, members: allocate_nearby(queues, members, ROOMS, {"a": "A", " ": "A"}),
    "CONSISTENT_HASH": allocate_by_consistent_hash,
    "STICKY": lambda queues, members: allocate_sticky({"orders": queues}, {"orders": members}, {}, {}),
}


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_no_queues_no_members_and_blank_members_are_refused(strategy):
    """Every strategy refuses an empty list of queues, an empty list of members, and a blank member name. Golden fact 10
    (spec/messaging.md)."""
    with pytest.raises(InvalidArgumentError, match="the name of a member is blank"):
        strategy(queues_of("broker-a", count=1), ["a", " "])
    with pytest.raises(InvalidArgumentError, match="the list of queues is empty"):
        strategy([], ["a"])
    with pytest.raises(InvalidArgumentError, match="the list of members is empty"):
        strategy(queues_of("broker-a", count=1), [])
