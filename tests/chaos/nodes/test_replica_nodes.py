"""Tests of a broker group with three replicas on three nodes. The nodes are killed, restarted, replaced and drained.

Each node is a raylet on this machine with a data directory of its own (tests.support.clusters.nodes). Every
acknowledged message is read back exactly once, and the replicas' logs have equal checksums.

RAYMQ_SOAK=1 also kills the master's process 20 times and its node 5 times, and stops the master 5 times for 10 to 30 s.
RAYMQ_CHAOS_SEED repeats the order of these faults.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import psutil
import pytest

import raymq
from placement.operations import balance, drain
from raymq.common.config.cluster import load_settings
from raymq.tools.doctor.examination import examine, take_snapshot
from raymq.tools.doctor.findings import State
from tests.support.cases import chaos_seed
from tests.support.clusters.cluster import descendants, one_group
from tests.support.clusters.faults import standing_still
from tests.support.clusters.nodes import LOOPBACK, Nodes
from tests.support.history.checker import check
from tests.support.history.history import History
from tests.support.history.waiting import eventually
from tests.support.history.workload import Senders, read_back
from tests.support.replicas.placed_group import PlacedGroup
from tests.support.replicas.ray_replicas import HEAL_TIMEOUT_S

SOAK = os.environ.get("RAYMQ_SOAK") == "1"
BROKER = "broker-a"
REPLICAS = 3
BETWEEN_FAULTS = 200
DRAIN_S = 200.0
STOPPED_S = (10.0, 30.0)
SETTINGS = one_group("{replicas: 3, min_in_sync_replicas: 2, replace_after_s: 5}")


@pytest.fixture
def replicas(mq: raymq.Client, machines: Nodes) -> PlacedGroup:
    group = PlacedGroup(BROKER, REPLICAS, machines)
    group.settled()
    return group


@pytest.fixture
def free_node(machines: Nodes, replicas: PlacedGroup) -> str:
    """Return the name of a node without a replica, on which a new replica may start."""
    if not machines.runs("spare"):
        machines.add("spare")
    nodes = ("head", "left", "right", "spare")
    for name in nodes:
        drain(machines.node_id(name), drained=False, progress=print)
    [free] = {*nodes} - {*replicas.homes().values()}
    return free


@contextmanager
def load(mq: raymq.Client, topic: str) -> Iterator[History]:
    """Run producers that send during a `with` block. Check at the end that each acknowledged message is stored
    once."""
    history = History()
    senders = Senders(mq, topic, producers=2, count=10**6, history=history, pause_s=0.005)
    senders.start()
    try:
        yield history
    finally:
        senders.stop()
        senders.join(120)
    report = check(history, read_back(mq, topic))
    print(report)
    assert report.violations == {}
    assert report.acknowledged > BETWEEN_FAULTS


def more(history: History) -> None:
    """Wait until the producers have finished more sends, successful or not."""
    enough = len(history) + BETWEEN_FAULTS
    eventually(lambda: len(history) >= enough, "sends that end")


def test_each_replica_has_a_node_of_its_own_and_nothing_listens_beyond_loopback(
    replicas: PlacedGroup, machines: Nodes
) -> None:
    replicas.wait_for_homes({"head", "left", "right"})
    listening = {
        connection.laddr.ip
        for process in descendants()
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert {address.replace("::ffff:", "").replace("::1", LOOPBACK) for address in listening} == {LOOPBACK}


def test_the_doctor_checks_every_node_and_the_connections_between_nodes(
    mq: raymq.Client, replicas: PlacedGroup, machines: Nodes
) -> None:
    findings = examine(take_snapshot(load_settings(None), None, None, lambda step: None))
    states: dict[str, list[State]] = {}
    for one in findings:
        states.setdefault(one.check, []).append(one.state)
    for name in ("nodes answer", "same token", "clocks", "lanes", "metrics ports"):
        assert states[name] == [State.OK] * 3, [one for one in findings if one.check == name]
    # The doctor checks four installed versions: on each of the three nodes, and on the machine of this program.
    assert states["versions"] == [State.OK] * 4
    # The doctor has four open lanes (direct socket connections): one to the broker, and three to the stores.
    assert {one.seen for one in findings if one.check == "lanes"} == {"4 lanes open"}
    for name in ("servers answer", "masters", "copies", "a replica to spare", "in sync", "health checks"):
        assert states[name] == [State.OK], [one for one in findings if one.check == name]
    # Two warnings are correct: the three nodes are on one machine, and the cluster has only one NameServer.
    assert (states["replicas apart"], states["NameServers"]) == ([State.WARN], [State.WARN])


def test_a_node_that_is_killed_with_the_master_and_returns_is_taken_back(
    mq: raymq.Client, replicas: PlacedGroup, machines: Nodes, topic: str
) -> None:
    with load(mq, topic) as history:
        replicas.lead_from("left")
        machines.kill("left")
        more(history)
        eventually(lambda: replicas.account()["in_sync"], "somebody in sync")
        machines.add("left")
        replicas.wait_for_homes({"head", "left", "right"})
        more(history)
    replicas.assert_equal_logs()


@pytest.mark.skipif(not SOAK, reason="one of the long runs: `make soak`")
@pytest.mark.timeout(5400)
def test_nothing_is_lost_while_masters_and_their_nodes_are_killed_and_stopped(
    mq: raymq.Client, replicas: PlacedGroup, machines: Nodes, topic: str
) -> None:
    seed = chaos_seed()
    rng = random.Random(seed)

    def kill_node() -> None:
        name = rng.choice(["left", "right"])  # Do not kill the head node: that kills the whole cluster.
        replicas.lead_from(name)
        before = replicas.account()["epoch"]
        machines.kill(name)
        replicas.led_after(before)
        machines.add(name)
        replicas.wait_for_homes({"head", "left", "right"})

    def stop_master() -> None:
        with standing_still(replicas.pid(replicas.settled()["master"])):
            time.sleep(rng.uniform(*STOPPED_S))

    faults: list[Callable[[], None]] = [replicas.fail_over] * 20 + [kill_node, stop_master] * 5
    rng.shuffle(faults)
    with load(mq, topic) as history:
        for fault in faults:
            print(f"{fault.__name__} after {len(history)} messages")
            fault()
            more(history)
            replicas.settled()
    replicas.assert_equal_logs()


def test_a_node_that_stays_away_is_replaced_and_one_that_is_drained_keeps_nothing(
    mq: raymq.Client, replicas: PlacedGroup, machines: Nodes, topic: str
) -> None:
    with load(mq, topic) as history:
        machines.kill("right")
        machines.add("spare")
        replicas.wait_for_homes({"head", "left", "spare"})
        more(history)
        machines.add("right")  # the node "right" starts again with its old data, which lacks the newest messages
        more(history)
        assert set(replicas.homes().values()) == {"head", "left", "spare"}
        replicas.lead_from("spare")
        steps: list[str] = []
        assert drain(machines.node_id("spare"), drained=True, progress=steps.append)["left"] == []
        assert steps != []
        assert set(replicas.homes().values()) == {"head", "left", "right"}
        more(history)
        assert balance(steps.append)["left"] == []
        assert replicas.settled()["master"] == min(replicas.homes())
    replicas.assert_equal_logs()


def test_a_drain_waits_for_a_stopped_replica_says_so_and_ends_when_the_replica_continues(
    mq: raymq.Client, replicas: PlacedGroup, machines: Nodes, free_node: str, topic: str
) -> None:
    homes = replicas.homes()
    stopped, leaving = sorted(homes.keys() - {replicas.settled()["master"]})
    steps: list[str] = []
    with load(mq, topic) as history, ThreadPoolExecutor(1) as pool:
        mq.admin.change_min_in_sync_replicas(BROKER, REPLICAS)
        with standing_still(replicas.pid(stopped)):
            eventually(lambda: stopped not in replicas.account()["in_sync"], "a set without the stopped replica")
            draining = pool.submit(drain, machines.node_id(homes[leaving]), drained=True, progress=steps.append)
            waits = f"replica {leaving} leaves when {REPLICAS} other replicas are in sync"
            eventually(lambda: any(waits in step for step in steps), "what the drain waits for", HEAL_TIMEOUT_S)
            assert waits in mq.admin.replicas(BROKER).change
            assert not draining.done()
            more(history)
        assert draining.result(DRAIN_S)["left"] == []
        assert set(replicas.homes().values()) == {*homes.values(), free_node} - {homes[leaving]}
        assert mq.admin.replicas(BROKER).change == ""
        mq.admin.change_min_in_sync_replicas(BROKER, 2)
        more(history)
    replicas.assert_equal_logs()


def test_a_stopped_replica_is_replaced_and_does_not_return(
    mq: raymq.Client, replicas: PlacedGroup, free_node: str, topic: str
) -> None:
    account = replicas.settled()
    stopped = max(one["replica"] for one in account["replicas"] if one["replica"] != account["master"])
    with load(mq, topic) as history:
        with standing_still(replicas.pid(stopped)):
            eventually(lambda: stopped not in replicas.account()["in_sync"], "a set without the stopped replica")
            mq.admin.change_replicas(BROKER, None, replace=stopped)
            group = mq.admin.wait_for_replicas(BROKER, DRAIN_S)
            assert group.change == ""
            assert stopped not in {one.replica for one in group.replicas}
            more(history)
        replicas.settled()
        more(history)
    assert free_node in replicas.homes().values()
    assert stopped not in replicas.homes()
    replicas.assert_equal_logs()
