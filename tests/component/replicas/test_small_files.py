"""Damages the small files of all three replicas of a stopped broker group, one kind of fault at a time, then opens the
group.

Each fault hits the first copy, or the second copy, of every file at once. The group elects a master, loses no
acknowledged message, and keeps its epochs, sets and ids. RAYMQ_DAMAGE_SEED sets the seed of the flipped bits.
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest

from placement.election import RECOVERED_EPOCH_GAP
from tests.support.replicas.local_replicas import LocalReplicas, append
from tests.support.stores.damage import FAULTS, damaged_bytes_are_kept, harm
from tests.support.stores.stores import bodies_of

pytestmark = pytest.mark.usefixtures("no_flushes")

BODIES = [b"%03d" % number for number in range(30)]
FIRST_COPIES = (
    *("epochFileCheckpoint", "confirmOffset", "config/epochs.json", "config/replica.json", "config/syncStateSet.json"),
)
REPLICAS = range(3)


@pytest.fixture(scope="module")
def seed() -> int:
    return int(os.environ.get("RAYMQ_DAMAGE_SEED", random.SystemRandom().randrange(1_000_000)))


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a stopped broker group with two epochs, and a copy of it in its first epoch."""
    root = tmp_path_factory.mktemp("group") / "newest"
    for bodies in (BODIES[:10], BODIES[10:20], BODIES[20:]):
        group = LocalReplicas(root)
        group.settle()
        append(group, bodies)
        group.end()
        if bodies == BODIES[:10]:
            shutil.copytree(root, root.with_name("older"))
    return root, root.with_name("older")


@pytest.mark.parametrize("suffix", ["", ".bak"], ids=["first copies", "second copies"])
@pytest.mark.parametrize("fault", FAULTS)
def test_damage_to_the_small_files_of_all_replicas_loses_nothing(
    versions: tuple[Path, Path], tmp_path: Path, seed: int, fault: str, suffix: str
) -> None:
    newest, older = versions
    print(f"RAYMQ_DAMAGE_SEED={seed}")
    root = tmp_path / "group"
    shutil.copytree(newest, root)
    whole = LocalReplicas(shutil.copytree(newest, tmp_path / "whole"))
    before = {name: replica.account() for name, replica in whole.replicas.items()}
    whole.end()
    damaged = {}
    for name in REPLICAS:
        for file in FIRST_COPIES:
            path = root / f"broker-a-{name}" / f"{file}{suffix}"
            rng = random.Random(f"{seed} {fault} {name} {file}")
            damaged[path] = harm(path, fault, older / f"broker-a-{name}" / f"{file}{suffix}", rng)
    group = LocalReplicas(root)
    try:
        for name, replica in group.replicas.items():
            now, then = replica.account(), before[name]
            assert (now.store_id, now.incarnation) == (then.store_id, then.incarnation)
            assert (now.epoch, now.log_epoch, now.sync_state_set) == (then.epoch, then.log_epoch, then.sync_state_set)
            assert (now.confirm_floor, now.end_offset) == (then.confirm_floor, then.end_offset)
        # The Controller has no journal: it finds the newest set and epoch in the replicas' files alone.
        group.settle()
        record = group.control_state.record
        assert record is not None
        assert record.epoch > max(state.epoch for state in before.values()) + RECOVERED_EPOCH_GAP
        append(group, [b"more"])
        for replica in group.replicas.values():
            assert bodies_of(replica.any_store) == [*BODIES, b"more"]
    finally:
        group.end()
    for path, content in damaged.items():
        assert damaged_bytes_are_kept(path, fault, content), path
