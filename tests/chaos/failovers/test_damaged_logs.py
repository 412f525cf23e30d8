"""Tests of damaged logs of three replicas. All processes are killed at once, and one bit of one log is flipped: no
acknowledged message is lost. Bits are flipped while all processes run: `raymq store verify --now` finds them.

Recovery reads a log from the start of the last snapshot's tail on, and a checksum covers these bytes. So the test flips
a bit in this part of the log. Earlier damage is only detected when the damaged record is read
(storage/recovery/snapshot.py). The messages before this part fill several log files.

RAYMQ_SOAK=1 runs ten times as many rounds. RAYMQ_CHAOS_SEED repeats the positions of a run's flipped bits.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

import psutil
import pytest
import ray

import raymq
from raymq.common.names import StorageName
from raymq.common.protocol.store import StoreVerification
from raymq.records.format.layout import BODY_CRC_OFFSET, BODY_OFFSET, BODY_SIZE_OFFSET, MAGIC_OFFSET, TOTAL_SIZE_OFFSET
from raymq.remoting.actor_ref import ActorRef
from storage.files.damage import DamageNotes
from storage.recovery.snapshot import SNAPSHOT_FILE, read_snapshot
from tests.support.cases import chaos_seed
from tests.support.clusters.cluster import SMALL_LOG_FILE_BYTES, Sandbox, actor_processes, one_group
from tests.support.clusters.commands import run_here
from tests.support.history.checker import check
from tests.support.history.history import History
from tests.support.history.waiting import eventually
from tests.support.history.workload import Senders, read_back
from tests.support.replicas.ray_replicas import RayReplicas, log_checksum

ROUNDS = 10 if os.environ.get("RAYMQ_SOAK") == "1" else 2
BROKER = "broker-a"
REPLICAS = 3
ENOUGH = 300
EARLIER = "records-before-the-snapshot"
EARLIER_BODIES = [b"%04d" % number * 256 for number in range(5000)]
"""Message bodies of 1 KiB that the test sends first. Their records fill the first log files."""
SETTINGS = one_group("{replicas: 3, spread: false, min_in_sync_replicas: 2}")
PLACES = [(True, True), (False, False), (True, False), (False, True)]
"""The cases of damage to test, each as two booleans. First: True if the damaged log is the former master's. Second:
True if the flipped bit is after the end of the last snapshot."""


@dataclass(frozen=True, slots=True)
class Place:
    """The location of a record in a log: its physical offset and its size in bytes."""

    offset: int
    size: int

    @property
    def position(self) -> int:
        """Return the record's position within its log file, in bytes."""
        return self.offset % SMALL_LOG_FILE_BYTES

    def path(self, store: Path) -> Path:
        """Return the path of the log file of `store` that contains the record."""
        return store / "commitlog" / f"{self.offset - self.position:020}"

    def read(self, store: Path) -> bytes:
        """Return the bytes at the record's location in the log of `store`; empty if the log file was truncated before
        it."""
        if not self.path(store).exists():
            return b""
        with self.path(store).open("rb") as file:
            file.seek(self.position)
            return file.read(self.size)


class DamagedGroup:
    """A broker group whose processes the test kills. The test damages the log of one replica before the processes
    restart."""

    def __init__(self, box: Sandbox, rng: random.Random) -> None:
        self.replicas = RayReplicas(BROKER, REPLICAS)
        self._box, self._rng = box, rng

    def directory(self, replica: int) -> Path:
        return self._box.data / f"{BROKER}-{replica}"

    def kill_and_flip(self, *, master: bool, behind_snapshot: bool) -> Place:
        """Kill all processes of the broker group and the Controller, and flip one bit of a record. Prints and returns
        the record's location.

        The storage processes are first stopped with SIGSTOP. So they write nothing more, and no restarted process reads
        the log before the bit is flipped.
        """
        leader = self.replicas.settled()["master"]
        damaged = leader if master else (leader + self._rng.randrange(1, REPLICAS)) % REPLICAS
        processes = [psutil.Process(self.replicas.pid(replica)) for replica in range(REPLICAS)]
        for process in processes:
            process.suspend()
        for process in processes:
            eventually(lambda pid=process.pid: _is_stopped(pid), f"the stop of process {process.pid}")  # type: ignore[misc]
        print(f"replica {damaged}, {'the former master' if master else 'a slave'}")
        place = self._flip_one(self.directory(damaged), behind_snapshot=behind_snapshot)
        for actor in ("Controller", "Broker", "Replicator"):
            processes += actor_processes(actor)
        for process in processes:
            process.kill()
        psutil.wait_procs(processes, timeout=30)
        return place

    def wait_until_repaired(self, place: Place) -> None:
        """Wait until the logs of all replicas have equal bytes at the record's location, and no log has a hole (known
        damaged range)."""

        def copies() -> set[bytes]:
            return {place.read(self.directory(replica)) for replica in range(REPLICAS)}

        eventually(lambda: len(copies()) == 1, f"the same {place.size} bytes at {place.offset} of all logs")
        self.replicas.wait_for_no_holes()

    def flip_running(self, replicas: Sequence[int]) -> tuple[Place, bytes]:
        """Flip one bit of a record in the logs of running replicas, the same bit in each. Returns the record's
        location, and its intact bytes."""
        store = self.directory(replicas[0])
        place = self._rng.choice(_records(store, 0))
        intact = place.read(store)
        byte, bit = self._rng.choice(_checked_bytes(intact)), self._rng.randrange(8)
        for replica in replicas:
            _flip_bit(self.directory(replica), place, byte, bit)
        print(f"replicas {replicas}: bit {bit} of byte {byte} of the record at {place.offset}, {place.size} bytes")
        return place, intact

    def put_back(self, place: Place, intact: bytes, epoch: int) -> None:
        """Repair a record in the logs of all replicas, as Replicators do. A Replicator may repair a log first, with the
        bytes of a replica that this method has repaired."""
        for replica in range(REPLICAS):
            try:
                self.actor(replica).call("mend_log", epoch, place.offset, intact, timeout_s=30.0)
            except raymq.InvalidArgumentError:
                assert place.read(self.directory(replica)) == intact

    def actor(self, replica: int) -> ActorRef:
        """Return a reference to the storage actor of a replica."""
        return ActorRef(str(StorageName(BROKER, replica)))

    def _flip_one(self, store: Path, *, behind_snapshot: bool) -> Place:
        """Flip one bit of a random record. With `behind_snapshot` the record ends after the end of the last snapshot,
        otherwise before it. Returns the record's location."""
        snapshot = read_snapshot(store / SNAPSHOT_FILE, DamageNotes())
        last_file = max(path for path in (store / "commitlog").iterdir() if any(path.read_bytes()))
        # A store may have no snapshot, for example after a truncation of its log. Recovery then reads the last log
        # file, and perhaps earlier files.
        tail, end = (int(last_file.name), 0) if snapshot is None else (snapshot.tail, snapshot.end)
        read = _records(store, tail)
        records = [one for one in read if (one.offset + one.size > end) == behind_snapshot]
        # If no record lies on the requested side of the end of the store's snapshot, choose from all records that
        # recovery reads.
        place = self._rng.choice(records or read)
        byte, bit = self._rng.choice(_checked_bytes(place.read(store))), self._rng.randrange(8)
        _flip_bit(store, place, byte, bit)
        print(f"bit {bit} of byte {byte} of the record at {place.offset}, {place.size} bytes")
        print(f"the snapshot's tail begins at {tail} and ends at {end}")
        return place


def _flip_bit(store: Path, place: Place, byte: int, bit: int) -> None:
    """Flip one bit of the record at a location of a store's log."""
    with place.path(store).open("r+b", buffering=0) as file:
        file.seek(place.position + byte)
        [value] = file.read(1)
        file.seek(place.position + byte)
        file.write(bytes([value ^ (1 << bit)]))


def _is_stopped(pid: int) -> bool:
    """Return True if all threads of a process are stopped by SIGSTOP."""
    try:
        states = [path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    except FileNotFoundError:  # The thread ended after its directory entry was listed.
        return False
    return set(states) == {"T"}


def _checked_bytes(record: bytes) -> list[int]:
    """Return the positions of the bytes in which a reader can detect damage: size, magic, checksum and body. Positions
    count from the record's start.

    As in RocketMQ, no checksum covers the topic and the properties.
    """
    body_size = int.from_bytes(record[BODY_SIZE_OFFSET : BODY_SIZE_OFFSET + 4])
    heads = (TOTAL_SIZE_OFFSET, MAGIC_OFFSET, BODY_CRC_OFFSET)
    return [start + byte for start in heads for byte in range(4)] + [BODY_OFFSET + byte for byte in range(body_size)]


def _records(store: Path, tail: int) -> list[Place]:
    """Return the location of each record in a store's log, from the physical offset `tail` to the log's end."""
    found = []
    for path in sorted((store / "commitlog").iterdir()):
        start, position, data = int(path.name), 0, path.read_bytes()
        if start + len(data) <= tail:
            continue
        while size := int.from_bytes(data[position : position + 4]):
            if position + size >= len(data):
                break  # Stop at the BLANK record, which fills the end of a log file.
            if start + position >= tail:
                found.append(Place(start + position, size))
            position += size
    return found


def fill_log(mq: raymq.Client) -> None:
    """Send messages until the first log files are full."""
    mq.admin.create_topic(EARLIER, queues=1)
    with mq.producer() as producer:
        for sent in [producer.send_async(raymq.Message(EARLIER, body)) for body in EARLIER_BODIES]:
            sent.result(120)


def earlier_bodies(mq: raymq.Client) -> list[bytes]:
    """Return the bodies of the messages that `fill_log` sent, in the order of their offsets."""
    [entry] = mq.admin.describe_topic(EARLIER)
    bodies: list[bytes] = []
    while len(bodies) < entry.max_offset:
        found = mq.admin.pull(entry.queue, len(bodies), max_messages=1000).messages
        assert found
        bodies += [message.body for message in found]
    return bodies


@pytest.mark.timeout(1800)
def test_a_flipped_bit_in_one_log_loses_nothing_after_every_process_was_killed(
    mq: raymq.Client, box: Sandbox, topic: str
) -> None:
    rng, history = random.Random(chaos_seed()), History()
    group = DamagedGroup(box, rng)
    group.replicas.settled()
    fill_log(mq)
    senders = Senders(mq, topic, producers=2, count=10**6, history=history, pause_s=0.005)
    senders.start()
    try:
        for master, behind_snapshot in islice(cycle(rng.sample(PLACES, len(PLACES))), ROUNDS):
            enough = len(history) + ENOUGH
            eventually(lambda enough=enough: len(history) >= enough, "sends that end")  # type: ignore[misc]
            place = group.kill_and_flip(master=master, behind_snapshot=behind_snapshot)
            account = group.replicas.settled()
            print({key: account[key] for key in ("master", "epoch", "loss")})
            assert account["loss"] == ""
            group.wait_until_repaired(place)
    finally:
        senders.stop()
        senders.join(120)
    report = check(history, read_back(mq, topic))
    print(report)
    assert report.violations == {}
    assert report.acknowledged >= ENOUGH * ROUNDS / 2
    assert earlier_bodies(mq) == EARLIER_BODIES
    end = group.replicas.equal_end()
    checksums = [log_checksum(group.directory(replica), end) for replica in range(REPLICAS)]
    assert len(set(checksums)) == 1


def mended_holes(group: DamagedGroup) -> list[int]:
    """Return the number of damaged ranges that each replica has repaired since it opened its store."""
    return [group.actor(replica).call("status", timeout_s=30.0)["mended_holes"] for replica in range(REPLICAS)]


@pytest.mark.timeout(600)
def test_a_verification_of_running_replicas_finds_flipped_bits_and_reports_what_no_replica_can_repair(
    mq: raymq.Client, box: Sandbox, topic: str
) -> None:
    group = DamagedGroup(box, random.Random(chaos_seed()))
    group.replicas.settled()
    with mq.producer() as producer:
        for sent in [producer.send_async(raymq.Message(topic, b"%d" % number * 40)) for number in range(500)]:
            sent.result(120)
    group.replicas.equal_end()
    master = group.replicas.settled()["master"]
    slave = (master + 1) % REPLICAS
    before = mended_holes(group)
    one, _ = group.flip_running([slave])
    two, _ = group.flip_running([master])

    found: dict[str, StoreVerification] = mq.admin.verify_stores(BROKER, timeout_s=300)

    print(found)
    assert [store.lost for store in found.values()] == [0] * REPLICAS
    assert [store.error for store in found.values()] == [""] * REPLICAS
    assert not any(store.scrub.running for store in found.values())
    after = mended_holes(group)
    assert all(after[replica] > before[replica] for replica in (slave, master))
    group.wait_until_repaired(one)
    group.wait_until_repaired(two)

    three, intact = group.flip_running(range(REPLICAS))
    address = ray.get_runtime_context().gcs_address
    arguments = ["store", "verify", "--now", "--json", "--address", address]
    done = run_here(*arguments)
    print(done.stdout, done.stderr)
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert [(row["store"], row["lost"]) for row in report["stores"]] == [
        (str(StorageName(BROKER, replica)), 1) for replica in range(REPLICAS)
    ]
    group.put_back(three, intact, group.replicas.settled()["epoch"])
    group.wait_until_repaired(three)
    assert run_here(*arguments).returncode == 0
