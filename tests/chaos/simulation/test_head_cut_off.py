"""Cuts the network between the head node, which has the Controller and the current master, and all other nodes.

While the cut lasts, no other replica leads. With two replicas needed for an acknowledgement, nothing is acknowledged.
After the cut, writes resume in an epoch of the same master or of another one, and no message is lost. In half of the
seeds the Controller also restarts during the cut, with or without its journal.
"""

from __future__ import annotations

import os

import pytest

from tests.support.replication_sim.client import CLIENT
from tests.support.replication_sim.controller import CONTROLLER
from tests.support.replication_sim.world import World

SEEDS = 2000 if os.environ.get("RAYMQ_SOAK") == "1" else 20
SETTLED_S = 6.0
LEASES_OVER_S = 6.0
"""Time in s after which the master has no lease of an earlier report, and no message of before the cut is under way."""


@pytest.mark.parametrize("min_in_sync", [1, 2])
def test_a_head_that_is_cut_off_with_the_master_makes_no_second_master(min_in_sync: int) -> None:
    resumed = 0
    for seed in range(SEEDS):
        world = World(seed, min_in_sync=min_in_sync)
        world.run(SETTLED_S)
        leading = [node for node in world.nodes.values() if node.leads()]
        if not leading:
            continue  # with this seed's message losses, the first election takes longer
        [master] = leading
        head_side = {CONTROLLER, CLIENT, master.name}
        far_side = world.nodes.keys() - head_side
        world.cut |= {pair for one in head_side for other in far_side for pair in ((one, other), (other, one))}
        world.run(SETTLED_S + LEASES_OVER_S)
        if seed % 2:
            world.controller.kill()
            if seed % 4 == 1:
                world.controller.records.clear()
            world.at(0.5, world.controller.start)
        during = set(world.checks.acknowledged)
        for step in range(20):
            world.run(SETTLED_S + LEASES_OVER_S + 0.5 * step)
            assert not any(world.nodes[name].leads() for name in far_side), f"seed {seed}"
        if min_in_sync == 2:
            assert set(world.checks.acknowledged) == during, f"seed {seed}"
        before = len(world.checks.acknowledged)
        world.heal()
        world.run(world.now + 15.0)
        resumed += len(world.checks.acknowledged) - before
        world.client.stopped = True
        world.run(world.now + 20.0)
        world.checks.check_end(world)
        assert world.checks.faults == [], f"seed {seed}: {world.checks.faults[:3]}"
    assert resumed > SEEDS * 50
