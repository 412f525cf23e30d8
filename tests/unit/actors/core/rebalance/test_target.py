"""Tests of the assignment strategies applied to a whole group: the strategy that is in effect, the queues that are
excluded, and the assignment that a topic keeps if its strategy refuses."""

from __future__ import annotations

import pytest

from actors.core.rebalance.target import GroupMembership, MemberRequest, disagreements, make_target
from raymq.common.message import MessageQueue
from raymq.common.protocol.membership import AllocateStrategy, Allocation

ORDERS = tuple(MessageQueue("orders", f"room1@broker-{name}", number) for name in "ab" for number in range(2))
AUDIT = (MessageQueue("audit", "room1@broker-a", 0),)
BOTH = frozenset({"orders", "audit"})
ROOMS = {"room1@broker-a": "A", "room1@broker-b": "B"}


def view(requests, *, queues=None, holders=None, target=None) -> GroupMembership:
    queues = {"orders": ORDERS, "audit": AUDIT} if queues is None else queues
    return GroupMembership(requests, queues, ROOMS, holders or {}, target or {})


def alike(strategy: AllocateStrategy, **fields) -> dict[str, MemberRequest]:
    allocation = Allocation(strategy, **fields)
    return {"a": MemberRequest(BOTH, allocation, "A"), "b": MemberRequest(frozenset({"orders"}), allocation, "B")}


@pytest.mark.parametrize(
    ("strategy", "of_a"),
    [
        (AllocateStrategy.AVG, [0, 1]),
        (AllocateStrategy.AVG_BY_CIRCLE, [0, 2]),
        (AllocateStrategy.MACHINE_ROOM, [0, 1]),
        (AllocateStrategy.MACHINE_ROOM_NEARBY, [0, 1]),
        (AllocateStrategy.STICKY, [0, 1]),
    ],
)
def test_each_strategy_shares_every_topic_among_its_subscribers(strategy, of_a):
    target, failures = make_target(view(alike(strategy, machine_rooms=frozenset({"room1"}))))
    assert failures == {}
    assert set(target) == {*ORDERS, *AUDIT}
    assert [number for number, queue in enumerate(ORDERS) if target[queue] == "a"] == of_a
    assert target[AUDIT[0]] == "a"


def test_consistent_hash_shares_every_topic():
    target, _ = make_target(view(alike(AllocateStrategy.CONSISTENT_HASH)))
    assert set(target) == {*ORDERS, *AUDIT}


def test_config_leaves_the_queues_that_nobody_is_configured_for():
    target, _ = make_target(view(alike(AllocateStrategy.CONFIG, queues=frozenset({ORDERS[1]}))))
    assert target == {ORDERS[1]: "a"}


def test_a_refusal_leaves_its_topic_and_only_that_as_it_was():
    requests = {"a": MemberRequest(BOTH, Allocation(AllocateStrategy.MACHINE_ROOM_NEARBY), "A")}
    roomless = (MessageQueue("audit", "broker-c", 0),)
    target, failures = make_target(view(requests, queues={"orders": ORDERS, "audit": roomless}, target={AUDIT[0]: "x"}))
    assert target == {**dict.fromkeys(ORDERS, "a"), AUDIT[0]: "x"}
    assert list(failures) == ["audit"]
    assert "broker-c" in failures["audit"]


def test_a_topic_without_a_route_keeps_its_plan_and_one_without_queues_is_given_up():
    before = {AUDIT[0]: "a", **dict.fromkeys(ORDERS, "a")}
    target, failures = make_target(view(alike(AllocateStrategy.AVG), queues={"orders": ()}, target=before))
    assert target == {AUDIT[0]: "a"}
    assert failures == {}


def test_nobody_gets_nothing():
    assert make_target(view({}, target={AUDIT[0]: "a"})) == ({}, {})
    assert disagreements(view({})) == []


def test_members_with_the_same_strategy_have_no_disagreements():
    assert disagreements(view(alike(AllocateStrategy.STICKY))) == []


def test_a_member_that_asks_for_other_machine_rooms_is_named():
    requests = {
        "b": MemberRequest(BOTH, Allocation(AllocateStrategy.MACHINE_ROOM, machine_rooms=frozenset({"room1"}))),
        "a": MemberRequest(BOTH, Allocation(AllocateStrategy.MACHINE_ROOM, machine_rooms=frozenset({"room2"}))),
    }
    said = disagreements(view(requests))
    assert said == [
        "member a requests machine rooms ['room2']; the group uses ['room1'], because member b joined first"
    ]


def test_a_queue_that_is_configured_twice_goes_to_its_holder_and_is_named():
    requests = alike(AllocateStrategy.CONFIG, queues=frozenset({ORDERS[0]}))
    target, _ = make_target(view(requests, holders={ORDERS[0]: "b"}))
    assert target == {ORDERS[0]: "b"}
    said = disagreements(view(requests, target=target))
    assert said == [f"queue {ORDERS[0]} is configured for several members (a, b); the queue goes to b"]


def test_a_queue_that_is_configured_but_not_there_is_named():
    nowhere = MessageQueue("orders", "broker-z", 0)
    requests = {"a": MemberRequest(BOTH, Allocation(AllocateStrategy.CONFIG, queues=frozenset({nowhere})))}
    said = disagreements(view(requests))
    assert said == [f"queue {nowhere} is configured for member a, which does not subscribe to its topic"]
