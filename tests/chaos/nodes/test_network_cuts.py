"""Tests of network partitions of three machines: split them, isolate the master, or block one direction; then heal the
network.

Each machine has a replica of a broker group. On two machines a user's program sends all the time. No acknowledged
message is lost, and two masters never acknowledge at the same time. RAYMQ_SOAK=1 tests all three kinds of partitions;
otherwise the test isolates the master. The isolated master then leaves its group.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from actors.core.replica.orders import MASTER_LEASE_S
from raymq.common.message import MessageQueue
from tests.support.clusters.network import WHY_IMPOSSIBLE, Hand, Network, network
from tests.support.history.checker import check
from tests.support.history.history import Operation, Sent, acknowledged_in, read_history_file
from tests.support.history.waiting import eventually
from tests.support.replicas.ray_replicas import log_checksum

HEAD, MASTER, OTHER = NAMES = ("head", "left", "right")
BROKER, TOPIC = "broker-a", "cut"
BETWEEN_FAULTS = 200
STANDSTILL_S = 3.0
HEAL_S = 120.0
CHAOS = Path(__file__).parent
SETTINGS = """\
broker_groups: 1
data_dir: ~/.raymq/store
store:
  mapped_file_size_commit_log_bytes: 1048576
  mapped_file_size_consume_queue_bytes: 60000
replication: {replicas: 3, min_in_sync_replicas: 2}
"""

pytestmark = [pytest.mark.skipif(bool(WHY_IMPOSSIBLE), reason=WHY_IMPOSSIBLE), pytest.mark.timeout(600)]
in_soak = pytest.mark.skipif(os.environ.get("RAYMQ_SOAK") != "1", reason="one of the long runs: `make soak`")


class Cluster:
    """A raymq cluster on three machines. Two machines run a sending program; the history of each program's sends is
    recorded."""

    def __init__(self, machines: Network, hand: Hand, journals: dict[str, Path]) -> None:
        self.machines, self.hand = machines, hand
        self._journals = journals

    def acknowledged(self, name: str) -> int:
        """Return the number of acknowledged sends so far, of the program that runs on the machine `name`."""
        return acknowledged_in(self._journals[name])

    def more(self, name: str) -> None:
        """Wait until further sends of the program on the machine `name` are acknowledged."""
        enough = self.acknowledged(name) + BETWEEN_FAULTS
        eventually(lambda: self.acknowledged(name) >= enough, f"acknowledgements on {name}", HEAL_S)

    def heal(self, *names: str) -> None:
        """Heal the network, make the machines `names` join the Ray cluster again, and wait until sends on the head node
        succeed."""
        self.machines.heal()
        for name in names:
            self.machines.join(name)
        self.hand.ask("settled")
        self.more(HEAD)

    def assert_standstill(self, *names: str) -> None:
        """Check that no send on the machines `names` is acknowledged any more. The check begins when the duration of
        one master lease has passed since the network cut."""
        time.sleep(MASTER_LEASE_S + STANDSTILL_S)
        before = [self.acknowledged(name) for name in names]
        time.sleep(STANDSTILL_S)
        assert [self.acknowledged(name) for name in names] == before

    def replica_on(self, name: str) -> int:
        """Return the number of the replica on the machine `name`: the newest replica whose directory is there."""
        stores = (self.machines.root(name) / ".raymq/store").glob(f"{BROKER}-*")
        return max(int(store.name.rpartition("-")[2]) for store in stores)

    def check(self) -> None:
        """Check that every acknowledged message is stored once, and that the replicas' logs are equal."""
        history: dict[Sent, Operation] = {}
        for journal in self._journals.values():
            history |= read_history_file(journal)
        queues = {
            MessageQueue(*queue): [Sent(*sent) for sent in stored] for queue, stored in self.hand.ask("read", TOPIC)
        }
        report = check(history.values(), queues)
        print(report)
        assert report.violations == {}
        end = self.hand.ask("equal_end")
        stores = [self.machines.root(name) / f".raymq/store/{BROKER}-{self.replica_on(name)}" for name in NAMES]
        assert len({log_checksum(store, end) for store in stores}) == 1


@contextmanager
def cluster(directory: Path) -> Iterator[Cluster]:
    """Start the cluster, with the replica on the machine `left` as master. Programs on the machine `left` and on the
    head node send until the end of the `with` block."""
    with network(directory, NAMES) as machines, ExitStack() as stack:
        machines.start_ray()
        (machines.root(HEAD) / "raymq.yaml").write_text(SETTINGS)
        print(machines.run(HEAD, "raymq", "up", "--config", "/root/raymq.yaml", "--wait-nodes", str(len(NAMES))))

        def spawn(name: str, program: str, *arguments: str, **streams: int) -> subprocess.Popen[bytes]:
            process = machines.spawn(name, sys.executable, str(CHAOS / program), *arguments, **streams)
            stack.callback(machines.end, process)
            return process

        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        hand = Hand(spawn(HEAD, "remote_group.py", BROKER, str(len(NAMES)), **pipes))
        journals = {name: directory / f"{name}.journal" for name in (HEAD, MASTER)}
        made = Cluster(machines, hand, journals)
        hand.ask("create_topic", TOPIC)
        hand.ask("lead", made.replica_on(MASTER))
        senders = []
        for number, (name, journal) in enumerate(journals.items()):
            journal.touch()
            senders.append(spawn(name, "sender.py", TOPIC, str(number), str(journal)))
        for name in journals:
            made.more(name)
        yield made
        for sender in senders:
            machines.end(sender)
        hand.ask("settled")
        made.check()


def test_a_master_that_is_cut_off_stops_and_another_leads_and_it_can_leave_its_group(tmp_path: Path) -> None:
    with cluster(tmp_path) as queue:
        others, cut_off = (HEAD, OTHER), queue.replica_on(MASTER)

        def isolate() -> None:
            queue.machines.cut([MASTER], others)
            queue.machines.cut(others, [MASTER])
            queue.more(HEAD)

        isolate()
        queue.assert_standstill(MASTER)
        queue.heal(MASTER)
        queue.hand.ask("lead", cut_off)
        isolate()
        queue.hand.ask("change", 2)
        queue.more(HEAD)
        queue.heal(MASTER)
        assert cut_off not in {one["replica"] for one in queue.hand.ask("account")["replicas"]}
        queue.hand.ask("change", 3)
        assert queue.replica_on(MASTER) > cut_off, "the new replica has a directory of its own"
        queue.more(HEAD)


@in_soak
def test_two_halves_without_a_majority_acknowledge_nothing(tmp_path: Path) -> None:
    with cluster(tmp_path) as queue:
        others = (MASTER, OTHER)
        queue.machines.cut([HEAD], others)
        queue.machines.cut(others, [HEAD])
        queue.assert_standstill(HEAD, MASTER)
        queue.heal(*others)


@in_soak
def test_a_master_that_receives_but_cannot_send_stops_and_another_leads(tmp_path: Path) -> None:
    with cluster(tmp_path) as queue:
        queue.machines.cut([MASTER], (HEAD, OTHER))
        queue.more(HEAD)
        queue.assert_standstill(MASTER)
        queue.heal(MASTER)
