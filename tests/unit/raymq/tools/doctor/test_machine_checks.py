"""Tests of the checks of `raymq doctor` about a machine, on a good machine and on machines with one fault each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raymq.common.protocol.status import ClusterStatus, StoreReport
from raymq.tools.doctor.checks.machine_checks import MACHINE_CHECKS
from raymq.tools.doctor.facts import ClusterFacts, DirectoryFacts, DoctorSnapshot, MachineFacts, NodeFacts
from raymq.tools.doctor.findings import Finding, State, run_checks

DISK = DirectoryFacts(
    "/data", "/data", file_system="ext4", owner_uid=7, uid=7, used_ratio=0.2, fiemap=True, fdatasync_ms=(0.5,) * 50
)
WELL = MachineFacts(
    host="box",
    python="3.11.7",
    ray="2.60.0",
    raymq="0.1.0",
    copies={"raymq": ("/site",), "raydp_jobs": ("/site",)},
    token_path="/home/u/.ray/auth_token",
    token_mode=0o600,
    token_digest="abc",
    shm_bytes=8 << 30,
    socket_path="/tmp/ray/s",
    socket_path_bytes=70,
    spark=True,
    java_home="/usr/lib/jvm/17",
    java_version="17.0.15",
    java_need="Java 11 or 17",
    java_released="2025-04-15",
    java_age_days=400,
    directories=(DISK,),
)


def findings(machine: MachineFacts, **more: object) -> dict[str, Finding]:
    """Return the findings about a machine, by the name of the check. Fails unless each check has exactly one
    finding."""
    found = run_checks(MACHINE_CHECKS, replace(DoctorSnapshot(machine), **more))  # type: ignore[arg-type]  # by name
    assert len({one.check for one in found}) == len(found)
    return {one.check: one for one in found}


def test_a_machine_in_order_passes_every_check():
    found = findings(WELL)
    assert {name: one.state for name, one in found.items()} == {check.name: State.OK for check in MACHINE_CHECKS}
    assert {one.do for one in found.values()} == {""}


ILL = [
    ("versions", {"python": "3.10.13"}, State.FAIL, "3.10.13"),
    ("versions", {"python": "3.14.0"}, State.FAIL, "3.14.0"),
    ("versions", {"python": "3.12.1"}, State.OK, "3.12.1"),
    ("versions", {"python": "3.13.0"}, State.OK, "3.13.0"),
    ("versions", {"raymq": "not installed"}, State.WARN, "not installed"),
    ("import path", {"copies": {"raymq": ("/here", "/site")}}, State.WARN, "/here and in /site"),
    ("import path", {"floors_missing": ("storage",)}, State.FAIL, "storage"),
    ("Java", {}, State.OK, "Java 17.0.15, released 2025-04-15, 400 days ago, in /usr/lib/jvm/17"),
    ("Java", {"java_version": ""}, State.WARN, "no Java, but Spark needs Java 11 or 17"),
    (
        "Java",
        {"java_version": "21.0.2", "java_problem": "has another version"},
        State.WARN,
        "Java 21.0.2 in /usr/lib/jvm/17 has another version: Spark needs Java 11 or 17",
    ),
    ("Java", {"java_age_days": 1100}, State.WARN, "1,100 days"),
    ("Java", {"java_age_days": None}, State.OK, "unknown age"),
    ("Java", {"spark": False, "java_version": ""}, State.OK, "not needed"),
    ("token", {"token_mode": 0o644}, State.FAIL, "0644"),
    ("token", {"token_mode": None, "token_digest": ""}, State.WARN, "no token"),
    ("token", {"token_mode": None, "token_digest": "", "auth_mode": "token"}, State.FAIL, "does not exist"),
    ("token", {"token_mode": None}, State.OK, "RAY_AUTH_TOKEN"),
    ("ports", {"port_error": "Cannot assign"}, State.FAIL, "Cannot assign"),
    ("open files", {"files_soft": 4096}, State.WARN, "4,096"),
    ("open files", {"files_soft": 256}, State.FAIL, "256"),
    ("shared memory", {"shm_bytes": 64 << 20}, State.WARN, "64 MiB"),
    ("shared memory", {"shm_bytes": None}, State.WARN, "no /dev/shm"),
    ("socket paths", {"socket_path_bytes": 108}, State.FAIL, "108"),
]


@pytest.mark.parametrize(("check", "changes", "state", "seen"), ILL)
def test_a_machine_that_is_ill_in_one_respect_fails_that_check_and_no_other(check, changes, state, seen):
    found = findings(replace(WELL, **changes))
    assert found[check].state is state
    assert seen in found[check].seen
    assert bool(found[check].do) == (state is not State.OK)
    assert {name for name, one in found.items() if one.state is not State.OK} <= {check}


ILL_DISK = [
    ("data directory", {"error": "Permission denied"}, State.FAIL, "Permission denied"),
    ("data directory", {"owner_uid": 8}, State.FAIL, "user 8"),
    ("data directory", {"writable": False}, State.FAIL, "writable"),
    ("data directory", {"exists": False}, State.OK, "does not exist yet"),
    ("file system", {"file_system": "tmpfs"}, State.WARN, "tmpfs"),
    ("file system", {"file_system": "nfs4"}, State.WARN, "nfs4"),
    ("file system", {"file_system": "overlay"}, State.WARN, "overlay"),
    ("disk space", {"used_ratio": 0.8}, State.WARN, "80%"),
    ("disk space", {"used_ratio": 0.95}, State.FAIL, "95%"),
    ("private files", {"readable": ("/data/x",), "readable_count": 3}, State.FAIL, "/data/x"),
    ("written blocks", {"fiemap": False}, State.WARN, "FIEMAP"),
    ("flush time", {"fdatasync_ms": (0.5,) * 49 + (40.0,)}, State.WARN, "40.0 ms"),
]


@pytest.mark.parametrize(("check", "changes", "state", "seen"), ILL_DISK)
def test_a_directory_that_is_ill_in_one_respect_fails_that_check_and_no_other(check, changes, state, seen):
    found = findings(replace(WELL, directories=(replace(DISK, **changes),)))
    assert found[check].state is state
    assert seen in found[check].seen
    assert {name for name, one in found.items() if one.state is not State.OK} <= {check}


def test_root_may_use_directories_of_other_users():
    assert findings(replace(WELL, directories=(replace(DISK, uid=0),)))["data directory"].state is State.OK


def test_a_store_open_outside_the_cluster_is_a_warning():
    held = replace(WELL, directories=(replace(DISK, locks={"broker-a-0": 42}),))
    assert findings(held)["locks"].state is State.WARN
    assert "broker-a-0 (pid 42)" in findings(held)["locks"].seen
    cluster = ClusterFacts(ClusterStatus(stores=(StoreReport("storage-broker-a-0", pid=42),)))
    assert findings(held, cluster=cluster)["locks"].state is State.OK


@pytest.mark.parametrize(
    ("error", "named", "state"),
    [
        ("", True, State.OK),
        ("nothing answers at a:1: start it", False, State.OK),
        ("nothing at a:1: start it", True, State.FAIL),
    ],
)
def test_a_ray_cluster_must_be_there_if_it_was_named(error, named, state):
    found = findings(WELL, ray_error=error, named=named)["Ray cluster"]
    assert found.state is state
    assert found.do == ("start it" if state is State.FAIL else "")


def test_each_node_is_judged_by_the_same_rules_at_its_address():
    nodes = (NodeFacts("n1", "10.0.0.1", machine=replace(WELL, files_soft=256)), NodeFacts("n2", "10.0.0.2"))
    found = [one for one in run_checks(MACHINE_CHECKS, DoctorSnapshot(WELL, nodes)) if one.check == "open files"]
    assert [(one.where, one.state) for one in found] == [("here", State.OK), ("10.0.0.1", State.FAIL)]
