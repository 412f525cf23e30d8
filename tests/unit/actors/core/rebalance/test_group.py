"""Tests of one consumer group's rebalance: granted queues, queues that move between members, expired members, restarts
and the group's description."""

from __future__ import annotations

from dataclasses import replace
from itertools import count, product

import pytest

from actors.core.rebalance.group import (
    HEARTBEAT_STEPS,
    RETARGET_INTERVAL_S,
    HeartbeatKind,
    HeartbeatSender,
    HeartbeatStep,
    RebalanceGroup,
)
from raymq.common.message import MessageQueue
from raymq.common.protocol.membership import AllocateStrategy, Allocation, GroupHeartbeat, GroupRefusal

QUEUES = frozenset(MessageQueue("orders", "broker-a", number) for number in range(4))


FIRST_VERSION = 1000
SEQUENCES = count(1)
SESSIONS: dict[tuple[RebalanceGroup, str, int], int] = {}
ORDERS = frozenset({"orders"})
STICKY = Allocation(AllocateStrategy.STICKY)
NEARBY = Allocation(AllocateStrategy.MACHINE_ROOM_NEARBY)


def new_group(started_s: float = 0.0, *, grace: bool = False) -> RebalanceGroup:
    core = RebalanceGroup(started_s, session_timeout_s=15.0, grace=grace, first_version=FIRST_VERSION)
    core.set_queues("orders", QUEUES)
    return core


@pytest.fixture
def group():
    return new_group()


def answer(group, member, now_s, holding=frozenset(), *, topics=ORDERS, process=1, sequence=None, **fields):
    """Send a member's heartbeat as RebalanceClient does, and send it again if the group returns another session.

    `process`: number of the process incarnation that uses the member's name.
    """
    sequence = next(SEQUENCES) if sequence is None else sequence
    session = SESSIONS.get((group, member, process), 0)
    heartbeat = GroupHeartbeat(member, topics, frozenset(holding), session=session, sequence=sequence, **fields)
    assignment = group.heartbeat(heartbeat, now_s)
    if isinstance(assignment, GroupRefusal):
        return assignment
    if assignment.session != session and not heartbeat.leaving:
        SESSIONS[group, member, process] = assignment.session
        assignment = group.heartbeat(replace(heartbeat, session=assignment.session), now_s)
    return assignment


def beat(group, member, now_s, holding=frozenset(), **fields):
    return answer(group, member, now_s, holding, **fields).queues


def ids(queues) -> list[int]:
    return sorted(queue.queue_id for queue in queues)


def test_a_lone_member_gets_everything(group):
    assert beat(group, "a", 0.0) == QUEUES


def test_a_new_member_waits_until_the_old_one_has_let_go(group):
    held = beat(group, "a", 0.0)
    assert beat(group, "b", 1.0) == frozenset()
    assert ids(beat(group, "a", 1.5, held)) == [0, 1]
    # member b gets no queues, because member a has not released its queues yet
    assert beat(group, "b", 2.0) == frozenset()
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


def test_a_member_that_returns_late_does_not_get_queues_of_others(group):
    held = beat(group, "a", 0.0)
    assert beat(group, "b", 16.0) == QUEUES
    assert beat(group, "a", 17.0, held) == frozenset()
    assert set(group.holders().values()) == {"b"}


def test_a_grant_whose_answer_was_lost_is_given_again(group):
    beat(group, "a", 0.0)
    assert beat(group, "a", 1.0) == QUEUES


def test_a_heartbeat_that_was_overtaken_by_a_newer_one_frees_nothing(group):
    """A late heartbeat takes no queues from its member. The heartbeat does not name the member's queues, because the
    member sent it before the queues were granted."""
    held = beat(group, "a", 0.0, sequence=2)
    beat(group, "a", 1.0, held, sequence=3)
    beat(group, "b", 1.0)
    assert beat(group, "a", 1.5, sequence=1) == frozenset()
    assert beat(group, "b", 2.0) == frozenset()


def test_a_heartbeat_that_arrives_twice_frees_nothing(group):
    """If the same heartbeat arrives twice, the member keeps the queues that the group granted in its first answer. The
    heartbeat does not list them as held, because the member sent it before that answer."""
    assert beat(group, "a", 0.0, sequence=2) == QUEUES
    beat(group, "b", 1.0)
    assert ids(beat(group, "a", 1.5, sequence=2)) == [0, 1]
    assert beat(group, "b", 2.0) == frozenset()


def test_a_new_process_of_a_member_starts_without_the_old_queues(group):
    beat(group, "pull-g-0", 0.0)
    beat(group, "b", 0.5)
    assert ids(beat(group, "pull-g-0", 1.0, process=2)) == [2, 3]
    assert ids(beat(group, "b", 1.5)) == [0, 1]


def test_late_heartbeats_of_a_dead_process_do_not_count_for_its_successor(group):
    beat(group, "pull-g-0", 0.0, process=1)
    held = beat(group, "pull-g-0", 1.0, process=2)
    late = GroupHeartbeat("pull-g-0", ORDERS, frozenset(), leaving=True, session=SESSIONS[group, "pull-g-0", 1])
    for heartbeat in (late, replace(late, leaving=False), replace(late, session=0, leaving=False)):
        assert group.heartbeat(heartbeat, 1.5).queues == frozenset()
        assert set(group.holders().values()) == {"pull-g-0"}
    assert beat(group, "pull-g-0", 2.0, held, process=2) == QUEUES


def test_an_invitation_that_nobody_takes_up_is_forgotten(group):
    hello = GroupHeartbeat("a", ORDERS, frozenset())
    session = group.heartbeat(hello, 0.0).session
    assert group.members == ()
    assert group.heartbeat(replace(hello, session=session), 15.5).session != session
    assert group.members == ()


def test_a_restarted_core_grants_nothing_that_may_be_held_until_the_grace_is_over():
    group = new_group(100.0, grace=True)
    held = {queue for queue in QUEUES if queue.queue_id >= 2}
    assert beat(group, "a", 101.0) == frozenset()
    assert ids(beat(group, "b", 102.0, held)) == [2, 3]  # member b keeps the queues that it already held
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


def test_a_newer_generation_of_a_member_makes_the_instance_wait(group):
    assert beat(group, "a", 0.5, generation=FIRST_VERSION - 7) == frozenset()
    assert beat(group, "a", 14.9) == frozenset()
    assert beat(group, "a", 15.0) == QUEUES


def test_a_member_with_this_generation_does_not_delay_the_first_grant(group):
    told = answer(group, "a", 0.5)
    assert beat(group, "a", 1.0, generation=told.generation) == QUEUES


def test_a_generation_from_a_clock_that_was_ahead_is_outgrown(group):
    assert answer(group, "a", 0.5, generation=FIRST_VERSION + 5000).generation > FIRST_VERSION + 5000


def test_a_reset_shows_in_the_offsets_version_and_not_in_the_generation(group):
    before = answer(group, "a", 0.0)
    assert group.offsets_reset() == before.offsets_version + 1
    after = answer(group, "a", 1.0, QUEUES)
    assert (after.generation, after.offsets_version) == (before.generation, before.offsets_version + 1)


def test_the_first_member_decides_the_strategy_and_others_are_reported(group):
    held = beat(group, "b", 0.0, allocation=STICKY)
    beat(group, "a", 1.0)
    text = group.describe(1.0)
    assert text["strategy"] == "STICKY"
    assert text["disagreements"] == ["member a requests AVG; the group uses STICKY, because member b joined first"]
    # STICKY lets member b keep queues 0 and 1; AVG would assign queues 2 and 3 to b
    assert ids(beat(group, "b", 2.0, held, allocation=STICKY)) == [0, 1]


def test_a_member_that_changes_its_strategy_keeps_its_place_in_the_order(group):
    beat(group, "b", 0.0)
    beat(group, "a", 1.0)
    beat(group, "b", 2.0, allocation=STICKY)
    assert group.describe(2.0)["strategy"] == "STICKY"


def test_a_strategy_that_fails_keeps_the_assignment_and_reports_the_reason(group):
    group.set_queues("orders", QUEUES, {"broker-a": "node-1"})
    held = beat(group, "a", 0.0, allocation=NEARBY, node="node-1")
    assert held == QUEUES
    beat(group, "b", 1.0, allocation=NEARBY)  # member b is in no machine room, because its heartbeat contains no node
    assert beat(group, "a", 2.0, held, allocation=NEARBY, node="node-1") == QUEUES
    assert "member b has no machine room" in group.describe(2.0)["failures"]["orders"]
    beat(group, "b", 3.0, allocation=NEARBY, node="node-1")
    assert group.describe(3.0)["failures"] == {}
    assert ids(beat(group, "a", 4.0, held, allocation=NEARBY, node="node-1")) == [0, 1]


def test_a_topic_that_was_given_up_is_not_granted_even_where_the_strategy_refuses(group):
    group.set_queues("orders", QUEUES, {"broker-a": "node-1"})
    held = beat(group, "a", 0.0, allocation=NEARBY, node="node-1")
    beat(group, "b", 1.0, allocation=NEARBY)
    other = frozenset({"other"})
    assert beat(group, "a", 2.0, held, allocation=NEARBY, node="node-1", topics=other) == frozenset()


def test_a_broker_that_moves_to_another_room_takes_its_queues_along(group):
    group.set_queues("orders", QUEUES, {"broker-a": "node-1"})
    held = beat(group, "a", 0.0, allocation=NEARBY, node="node-1")
    beat(group, "b", 0.5, allocation=NEARBY, node="node-2")
    assert beat(group, "a", 1.0, held, allocation=NEARBY, node="node-1") == QUEUES
    group.set_queues("orders", QUEUES, {"broker-a": "node-2"})
    assert beat(group, "a", 1.5, held, allocation=NEARBY, node="node-1") == frozenset()


def test_a_topic_that_has_no_queues_any_more_is_given_up(group):
    held = beat(group, "a", 0.0)
    group.set_queues("orders", ())
    assert beat(group, "a", 1.0, held) == frozenset()


def test_the_target_is_recomputed_regularly(group, monkeypatch):
    made = []
    monkeypatch.setattr(group, "_retarget", lambda: made.append(1))
    beat(group, "a", 0.0)
    for second in range(1, 60):
        beat(group, "a", float(second))
    assert len(made) == 1 + 59 // RETARGET_INTERVAL_S


def test_the_description_has_the_held_and_awaited_queues_of_members(group):
    held = beat(group, "a", 0.0, node="node-1")
    beat(group, "b", 1.0)
    beat(group, "a", 2.0, held, node="node-1")
    text = group.describe(3.0)
    assert text["unassigned"] == []
    assert text["members"] == [
        {
            "member": "a",
            "topics": ["orders"],
            "expressions": {"orders": "*"},
            "room": "node-1",
            "strategy": "AVG",
            "queues": [f"orders@broker-a:{number}" for number in range(4)],
            "waits_for": [],
            "last_heartbeat_age_s": 1.0,
        },
        {
            "member": "b",
            "topics": ["orders"],
            "expressions": {"orders": "*"},
            "room": "",
            "strategy": "AVG",
            "queues": [],
            "waits_for": ["orders@broker-a:2", "orders@broker-a:3"],
            "last_heartbeat_age_s": 2.0,
        },
    ]


def heartbeat_of(group: RebalanceGroup, sender: HeartbeatSender, kind: HeartbeatKind) -> GroupHeartbeat:
    """Make `a` a member that has been assigned four queues and reports none of them as held. Returns a heartbeat of the
    given sender and kind, to send next."""
    asked = GroupHeartbeat("a", ORDERS, frozenset(), session=0, sequence=1)
    joined = replace(asked, session=group.heartbeat(asked, 0.0).session, sequence=10)
    assert group.heartbeat(joined, 0.0).queues == QUEUES
    sessions = {
        HeartbeatSender.STRANGER: lambda: 0,
        HeartbeatSender.INVITED: lambda: group.heartbeat(asked, 0.0).session,
        HeartbeatSender.MEMBER: lambda: joined.session,
    }
    sequence = {HeartbeatKind.REPEATED: 10, HeartbeatKind.LATE: 9}.get(kind, 11)
    return replace(joined, session=sessions[sender](), sequence=sequence, leaving=kind is HeartbeatKind.LEAVING)


@pytest.mark.parametrize(("sender", "kind"), list(product(HeartbeatSender, HeartbeatKind)))
def test_every_heartbeat_has_its_step(group, sender, kind):
    heartbeat = heartbeat_of(group, sender, kind)
    members, holders = group.members, group.holders()
    step = HEARTBEAT_STEPS[sender].get(kind)
    if step is None:
        # A process that is not a member yet may start with any sequence number. So there is no earlier heartbeat of a
        # member with which its heartbeats are compared, and none counts as late or repeated.
        assert sender is not HeartbeatSender.MEMBER
        step = HEARTBEAT_STEPS[sender][HeartbeatKind.NEXT]
    assignment = group.heartbeat(heartbeat, 1.0)
    if step in (HeartbeatStep.ACCEPT, HeartbeatStep.REPEAT):
        assert assignment.queues == QUEUES
    else:
        assert assignment.queues == frozenset()
    assert (assignment.session != heartbeat.session) == (step is HeartbeatStep.INVITE)
    assert group.members == (() if step is HeartbeatStep.REMOVE else members)
    assert group.holders() == ({} if step is HeartbeatStep.REMOVE else holders)


@pytest.mark.parametrize(("kind", "freed"), [(HeartbeatKind.NEXT, True), (HeartbeatKind.REPEATED, False)])
def test_only_a_new_heartbeat_frees_queues_that_its_sender_does_not_hold(group, kind, freed):
    heartbeat = heartbeat_of(group, HeartbeatSender.MEMBER, kind)
    group.set_queues("orders", ())
    group.heartbeat(heartbeat, 1.0)
    assert (group.holders() == {}) == freed


PAID = {"orders": "paid"}
CHEAP = {"orders": "SQL92: price < 5"}


@pytest.mark.parametrize(("first", "second"), [(PAID, CHEAP), (CHEAP, {}), ({}, PAID)])
def test_a_newcomer_that_wants_other_messages_is_refused_with_both_expressions(group, first, second):
    held = beat(group, "a", 0.0, expressions=first)
    refusal = answer(group, "b", 1.0, expressions=second)
    assert refusal == GroupRefusal("orders", second.get("orders", "*"), "a", first.get("orders", "*"))
    assert group.members == ("a",)
    assert beat(group, "a", 2.0, held, expressions=first) == QUEUES


def test_members_that_want_the_same_share_the_queues_and_other_topics_do_not_count(group):
    beat(group, "a", 0.0, topics=frozenset({"orders", "rain"}), expressions={**CHEAP, "rain": "x"})
    beat(group, "b", 1.0, topics=frozenset({"orders", "snow"}), expressions={**CHEAP, "snow": "y"})
    assert group.members == ("a", "b")


def test_an_expression_changes_once_all_others_have_left(group):
    beat(group, "a", 0.0, expressions=PAID)
    beat(group, "b", 0.0, expressions=PAID)
    assert isinstance(answer(group, "b", 1.0, expressions=CHEAP), GroupRefusal)
    assert group.members == ("a", "b")  # member b is still in the group, but its refused heartbeat has no effect
    answer(group, "a", 2.0, leaving=True)
    assert beat(group, "b", 3.0, expressions=CHEAP) == QUEUES
    assert isinstance(answer(group, "c", 3.0, expressions=PAID), GroupRefusal)


def test_a_silent_member_keeps_others_away_until_it_counts_as_dead(group):
    beat(group, "a", 0.0, expressions=PAID)
    assert isinstance(answer(group, "b", 15.0, expressions=CHEAP), GroupRefusal)
    assert beat(group, "b", 15.1, expressions=CHEAP) == QUEUES


def test_a_process_that_takes_over_a_members_name_may_want_other_messages(group):
    beat(group, "a", 0.0, expressions=PAID)
    assert beat(group, "a", 1.0, expressions=CHEAP, process=2) == QUEUES
