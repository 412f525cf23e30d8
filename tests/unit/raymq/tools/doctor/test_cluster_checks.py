"""Tests of the checks of `raymq doctor` about a running raymq and its metrics. Each check has a good and a bad
case."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from raymq.common.protocol.status import ClusterStatus
from raymq.tools.doctor.checks.cluster_checks import CLUSTER_CHECKS, RAY_DEFAULTS
from raymq.tools.doctor.checks.metrics_checks import METRICS_CHECKS
from raymq.tools.doctor.facts import (
    ClusterFacts,
    DoctorSnapshot,
    GroupFacts,
    HealthChecks,
    MachineFacts,
    MetricsPort,
    NodeFacts,
    PrometheusFacts,
)
from raymq.tools.doctor.findings import Finding, State, run_checks

SCHEDULE = {"late_ms": 0, "pending": {"1": 2}}
REPLICAS = [{"replica": index, "node": f"10.0.0.{index}", "note": "", "error": ""} for index in range(3)]
STATUS: dict[str, Any] = {
    "actors": ["broker-a", "nameserver-0", "nameserver-1", "storage-broker-a-0"],
    "brokers": [{"actor": "broker-a", "error": "", "ready": True, "waiting_for": "", "deleted_unread": []}],
    "stores": [{"actor": "storage-broker-a-0", "error": "", "writable": True, "role": "MASTER", "schedule": SCHEDULE}],
    "rebalances": [{"actor": "rebalance-0", "error": ""}],
    "pulls": [],
    "replication": [
        {
            "actor": "controller",
            "error": "",
            "groups": [
                {
                    "broker": "broker-a",
                    "reason": "",
                    "in_sync": [0, 1, 2],
                    "learners": [],
                    "min_in_sync_replicas": 2,
                    "replicas": REPLICAS,
                }
            ],
        }
    ],
}
DAY_MS = 86_400_000
GROUP = GroupFacts("billing", lag=5, lag_ms=1000, members=2, slowest_topic="orders", retention_ms=3 * DAY_MS)
WELL = ClusterFacts(ClusterStatus.of(STATUS), nodes=3, groups=(GROUP,), health=HealthChecks(500, 1000, 3))
MACHINE = MachineFacts("box", "3.11.7", "2.60.0", "0.1.0")
SNAPSHOT = DoctorSnapshot(
    MACHINE,
    (NodeFacts("n0", "10.0.0.1", is_head=True, machine=MACHINE, board=True),),
    cluster=WELL,
    ports=(MetricsPort("10.0.0.1", 9000, servers=frozenset(("broker-a", "storage-broker-a-0"))),),
    prometheus=PrometheusFacts("http://p:9090", rules=frozenset(("RaymqNoMaster",))),
)
CHECKS = (*CLUSTER_CHECKS, *METRICS_CHECKS)


def findings(snapshot: DoctorSnapshot) -> dict[str, Finding]:
    found = run_checks(CHECKS, snapshot)
    assert len({one.check for one in found}) == len(found)
    return {one.check: one for one in found}


def status(*path: Any, **changes: Any) -> ClusterFacts:
    """Return the facts of a cluster without problems, except that some fields of its status are changed. `path`: the
    keys and indices that lead to the changed part of the status. `changes`: the new values of the part's fields."""
    whole = deepcopy(STATUS)
    part = whole
    for key in path:
        part = part[key]
    part.update(changes)
    return replace(WELL, status=ClusterStatus.of(whole))


def group(**changes: Any) -> ClusterFacts:
    return replace(WELL, groups=(replace(GROUP, **changes),))


def test_a_cluster_in_order_passes_every_check():
    assert {name: one.state for name, one in findings(SNAPSHOT).items()} == {check.name: State.OK for check in CHECKS}


REPLICATED = ("replication", 0, "groups", 0)
ONE_NODE = [dict(replica, node="10.0.0.9") for replica in REPLICAS]
TAKEN = [{"group": "billing", "topic": "orders", "messages": 5}]
STOPPED = [{"store": "broker-b-0", "broker": "broker-b", "directory": "/data/broker-b-0"}]
ILL = [
    ("servers answer", status("stores", 0, error="no answer"), State.FAIL, "no answer"),
    ("stores open", status("stores", 0, error="EIO", closed=True), State.FAIL, "the store is closed: EIO"),
    ("servers shown", status(refused=["storage-broker-a-0"]), State.WARN, "storage-broker-a-0"),
    ("brokers ready", status("brokers", 0, ready=False, waiting_for="its store"), State.FAIL, "its store"),
    ("masters", status(*REPLICATED, reason="none answers"), State.FAIL, "none answers"),
    ("stores take messages", status("stores", 0, writable=False, not_writable_reason="full"), State.FAIL, "full"),
    (
        "stores undamaged",
        status("stores", 0, holes=[{"offset": 1000, "size": 443, "reason": "the body does not match"}]),
        State.FAIL,
        "443 damaged bytes at 1000 of its log",
    ),
    (
        "stores undamaged",
        status("stores", 0, scrub={"unrepaired": ["log file x cannot be read"]}),
        State.FAIL,
        "log file x cannot be read",
    ),
    (
        "stores verified",
        status("stores", 0, scrub={"overdue": True, "age_ms": 21 * 86_400_000}),
        State.WARN,
        "last verified 21.0 days ago",
    ),
    ("stores undamaged", status("stores", 0, damaged_files=["dedup is damaged"]), State.WARN, "dedup is damaged"),
    (
        "stores take messages",
        status("stores", 0, writable=False, role="SLAVE", not_writable_reason="EIO", disk_failure="EIO"),
        State.FAIL,
        "EIO",
    ),
    (
        "nothing lost",
        status(*REPLICATED, loss="replica 0 has 443 damaged bytes in its log"),
        State.FAIL,
        "elected although",
    ),
    ("nothing lost", status("stores", 0, cut_bytes=1234), State.WARN, "1,234 bytes were cut off"),
    (
        "replicas follow",
        status("stores", 0, refusal="replica 1 does not follow replica 0, which lacks acknowledged messages"),
        State.FAIL,
        "does not follow replica 0",
    ),
    ("stores on disk", status(stopped_stores=STOPPED), State.WARN, "/data/broker-b-0"),
    ("replicas apart", status(*REPLICATED, replicas=ONE_NODE), State.WARN, "10.0.0.9"),
    ("copies", status(replication=[]), State.WARN, "broker-a"),
    ("a replica to spare", status(*REPLICATED, min_in_sync_replicas=3), State.WARN, "3"),
    ("in sync", status(*REPLICATED, in_sync=[0, 1]), State.WARN, "2 of 3"),
    ("in sync", status(*REPLICATED, in_sync=[0]), State.FAIL, "1 of 3"),
    ("health checks", replace(WELL, health=RAY_DEFAULTS), State.WARN, "3000 ms"),
    ("NameServers", status(actors=["broker-a", "nameserver-0", "storage-broker-a-0"]), State.WARN, "3 nodes"),
    ("delayed messages", status("stores", 0, schedule={**SCHEDULE, "late_ms": 9000}), State.WARN, "9 s late"),
    ("deleted unread", status("brokers", 0, deleted_unread=TAKEN), State.FAIL, "5 messages of orders"),
    ("groups answer", group(error="no answer"), State.WARN, "no answer"),
    ("groups answer", replace(WELL, groups_left_out=7), State.WARN, ": 7"),
    ("groups answer", replace(WELL, groups_error="no broker"), State.WARN, "no broker"),
    ("groups have members", group(members=0), State.WARN, ": 5"),
    ("dead letters", group(dead_letters=3), State.WARN, ": 3"),
    ("retention", group(lag_ms=round(2.9 * DAY_MS)), State.WARN, "69.6 h old, of 72.0 h"),
    ("retention", group(lost=4), State.WARN, "4 messages"),
]


@pytest.mark.parametrize(("check", "cluster", "state", "seen"), ILL)
def test_a_cluster_that_is_ill_in_one_respect_fails_that_check_and_no_other(check, cluster, state, seen):
    found = findings(replace(SNAPSHOT, cluster=cluster))
    assert found[check].state is state
    assert seen in found[check].seen
    assert found[check].do
    assert {name for name, one in found.items() if one.state is not State.OK} == {check}


WELL_TOO = [
    ("stores take messages", status("stores", 0, writable=False, role="SLAVE", not_writable_reason="a slave")),
    ("in sync", status(*REPLICATED, in_sync=[0, 1], learners=[2], min_in_sync_replicas=1)),
    ("health checks", replace(WELL, health=RAY_DEFAULTS, nodes=1)),
    ("health checks", replace(WELL, health=None)),
    ("groups have members", group(lag=0, members=0)),
    ("groups have members", group(group="raymq-webhooks", members=0)),
    ("retention", group(lag_ms=9 * DAY_MS, retention_ms=None)),
]


@pytest.mark.parametrize(("check", "cluster"), WELL_TOO)
def test_similar_conditions_that_are_well(check, cluster):
    assert findings(replace(SNAPSHOT, cluster=cluster))[check].state is State.OK


ILL_METRICS = [
    ("metrics ports", {"ports": (MetricsPort("10.0.0.1", 9000, "refused", SNAPSHOT.ports[0].servers),)}, "refused"),
    ("gauges", {"ports": (MetricsPort("10.0.0.1", 9000),)}, "broker-a, storage-broker-a-0"),
    ("Grafana board", {"nodes": (replace(SNAPSHOT.nodes[0], board=False),)}, "not installed"),
    ("Grafana board", {"nodes": (replace(SNAPSHOT.nodes[0], board=None),)}, "did not report"),
    ("alert rules", {"prometheus": PrometheusFacts("http://p", "refused")}, "refused"),
    ("alert rules", {"prometheus": PrometheusFacts("http://p", rules=frozenset(("Other",)))}, "no rule"),
]


@pytest.mark.parametrize(("check", "changes", "seen"), ILL_METRICS)
def test_metrics_that_are_ill_in_one_respect_fail_that_check_and_no_other(check, changes, seen):
    found = findings(replace(SNAPSHOT, **changes))
    assert found[check].state is State.WARN
    assert seen in found[check].seen
    assert {name for name, one in found.items() if one.state is not State.OK} == {check}


def test_servers_that_report_nothing_because_metrics_are_off_are_well():
    silent = replace(SNAPSHOT, ports=(MetricsPort("10.0.0.1", 9000),), metrics_enable=False)
    assert findings(silent)["gauges"].state is State.OK
