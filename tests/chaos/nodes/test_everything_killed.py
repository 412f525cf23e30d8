"""Test of a crash of the whole cluster: all processes on three nodes, including the head node, are killed at once.
After the restart, all acknowledged messages are read from disk.

Before the last start the Controller's journal is deleted, and one copy of each small file of the stores is damaged: a
flipped bit, a cut, an empty file or a missing file. RAYMQ_DAMAGE_SEED sets the seed. A user's program sends all the
time and is killed together with the cluster. RAYMQ_SOAK=1 runs the test three times.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import raymq
from tests.support.clusters.cluster import Sandbox, one_group, sandbox
from tests.support.clusters.nodes import Nodes, nodes
from tests.support.history.checker import check
from tests.support.history.history import Operation, Sent, acknowledged_in, read_history_file
from tests.support.history.waiting import eventually
from tests.support.history.workload import read_back
from tests.support.replicas.ray_replicas import RayReplicas, log_checksum
from tests.support.stores.damage import FAULTS, harm, small_files

ROUNDS = 3 if os.environ.get("RAYMQ_SOAK") == "1" else 1
NAMES = ("head", "left", "right")
BROKER = "broker-a"
TOPIC = "all"
ENOUGH = 500
SENDER = Path(__file__).with_name("sender.py")
SETTINGS = one_group("{replicas: 3, min_in_sync_replicas: 2}")


@contextmanager
def sending(machines: Nodes, producer: int, journal: Path) -> Iterator[None]:
    """Run a user's sending program during a `with` block. The block begins after the program has sent some messages.
    The program is killed at the end of the block."""
    journal.touch()
    environment = {**os.environ, "RAY_ADDRESS": machines.address}
    program = subprocess.Popen([sys.executable, str(SENDER), TOPIC, str(producer), str(journal)], env=environment)

    def enough() -> bool:
        assert program.poll() is None, "the program that sends has ended"
        return acknowledged_in(journal) >= ENOUGH

    try:
        eventually(enough, "sends")
        yield  # The sending program may already have ended by itself, because the test killed its cluster.
    finally:
        program.kill()
        program.wait(30)


@pytest.mark.timeout(600)
def test_everything_acknowledged_is_there_after_all_processes_were_killed(tmp_path: Path) -> None:
    history: dict[Sent, Operation] = {}
    with sandbox(SETTINGS) as box:
        for producer in range(ROUNDS):
            journal = tmp_path / f"{producer}"
            with nodes(box, NAMES) as machines, raymq.connect(embedded=True) as mq:
                check_cluster(mq, history)
                with sending(machines, producer, journal):
                    machines.kill_all()
            history |= read_history_file(journal)
        damage_small_files(box)
        with nodes(box, NAMES) as machines, raymq.connect(embedded=True) as mq:
            check_cluster(mq, history)
            check_logs(box)


def damage_small_files(box: Sandbox) -> None:
    """Delete the Controller's journal, and damage the first copy of each small file of all stores."""
    seed = int(os.environ.get("RAYMQ_DAMAGE_SEED", random.SystemRandom().randrange(1_000_000)))
    print(f"RAYMQ_DAMAGE_SEED={seed}")
    rng = random.Random(seed)
    journals = list(box.data.glob("*/controller/journal*"))
    assert len(journals) == 2
    for path in journals:
        path.unlink()
    damaged = 0
    for store in sorted(box.data.glob(f"*/{BROKER}-*")):
        for name in small_files(store):
            if (store / f"{name}.bak").exists():
                harm(store / name, rng.choice(FAULTS[:4]), store, rng)
                damaged += 1
    assert damaged >= 15


def check_cluster(mq: raymq.Client, history: dict[Sent, Operation]) -> None:
    """Wait until all replicas are in sync. Then check that each acknowledged message is stored exactly once."""
    RayReplicas(BROKER, len(NAMES)).settled()
    if not history:
        mq.admin.create_topic(TOPIC, queues=4)
        return
    report = check(history.values(), read_back(mq, TOPIC))
    print(report)
    assert report.violations == {}
    assert report.acknowledged >= ENOUGH


def check_logs(box: Sandbox) -> None:
    """Check that the replicas' logs are equal. A replica's log may be on any node."""
    end = RayReplicas(BROKER, len(NAMES)).equal_end()
    stores = [store for name in NAMES for store in (box.data / name).glob(f"{BROKER}-*")]
    assert len(stores) == len(NAMES)
    assert len({log_checksum(store, end) for store in stores}) == 1
