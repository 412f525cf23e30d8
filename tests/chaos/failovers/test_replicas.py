"""Tests of process faults: a broker group of three replicas on one machine works while its processes are killed and
stopped.

To repeat the faults of a run in the same order, set RAYMQ_CHAOS_SEED to the run's seed.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import ray

import raymq
from raymq.client.cluster.launcher import launch
from tests.support.cases import chaos_seed
from tests.support.clusters.cluster import Sandbox, kill_actors, one_group, poll_until
from tests.support.clusters.faults import standing_still
from tests.support.history.checker import check
from tests.support.history.history import History
from tests.support.history.log_rules import check_log
from tests.support.history.observations import Observations, TailWatcher
from tests.support.history.waiting import eventually
from tests.support.history.watcher import Watcher
from tests.support.history.workload import Senders, read_back, read_everything
from tests.support.replicas.ray_replicas import RayReplicas, log_checksum

FIRST = raymq.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET
BROKER = "broker-a"
REPLICAS = 3
STOPPED_S = 5.0
BETWEEN_FAULTS = 200
SETTINGS = one_group("{replicas: 3, spread: false, min_in_sync_replicas: 2}")


@pytest.fixture
def replicas(mq: raymq.Client) -> RayReplicas:
    """Return the broker group after all its replicas are in sync."""
    group = RayReplicas(BROKER, REPLICAS)
    group.settled()
    return group


class Faults:
    """Injects faults into the broker group's processes, one after another. Each fault begins when all replicas are in
    sync."""

    def __init__(self, replicas: RayReplicas, rng: random.Random) -> None:
        self._replicas, self._rng = replicas, rng

    def in_some_order(self) -> list[Callable[[], None]]:
        faults = [self.kill_master] * 3
        faults += [self.stop_master, self.kill_slave, self.kill_controller, self.kill_broker]
        self._rng.shuffle(faults)
        return faults

    def kill_master(self) -> None:
        self._replicas.fail_over()

    def stop_master(self) -> None:
        with standing_still(self._replicas.pid(self._replicas.settled()["master"])):
            time.sleep(STOPPED_S)

    def kill_slave(self) -> None:
        master = self._replicas.settled()["master"]
        self._replicas.kill(self._rng.choice([replica for replica in range(REPLICAS) if replica != master]))

    def kill_controller(self) -> None:
        kill_actors("Controller")

    def kill_broker(self) -> None:
        kill_actors("Broker")


def test_nothing_acknowledged_is_lost_or_doubled_while_servers_are_killed_and_stopped(
    mq: raymq.Client, box: Sandbox, replicas: RayReplicas, topic: str, group: str
) -> None:
    seed = chaos_seed()
    history, seen = History(), Observations()
    senders = Senders(mq, topic, producers=2, count=10**6, history=history, pause_s=0.005, observations=seen)
    tails = TailWatcher(mq, topic, seen, group)
    with Watcher(mq, topic, group, observations=seen) as watcher, tails:
        senders.start()
        try:
            for fault in Faults(replicas, random.Random(seed)).in_some_order():
                enough = len(history) + BETWEEN_FAULTS
                eventually(lambda enough=enough: len(history) >= enough, "sends that end")  # type: ignore[misc]
                replicas.settled()
                print(f"{fault.__name__} after {len(history)} messages")
                fault()
        finally:
            senders.stop()
            senders.join(120)
        replicas.settled()
        stored = read_everything(mq, topic, history, watcher, more_than=BETWEEN_FAULTS * 5)
    watcher.check()
    tails.check()
    assert watcher.seen == stored
    check_log(seen, random.Random(seed))
    end = replicas.equal_end()
    assert end > 0
    assert len({log_checksum(box.data / f"{BROKER}-{replica}", end) for replica in range(REPLICAS)}) == 1


def test_topics_and_committed_offsets_are_there_after_a_failover(
    mq: raymq.Client, replicas: RayReplicas, topic: str, group: str
) -> None:
    with mq.producer() as producer:
        for number in range(40):
            producer.send(raymq.Message(topic, b"%d" % number))
    with mq.pull_consumer(group, consume_from=FIRST, auto_commit=False) as consumer:
        consumer.subscribe(topic)
        first = {message.body for message in poll_until(consumer, 15)}
        consumer.commit()
    committed = {entry.queue: entry.committed or 0 for entry in mq.admin.describe_group(group)}
    described = mq.admin.describe_topic(topic)
    replicas.fail_over()
    with mq.pull_consumer(group, consume_from=FIRST, auto_commit=False) as consumer:
        consumer.subscribe(topic)
        rest = {message.body for message in poll_until(consumer, 25)}
    assert {entry.queue: entry.committed or 0 for entry in mq.admin.describe_group(group)} == committed
    assert mq.admin.describe_topic(topic) == described
    assert first | rest == {b"%d" % number for number in range(40)}
    assert not first & rest


def test_a_deleted_topic_stays_deleted_after_failovers(mq: raymq.Client, replicas: RayReplicas, topic: str) -> None:
    with mq.producer() as producer:
        for number in range(20):
            producer.send(raymq.Message(topic, b"old %d" % number))
    mq.admin.delete_topic(topic)
    for _ in range(2):
        replicas.fail_over()
        eventually(lambda: _topics(mq) is not None, "an answer")
        assert topic not in (_topics(mq) or [])
    mq.admin.create_topic(topic, queues=4)
    with mq.producer() as producer:
        for number in range(20):
            producer.send(raymq.Message(topic, b"new %d" % number))
        # Each replica becomes the master once, including the replica on which the topic was deleted.
        for number in range(20, 23):
            before = replicas.settled()["master"]
            replicas.lead((before + 1) % REPLICAS)
            replicas.settled()
            producer.send(raymq.Message(topic, b"new %d" % number))
    replicas.fail_over()
    bodies = []
    for entry in mq.admin.describe_topic(topic):
        assert entry.min_offset == 0
        if entry.max_offset:
            result = mq.admin.pull(entry.queue, 0, max_messages=100)
            bodies += [message.body for message in result.messages]
    assert sorted(bodies) == sorted(b"new %d" % number for number in range(23))


def _topics(mq: raymq.Client) -> list[str] | None:
    try:
        return list(mq.admin.list_topics())
    except raymq.RaymqError:
        return None


def test_delayed_messages_are_delivered_once_after_failovers(
    mq: raymq.Client, replicas: RayReplicas, topic: str, group: str
) -> None:
    due_ms = time.time_ns() // 1_000_000 + 8_000
    with mq.producer() as producer:
        for number in range(20):
            producer.send(raymq.Message(topic, b"at %d" % number, deliver_at_ms=due_ms + 100 * number))
            producer.send(raymq.Message(topic, b"level %d" % number, delay_level=2))
    expected = {b"%b %d" % (kind, number) for kind in (b"at", b"level") for number in range(20)}
    replicas.fail_over()
    replicas.fail_over()
    with mq.pull_consumer(group, consume_from=FIRST) as consumer:
        consumer.subscribe(topic)
        messages = poll_until(consumer, len(expected))
        messages += consumer.poll(max_messages=100, timeout_s=2.0)
    assert sorted(message.body for message in messages) == sorted(expected)
    assert all(message.store_timestamp_ms >= due_ms for message in messages if message.body.startswith(b"at"))


def test_the_status_names_the_master_the_replicas_in_sync_and_their_nodes(
    mq: raymq.Client, replicas: RayReplicas
) -> None:
    address = ray.get_runtime_context().gcs_address

    def told() -> tuple[dict[str, Any], dict[str, Any]] | tuple[()]:
        """Return the Controller's status of the broker group, and the group's report in `raymq status`. The result is
        empty unless the report has every replica's state and lag."""
        before = replicas.settled()
        [controller] = launch("status", address)["replication"]
        known = [replica for group in controller["groups"] for replica in group["replicas"]]
        heard = [one["role"] != "SILENT" and one["lag_bytes"] is not None for one in known]
        same = replicas.settled()["epoch"] == before["epoch"]
        return (before, controller) if same and heard == [True] * REPLICAS else ()

    before, controller = eventually(told, "a status of the whole group")
    [group] = controller["groups"]
    assert controller["error"] == ""
    assert (group["master"], group["epoch"], group["reason"]) == (before["master"], before["epoch"], "")
    assert group["in_sync"] == list(range(REPLICAS))
    roles = {replica["replica"]: replica["role"] for replica in group["replicas"]}
    assert roles == {replica: "MASTER" if replica == group["master"] else "SLAVE" for replica in range(REPLICAS)}
    assert {replica["node"] for replica in group["replicas"]} == {ray.util.get_node_ip_address()}
    assert all(replica["lag_bytes"] >= 0 and replica["note"] == "" for replica in group["replicas"])
    assert all(replica["lag_s"] >= 0.0 for replica in group["replicas"])


def test_the_master_can_be_moved_to_another_replica_without_a_failed_send(
    mq: raymq.Client, replicas: RayReplicas, topic: str
) -> None:
    history = History()
    senders = Senders(mq, topic, producers=1, count=10**6, history=history, pause_s=0.002)
    senders.start()
    try:
        replicas.lead((replicas.settled()["master"] + 1) % REPLICAS)
        enough = len(history) + BETWEEN_FAULTS
        eventually(lambda: len(history) >= enough, "sends that end")
    finally:
        senders.stop()
        senders.join(120)
    report = check(history, read_back(mq, topic))
    assert report.violations == {}
    assert report.acknowledged == len(history)
