"""Tests of replication and election with random faults. No acknowledged message is lost, and a
message that a consumer has read never changes.

The module also tests the simulation itself: if a known bug is put into the simulation on purpose (Bugs), its checks
must find the bug.
"""

from __future__ import annotations

from typing import Any

import pytest

from placement.election import FIXED_MASTER
from tests.support.cases import rounds
from tests.support.replication_sim.world import ALL_FAULTS, CHANGE_FAULTS, CHANGES, ROT_FAULTS, Bugs, run_seed

SEEDS = rounds(1000, 100_000)
"""The number of seeds with all faults and changes together. A test with fewer faults runs a part of them."""
SLICES = 10


def find(**options: Any) -> None:
    """Run seeds until the checks find a planted bug, and print the seed. The bug that is hardest to find causes a fault
    in about 1 of 100 seeds."""
    for seed in range(200):
        faults = run_seed(seed, **options).checks.faults
        if faults:
            print(f"found by seed {seed}: {faults[0]}")
            return
    raise AssertionError("the checks did not find the planted bug in 200 seeds")


WITH_CHANGES = (*ALL_FAULTS, *CHANGES, "grow", "replace")


@pytest.mark.parametrize("part", range(SLICES))
def test_all_faults_and_changes_of_the_replicas_together_lose_or_undo_nothing(part):
    acknowledged = mended = changes = 0
    for seed in range(part, SEEDS, SLICES):
        world = run_seed(seed, min_in_sync=1 + seed // SLICES % 2, only=WITH_CHANGES)
        assert world.checks.faults == [], f"seed {seed}: {world.checks.faults[:3]}"
        acknowledged += len(world.checks.acknowledged)
        mended, changes = mended + world.mended, changes + world.changes
    # Check that the simulated groups have acknowledged and repaired enough. The search for lost messages would prove
    # nothing if few messages were acknowledged.
    assert acknowledged > SEEDS // SLICES * 200
    assert mended > 0
    assert changes > SEEDS // SLICES


@pytest.mark.parametrize("seed", [2407, 2503])
def test_a_lost_journal_does_not_revive_an_annulled_election(seed):
    """In these seeds the elected replica ended before it led, its log lost its end, and the journal was lost."""
    assert run_seed(seed, min_in_sync=1 + seed // SLICES % 2, only=ALL_FAULTS).checks.faults == []


def test_a_late_report_does_not_make_its_replica_the_only_member_of_the_set():
    """In this seed a master proposed to be the only member, its process ended, and its log lost its end. Then the
    report with the proposal arrived."""
    seed = 4103
    assert run_seed(seed, min_in_sync=1 + seed // SLICES % 2, only=WITH_CHANGES).checks.faults == []


def test_a_group_without_a_journal_waits_for_a_replica_that_was_removed_unseen():
    """In this seed a replica lost its directory and was removed. The journal was lost before a replica heard of it."""
    world = run_seed(610, only=("wipe", "journal", "shrink", "replace", "cut", "pause"))
    assert world.checks.faults == []
    assert world.trace[-1].endswith("rightly refused")
    assert "replica 1 does not answer" in world.controller.control.reason


def test_a_replica_that_joins_the_set_while_it_leaves_is_not_removed_by_an_old_report():
    """In this seed a leaving replica joined the set. Then the master's process ended, and its log lost its end."""
    seed = 7468
    assert run_seed(seed, min_in_sync=1 + seed // SLICES % 2, only=WITH_CHANGES).checks.faults == []


def test_a_replica_whose_disk_failed_leaves_without_a_repair_of_the_master():
    """In this seed the leaving replica had the last intact copy of a record, and its disk failed."""
    seed = 7033
    assert run_seed(seed, min_in_sync=1 + seed // SLICES % 2, only=WITH_CHANGES).checks.faults == []


@pytest.mark.parametrize("seed", [10_187, 11_268])
def test_a_replica_that_had_left_is_not_waited_for_after_the_loss_of_the_journal(seed):
    """In these seeds a record was damaged while the Controller did not know that other replicas had left the group."""
    assert run_seed(seed, min_in_sync=1 + seed // SLICES % 2, only=WITH_CHANGES).checks.faults == []


TOGETHER_BUGS = (
    *("skip_truncation", "acknowledge_early", "elect_outside", "lead_as_any_process"),
    *("overwrite_by_holes", "lease_by_wall_clock", "prefer_undamaged"),
)


@pytest.mark.parametrize("bug", TOGETHER_BUGS)
def test_a_planted_bug_is_found_while_all_faults_happen_together(bug):
    find(bugs=Bugs(**{bug: True}), only=ALL_FAULTS)


def test_clocks_that_run_at_half_or_double_the_speed_lose_or_undo_nothing():
    for seed in range(SEEDS // 40):
        world = run_seed(seed, min_in_sync=1 + seed % 2, only=ALL_FAULTS, drift=0.5)
        assert world.checks.faults == [], f"seed {seed}: {world.checks.faults[:3]}"


@pytest.mark.parametrize("part", range(SLICES))
def test_no_seed_loses_or_undoes_anything(part):
    acknowledged = 0
    for seed in range(part, SEEDS // 8, SLICES):
        world = run_seed(seed, min_in_sync=1 + seed // SLICES % 2)
        assert world.checks.faults == [], f"seed {seed}: {world.checks.faults[:3]}"
        acknowledged += len(world.checks.acknowledged)
    assert acknowledged > SEEDS // 8 // SLICES * 200


def test_with_fixed_roles_no_seed_loses_or_undoes_anything_and_nobody_else_leads():
    acknowledged = 0
    for seed in range(SEEDS // 10):
        world = run_seed(seed, min_in_sync=1 + seed % 2, fixed=True)
        assert world.checks.faults == [], f"seed {seed}: {world.checks.faults[:3]}"
        assert set(world.checks.masters.values()) <= {FIXED_MASTER}, f"seed {seed}"
        acknowledged += len(world.checks.acknowledged)
    assert acknowledged > SEEDS // 10 * 100


@pytest.mark.parametrize(
    "options", [{"all_ack": False}, {"async_flush": True}], ids=["all replicas acknowledge", "without flushes"]
)
def test_with_other_acknowledgements_no_seed_loses_or_undoes_anything(options):
    acknowledged = 0
    for seed in range(SEEDS // 10):
        world = run_seed(seed, min_in_sync=1 + seed % 2, **options)
        assert world.checks.faults == [], f"seed {seed}: {world.checks.faults[:3]}"
        acknowledged += len(world.checks.acknowledged)
    assert acknowledged > SEEDS // 10 * 100


@pytest.mark.parametrize("only", [("master",), ("blackout",), ("master", "kill", "cut")], ids="-".join)
def test_a_master_that_has_less_than_its_followers_after_a_power_cut_loses_or_undoes_nothing(only):
    for seed in range(SEEDS // 10):
        world = run_seed(seed, only=only)
        assert world.checks.faults == [], f"seed {seed}: {world.checks.faults[:3]}"


def test_with_fixed_roles_a_planted_bug_is_found():
    find(bugs=Bugs(lead_anew=True), fixed=True)


@pytest.mark.parametrize("bug", ["skip_truncation", "skip_fencing", "acknowledge_early", "elect_outside"])
def test_a_planted_bug_is_found(bug):
    find(bugs=Bugs(**{bug: True}))


SHORT_LOGS = ("shorten all", "accounts", "kill")
BELOW_THE_FLOOR = ("shorten all below the floor", "accounts", "kill")


@pytest.mark.parametrize(
    ("only", "options"),
    [(SHORT_LOGS, {}), (BELOW_THE_FLOOR, {"grace_s": 0.0})],
    ids=["any loss, with a grace", "loss below the floor, without a grace"],
)
def test_logs_that_lose_their_end_and_late_accounts_lose_or_undo_nothing(only, options):
    acknowledged = 0
    for seed in range(SEEDS // 10):
        world = run_seed(seed, min_in_sync=1 + seed % 2, only=only, **options)
        assert world.checks.faults == [], f"seed {seed}: {world.checks.faults[:3]}"
        acknowledged += len(world.checks.acknowledged)
    assert acknowledged > SEEDS // 10 * 100


@pytest.mark.parametrize(
    ("bugs", "only", "options"),
    [
        (Bugs(ignore_floor=True), BELOW_THE_FLOOR, {"grace_s": 0.0}),
        (Bugs(), SHORT_LOGS, {"grace_s": 0.0}),
        (Bugs(lead_as_any_process=True), SHORT_LOGS, {}),
        (Bugs(share_elected_set=True), (*SHORT_LOGS, "shorten", "journal"), {}),
    ],
    ids=[
        *("the floor is ignored", "nobody is waited for", "an order is carried out by a later process"),
        "the set of an election is stored before the elected replica leads",
    ],
)
def test_an_election_of_a_log_that_lost_its_end_is_found(bugs, only, options):
    find(bugs=bugs, only=only, **options)


DISKS = ("disk", "kill", "cut")


@pytest.mark.parametrize("options", [{}, {"all_ack": False}, {"async_flush": True}, {"fixed": True}], ids=str)
def test_disks_that_fail_lose_or_undo_nothing(options):
    acknowledged = 0
    for seed in range(SEEDS // 25):
        world = run_seed(seed, min_in_sync=1 + seed % 2, only=DISKS, **options)
        assert world.checks.faults == [], f"seed {seed}: {world.checks.faults[:3]}"
        acknowledged += len(world.checks.acknowledged)
    assert acknowledged > SEEDS // 25 * 100


ROT_SEEDS, ROT_SLICES = SEEDS // 10, 2


@pytest.mark.parametrize("part", range(ROT_SLICES))
def test_damaged_records_are_mended_or_copied_as_they_are_and_lose_or_undo_nothing(part):
    acknowledged = mended = copied = 0
    for seed in range(part, ROT_SEEDS, ROT_SLICES):
        world = run_seed(seed, min_in_sync=1 + seed % 2, only=ROT_FAULTS)
        assert world.checks.faults == [], f"seed {seed}: {world.checks.faults[:3]}"
        acknowledged += len(world.checks.acknowledged)
        mended, copied = mended + world.mended, copied + world.copied_holes
    assert acknowledged > ROT_SEEDS // ROT_SLICES * 100
    assert mended > ROT_SEEDS // ROT_SLICES
    assert copied > 0


@pytest.mark.parametrize("options", [{"all_ack": False}, {"async_flush": True}, {"fixed": True}], ids=str)
def test_damaged_records_lose_or_undo_nothing_with_other_rules(options):
    mended = 0
    for seed in range(SEEDS // 25):
        world = run_seed(seed, min_in_sync=1 + seed % 2, only=ROT_FAULTS, **options)
        assert world.checks.faults == [], f"seed {seed}: {world.checks.faults[:3]}"
        mended += world.mended
    assert mended > SEEDS // 25


@pytest.mark.parametrize("bug", ["give_holes_at_once", "overwrite_by_holes"])
def test_a_planted_bug_with_damaged_records_is_found(bug):
    find(bugs=Bugs(**{bug: True}), only=ROT_FAULTS)


CHANGE_SEEDS = SEEDS // 10


@pytest.mark.parametrize("part", range(SLICES))
def test_changes_of_the_replicas_lose_or_undo_nothing_and_end(part):
    acknowledged = changes = 0
    for seed in range(part, CHANGE_SEEDS, SLICES):
        world = run_seed(seed, replicas=1 + seed % 3, only=CHANGE_FAULTS)
        assert world.checks.faults == [], f"seed {seed}: {world.checks.faults[:3]}"
        acknowledged, changes = acknowledged + len(world.checks.acknowledged), changes + world.changes
    assert acknowledged > CHANGE_SEEDS // SLICES * 100
    assert changes > CHANGE_SEEDS // SLICES * 4


def test_changes_of_the_replicas_keep_enough_replicas_in_sync():
    for seed in range(CHANGE_SEEDS // 5):
        world = run_seed(seed, min_in_sync=2, only=CHANGE_FAULTS)
        assert world.checks.faults == [], f"seed {seed}: {world.checks.faults[:3]}"


@pytest.mark.parametrize(
    ("bug", "options"),
    [
        ("count_early", {"grace_s": 0.0, "only": ("grow", "replace", "shrink", "pause", "kill", "cut")}),
        ("remove_at_once", {"only": CHANGE_FAULTS}),
        ("elect_removed", {"only": CHANGE_FAULTS}),
        ("forget_members", {"only": CHANGE_FAULTS}),
    ],
)
def test_a_planted_bug_in_changes_of_the_replicas_is_found(bug, options):
    find(bugs=Bugs(**{bug: True}), **options)
