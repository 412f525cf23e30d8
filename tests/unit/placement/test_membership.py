"""Tests of the steps by which the replicas of a broker group change."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actors.core.replica.orders import FollowerLag, ReplicaRole, ReplicaState
from placement.membership import ChangeStep, begin_change, cancel_change, change_min_in_sync, describe, next_step
from raymq.common.errors import InvalidArgumentError
from storage.replication.epochs import ReplicaMembers

ONE = ReplicaMembers(0, frozenset({0}))
THREE = ReplicaMembers(0, frozenset({0, 1, 2}))


def stores(*replicas: int) -> dict[int, str]:
    return {replica: f"store-{replica}" for replica in replicas}


def state(replica: int, **changes: object) -> ReplicaState:
    plain = ReplicaState(replica, f"store-{replica}", 1, 0.0, ReplicaRole.SLAVE, 5, 0, 5, 100, 100, None)
    return replace(plain, caught_up=True, **changes)  # type: ignore[arg-type]


def states(*replicas: int) -> dict[int, ReplicaState]:
    return {replica: state(replica) for replica in replicas}


def begin(now: ReplicaMembers, count: int, **options: object) -> ReplicaMembers:
    given = {"in_sync": now.replicas, "master": 0, "required": 1, **options}
    return begin_change("broker-a", now, count, **given)  # type: ignore[arg-type]


def test_new_replicas_join_before_they_count() -> None:
    joining = begin(ONE, 3)
    assert joining == ReplicaMembers(1, frozenset({0, 1, 2}), frozenset({1, 2}), added=frozenset({1, 2}))
    step = next_step(joining, stores(0), 0, states(0, 1, 2), 1)
    assert step.members is None
    assert "replica 1 copies the log of replica 0" in step.waits
    one = next_step(joining, stores(0, 2), 0, states(0, 1, 2), 1).members
    assert one is not None
    assert (one.version, one.joining) == (2, {1})
    both = next_step(one, stores(0, 1, 2), 0, states(0, 1, 2), 1).members
    assert both is not None
    assert (both.version, both.is_changing, both.replicas) == (3, False, {0, 1, 2})


def test_what_a_joining_replica_waits_for_is_said() -> None:
    joining = begin(ONE, 2)
    assert "does not answer yet" in next_step(joining, stores(0), 0, states(0), 1).waits
    failed = {0: state(0), 1: state(1, failed="its disk failed")}
    assert "its disk failed" in next_step(joining, stores(0), 0, failed, 1).waits
    lagging = {0: state(0, lags={1: FollowerLag(4096, 1.0)}), 1: state(1)}
    assert "4,096 bytes" in next_step(joining, stores(0), 0, lagging, 1).waits


def test_a_replica_leaves_the_set_and_then_the_group_and_keeps_its_number() -> None:
    leaving = begin(THREE, 2)
    assert leaving.leaving == {2}
    first = next_step(leaving, stores(0, 1, 2), 0, states(0, 1, 2), 1)
    assert first == ChangeStep(leaving, stores(0, 1))
    step = next_step(leaving, stores(0, 1), 0, states(0, 1, 2), 1)
    assert step == ChangeStep(ReplicaMembers(2, frozenset({0, 1}), removed=frozenset({2})), stores(0, 1))
    assert step.members is not None
    assert begin(step.members, 3).joining == {3}, "the number of a removed replica is used again"


def test_replicas_that_are_not_in_sync_leave_first_and_the_master_last() -> None:
    assert begin(THREE, 2, in_sync={0, 2}, master=2).leaving == {1}
    assert begin(THREE, 2, master=2).leaving == {1}
    assert begin(THREE, 1, master=2).leaving == {0, 1}


def test_a_replica_is_replaced_only_after_the_new_one_counts() -> None:
    now = begin(THREE, 3, replace_one=1)
    assert (now.joining, now.leaving, now.staying) == ({3}, {1}, {0, 2, 3})
    assert next_step(now, stores(0, 1, 2), 0, states(0, 1, 2, 3), 1).members is None
    counted = next_step(now, stores(0, 1, 2, 3), 0, states(0, 1, 2, 3), 1).members
    assert counted is not None
    late = next_step(counted, stores(0, 1, 2), 0, states(0, 1, 2), 1)
    assert (late.members, late.waits) == (None, "replica 1 leaves when replica 3 is in sync again")
    assert next_step(counted, stores(0, 1, 2, 3), 0, states(0, 1, 2, 3), 1) == ChangeStep(counted, stores(0, 2, 3))
    after = next_step(counted, stores(0, 2, 3), 0, states(0, 1, 2, 3), 1)
    assert after.members == ReplicaMembers(3, frozenset({0, 2, 3}), removed=frozenset({1}))


def test_a_master_hands_over_to_a_replica_that_stays_and_has_everything() -> None:
    leaving = begin(THREE, 3, replace_one=0)
    leaving = replace(leaving, joining=frozenset())
    whole = states(0, 1, 2, 3)
    assert next_step(leaving, stores(0, 1, 2, 3), 0, whole, 1).successor == 1
    step = next_step(leaving, stores(0, 1, 2, 3), 0, {**whole, 1: state(1, failed="its disk failed")}, 1)
    assert (step.successor, step.members) == (2, None)
    behind = {0: state(0), 3: replace(state(3), caught_up=False)}
    step = next_step(leaving, stores(0, 3), 0, behind, 1)
    assert (step.successor, step.members) == (None, None)
    assert "no other replica that stays can lead yet" in step.waits
    assert next_step(leaving, stores(1, 2, 3), 1, whole, 1).stores == stores(1, 2, 3)


def test_a_replica_that_answers_repairs_the_masters_log_before_it_leaves() -> None:
    leaving = begin(THREE, 2)
    damaged = {**states(1, 2), 0: state(0, role=ReplicaRole.MASTER, hole_bytes=10, hole_lackers=frozenset({1}))}
    step = next_step(leaving, stores(0, 1, 2), 0, damaged, 1)
    assert step.members is None
    assert "replica 2 leaves when it has repaired the damaged log of replica 0" in step.waits
    lacks = {**damaged, 0: replace(damaged[0], hole_lackers=frozenset({1, 2}))}
    for answering in (
        lacks,
        states(0, 1, 2),
        {0: damaged[0], 1: damaged[1]},
    ):  # the last one: replica 2 does not answer
        assert next_step(leaving, stores(0, 1, 2), 0, answering, 1).stores == stores(0, 1)
        after = next_step(leaving, stores(0, 1), 0, answering, 1).members
        assert after is not None
        assert after.removed == {2}
    assert next_step(leaving, stores(0, 1), 0, damaged, 1).waits == step.waits


def test_enough_replicas_stay_in_sync() -> None:
    leaving = replace(begin(THREE, 2), leaving=frozenset({1}))
    step = next_step(leaving, stores(0, 1), 0, states(0, 1), 2)
    assert step == ChangeStep(waits="replica 1 leaves when 2 other replicas are in sync; in sync without it: 0")
    dead = next_step(leaving, stores(0, 2), 0, states(0, 2), 2)
    assert dead.stores == stores(0, 2), "a replica that is not in sync has no copy that counts"


@pytest.mark.parametrize(
    ("now", "count", "options", "reason"),
    [
        (begin(ONE, 3), 2, {}, "already being changed (replica 1, 2 joins)"),
        (THREE, 1, {"required": 2}, "2 to 9 replicas, not 1: min_in_sync_replicas and in_sync_replicas need 2"),
        (THREE, 10, {}, "1 to 9 replicas, not 10"),
        (THREE, 3, {"replace_one": 7}, "has no replica 7: its replicas are 0, 1, 2"),
    ],
)
def test_a_change_that_is_not_possible_is_refused(now, count, options, reason) -> None:
    with pytest.raises(InvalidArgumentError, match="broker-a") as refused:
        begin(now, count, **options)
    assert reason in str(refused.value)


def test_the_same_number_changes_nothing() -> None:
    assert begin(THREE, 3) is THREE


def test_a_cancelled_change_removes_what_it_added() -> None:
    counted = next_step(begin(THREE, 3, replace_one=1), stores(0, 1, 2, 3), 0, states(0, 1, 2, 3), 1).members
    assert counted is not None
    back = cancel_change("broker-a", counted)
    assert (back.version, back.leaving, back.joining, back.staying) == (3, {3}, set(), {0, 1, 2})
    with pytest.raises(InvalidArgumentError, match="can no longer be cancelled"):
        cancel_change("broker-a", back)
    after = next_step(back, stores(0, 1, 2), 0, states(0, 1, 2, 3), 1).members
    assert after == ReplicaMembers(4, frozenset({0, 1, 2}), removed=frozenset({3}))
    with pytest.raises(InvalidArgumentError, match="not being changed"):
        cancel_change("broker-a", after)


def test_a_change_that_only_removes_is_cancelled_before_the_first_replica_has_left() -> None:
    assert not cancel_change("broker-a", begin(THREE, 2)).is_changing
    first = next_step(begin(THREE, 1), stores(0, 1), 0, states(0, 1, 2), 1).members
    assert first is not None
    with pytest.raises(InvalidArgumentError, match=r"can no longer be cancelled \(replica 1 leaves\)"):
        cancel_change("broker-a", first)


def test_the_minimum_in_sync_is_one_step_and_stays_while_replicas_change() -> None:
    two = change_min_in_sync("broker-a", THREE, 2, present=1, in_sync={0, 1, 2})
    assert two == replace(THREE, version=1, min_in_sync=2)
    assert change_min_in_sync("broker-a", two, 2, present=2, in_sync={0}) is two
    leaving = begin(two, 2)
    last = next_step(leaving, stores(0, 1), 0, states(0, 1, 2), 2).members
    assert last is not None
    assert (leaving.min_in_sync, last.min_in_sync, begin(last, 3).min_in_sync) == (2, 2, 2)
    assert ReplicaMembers.from_plain(two.to_plain()) == two
    old = {name: value for name, value in THREE.to_plain().items() if name != "min_in_sync"}
    assert ReplicaMembers.from_plain(old) == THREE


def test_a_minimum_with_which_messages_would_be_refused_is_refused_but_a_lower_one_is_not() -> None:
    with pytest.raises(InvalidArgumentError, match="only replica 0, 2 is in sync"):
        change_min_in_sync("broker-a", THREE, 3, present=1, in_sync={0, 2})
    assert change_min_in_sync("broker-a", THREE, 2, present=3, in_sync={0}).min_in_sync == 2
    with pytest.raises(InvalidArgumentError, match="already being changed"):
        change_min_in_sync("broker-a", begin(THREE, 2), 1, present=1, in_sync={0, 1, 2})


def test_a_change_is_described_and_survives_as_plain_values() -> None:
    now = begin(THREE, 3, replace_one=1)
    assert describe(now) == "replica 3 joins, replica 1 leaves"
    assert describe(THREE) == ""
    assert ReplicaMembers.from_plain(now.to_plain()) == now
