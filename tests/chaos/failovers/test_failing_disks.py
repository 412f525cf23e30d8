"""Tests of machine faults in a group of three replicas: disks that return errors or are full, and clocks that are set
back.

tests/support/faulty_machine injects the disk errors and the wrong clocks into the servers' processes. If a tmpfs can be
mounted, the stores are on a tmpfs, which a test fills to the last byte.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

import raymq
from raymq.common.errors import RaymqError, StoreError
from raymq.common.message import MessageExt
from raymq.common.names import CONTROLLER, StorageName
from raymq.remoting.actor_ref import ActorRef
from tests.support.clusters.cluster import (
    Sandbox,
    actor_processes,
    embedded,
    kill_actors,
    one_group,
    poll_until,
    sandbox,
)
from tests.support.history.checker import check
from tests.support.history.history import History
from tests.support.history.listener_notes import ListenerNotes
from tests.support.history.waiting import eventually
from tests.support.history.watcher import Watcher
from tests.support.history.workload import Senders, read_back
from tests.support.replicas.ray_replicas import RayReplicas, log_checksum
from tests.support.stores.small_disk import SmallDisk, small_disk

FIRST = raymq.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET
BROKER = "broker-a"
REPLICAS = 3
DISK_MIB = 384
ENOUGH = 200
RESUME_S = 120.0
OUTAGE_S = 10.0
"""Minimum time for which a disk stays broken, in seconds."""
BACK_S = -3600.0
AHEAD_S = 86_400.0
SERVERS = ("Controller", "NameServer", "Broker", "Storage", "Replicator", "Rebalance", "Pull")
FAULTY_MACHINE = Path(__file__).parents[2] / "support/faulty_machine"
STORE_SETTINGS = """\
  clean_resource_interval_ms: 200
  max_hash_slot_num: 10000
  max_index_num: 40000
"""


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine on which the replicas run.

    `disk`: the disk of all stores; None if no tmpfs can be mounted. `reason`: the reason why no tmpfs can be mounted.
    """

    box: Sandbox
    faults: Path
    disk: SmallDisk | None
    reason: str

    def marker(self, replica: int, fault: str) -> Path:
        return self.box.data / f"{BROKER}-{replica}" / fault


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    faults = tmp_path_factory.mktemp("faults")
    settings = one_group("{replicas: 3, spread: false, min_in_sync_replicas: 2}")
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(FAULTY_MACHINE), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("RAYMQ_TEST_FAULTS", str(faults))
        box = stack.enter_context(sandbox(settings.replace("store:\n", f"store:\n{STORE_SETTINGS}")))
        patch.setenv("RAYMQ_TEST_STORES", str(box.data))
        disk, reason = None, ""
        try:
            disk = stack.enter_context(small_disk(box.data, DISK_MIB))
        except pytest.skip.Exception as skipped:
            reason = str(skipped)
        yield Machine(box, faults, disk, reason)


@pytest.fixture(scope="module")
def box(machine: Machine) -> Sandbox:
    return machine.box


@pytest.fixture(scope="module")
def mq(box: Sandbox) -> Iterator[raymq.Client]:
    with embedded(box) as client:
        yield client


def statuses() -> list[dict[str, object]]:
    return [ActorRef(str(StorageName(BROKER, replica))).call("status") for replica in range(REPLICAS)]


@pytest.mark.parametrize("fault", ["flush", "write", "read", "bus"])
def test_a_master_whose_disk_fails_gives_up_its_role_and_returns_after_the_fault(
    mq: raymq.Client, machine: Machine, fault: str
) -> None:
    replicas, topic = RayReplicas(BROKER, REPLICAS), f"orders-{fault}"
    left = replicas.settled()["master"]
    pid = replicas.pid(left)
    mq.admin.create_topic(topic, queues=4)
    history = History()
    senders = Senders(mq, topic, producers=2, count=10**6, history=history, pause_s=0.005)
    marker = machine.marker(left, fault)
    senders.start()
    try:
        with Watcher(mq, topic, f"readers-{fault}", patient=True) as reader:
            eventually(lambda: len(history) >= ENOUGH, "sends that end")
            marker.touch()
            broken_s = time.monotonic()
            eventually(lambda: replicas.led()["master"] != left, "another master")
            led_s = time.monotonic() - broken_s
            before = len(history)
            eventually(lambda: len(history) >= before + ENOUGH, "sends that go on while the disk is broken")
            print(
                f"{fault}: another replica led {led_s:.2f} s after the disk broke; {ENOUGH} sends took "
                f"{time.monotonic() - broken_s - led_s:.2f} s more"
            )
            eventually(lambda: not psutil.pid_exists(pid), "the end of the process")
            # While its disk is broken, the former master stays out of the broker group and reports the reason. The
            # other replicas continue.
            why = eventually(lambda: why_out(left, patient=True), "a reason")
            print(f"{fault}: {why}")
            seen = len(reader.seen)
            before = len(history)
            while time.monotonic() < broken_s + OUTAGE_S:
                assert left not in replicas.led()["in_sync"]
                assert why_out(left)
                time.sleep(0.2)
            eventually(lambda: len(history) >= before + ENOUGH, "sends during the outage")
            eventually(lambda: len(reader.seen) >= seen + ENOUGH, "reads during the outage")
            reader.check()
            marker.unlink()
            replicas.settled()
            before = len(history)
            eventually(lambda: len(history) >= before + ENOUGH, "sends with all replicas")
    finally:
        marker.unlink(missing_ok=True)
        senders.stop()
        senders.join(120)
    report = check(history, read_back(mq, topic))
    print(report)
    assert report.violations == {}
    assert report.acknowledged > ENOUGH * 2
    end = replicas.equal_end()
    stores = [machine.box.data / f"{BROKER}-{replica}" for replica in range(REPLICAS)]
    assert len({log_checksum(store, end) for store in stores}) == 1
    assert [status["disk_failure"] for status in statuses()] == [""] * REPLICAS


def why_out(replica: int, *, patient: bool = False) -> str:
    """Return the error that a replica reports as the reason why it does not work; empty if the replica works.

    If the replica does not answer, the result says so. With `patient`, the result is then empty instead.
    """
    try:
        status = ActorRef(str(StorageName(BROKER, replica))).call("status")
    except StoreError as error:
        return str(error)
    except RaymqError as error:
        return "" if patient else f"no answer: {error}"
    return str(status["disk_failure"])


@pytest.mark.parametrize("share", [0.92, 1.0])
def test_on_a_full_disk_consumers_commit_join_and_receive_and_sends_are_refused_at_once(
    mq: raymq.Client, machine: Machine, share: float
) -> None:
    if machine.disk is None:
        pytest.skip(machine.reason)
    replicas, topic, disk = RayReplicas(BROKER, REPLICAS), f"stock-{share:.0%}".rstrip("%"), machine.disk
    replicas.settled()
    mq.admin.create_topic(topic, queues=4)
    with mq.producer() as producer, mq.pull_consumer(f"old-{topic}", consume_from=FIRST) as first:
        for number in range(80):
            producer.send(raymq.Message(topic, b"%d" % number))
        first.subscribe(topic)
        read = poll_until(first, 10)
        try:
            disk.fill(share)
            # Compare the reason why each replica accepts no writes, not its field `writable`. A slave is never
            # writable, even if its disk has space.
            eventually(
                lambda: all("% full" in str(status["not_writable_reason"]) for status in statuses()),
                "disks that are found to be full",
            )
            assert not any(status["writable"] for status in statuses())
            began_s = time.monotonic()
            with pytest.raises(raymq.StoreNotWritableError, match="% full"):
                producer.send(raymq.Message(topic, b"refused"))
            first.commit()
            # A second member of the consumer group causes a rebalance.
            with mq.pull_consumer(f"old-{topic}", consume_from=FIRST) as second:
                second.subscribe(topic)
                while len({message.body for message in read}) < 80:
                    for consumer in (first, second):
                        read += consumer.poll(timeout_s=0.2)
                        consumer.commit()
            with mq.pull_consumer(f"new-{topic}", consume_from=FIRST) as other:
                other.subscribe(topic)
                assert len(poll_until(other, 80)) >= 80
                other.commit()
            with mq.simple_consumer(f"simple-{topic}", consume_from=FIRST) as simple:
                simple.subscribe(topic)
                [message, *_] = eventually(lambda: simple.receive(max_messages=1, invisible_s=60), "a lease")
                simple.ack(message)
            print(
                f"{share:.0%}, {disk.free_bytes} bytes free: refused, committed, joined, rebalanced and received in "
                f"{time.monotonic() - began_s:.1f} s"
            )
            assert all(entry.committed for entry in mq.admin.describe_group(f"new-{topic}"))
        finally:
            disk.make_room()
        eventually(lambda: producer_takes(producer, topic), "sends after room was made")


def test_restarted_servers_work_with_the_clock_an_hour_back(mq: raymq.Client, machine: Machine) -> None:
    RayReplicas(BROKER, REPLICAS).settled()
    mq.admin.create_topic("timed", queues=4)
    heard = ListenerNotes(machine.faults / "heard")
    with (
        mq.producer() as producer,
        mq.pull_consumer("timed-pull", consume_from=FIRST) as consumer,
        mq.push_consumer("timed-push", consume_from=FIRST).subscribe("timed").on_message(NotingListener(heard)).start(),
    ):
        consumer.subscribe("timed")
        polled: set[bytes] = set()
        sent: set[bytes] = set()

        def all_goes_on() -> None:
            bodies = {b"%d" % number for number in range(len(sent), len(sent) + 20)}
            for number, body in enumerate(sorted(bodies)):
                producer.send(raymq.Message("timed", body, delay_level=0 if number else 1))
            sent.update(bodies)

            def polled_all() -> bool:
                polled.update(message.body for message in consumer.poll(timeout_s=0.2))
                return sent <= polled

            eventually(polled_all, "polls", RESUME_S)
            consumer.commit()
            eventually(lambda: {line.encode() for line in heard.lines()} >= sent, "pushes", RESUME_S)

        all_goes_on()
        (machine.faults / "clock").write_text(str(BACK_S))
        try:
            for server in SERVERS:
                before = {process.pid for process in actor_processes(server)}
                assert before, server
                kill_actors(server)

                def started_again(server: str = server, before: set[int] = before) -> bool:
                    now = {process.pid for process in actor_processes(server)}
                    wrong = {int(path.name.removeprefix("wrong-")) for path in machine.faults.glob("wrong-*")}
                    return bool(now) and not now & before and now <= wrong

                eventually(started_again, f"{server} with its clock set back", RESUME_S)
                all_goes_on()
                print(f"{server}: all goes on")
            mq.admin.create_topic("made-after", queues=2)
            producer.send(raymq.Message("made-after", b"1"))
        finally:
            (machine.faults / "clock").unlink()
    assert all(entry.committed for entry in mq.admin.describe_group("timed-pull"))


def test_stores_and_brokers_whose_clocks_are_a_day_ahead_are_not_early(mq: raymq.Client, machine: Machine) -> None:
    """The servers of a broker group restart with wrong clocks. No message is deleted or delivered early, and no leased
    message is leased to a second consumer."""
    RayReplicas(BROKER, REPLICAS).settled()
    kept, late, leased = "kept", "late", "leased"
    mq.admin.create_topic(kept, queues=1, reserve_time_s=300)
    for topic in (late, leased):
        mq.admin.create_topic(topic, queues=1)
    bodies = {b"%d" % number for number in range(20)}
    with (
        mq.producer() as producer,
        mq.simple_consumer("of-leased") as first,
        mq.simple_consumer("of-leased") as second,
        mq.pull_consumer("of-late", consume_from=FIRST) as consumer,
    ):
        first.subscribe(leased)
        second.subscribe(leased)
        for body in sorted(bodies):
            producer.send(raymq.Message(kept, body))
            producer.send(raymq.Message(leased, body))
            producer.send(raymq.Message(late, body, delay_level=9))
        held = {message.body for message in received(first, len(bodies))}
        assert held == bodies

        def attributes_stored() -> bool:
            files = [machine.box.data / f"{BROKER}-{replica}/config/topics.json" for replica in range(REPLICAS)]
            return any(path.exists() and kept in path.read_text() for path in files)

        eventually(attributes_stored, "the attributes of the topic in a store")
        restart_with_clock(machine, AHEAD_S)
        try:
            RayReplicas(BROKER, REPLICAS).settled()
            producer.send(raymq.Message(kept, b"after"))
            mq.admin.clean_store(BROKER)

            def skews() -> list[float]:
                [group] = ActorRef(CONTROLLER).call("status")["groups"]
                return [one["clock_skew_s"] or 0.0 for one in group["replicas"]]

            eventually(lambda: min(skews()) > AHEAD_S - 60, "the difference of the clocks at the Controller")
            assert second.receive(invisible_s=60, wait_s=2) == []
            consumer.subscribe(late)
            assert consumer.poll(timeout_s=2) == []
            [queue] = mq.admin.describe_topic(kept)
            assert (queue.min_offset, queue.max_offset) == (0, len(bodies) + 1)
        finally:
            restart_with_clock(machine, None)
        RayReplicas(BROKER, REPLICAS).settled()


def received(consumer: raymq.SimpleConsumer, count: int) -> list[raymq.ReceivedMessage]:
    """Lease `count` messages for ten minutes."""
    messages: list[raymq.ReceivedMessage] = []

    def all_received() -> bool:
        messages.extend(consumer.receive(invisible_s=600, wait_s=1))
        return len(messages) >= count

    eventually(all_received, f"{count} leased messages")
    return messages


def restart_with_clock(machine: Machine, wrong_s: float | None) -> None:
    """Kill the stores and the broker, and wait until all run again, with clocks that are wrong by `wrong_s`."""
    if wrong_s is None:
        (machine.faults / "clock").unlink()
    else:
        (machine.faults / "clock").write_text(str(wrong_s))
    for server in ("Broker", "Storage"):
        before = {process.pid for process in actor_processes(server)}
        kill_actors(server)

        def started_again(server: str = server, before: set[int] = before) -> bool:
            now = {process.pid for process in actor_processes(server)}
            wrong = {int(path.name.removeprefix("wrong-")) for path in machine.faults.glob("wrong-*")}
            return len(now) >= len(before) and not now & before and (wrong_s is None or now <= wrong)

        eventually(started_again, f"{server} with another clock", RESUME_S)


class NotingListener:
    """A listener that writes each message's body to a file."""

    def __init__(self, notes: ListenerNotes) -> None:
        self._notes = notes

    def __call__(self, message: MessageExt) -> None:
        self._notes.write(message.body.decode())


def producer_takes(producer: raymq.Producer, topic: str) -> bool:
    try:
        producer.send(raymq.Message(topic, b"again"))
    except raymq.StoreNotWritableError:
        return False
    return True
