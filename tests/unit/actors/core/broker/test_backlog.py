"""Tests of the bounds that a broker sends to its store, and of the messages that groups skip if a topic is full."""

from __future__ import annotations

import random

import pytest

from actors.core.broker.backlog import bounded_topics, decide_skip, kept_messages, skip_targets
from actors.core.broker.state import BrokerState
from raymq.common.protocol.bounds import BoundedTopic, TopicBacklog, share_of

BOUND = {"backlog.max.messages": "10", "backlog.policy": "drop", "backlog.groups": "billing"}


def state_with(layout: str = "", **attributes: str) -> BrokerState:
    state = BrokerState()
    changes = [state.decide_topic("orders", 2, 2, layout, attributes or BOUND), state.decide_topic("free", 2, 2)]
    for change in [*changes, *state.decide_group("billing")]:
        assert change is not None
        state.apply(change, 0)
    return state


def test_the_bound_has_the_share_of_the_broker_group_and_the_committed_offsets():
    state = state_with("broker-a:2;broker-b:3")
    state.apply({"kind": "offsets", "group": "billing", "topic": "orders", "offsets": {"1": 7}}, 0)
    [bound] = bounded_topics(state, "broker-a")
    assert bound == BoundedTopic("orders", 2, 4, None, "drop", False, {"billing": {1: 7}})


@pytest.mark.parametrize("limit", [3, 10, 997, 1 << 40])
def test_the_shares_of_all_broker_groups_add_up_to_the_limit(limit):
    queues = {"a": 1, "b": 4, "c": 2}
    shares = [share_of(limit, name, queues) for name in queues]
    assert min(shares) >= 1
    assert sum(shares) == limit or limit < sum(queues.values())


def test_messages_are_dropped_only_above_the_limit_and_with_the_policy_drop():
    bound = BoundedTopic("orders", 1, 16, None, "drop", False, {"billing": {}})
    assert kept_messages(bound, TopicBacklog("orders", "billing", 16, 0, [])) is None
    assert kept_messages(bound, TopicBacklog("orders", "billing", 17, 0, [])) == 14
    assert kept_messages(bound._replace(policy="block"), TopicBacklog("orders", "billing", 99, 0, [])) is None
    in_bytes = bound._replace(max_messages=None, max_bytes=8000)
    assert kept_messages(in_bytes, TopicBacklog("orders", "billing", 100, 10_000, [])) == 70


def test_the_longest_queues_skip_first():
    assert skip_targets({0: 90, 1: 0}, [(0, 100), (50, 80), (0, 0)], 25) == {1: (50, 65)}
    assert skip_targets({}, [(0, 100), (0, 100)], 50) == {0: (0, 75), 1: (0, 75)}
    assert skip_targets({0: 5}, [(0, 10)], 5) == {}


def test_a_skip_keeps_the_newest_messages_and_never_goes_back():
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    for _ in range(500):
        bounds = [(first := chance.randrange(50), first + chance.randrange(200)) for _ in range(chance.randrange(1, 6))]
        committed = {q: chance.randrange(300) for q in range(len(bounds)) if chance.random() < 0.7}
        kept = chance.randrange(1, 200)
        before = {q: max(end - max(committed.get(q, 0), first), 0) for q, (first, end) in enumerate(bounds)}
        targets = skip_targets(committed, bounds, kept)
        after = before | {q: bounds[q][1] - to for q, (_, to) in targets.items()}
        assert all(committed.get(q, 0) <= start < to <= bounds[q][1] for q, (start, to) in targets.items())
        assert sum(after.values()) == min(kept, sum(before.values()))


def test_a_skip_moves_the_committed_offset_and_makes_members_start_again():
    state = state_with()
    change, skipped = decide_skip(state, "billing", "orders", [(0, 10), (0, 2)], 6)
    assert skipped == 6
    state.apply(change, 0)
    assert state.offsets.committed("billing", "orders") == {0: 6}
    assert state.offsets.version("billing", "orders", 0) == 1
    assert decide_skip(state, "billing", "orders", [(0, 10), (0, 2)], 6) == (None, 0)
    assert decide_skip(state, "nobody", "orders", [(0, 10)], 1) == (None, 0)
