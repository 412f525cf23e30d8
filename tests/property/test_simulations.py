"""Tests that run each simulation with a few seeds. tests/chaos/simulation runs all seeds. It also puts known bugs into
the simulations, and checks that the simulations find these bugs."""

from __future__ import annotations

import pytest

from tests.support.group_sim.world import World
from tests.support.replication_sim.world import ALL_FAULTS, CHANGE_FAULTS, run_seed

SEEDS = 20


@pytest.mark.parametrize(
    ("options", "seeds"),
    [
        ({}, SEEDS),
        ({"only": ALL_FAULTS}, SEEDS // 5),
        ({"only": CHANGE_FAULTS}, SEEDS // 5),
        ({"fixed": True}, SEEDS // 5),
        ({"all_ack": False}, SEEDS // 5),
        ({"async_flush": True}, SEEDS // 5),
    ],
    ids=["elected", "all faults together", "changed replicas", "fixed", "all replicas acknowledge", "without flushes"],
)
def test_replication_and_election_lose_and_undo_nothing(options, seeds):
    acknowledged = 0
    for seed in range(seeds):
        world = run_seed(seed, min_in_sync=1 + seed % 2, **options)
        assert world.checks.faults == [], f"seed {seed}: {world.checks.faults[:3]}"
        acknowledged += len(world.checks.acknowledged)
    assert acknowledged > seeds * 100, "the replicas stand still to be safe"


def test_a_consumer_group_keeps_its_laws():
    deliveries = 0
    for seed in range(SEEDS):
        world = World(seed)
        world.run()
        deliveries += world.ledger.deliveries
    assert deliveries > 40 * SEEDS, "the seeds put hardly any load on the group"


def test_the_same_seed_gives_the_same_trace_of_a_broker_group():
    assert run_seed(7).trace == run_seed(7).trace != run_seed(8).trace


def test_the_same_seed_gives_the_same_trace_of_a_consumer_group():
    one, two, other = World(5), World(5), World(6)
    for world in (one, two, other):
        world.run()
    assert one.trace == two.trace
    assert one.trace != other.trace
