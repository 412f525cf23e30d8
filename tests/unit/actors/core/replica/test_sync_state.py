"""Tests of the confirm offset and the sync-state set, as a master computes them."""

from __future__ import annotations

import random

import pytest

from actors.core.replica.orders import FollowerLag
from actors.core.replica.sync_state import JOIN_MAX_S, MasterSyncState
from storage.replication.epochs import SyncStateSet


def of(version: int, *members: int) -> SyncStateSet:
    return SyncStateSet(7, version, {member: f"store-{member}" for member in members})


@pytest.fixture
def master():
    return MasterSyncState(0, of(1, 0), 100, 0.0, not_catchup_s=15.0)


def asks(master: MasterSyncState, follower: int, offset: int, now_s: float, **more: bool) -> None:
    master.asked(follower, f"store-{follower}", offset, now_s, **more)


def test_alone_everything_flushed_is_confirmed(master):
    master.flushed(250, 1.0)
    assert master.confirm_offset == 250
    assert master.copies(250) == 1


def test_a_follower_that_has_everything_is_asked_for_and_counts_from_then_on(master):
    asks(master, 1, 100, 1.0)
    asked = master.propose(1.0)
    assert asked is not None
    assert asked.stores == {0: "store-0", 1: "store-1"}
    master.flushed(200, 1.0)
    # The master already waits for replica 1, although the Controller has not yet confirmed it as a member of the
    # sync-state set.
    assert master.confirm_offset == 100
    asks(master, 1, 180, 1.1)
    assert master.confirm_offset == 180


def test_bytes_that_the_masters_disk_lacks_are_not_confirmed(master):
    asks(master, 1, 100, 1.0)
    master.propose(1.0)
    master.decided(of(2, 0, 1))
    asks(master, 1, 180, 1.1)
    assert master.confirm_offset == 100
    assert master.copies(180) == 1
    assert master.lags(1.1)[1] == FollowerLag(0, 0.0)
    master.flushed(150, 1.2)
    assert master.confirm_offset == 150
    master.flushed(200, 1.3)
    assert (master.confirm_offset, master.copies(180)) == (180, 2)


def test_a_follower_below_the_confirm_offset_is_not_proposed(master):
    master.flushed(200, 1.0)
    asks(master, 1, 150, 1.0)
    assert master.propose(1.0) is None


def test_a_follower_with_a_small_lag_joins_the_set_under_constant_load(master):
    for step in range(4):  # the log grows before each of the slave's requests for a chunk
        master.flushed(200 + 100 * step, 1.0 + step / 100)
        asks(master, 1, 100 + 100 * step, 1.0 + step / 100)
    asked = master.propose(1.3)
    assert asked is not None
    assert asked.members == {0, 1}
    assert master.confirm_offset <= 400  # the slave has the log up to offset 400


def test_a_follower_that_stands_still_before_it_is_asked_for_holds_nobody_up_for_long(master):
    master.flushed(200, 1.0)
    asks(master, 1, 100, 1.0)
    master.flushed(300, 1.0)
    asks(master, 1, 200, 1.0)
    master.flushed(400, 1.0)
    assert master.propose(1.1) is None
    assert master.confirm_offset == 300
    assert master.propose(1.0 + JOIN_MAX_S + 0.1) is None
    assert master.confirm_offset == 400


def test_a_learner_is_never_asked_for(master):
    asks(master, 1, 100, 1.0, learner=True)
    assert master.propose(1.0) is None


def test_the_answer_ends_the_question_only_when_it_is_newer(master):
    asks(master, 1, 100, 1.0)
    master.propose(1.0)
    # the Controller's answer renews the lease, but it still contains the sync-state set from before the proposal
    master.decided(of(1, 0))
    assert master.counted == {0, 1}
    master.decided(of(2, 0, 1))
    assert master.sync_state_set.members == {0, 1}
    assert master.propose(1.0) is None


def test_a_member_that_does_not_keep_up_is_dropped_when_the_controller_agrees(master):
    asks(master, 1, 100, 1.0)
    master.decided(of(2, 0, 1))
    master.flushed(500, 1.0)
    asks(master, 1, 100, 2.0)
    assert master.propose(15.9) is None
    asked = master.propose(17.1)
    assert asked is not None
    assert asked.members == {0}
    assert master.confirm_offset == 100
    master.decided(of(3, 0))
    assert master.confirm_offset == 500


def test_a_follower_that_reaches_where_the_log_ended_when_it_asked_before_keeps_up(master):
    asks(master, 1, 100, 1.0)
    master.decided(of(2, 0, 1))
    for second in range(2, 60):
        master.flushed(100 * second, float(second))
        asks(master, 1, 100 * (second - 1), float(second))
    assert master.propose(60.0) is None


def test_a_member_whose_directory_was_lost_counts_no_more_and_is_dropped(master):
    asks(master, 1, 100, 1.0)
    master.decided(of(2, 0, 1))
    master.flushed(300, 1.0)
    asks(master, 1, 300, 1.5)
    assert master.copies(300) == 2
    master.asked(1, "another", 0, 2.0)
    assert master.copies(300) == 1
    asked = master.propose(2.0)
    assert asked is not None
    assert asked.members == {0}


def test_a_recreated_directory_joins_the_set_once_it_has_everything(master):
    asks(master, 1, 100, 1.0)
    master.decided(of(2, 0, 1))
    master.asked(1, "another", 0, 2.0)
    master.propose(2.0)
    master.decided(of(3, 0))
    master.asked(1, "another", 100, 3.0)
    asked = master.propose(3.0)
    assert asked is not None
    assert asked.stores == {0: "store-0", 1: "another"}


def test_the_confirm_offset_never_goes_back(master):
    master.flushed(300, 1.0)
    asks(master, 1, 300, 1.0)
    master.decided(of(2, 0, 1))
    asks(master, 1, 50, 2.0)
    assert master.confirm_offset == 300


def test_lag_is_in_bytes_and_in_seconds_since_the_first_missing_byte(master):
    master.flushed(200, 2.0)
    master.flushed(300, 5.0)
    asks(master, 1, 120, 6.0)
    asks(master, 2, 200, 6.0)
    asks(master, 3, 300, 6.0, learner=True)
    assert master.lags(7.0) == {1: FollowerLag(180, 5.0), 2: FollowerLag(100, 2.0), 3: FollowerLag(0, 0.0)}
    assert master.lags(9.0)[2] == FollowerLag(100, 4.0)


def test_bytes_from_before_the_epoch_count_as_stored_at_its_start(master):
    asks(master, 1, 40, 3.0)
    assert master.lags(8.0) == {1: FollowerLag(60, 8.0)}


def test_a_replica_that_the_controller_cannot_reach_is_dropped_at_once(master):
    asks(master, 1, 100, 1.0)
    master.decided(of(2, 0, 1))
    master.silent(frozenset({1}))
    asked = master.propose(1.1)
    assert asked is not None
    assert asked.members == {0}


def test_a_replica_that_has_left_the_group_counts_until_the_set_is_decided_and_never_joins_again(master):
    master.flushed(100, 0.0)
    asks(master, 1, 100, 0.1)
    asks(master, 1, 100, 0.2)
    master.propose(0.2)
    master.decided(of(2, 0, 1))
    master.note_removed(frozenset({1}))
    master.flushed(200, 0.3)
    assert master.confirm_offset == 100, "the Controller may still elect the replica"
    assert master.propose(0.3) == of(2, 0)
    master.decided(of(3, 0))
    assert master.confirm_offset == 200
    asks(master, 1, 200, 0.4)
    asks(master, 1, 200, 0.5)
    assert (master.propose(0.5), master.counted, master.lags(0.5)) == (None, {0}, {})


class PlainSyncState(MasterSyncState):
    """Computes the counted replicas anew for each confirm offset."""

    def _confirm(self) -> None:
        self._recount()
        super()._confirm()


@pytest.mark.parametrize("seed", range(40))
def test_the_confirm_offset_waits_for_the_replicas_that_count_now(seed):
    dice = random.Random(seed)
    first = of(1, *dice.choice([(0,), (0, 1)]))
    masters = [kind(0, first, 100, 0.0, not_catchup_s=1.0) for kind in (MasterSyncState, PlainSyncState)]
    end, version, now_s, proposals = 100, 1, 0.0, [first]
    for _ in range(200):
        now_s += dice.choice([0.0, 0.1, 0.6])
        others = frozenset(dice.sample([1, 2, 3], dice.randint(0, 3)))
        steps = ["flush"] * 8 + ["ask"] * 24 + ["propose"] * 8 + ["decide"] * 8 + ["silent"] * 4 + ["remove"]
        step = dice.choice(steps)
        if step == "flush":
            end += dice.randint(0, 20)
        follower, offset = dice.randint(1, 3), max(end - dice.choice([0, 0, 5, 20]), 0)
        store_id = f"store-{follower}" if dice.random() < 0.9 else "another"
        version += step == "decide"
        answer = SyncStateSet(7, version, dice.choice(proposals[-2:]).stores)
        for master in masters:
            if step == "flush":
                master.flushed(end, now_s)
            elif step == "ask":
                master.asked(follower, store_id, offset, now_s)
            elif step == "silent":
                master.silent(others)
            elif step == "remove":
                master.note_removed(others)
            elif step == "propose":
                proposals += [proposal for proposal in [master.propose(now_s)] if proposal is not None]
            elif step == "decide":
                master.decided(answer)
        one, plain = masters
        assert one.confirm_offset == plain.confirm_offset, f"after {step}"
        assert (one.counted, one.lags(now_s)) == (plain.counted, plain.lags(now_s)), f"after {step}"
