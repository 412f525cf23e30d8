"""Tests of the leases with which Rebalance actors claim slots (shares of all consumer groups) in a common register, a
key-value store. The tests run one call to the register at a time."""

from __future__ import annotations

import pytest

from actors.core.rebalance.slot_lease import TAKE_OVER_AFTER_S, VALID_S, VERSION_STEP, Drop, Get, Put, SlotLease

LEASE_S = 15.0


class UnreachableError(Exception):
    """Simulated error: the register executed a call, but its reply was lost."""


class Scene:
    """A simulated register (the key-value store in which Rebalance actors claim slots), with a clock that all simulated
    processes share."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.wall_ns = 5_000
        self.values: dict[str, str] = {}
        self.loses: list[str] = []

    def process(self, server: str, life: str = "1", *, home: bool = False) -> SlotLease:
        return SlotLease(0, server, f"{server}.{life}", home=home, lease_s=LEASE_S)

    def look(self, lease: SlotLease) -> None:
        self.run(lease.look(lambda: self.now_s, lambda: self.wall_ns))

    def run(self, steps) -> None:
        answer = None
        try:
            while True:
                answer = self.carry_out(steps.send(answer))
        except StopIteration:
            return

    def carry_out(self, call: Get | Put | Drop):
        if isinstance(call, Get):
            return self.values.get(call.key)
        if isinstance(call, Drop):
            return self.values.pop(call.key, None)
        written = call.overwrite or call.key not in self.values
        if written:
            self.values[call.key] = call.value
        if call.key in self.loses:
            self.loses.remove(call.key)
            raise UnreachableError
        return written

    def silence(self, taker: SlotLease) -> None:
        """Advance the clock until the lease of the slot's holder expires, because the holder does not renew it. Then
        let `taker` take over the slot (a share of all groups)."""
        self.look(taker)
        self.now_s += TAKE_OVER_AFTER_S
        self.look(taker)


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_the_home_has_the_slot_first_and_need_not_wait(scene):
    home, other = scene.process("rebalance-0", home=True), scene.process("rebalance-1")
    scene.look(other)
    scene.look(home)
    scene.look(other)
    assert (home.valid(scene.now_s), other.valid(scene.now_s)) == (True, False)
    assert (home.holder, other.holder) == ("rebalance-0", "rebalance-0")
    assert not home.waits_for_old_leases(scene.now_s)


def test_another_takes_it_where_the_home_never_comes(scene):
    other = scene.process("rebalance-1")
    scene.silence(other)
    assert other.valid(scene.now_s)
    assert not other.waits_for_old_leases(scene.now_s)


def test_a_holder_that_looks_stays_it(scene):
    home, other = scene.process("rebalance-0", home=True), scene.process("rebalance-1")
    for _ in range(3 * int(TAKE_OVER_AFTER_S)):
        scene.look(home)
        scene.look(other)
        scene.now_s += 1.0
        assert home.valid(scene.now_s)
    assert not other.held


def test_a_holder_that_does_not_look_falls_silent_before_another_speaks(scene):
    home, other = scene.process("rebalance-0", home=True), scene.process("rebalance-1")
    scene.look(home)
    assert home.valid(scene.now_s + VALID_S - 0.001)
    assert not home.valid(scene.now_s + VALID_S)
    scene.silence(other)
    assert other.valid(scene.now_s)
    assert other.waits_for_old_leases(scene.now_s + VALID_S + LEASE_S - 0.001)
    assert not other.waits_for_old_leases(scene.now_s + VALID_S + LEASE_S)
    scene.look(home)
    assert (home.held, home.holder) == (False, "rebalance-1")


def test_the_process_that_follows_a_dead_one_claims_at_once_but_waits_for_its_leases(scene):
    scene.look(scene.process("rebalance-0", "1", home=True))
    after = scene.process("rebalance-0", "2", home=True)
    scene.look(after)
    assert after.valid(scene.now_s)
    assert after.epoch == 2
    assert after.waits_for_old_leases(scene.now_s)


def test_of_two_processes_of_one_name_the_older_does_not_take_it_back(scene):
    older, newer = scene.process("rebalance-0", "1", home=True), scene.process("rebalance-0", "2", home=True)
    scene.look(older)
    scene.look(newer)
    for _ in range(3):
        scene.look(older)
        scene.look(newer)
        scene.now_s += 1.0
    assert (older.held, newer.held, newer.epoch) == (False, True, 2)


def test_the_register_accepts_one_of_two_claims(scene):
    scene.look(scene.process("rebalance-0", home=True))
    one, two = scene.process("rebalance-1"), scene.process("rebalance-2")
    scene.look(one)
    scene.look(two)
    scene.now_s += TAKE_OVER_AFTER_S
    scene.look(one)
    scene.look(two)
    assert (one.held, two.held, two.holder) == (True, False, "rebalance-1")


def test_a_claim_whose_answer_was_lost_counts(scene):
    home = scene.process("rebalance-0", home=True)
    scene.loses = ["0/1"]
    with pytest.raises(UnreachableError):
        scene.look(home)
    assert not home.valid(scene.now_s)
    scene.look(home)
    assert (home.valid(scene.now_s), home.epoch) == (True, 1)


def test_a_claim_without_a_sign_of_life_is_found(scene):
    home, other = scene.process("rebalance-0", home=True), scene.process("rebalance-1")
    scene.loses = ["0"]
    with pytest.raises(UnreachableError):
        scene.look(home)
    del scene.values["0"]
    scene.silence(other)
    assert not other.held
    scene.silence(other)
    assert (other.held, other.epoch) == (True, 2)


def test_versions_grow_though_the_wall_clock_goes_back(scene):
    scene.wall_ns = 10**18
    first = scene.process("rebalance-0", "1", home=True)
    scene.look(first)
    scene.wall_ns = 7
    second = scene.process("rebalance-0", "2", home=True)
    scene.look(second)
    assert second.claim.version >= first.claim.version + VERSION_STEP


def test_after_a_release_nobody_waits(scene):
    home = scene.process("rebalance-0", "1", home=True)
    scene.look(home)
    scene.run(home.release())
    assert not home.valid(scene.now_s)
    scene.look(home)
    assert not home.held
    after = scene.process("rebalance-0", "2", home=True)
    scene.look(after)
    assert after.valid(scene.now_s)
    assert not after.waits_for_old_leases(scene.now_s)


def test_old_claims_are_dropped(scene, monkeypatch):
    monkeypatch.setattr("actors.core.rebalance.slot_lease.CLAIMS_KEPT", 3)
    for life in range(10):
        scene.look(scene.process("rebalance-0", str(life), home=True))
    assert sorted(key for key in scene.values if "/" in key) == ["0/10", "0/8", "0/9"]
