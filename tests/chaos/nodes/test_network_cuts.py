"""Tests of network partitions of three machines: cut off the head, isolate the master, or block one direction; then
heal the network.

Each machine has a replica of a broker group. On two machines a user's program sends all the time. No acknowledged
message is lost or stored twice, and two masters never acknowledge at the same time. What consumers on the head node see
must fit a log (tests.support.history.log_rules). RAYMQ_SOAK=1 also cuts the head off alone, and blocks one direction.
RAYMQ_CHAOS_SEED repeats the choices of the planted faults.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from actors.core.replica.orders import MASTER_LEASE_S
from raymq.common.message import MessageQueue
from storage.replication.epoch_file import EPOCH_FILE
from tests.support.cases import chaos_seed
from tests.support.clusters.network import WHY_IMPOSSIBLE, Hand, Network, network
from tests.support.history.checker import check
from tests.support.history.history import Operation, Sent, acknowledged_in, read_history_file
from tests.support.history.waiting import eventually
from tests.support.replicas.ray_replicas import log_checksum

HEAD, LEFT, RIGHT = NAMES = ("head", "left", "right")
SENDING = (HEAD, LEFT)
BROKER = "broker-a"
SEND_TIMEOUT_S = 6.0
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
    """A raymq cluster on three machines. During `load` two machines run a sending program, and the history of each
    program's sends is recorded."""

    def __init__(self, directory: Path, machines: Network, hand: Hand) -> None:
        self.machines, self.hand = machines, hand
        self.directory = directory
        """A directory of the test that programs on the machines see, too."""
        self._topic = ""
        self._programs = ExitStack()

    def spawn(self, name: str, program: str, *arguments: str, **streams: int) -> subprocess.Popen[bytes]:
        """Start a helper program on a machine. The program is killed at the end of the present `load`."""
        process = self.machines.spawn(name, sys.executable, str(CHAOS / program), *arguments, **streams)
        self._programs.callback(self.machines.end, process)
        return process

    @contextmanager
    def load(self, topic: str, master: str) -> Iterator[None]:
        """Make the replica on the machine `master` the master, and send to a new topic during a `with` block. Check at
        the end that nothing is lost or stored twice."""
        self._topic, seed = topic, chaos_seed()
        with ExitStack() as self._programs:
            self._programs.callback(self.machines.heal)
            self.hand.ask("lead", self.replica_on(master))
            self.hand.ask("watch", topic)
            for number, name in enumerate(SENDING):
                self._journal(name).touch()
                self.spawn(name, "sender.py", topic, str(number), str(self._journal(name)), str(SEND_TIMEOUT_S))
            for name in SENDING:
                self.more(name)
            yield
        self.hand.ask("settled")
        self._check(seed)

    def _journal(self, name: str) -> Path:
        return self.directory / f"{self._topic}-{name}.journal"

    def acknowledged(self, name: str) -> int:
        """Return the number of acknowledged sends so far, of the program that runs on the machine `name`."""
        return acknowledged_in(self._journal(name))

    def failed(self, name: str) -> Counter[str]:
        """Return how many sends of the program on the machine `name` have failed so far, by the class of the error."""
        operations = read_history_file(self._journal(name)).values()
        return Counter(one.error.partition(":")[0] for one in operations if one.error)

    def more(self, name: str) -> None:
        """Wait until further sends of the program on the machine `name` are acknowledged."""
        enough = self.acknowledged(name) + BETWEEN_FAULTS
        eventually(lambda: self.acknowledged(name) >= enough, f"acknowledgements on {name}", HEAL_S)

    def separate(self, *names: str) -> None:
        """Cut the network, in both directions, between the machines `names` and all other machines."""
        others = [name for name in NAMES if name not in names]
        self.machines.cut(names, others)
        self.machines.cut(others, names)

    def heal(self, *names: str) -> None:
        """Heal the network, make the machines `names` join the Ray cluster again, and wait until sends on the head node
        succeed."""
        begin_s = time.monotonic()
        self.machines.heal()
        self.machines.join(*names)
        self.more(HEAD)
        print(f"sends on the head node succeed {time.monotonic() - begin_s:.1f} s after the end of the cut")
        self.hand.ask("settled")
        self.more(HEAD)

    def assert_standstill(self, *names: str) -> None:
        """Check that no send on the machines `names` is acknowledged any more. The check begins when the duration of
        one master lease has passed since the network cut."""
        time.sleep(MASTER_LEASE_S + STANDSTILL_S)
        before = [self.acknowledged(name) for name in names]
        time.sleep(STANDSTILL_S)
        assert [self.acknowledged(name) for name in names] == before

    def store_on(self, name: str) -> Path:
        """Return the directory of the replica on the machine `name`: the directory with the largest number."""
        stores = (self.machines.root(name) / ".raymq/store").glob(f"{BROKER}-*")
        return max(stores, key=lambda store: int(store.name.rpartition("-")[2]))

    def replica_on(self, name: str) -> int:
        """Return the number of the replica on the machine `name`."""
        return int(self.store_on(name).name.rpartition("-")[2])

    def epochs_on(self, name: str) -> bytes:
        """Return the epochs in which masters have written the log of the replica on the machine `name`."""
        return (self.store_on(name) / EPOCH_FILE).read_bytes()

    def _check(self, seed: int) -> None:
        """Check that every acknowledged message is stored once, that the observations fit a log, and that the replicas'
        logs are equal."""
        history: dict[Sent, Operation] = {}
        for name in SENDING:
            history |= read_history_file(self._journal(name))
        queues = {
            MessageQueue(*queue): [Sent(*sent) for sent in stored]
            for queue, stored in self.hand.ask("read", self._topic)
        }
        report = check(history.values(), queues)
        print(report)
        assert report.violations == {}
        seen = self.hand.ask("check_log", [str(self._journal(name)) for name in SENDING], seed)
        print(f"{seen} observations fit a log")
        end = self.hand.ask("equal_end")
        assert len({log_checksum(self.store_on(name), end) for name in NAMES}) == 1


@pytest.fixture(scope="module")
def queue(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("cuts")
    with network(directory, NAMES) as machines:
        machines.start_ray()
        (machines.root(HEAD) / "raymq.yaml").write_text(SETTINGS)
        print(machines.run(HEAD, "raymq", "up", "--config", "/root/raymq.yaml", "--wait-nodes", str(len(NAMES))))
        group = (str(CHAOS / "remote_group.py"), BROKER, str(len(NAMES)))
        hand = machines.spawn(HEAD, sys.executable, *group, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            yield Cluster(directory, machines, Hand(hand))
        finally:
            machines.end(hand)


def test_a_head_that_is_cut_off_together_with_the_master_makes_no_second_master(queue: Cluster) -> None:
    far = (LEFT, RIGHT)
    with queue.load("head-and-master", master=HEAD):
        before = [queue.epochs_on(name) for name in far]
        queue.separate(HEAD)
        queue.assert_standstill(*SENDING)
        eventually(lambda: queue.failed(HEAD)["ServiceNotAvailableError"], "sends without replicas in sync", HEAL_S)
        eventually(lambda: queue.failed(LEFT)["SendUnknownError"], "sends without an answer", HEAL_S)
        print({name: queue.failed(name) for name in SENDING})
        assert [queue.epochs_on(name) for name in far] == before
        queue.heal(*far)


@in_soak
def test_a_head_that_is_cut_off_from_the_master_makes_no_second_master(queue: Cluster) -> None:
    far = (LEFT, RIGHT)
    with queue.load("head-alone", master=LEFT):
        before = [queue.epochs_on(name) for name in far]
        queue.separate(HEAD)
        elected = queue.replica_on(HEAD)
        eventually(lambda: queue.hand.ask("account")["in_sync"] == [elected], "a master on the head node", HEAL_S)
        queue.assert_standstill(*SENDING)
        eventually(lambda: queue.failed(HEAD).total(), "sends without replicas in sync", HEAL_S)
        eventually(lambda: queue.failed(LEFT).total(), "sends without an answer", HEAL_S)
        print({name: queue.failed(name) for name in SENDING})
        assert [queue.epochs_on(name) for name in far] == before
        queue.heal(*far)


def test_a_master_that_is_cut_off_stops_and_another_leads_and_it_can_leave_its_group(queue: Cluster) -> None:
    with queue.load("isolated", master=LEFT):
        cut_off = queue.replica_on(LEFT)
        queue.separate(LEFT)
        queue.more(HEAD)
        queue.assert_standstill(LEFT)
        queue.heal(LEFT)
        queue.hand.ask("lead", cut_off)
        queue.separate(LEFT)
        queue.more(HEAD)
        queue.hand.ask("change", 2)
        queue.more(HEAD)
        queue.heal(LEFT)
        assert cut_off not in {one["replica"] for one in queue.hand.ask("account")["replicas"]}
        queue.hand.ask("change", 3)
        assert queue.replica_on(LEFT) > cut_off, "the new replica has a directory of its own"
        queue.more(HEAD)


@in_soak
def test_a_master_that_receives_but_cannot_send_stops_and_another_leads(queue: Cluster) -> None:
    with queue.load("one-direction", master=LEFT):
        queue.machines.cut([LEFT], (HEAD, RIGHT))
        queue.more(HEAD)
        queue.assert_standstill(LEFT)
        queue.heal(LEFT)
