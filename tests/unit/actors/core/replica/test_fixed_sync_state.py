"""Tests of a master's record of its slaves when the replicas' roles are fixed."""

from __future__ import annotations

import pytest

from actors.core.replica.sync_state import FixedSyncState
from storage.replication.epochs import SyncStateSet


@pytest.fixture
def master():
    first = SyncStateSet(7, 1, {0: "store-0"})
    return FixedSyncState(0, first, 100, 0.0, not_catchup_s=15.0, max_gap_bytes=50)


def asks(master: FixedSyncState, follower: int, offset: int, now_s: float, **more: bool) -> None:
    master.asked(follower, f"store-{follower}", offset, now_s, **more)


def test_the_confirm_offset_is_the_masters_flushed_offset(master):
    asks(master, 1, 100, 1.0)
    master.flushed(400, 2.0)
    assert master.confirm_offset == 400
    asks(master, 1, 150, 3.0)
    assert master.confirm_offset == 400


def test_the_set_stays_the_master_alone(master):
    asks(master, 1, 100, 1.0)
    assert master.propose(1.0) is None
    assert master.sync_state_set.members == {0}


def test_copies_are_counted_wherever_they_are_but_at_learners(master):
    master.flushed(400, 1.0)
    asks(master, 1, 300, 1.0)
    asks(master, 2, 400, 1.0)
    asks(master, 3, 400, 1.0, learner=True)
    assert [master.copies(end) for end in (300, 301, 400, 401)] == [3, 2, 2, 0]


def test_in_sync_is_who_lacks_less_than_the_gap(master):
    asks(master, 1, 50, 1.0)
    asks(master, 2, 51, 1.0)
    asks(master, 3, 100, 1.0, learner=True)
    assert master.in_sync(1.0) == {0, 2}


def test_a_silent_or_unreachable_replica_is_not_in_sync(master):
    asks(master, 1, 100, 1.0)
    asks(master, 2, 100, 10.0)
    assert master.in_sync(16.0) == {0, 1, 2}
    assert master.in_sync(16.1) == {0, 2}
    master.silent(frozenset({2}))
    assert master.in_sync(16.1) == {0}
    master.silent(frozenset())
    assert master.in_sync(16.1) == {0, 2}
