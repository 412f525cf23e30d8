"""Tests of the strategies that assign one topic's queues to consumers: one owner per queue, balance, independence of
input order, and few moves."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
from hypothesis import given, settings, strategies as st

from actors.core.rebalance.allocation import (
    allocate_averagely,
    allocate_by_circle,
    allocate_by_config,
    allocate_by_consistent_hash,
    allocate_by_machine_room,
    allocate_nearby,
)
from actors.core.rebalance.sticky import allocate_sticky
from raymq.common.message import MessageQueue
from tests.support.cases import examples

BROKERS = ["room1@x", "room1@y", "room2@x", "room3@x"]
BROKER_ROOMS = {name: name.split("@")[0] for name in BROKERS}
QUEUES = st.sets(
    st.builds(MessageQueue, st.just("orders"), st.sampled_from(BROKERS), st.integers(0, 99)), min_size=1, max_size=40
)
MEMBERS = st.dictionaries(
    st.text("abc-0123", min_size=1, max_size=6), st.sampled_from(["room1", "room2", "room9"]), min_size=1, max_size=12
)
"""Hypothesis strategy for group members, with the machine room of each member."""


def sticky(queues, rooms):
    return allocate_sticky({"orders": queues}, {"orders": rooms}, {}, {})


ALL = {
    "AVG": allocate_averagely,
    "AVG_BY_CIRCLE": allocate_by_circle,
    "MACHINE_ROOM": lambda queues, rooms: allocate_by_machine_room(queues, rooms, {"room1", "room3"}),
    "MACHINE_ROOM_NEARBY": lambda queues, rooms: allocate_nearby(queues, rooms, BROKER_ROOMS, dict(rooms)),
    "CONSISTENT_HASH": allocate_by_consistent_hash,
    "STICKY": sticky,
}
every_strategy = pytest.mark.parametrize("strategy", ALL, ids=ALL)
tries = settings(max_examples=examples(150), deadline=None, derandomize=True)


@every_strategy
@tries
@given(queues=QUEUES, rooms=MEMBERS)
def test_every_queue_has_exactly_one_owner(strategy, queues, rooms):
    shares = ALL[strategy](list(queues), rooms)
    assert set(shares) == set(rooms)
    if strategy == "MACHINE_ROOM":
        queues = {queue for queue in queues if BROKER_ROOMS[queue.broker_name] != "room2"}
    assert sorted(queue for share in shares.values() for queue in share) == sorted(queues)


@pytest.mark.parametrize("strategy", ["AVG", "AVG_BY_CIRCLE", "MACHINE_ROOM", "STICKY"])
@tries
@given(queues=QUEUES, rooms=MEMBERS)
def test_shares_differ_by_at_most_one(strategy, queues, rooms):
    sizes = [len(share) for share in ALL[strategy](queues, rooms).values()]
    assert max(sizes) - min(sizes) <= 1


@every_strategy
@tries
@given(queues=QUEUES, rooms=MEMBERS, chance=st.randoms(use_true_random=False))
def test_the_order_of_queues_and_members_does_not_matter(strategy, queues, rooms, chance: random.Random):
    shuffled, names = sorted(queues), sorted(rooms)
    chance.shuffle(shuffled)
    chance.shuffle(names)
    shares = ALL[strategy](shuffled, {name: rooms[name] for name in names})
    assert shares == ALL[strategy](sorted(queues), {name: rooms[name] for name in sorted(rooms)})


@tries
@given(QUEUES, MEMBERS)
def test_averagely_gives_neighbours_and_the_first_members_the_larger_shares(queues, rooms):
    shares = allocate_averagely(list(queues), rooms)
    in_order = [shares[member] for member in sorted(rooms)]
    assert [queue for share in in_order for queue in share] == sorted(queues)
    assert [len(share) for share in in_order] == sorted(map(len, in_order), reverse=True)


@tries
@given(QUEUES, MEMBERS)
def test_nearby_keeps_a_rooms_queues_in_it_and_even_where_it_has_members(queues, rooms):
    shares = allocate_nearby(queues, rooms, BROKER_ROOMS, rooms)
    counts: dict[str, dict[str, int]] = defaultdict(dict)
    for member, share in shares.items():
        for room in set(BROKER_ROOMS.values()):
            counts[room][member] = sum(BROKER_ROOMS[queue.broker_name] == room for queue in share)
    for room, by_member in counts.items():
        inside = [member for member in rooms if rooms[member] == room] or list(rooms)
        assert sum(by_member[member] for member in inside) == sum(by_member.values())
        assert max(by_member[member] for member in inside) - min(by_member[member] for member in inside) <= 1


@tries
@given(QUEUES, MEMBERS, st.data())
def test_consistent_hash_moves_only_the_queues_of_the_member_that_leaves(queues, rooms, data):
    leaver = data.draw(st.sampled_from(sorted(rooms)))
    stayers = sorted(set(rooms) - {leaver})
    if not stayers:
        return
    before, after = allocate_by_consistent_hash(queues, rooms), allocate_by_consistent_hash(queues, stayers)
    for member in stayers:
        assert set(before[member]) <= set(after[member])


@tries
@given(QUEUES, MEMBERS, st.data())
def test_config_gives_no_queue_twice_and_none_to_a_stranger(queues, rooms, data):
    wishes = {member: data.draw(st.sets(st.sampled_from(sorted(queues)))) for member in sorted(rooms)}
    present = data.draw(st.dictionaries(st.sampled_from(sorted(queues)), st.sampled_from([*sorted(rooms), "gone"])))
    shares = allocate_by_config(queues, rooms, wishes, present)
    given_out = [queue for share in shares.values() for queue in share]
    assert sorted(given_out) == sorted(set().union(*wishes.values()))
    assert all(set(share) <= wishes[member] for member, share in shares.items())
    for queue, member in present.items():
        if member in rooms and queue in wishes[member]:
            assert queue in shares[member]
