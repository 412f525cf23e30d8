"""Tests of a disk that breaks permanently: the master of three replicas loses its disk, and the two other replicas
continue without it.

Each fault has its own cluster, which is closed while the disk is still broken.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import raymq
from actors.core.replica.orders import MASTER_LEASE_S
from actors.replica.failed_disk import RESTART_INTERVAL_S
from tests.support.clusters.cluster import embedded, one_group
from tests.support.history.checker import check
from tests.support.history.history import History, Outcome
from tests.support.history.listener_notes import ListenerNotes
from tests.support.history.waiting import eventually
from tests.support.history.watcher import Watcher
from tests.support.history.workload import Senders, read_back
from tests.support.replicas.faulty_machines import DISK_FAULTS, FaultyMachine, faulty_machine, why_out
from tests.support.replicas.ray_replicas import RayReplicas, log_checksum

BROKER, REPLICAS, TOPIC = "broker-a", 3, "orders"
SETTINGS = one_group("{replicas: 3, spread: false, min_in_sync_replicas: 2}")
FIRST = raymq.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET
ENOUGH = 200
LOADED_S = 15.0
"""Maximum number of seconds, after the master's lease has expired, until sends succeed again on a loaded
machine."""
WATCH_S = RESTART_INTERVAL_S + 3.0
"""Seconds for which the test watches the replica whose disk is broken. If its process ended repeatedly, it would end
within this time."""
ELECTIONS_MAX = 3
"""Maximum number of elections that the test allows after the disk breaks. One election replaces the master. On a loaded
machine a master may renew its lease too late, which causes another election."""


class BrokenMaster:
    """A broker group of three replicas whose master's disk breaks. `break_disk` breaks the disk, and `check` checks the
    group while the disk is broken."""

    def __init__(self, machine: FaultyMachine, fault: str) -> None:
        self.replicas = RayReplicas(BROKER, REPLICAS)
        before = self.replicas.settled()
        self.broken: int = before["master"]
        self.others = sorted(set(range(REPLICAS)) - {self.broken})
        self.pid = self.replicas.pid(self.broken)
        self._epoch: int = before["epoch"]
        self._marker = machine.marker(BROKER, self.broken, fault)

    def break_disk(self) -> float:
        """Break the master's disk permanently. Returns the current time of the monotonic clock, in s."""
        self._marker.touch()
        return time.monotonic()

    def check(self) -> None:
        """Fail if the broken replica is the master, counts as in sync, or reports no error. Also fail if there were too
        many elections."""
        account = self.replicas.led()
        assert account["master"] in self.others, account
        assert set(account["in_sync"]) <= set(self.others), account
        assert self.elections(account) <= ELECTIONS_MAX, account
        assert why_out(BROKER, self.broken)

    def elections(self, account: dict[str, Any]) -> int:
        """Return the number of elections since the test made the disk fail."""
        return int(account["epoch"]) - self._epoch

    def others_end(self) -> int:
        """Wait until the two replicas with working disks are in sync and their logs end at the same confirmed offset.
        Returns this offset."""

        def end() -> int:
            account = self.replicas.led()
            rows = [one for one in account["replicas"] if one["replica"] in self.others]
            ends = {one.get(key, -1) for one in rows for key in ("end_offset", "confirm_offset")}
            return ends.pop() if account["in_sync"] == self.others and len(ends) == 1 else 0

        return eventually(lambda: max(end(), 0), "one end of both other logs")


@pytest.mark.parametrize("fault", DISK_FAULTS)
def test_a_disk_that_stays_broken_causes_one_election_and_loses_no_message(tmp_path: Path, fault: str) -> None:
    (tmp_path / "faults").mkdir()
    with faulty_machine(SETTINGS, tmp_path / "faults") as machine:
        with embedded(machine.box) as mq:
            group = BrokenMaster(machine, fault)
            end = run_without_the_disk(mq, group, fault, ListenerNotes(tmp_path / "heard"))
            closing_s = time.monotonic()
        print(f"{fault}: the cluster was closed in {time.monotonic() - closing_s:.1f} s while the disk was broken")
        stores = [machine.box.data / f"{BROKER}-{replica}" for replica in group.others]
        assert len({log_checksum(store, end) for store in stores}) == 1


def run_without_the_disk(mq: raymq.Client, group: BrokenMaster, fault: str, heard: ListenerNotes) -> int:
    """Send and consume before and after the master's disk breaks. Returns the offset at which the logs of the two other
    replicas end."""
    mq.admin.create_topic(TOPIC, queues=4)
    history = History()
    senders = Senders(mq, TOPIC, producers=2, count=10**6, history=history, pause_s=0.005)
    senders.start()
    pushed = mq.push_consumer("pushed", consume_from=FIRST).subscribe(TOPIC).on_message(heard)
    try:
        with Watcher(mq, TOPIC, "pulled", patient=True) as reader, pushed.start():
            eventually(lambda: acknowledged(history) and heard.lines() and reader.seen, "messages that arrive")
            broken_s = group.break_disk()
            await_sends(history, group)
            resumed_s = time.monotonic() - broken_s
            eventually(lambda: not psutil.pid_exists(group.pid), "the end of the process")
            why = eventually(lambda: why_out(BROKER, group.broken, patient=True), "a reason")
            print(f"{fault}: sends were acknowledged again {resumed_s:.2f} s after the disk broke: {why}")
            assert resumed_s < MASTER_LEASE_S + LOADED_S
            while time.monotonic() < broken_s + WATCH_S:
                group.check()
                time.sleep(0.2)
            for step in ("sends", "more sends"):
                count = len(history)
                eventually(lambda count=count: len(history) >= count + ENOUGH, step)  # type: ignore[misc]
            senders.stop()
            senders.join(120)
            bodies = acknowledged(history)
            eventually(lambda: bodies <= {body for _, _, body in list(reader.seen)}, "everything pulled")
            eventually(lambda: bodies <= {line.encode() for line in heard.lines()}, "everything pushed")
            reader.check()
    finally:
        senders.stop()
        senders.join(120)
    report = check(history, read_back(mq, TOPIC))
    end = group.others_end()
    group.check()
    print(f"{fault}: {group.elections(group.replicas.led())} elections; {report}")
    assert report.violations == {}
    return end


def acknowledged(history: History) -> set[bytes]:
    """Return the bodies of the messages in `history` that were acknowledged."""
    return {operation.sent.body() for operation in history if operation.outcome is Outcome.OK}


def await_sends(history: History, group: BrokenMaster) -> None:
    """Wait until another replica is the master and acknowledges messages."""
    begun_s = time.monotonic()
    eventually(lambda: group.replicas.led()["master"] != group.broken, "another master")
    print(f"another replica leads after {time.monotonic() - begun_s:.2f} s")
    count = len(acknowledged(history))
    eventually(lambda: len(acknowledged(history)) > count, "an acknowledgement of another master")
