"""Every process of three replicas is killed at once, and one bit of one log is flipped: nothing acknowledged is lost.

RAYMQ_SOAK=1 does it ten times; RAYMQ_CHAOS_SEED repeats the places of a run's bits.
"""

from __future__ import annotations

import json
import os
import random
from itertools import cycle, islice
from pathlib import Path

import psutil
import pytest

import raymq
from raymq.records.format.layout import BODY_CRC_OFFSET, BODY_OFFSET, BODY_SIZE_OFFSET, MAGIC_OFFSET, TOTAL_SIZE_OFFSET
from storage.files.damage import DamageNotes
from storage.recovery.snapshot import SNAPSHOT_FILE, read_snapshot
from tests.support.clusters.cluster import Sandbox, actor_processes, one_group
from tests.support.history.checker import check
from tests.support.history.history import History
from tests.support.history.waiting import eventually
from tests.support.history.workload import Senders, read_back
from tests.support.replicas.ray_replicas import RayReplicas, log_checksum

SEED = int(os.environ.get("RAYMQ_CHAOS_SEED", str(random.SystemRandom().randrange(10**6))))
ROUNDS = 10 if os.environ.get("RAYMQ_SOAK") == "1" else 2
BROKER = "broker-a"
REPLICAS = 3
ENOUGH = 300
SETTINGS = one_group("{replicas: 3, spread: false, min_in_sync_replicas: 2}")
PLACES = [(True, True), (False, False), (True, False), (False, True)]
"""Whether the former master's log is damaged or another one, and behind or before the last snapshot."""


class DamagedGroup:
    """The group, whose processes are killed and one of whose logs is damaged then."""

    def __init__(self, box: Sandbox, rng: random.Random) -> None:
        self.replicas = RayReplicas(BROKER, REPLICAS)
        self._box, self._rng = box, rng

    def directory(self, replica: int) -> Path:
        return self._box.data / f"{BROKER}-{replica}"

    def kill_and_flip(self, *, master: bool, behind_snapshot: bool) -> str:
        """Kill all processes of the group and the Controller, then flip a bit. Says what was flipped where."""
        leader = self.replicas.settled()["master"]
        damaged = leader if master else (leader + self._rng.randrange(1, REPLICAS)) % REPLICAS
        pids = [self.replicas.pid(replica) for replica in range(REPLICAS)]
        processes = [psutil.Process(pid) for pid in pids]
        for actor in ("Controller", "Broker", "Replicator"):
            processes += actor_processes(actor)
        for process in processes:
            process.kill()
        psutil.wait_procs(processes, timeout=30)
        before = self._incarnation(damaged)
        said = self._flip(self.directory(damaged), behind_snapshot=behind_snapshot)
        assert self._incarnation(damaged) == before, "the store was opened before its log was damaged"
        return f"replica {damaged}, {'the former master' if master else 'a slave'}: {said}"

    def _incarnation(self, replica: int) -> int:
        return int(json.loads((self.directory(replica) / "config" / "replica.json").read_text())["incarnation"])

    def _flip(self, store: Path, *, behind_snapshot: bool) -> str:
        """Flip a bit of a random record before or behind the end of the last snapshot."""
        snapshot = read_snapshot(store / SNAPSHOT_FILE, DamageNotes())
        end = 0 if snapshot is None else snapshot.end
        records = [record for record in _records(store) if (record[0] + record[1] > end) == behind_snapshot]
        if not records:  # the snapshot has everything, or nothing
            records = _records(store)
        offset, size, path, position = self._rng.choice(records)
        byte, bit = self._rng.choice(_checked_bytes(path, position)), self._rng.randrange(8)
        with path.open("r+b") as file:
            file.seek(position + byte)
            [value] = file.read(1)
            file.seek(position + byte)
            file.write(bytes([value ^ (1 << bit)]))
        return f"bit {bit} of byte {byte} of the record at {offset}, {size} bytes; the snapshot ends at {end}"


def _checked_bytes(path: Path, position: int) -> list[int]:
    """The bytes of a record, from its start, whose damage shows: its size, its magic, its checksum and its body. As in
    RocketMQ, no checksum covers the topic and the properties."""
    with path.open("rb") as file:
        file.seek(position + BODY_SIZE_OFFSET)
        body_size = int.from_bytes(file.read(4))
    heads = (TOTAL_SIZE_OFFSET, MAGIC_OFFSET, BODY_CRC_OFFSET)
    return [start + byte for start in heads for byte in range(4)] + [BODY_OFFSET + byte for byte in range(body_size)]


def _records(store: Path) -> list[tuple[int, int, Path, int]]:
    """Each record of a log: its offset and size, its file and the position there."""
    found = []
    for path in sorted((store / "commitlog").iterdir()):
        data, position = path.read_bytes(), 0
        while size := int.from_bytes(data[position : position + 4]):
            if position + size >= len(data):
                break  # the BLANK
            found.append((int(path.name) + position, size, path, position))
            position += size
    return found


@pytest.mark.timeout(1800)
def test_a_flipped_bit_in_one_log_loses_nothing_after_every_process_was_killed(
    mq: raymq.Client, box: Sandbox, topic: str
) -> None:
    print(f"RAYMQ_CHAOS_SEED={SEED}")
    rng, history = random.Random(SEED), History()
    group = DamagedGroup(box, rng)
    group.replicas.settled()
    senders = Senders(mq, topic, producers=2, count=10**6, history=history, pause_s=0.005)
    senders.start()
    try:
        for master, behind_snapshot in islice(cycle(rng.sample(PLACES, len(PLACES))), ROUNDS):
            enough = len(history) + ENOUGH
            eventually(lambda enough=enough: len(history) >= enough, "sends that end")  # type: ignore[misc]
            print(group.kill_and_flip(master=master, behind_snapshot=behind_snapshot))
            account = group.replicas.settled()
            print({key: account[key] for key in ("master", "epoch", "loss")})
            assert account["loss"] == ""
    finally:
        senders.stop()
        senders.join(120)
    report = check(history, read_back(mq, topic))
    print(report)
    assert report.violations == {}
    assert report.acknowledged >= ENOUGH * ROUNDS / 2
    end = group.replicas.equal_end()
    checksums = [log_checksum(group.directory(replica), end) for replica in range(REPLICAS)]
    assert len(set(checksums)) == 1
