"""Grants, hand-over, expiry and restart of one consumer group."""

from __future__ import annotations

import pytest

from actors.core.rebalance_group import RebalanceGroup
from raymq.membership import GroupHeartbeat
from raymq.message import MessageQueue

QUEUES = frozenset(MessageQueue("orders", "broker-a", number) for number in range(4))


@pytest.fixture
def group():
    core = RebalanceGroup(0.0, session_timeout_s=15.0, grace_s=0.0)
    core.set_queues("orders", QUEUES)
    return core


def beat(group, member, now_s, holding=frozenset(), *, leaving=False, topics=frozenset({"orders"}), sequence=0):
    return group.heartbeat(GroupHeartbeat(member, topics, frozenset(holding), leaving, sequence), now_s).queues


def ids(queues) -> list[int]:
    return sorted(queue.queue_id for queue in queues)


def test_a_lone_member_gets_everything(group):
    assert beat(group, "a", 0.0) == QUEUES


def test_a_new_member_waits_until_the_old_one_has_let_go(group):
    held = beat(group, "a", 0.0)
    assert beat(group, "b", 1.0) == frozenset()
    assert ids(beat(group, "a", 1.5, held)) == [0, 1]
    assert beat(group, "b", 2.0) == frozenset()  # not yet let go
    assert ids(beat(group, "a", 2.5, {queue for queue in held if queue.queue_id < 2})) == [0, 1]
    assert ids(beat(group, "b", 3.0)) == [2, 3]


def test_a_member_that_leaves_frees_its_queues_at_once(group):
    beat(group, "a", 0.0)
    assert beat(group, "a", 1.0, leaving=True) == frozenset()
    assert beat(group, "b", 1.0) == QUEUES
    assert group.members == ("b",)


def test_a_silent_member_keeps_its_queues_until_its_session_ends(group):
    beat(group, "a", 0.0)
    assert beat(group, "b", 15.0) == frozenset()
    assert beat(group, "b", 15.1) == QUEUES


def test_a_member_that_comes_back_too_late_does_not_get_what_others_hold(group):
    held = beat(group, "a", 0.0)
    assert beat(group, "b", 16.0) == QUEUES
    assert beat(group, "a", 17.0, held) == frozenset()
    assert set(group.holders().values()) == {"b"}


def test_a_grant_whose_answer_was_lost_is_given_again(group):
    beat(group, "a", 0.0)
    assert beat(group, "a", 1.0) == QUEUES


def test_a_heartbeat_that_was_overtaken_by_a_newer_one_frees_nothing(group):
    """It was sent before the member was granted its queues, so it does not name them."""
    held = beat(group, "a", 0.0, sequence=2)
    beat(group, "a", 1.0, held, sequence=3)
    beat(group, "b", 1.0)
    assert beat(group, "a", 1.5, sequence=1) == frozenset()
    assert beat(group, "b", 2.0) == frozenset()


def test_a_member_that_was_restarted_under_its_name_starts_with_what_it_holds_now(group):
    beat(group, "pull-g-0", 0.0, sequence=100)
    beat(group, "b", 0.5)
    assert ids(beat(group, "pull-g-0", 1.0, sequence=900)) == [2, 3]
    assert ids(beat(group, "b", 1.5)) == [0, 1]


def test_a_restarted_core_grants_nothing_that_may_be_held_until_the_grace_is_over():
    group = RebalanceGroup(100.0, session_timeout_s=15.0, grace_s=15.0)
    group.set_queues("orders", QUEUES)
    held = {queue for queue in QUEUES if queue.queue_id >= 2}
    assert beat(group, "a", 101.0) == frozenset()
    assert ids(beat(group, "b", 102.0, held)) == [2, 3]  # it goes on with its own
    assert beat(group, "a", 114.9) == frozenset()
    assert ids(beat(group, "a", 115.0)) == [0, 1]


def test_members_share_only_the_topics_they_subscribe_to(group):
    other = MessageQueue("other", "broker-a", 0)
    group.set_queues("other", [other])
    assert beat(group, "a", 0.0) == QUEUES
    assert beat(group, "b", 0.0, topics=frozenset({"other"})) == {other}
    assert group.topics == {"orders", "other"}


def test_a_member_that_gives_up_a_topic_loses_its_queues(group):
    held = beat(group, "a", 0.0)
    assert beat(group, "a", 1.0, held, topics=frozenset({"other"})) == frozenset()


def test_queues_that_are_added_to_a_topic_are_granted(group):
    held = beat(group, "a", 0.0)
    more = QUEUES | {MessageQueue("orders", "broker-b", 0)}
    group.set_queues("orders", more)
    assert beat(group, "a", 1.0, held) == more


def test_the_generation_grows_only_when_the_target_changes(group):
    beat(group, "a", 0.0)
    generation = group.generation
    beat(group, "a", 1.0, QUEUES)
    group.set_queues("orders", sorted(QUEUES, reverse=True))
    assert group.generation == generation
    beat(group, "b", 2.0)
    assert group.generation == generation + 1


def test_members_that_are_expired_are_named(group):
    beat(group, "a", 0.0)
    beat(group, "b", 10.0)
    assert group.expire(15.5) == ["a"]
    assert group.expire(15.5) == []
