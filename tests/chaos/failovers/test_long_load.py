"""Soak test: three replicas under a steady load, with a process killed in every minute.

No acknowledged message is lost or stored twice. `make soak` runs the test for RAYMQ_SOAK_MINUTES (60) with
RAYMQ_SOAK_RATE (20,000) messages of 128 bytes per second. It compares the first ten minutes with the last ten. The
rates differ by at most 10 %, and memory, descriptors and threads grow by at most 5 %, over all servers and in each
server that lived for half of the run. A store lives for less, and needs more while it is the master. The
report of each minute is printed after the tests, and RAYMQ_SOAK_REPORT names a file for it as JSON.

`make chaos` runs a short form, with a low rate, two kills and no judgement of speed. RAYMQ_CHAOS_SEED repeats the order
of the kills.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import raymq
from tests.support.cases import SUMMARY, chaos_seed
from tests.support.clusters.cluster import Sandbox, kill_actors
from tests.support.history.waiting import eventually
from tests.support.replicas.ray_replicas import RayReplicas
from tests.support.soak.audit import Audit
from tests.support.soak.load import Load
from tests.support.soak.minutes import Minute, as_text, rate_changes, save, size_changes
from tests.support.soak.readings import CLIENTS, GROWTH_MAX, SERVERS, Reading, growths, leaks, read_processes

SOAK = os.environ.get("RAYMQ_SOAK") == "1"
MINUTES = int(os.environ.get("RAYMQ_SOAK_MINUTES", "60")) if SOAK else 3
MINUTE_S = 60.0 if SOAK else 3.0
PER_S = float(os.environ.get("RAYMQ_SOAK_RATE", "20000")) if SOAK else 2000.0
REPORT = Path(os.environ.get("RAYMQ_SOAK_REPORT", os.devnull)).absolute()
BODY_BYTES = 128
PRODUCERS = CONSUMERS = 2
QUEUES = 8
BROKER = "broker-a"
REPLICAS = 3
KEPT_S = 180.0
"""The time, in seconds, for which the topic keeps messages. It bounds the disk space of a long run."""
DISK_MAX_MIB = 10 * 1024
RATE_CHANGE_MAX = 0.10
DRAIN_S = 300.0
MORE = {"descriptors": 24, "threads": 24}
"""Descriptors and threads that a process of the short form may have more after the kills than the largest process of
its kind before. A new master has connections that a slave does not need."""

SETTINGS = f"""\
broker_groups: 1
store:
  mapped_file_size_commit_log_bytes: {64 << 20}
  mapped_file_size_consume_queue_bytes: 2000000
  max_hash_slot_num: 500000
  max_index_num: 2000000
  file_reserved_time_hours: 0
  delete_when: "{";".join(f"{hour:02}" for hour in range(24))}"
replication: {{replicas: 3, spread: false, min_in_sync_replicas: 2}}
"""


class Kills:
    """Kills one process at a time: the master, a slave, the broker, the Controller and a consumer, in an order that the
    seed decides. Each kind is killed once before a kind is killed again. The master comes first in a short run."""

    def __init__(self, replicas: RayReplicas, load: Load, rng: random.Random) -> None:
        self._replicas, self._load, self._rng = replicas, load, rng
        self._next: list[Callable[[], str]] = []

    def kill_one(self) -> str:
        """Wait until all replicas are in sync, and kill the next process. Returns its name."""
        master = self._replicas.settled()["master"]
        if not self._next:
            self._next = [self._kill_slave, self._kill_broker, self._kill_controller, self._load_consumer]
            self._rng.shuffle(self._next)
            self._next.insert(0, self._kill_master)
        self._master = master
        return self._next.pop(0)()

    def _kill_master(self) -> str:
        self._replicas.kill(self._master)
        return f"master ({self._master})"

    def _kill_slave(self) -> str:
        slave = self._rng.choice([replica for replica in range(REPLICAS) if replica != self._master])
        self._replicas.kill(slave)
        return f"slave ({slave})"

    def _kill_broker(self) -> str:
        kill_actors("Broker")
        return "broker"

    def _kill_controller(self) -> str:
        kill_actors("Controller")
        return "Controller"

    def _load_consumer(self) -> str:
        return self._load.kill_consumer(self._rng)


def disk_mib(directory: Path) -> float:
    """Return the disk space of a directory in MiB. Files that are deleted during the count do not count."""
    blocks = 0
    for path in directory.rglob("*"):
        try:
            blocks += path.stat().st_blocks
        except FileNotFoundError:
            continue  # the file was deleted after it was listed
    return blocks * 512 / (1 << 20)


class Run:
    """The run of a soak test: its minutes so far."""

    def __init__(self, data: Path, load: Load, audit: Audit, kills: Kills, rng: random.Random) -> None:
        self._data, self._load, self._audit, self._kills, self._rng = data, load, audit, kills, rng
        self.minutes: list[Minute] = []

    def next_minute(self, *, kills: bool) -> Minute:
        """Let a minute pass, with a kill at a random time of its first half if `kills`. Returns the minute's row."""
        begin_s, killed = time.monotonic(), ""
        if kills:
            time.sleep(self._rng.uniform(0.0, MINUTE_S / 2))
            self._load.check()
            killed = self._kills.kill_one()
        time.sleep(max(0.0, begin_s + MINUTE_S - time.monotonic()))
        processes = tuple(read_processes((*SERVERS, *CLIENTS)))
        interval, seconds = self._load.take(), time.monotonic() - begin_s
        minute = Minute(
            len(self.minutes),
            seconds,
            interval.sent,
            interval.read,
            interval.send_ms,
            interval.read_ms,
            max(0, self._audit.acknowledged - self._audit.stored),
            interval.failed,
            killed,
            disk_mib(self._data),
            os.getloadavg()[0],
            processes,
        )
        self.minutes.append(minute)
        return minute


def wait_for_no_leaks(before: list[Reading]) -> None:
    """Wait until the processes of raymq are as many as `before`, with about as many descriptors and threads. It takes
    some time until the connections of a killed process are closed."""
    found: list[str] = []

    def none() -> bool:
        nonlocal found
        found = leaks(before, read_processes((*SERVERS, *CLIENTS)), MORE)
        return not found

    try:
        eventually(none, "processes without leaks")
    except AssertionError as error:
        raise AssertionError(f"{error}: {found}") from None


@pytest.mark.timeout(600 + 2 * int(MINUTES * MINUTE_S) + int(DRAIN_S))
def test_a_steady_load_with_kills_loses_nothing_and_no_process_grows(
    mq: raymq.Client, box: Sandbox, group: str, record_property: Callable[[str, object], None]
) -> None:
    seed = chaos_seed()
    rng, audit, replicas = random.Random(seed), Audit(), RayReplicas(BROKER, REPLICAS)
    # A replica's Replicator is made when the replica follows for the first time, and then stays. So each replica
    # follows once before the processes are counted.
    replicas.lead((replicas.settled()["master"] + 1) % REPLICAS)
    replicas.settled()
    mq.admin.create_topic("soak", queues=QUEUES, reserve_time_s=KEPT_S)
    load = Load("soak", group, audit, producers=PRODUCERS, consumers=CONSUMERS, per_s=PER_S, size=BODY_BYTES)
    run = Run(box.data, load, audit, Kills(replicas, load, rng), rng)
    facts = {"seed": seed, "rate": PER_S, "body_bytes": BODY_BYTES, "replicas": REPLICAS}
    try:
        load.start()
        eventually(lambda: load.check() is None and audit.stored > PER_S, "messages at the consumers")
        load.take()
        before = read_processes((*SERVERS, *CLIENTS))
        for number in range(MINUTES):
            run.next_minute(kills=SOAK or number > 0)
            save(REPORT, facts, run.minutes, [])
        load.stop_sending()
        replicas.settled()

        def all_read() -> bool:
            load.check()
            return sum(entry.max_offset for entry in mq.admin.describe_topic("soak")) <= audit.stored

        eventually(all_read, "everything at the consumers", DRAIN_S)
        assert replicas.equal_end() > 0
        if not SOAK:
            wait_for_no_leaks(before)
    finally:
        print(as_text(run.minutes))
        load.stop()
    verdict = audit.verdict()
    growth = growths(one.processes for one in run.minutes)
    print(verdict, *load.failures, sep="\n")
    save(REPORT, {**facts, "verdict": str(verdict), "failures": load.failures}, run.minutes, growth)
    if SOAK:
        changes = rate_changes(run.minutes) | size_changes(run.minutes)
        grown = "\n".join(map(str, growth))
        record_property(SUMMARY, f"{as_text(run.minutes)}\n{verdict}\nchanges: {changes}\n{grown}")
    assert verdict.violations == {}, verdict.examples
    assert len(run.minutes) == MINUTES
    assert sum(bool(minute.killed) for minute in run.minutes) == (MINUTES if SOAK else MINUTES - 1)
    assert {one.kind for one in before} == {*SERVERS, *CLIENTS}
    assert max(minute.disk_mib for minute in run.minutes) < DISK_MAX_MIB
    if SOAK:
        rates, sizes = rate_changes(run.minutes), size_changes(run.minutes)
        assert {name: share for name, share in rates.items() if abs(share) > RATE_CHANGE_MAX} == {}
        assert {name: share for name, share in sizes.items() if share > GROWTH_MAX} == {}
        old = [one for one in growth if one.kind in SERVERS and one.life_s > MINUTES * MINUTE_S / 2]
        assert [str(one) for one in old if one.excessive] == []
