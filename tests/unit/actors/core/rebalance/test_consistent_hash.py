"""Tests of the strategy CONSISTENT_HASH: the golden facts of spec/messaging.md about this strategy, including the
positions on the hash ring."""

from __future__ import annotations

import pytest

from actors.core.rebalance.allocation import allocate_by_consistent_hash, queue_key, ring_position
from raymq.common.errors import InvalidArgumentError
from raymq.common.message import MessageQueue


def shares(topic: str, broker_name: str, count: int, members: list[str]) -> dict[str, set[int]]:
    queues = [MessageQueue(topic, broker_name, number) for number in range(count)]
    allocated = allocate_by_consistent_hash(queues, members)
    return {member: {queue.queue_id for queue in share} for member, share in allocated.items()}


def test_golden_fact_8():
    members = [f"CID_PREFIX{number}" for number in range(4)]
    before = shares("topic", "brokerName", 10, members)
    assert list(before.values()) == [{1, 6, 7, 8, 9}, {0, 3}, {2, 5}, {4}]
    assert list(shares("topic", "brokerName", 10, members[:3]).values()) == [{1, 6, 7, 8, 9}, {0, 3, 4}, {2, 5}]


def test_golden_fact_9():
    assert list(shares("TopicTest", "broker-a", 8, ["c0", "c1", "c2"]).values()) == [{1}, {0, 3, 4, 5, 7}, {2, 6}]
    assert ring_position("c0-0") == 2316876094
    assert ring_position(queue_key(MessageQueue("TopicTest", "broker-a", 0))) == 1987926524


def test_a_queue_past_the_last_place_belongs_to_the_first():
    """A queue after the last member on the hash ring belongs to the first member. Here the only member is before the
    queue on the ring, so the search wraps around."""
    queue = MessageQueue("t", "b", 0)
    low = next(name for name in (f"c{number}" for number in range(99)) if ring_position(f"{name}-0") < 1 << 28)
    assert ring_position(queue_key(queue)) > 1 << 28
    assert allocate_by_consistent_hash([queue], [low], virtual_nodes=1) == {low: [queue]}


def test_a_ring_without_places_is_refused():
    with pytest.raises(InvalidArgumentError, match="virtual_nodes"):
        allocate_by_consistent_hash([MessageQueue("t", "b", 0)], ["c"], virtual_nodes=0)
