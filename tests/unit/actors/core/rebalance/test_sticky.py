"""Tests of the strategy STICKY with examples. tests/property/test_sticky.py tests its general properties."""

from __future__ import annotations

from actors.core.rebalance.sticky import allocate_sticky
from raymq.common.message import MessageQueue


def topic(name: str, count: int) -> list[MessageQueue]:
    return [MessageQueue(name, "broker-a", number) for number in range(count)]


def owners(shares: dict[str, list[MessageQueue]]) -> dict[MessageQueue, str]:
    return {queue: member for member, share in shares.items() for queue in share}


def test_a_fourth_member_takes_only_its_own_share_from_the_others():
    queues = {"orders": topic("orders", 12)}
    three = owners(allocate_sticky(queues, {"orders": ["a", "b", "c"]}, {}, {}))
    four = owners(allocate_sticky(queues, {"orders": ["a", "b", "c", "d"]}, three, three))
    assert {four[queue] for queue in queues["orders"] if four[queue] != three[queue]} == {"d"}
    assert sum(four[queue] != three[queue] for queue in four) == 3


def test_the_queues_of_one_that_leaves_are_all_that_moves():
    queues = {"orders": topic("orders", 9)}
    before = owners(allocate_sticky(queues, {"orders": ["a", "b", "c"]}, {}, {}))
    left = {queue: member for queue, member in before.items() if member != "b"}
    after = owners(allocate_sticky(queues, {"orders": ["a", "c"]}, left, before))
    assert all(after[queue] == member for queue, member in left.items())


def test_the_larger_shares_of_several_topics_go_to_different_members():
    """If several topics cannot be divided evenly, the strategy STICKY assigns the larger share of each topic to a
    different member. The strategy AVG would assign the larger shares of both topics to member `a`."""
    queues = {"audit": topic("audit", 1), "orders": topic("orders", 3)}
    shares = allocate_sticky(queues, {"audit": ["a", "b"], "orders": ["a", "b"]}, {}, {})
    assert [len(share) for share in shares.values()] == [2, 2]


def test_members_of_one_topic_more_get_less_of_the_other_where_it_has_queues_over():
    queues = {"audit": topic("audit", 3), "orders": topic("orders", 3)}
    shares = allocate_sticky(queues, {"audit": ["a"], "orders": ["a", "b"]}, {}, {})
    assert [len(share) for share in shares.values()] == [4, 2]


def test_even_totals_come_before_staying():
    queues = {"audit": topic("audit", 3), "orders": topic("orders", 3)}
    present = dict.fromkeys(queues["audit"][:2] + queues["orders"][:2], "a")
    present |= dict.fromkeys([queues["audit"][2], queues["orders"][2]], "b")
    subscribers = {"audit": ["a", "b"], "orders": ["a", "b"]}
    after = owners(allocate_sticky(queues, subscribers, present, present))
    assert sum(after[queue] != member for queue, member in present.items()) == 1


def test_a_hand_over_that_is_under_way_is_not_overturned():
    """A new assignment plan does not undo an unfinished move of a queue. The previous plan assigned queue 2 to member
    `c`, but member `a` still holds it: the new plan also assigns it to `c`."""
    queues = {"orders": topic("orders", 4)}
    present = dict.fromkeys(queues["orders"], "a")
    planned = {queue: "c" if queue.queue_id == 2 else "b" if queue.queue_id == 0 else "a" for queue in queues["orders"]}
    after = owners(allocate_sticky(queues, {"orders": ["a", "b", "c"]}, present, planned))
    assert after == planned
