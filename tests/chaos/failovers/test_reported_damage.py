"""Tests of reports about damage: `raymq status`, `raymq doctor` and the console show the replica, the fault and the
remedy if a log is damaged or a disk is broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import ray

import raymq
from placement.console.live_control import live_cluster
from raymq.tools.console.app import create_app
from raymq.tools.console.settings import ConsoleSettings
from storage.recovery.snapshot import SNAPSHOT_FILE
from tests.support.browser.asgi_server import served
from tests.support.clusters.cluster import (
    SMALL_LOG_FILE_BYTES,
    Sandbox,
    embedded,
    kill_actors,
    one_group,
)
from tests.support.history.waiting import eventually
from tests.support.replicas.faulty_machines import FaultyMachine, faulty_machine, why_out
from tests.support.replicas.ray_replicas import RayReplicas
from tests.support.stores.damage import flip

BROKER, REPLICAS = "broker-a", 3
STORES = [f"storage-{BROKER}-{replica}" for replica in range(REPLICAS)]
COMMAND_TIMEOUT_S = 200.0
PATIENCE_S = 180.0
TOKEN = "the admins' token"


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyMachine]:
    settings = one_group("{replicas: 3, spread: false, min_in_sync_replicas: 2}")
    with faulty_machine(settings, tmp_path_factory.mktemp("faults")) as made:
        yield made


@pytest.fixture(scope="module")
def box(machine: FaultyMachine) -> Sandbox:
    return machine.box


@pytest.fixture(scope="module")
def mq(box: Sandbox) -> Iterator[raymq.Client]:
    with embedded(box) as client:
        yield client


@pytest.fixture(scope="module")
def console(mq: raymq.Client) -> Iterator[str]:
    """Run a console of the cluster for the duration of a `with` block. Yields its URL."""
    app = create_app(live_cluster(mq, "raymq"), ConsoleSettings(is_admin=lambda token: token == TOKEN))
    with served(app) as origin:
        yield origin


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a `raymq` command in a separate process, as a user does."""
    address = ray.get_runtime_context().gcs_address
    return subprocess.run(
        [str(Path(sys.executable).with_name("raymq")), *arguments],
        check=False,
        env={**os.environ, "RAY_ADDRESS": address},
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
    )


def findings(command: str, key: str) -> tuple[int, list[dict[str, Any]]]:
    """Run a `raymq` command with --json. Returns its exit code, and the findings about stores in the output's list
    `key`."""
    done = run(command, "--json")
    rows = json.loads(done.stdout)[key]
    return done.returncode, [row for row in rows if row["where"] in STORES and row["state"] == "fail"]


def assert_shown(finding: dict[str, Any], console: str) -> None:
    """Check that a finding's replica, fault and remedy are shown in the tables of `raymq status` and `raymq doctor`,
    and on two pages of the console."""
    for command in ("status", "doctor"):

        def shows(command: str = command) -> bool:
            columns = columns_of(run(command).stdout)
            return all(any(finding[part] in column for column in columns) for part in ("where", "seen", "do"))

        eventually(shows, f"{finding} in the table of raymq {command}", PATIENCE_S)
    problem = f"{finding['where']}: {finding['seen']}; {finding['do']}"
    for page in ("/", "/cluster"):
        eventually(lambda page=page: plain(problem) in plain(get(console + page)), f"{problem} at {page}")  # type: ignore[misc]
    eventually(lambda: finding in json.loads(get(f"{console}/api/v1/status"))["problems"], f"{finding} in JSON")


def get(url: str) -> str:
    with urlopen(Request(url, headers={"Authorization": f"Bearer {TOKEN}"}), timeout=COMMAND_TIMEOUT_S) as answer:
        return str(answer.read().decode())


def columns_of(tables: str) -> list[str]:
    """Return the text of each table column from top to bottom. A cell's text may be wrapped into several lines."""
    lines = [line.split("│")[1:-1] for line in tables.splitlines() if line.startswith("│")]
    width = max(map(len, lines), default=0)
    return [" ".join(line[index].strip() for line in lines if len(line) > index) for index in range(width)]


def plain(text: str) -> str:
    """Return only the letters and digits of a text, in lower case. This makes texts comparable that differ in
    punctuation or escapes."""
    return "".join(letter for letter in text.replace("&#39;", "").replace("&#34;", "").lower() if letter.isalnum())


def test_each_replica_with_a_damaged_log_is_named_with_the_damage_and_the_remedy(
    mq: raymq.Client, box: Sandbox, console: str
) -> None:
    replicas = RayReplicas(BROKER, REPLICAS)
    mq.admin.create_topic("orders", queues=1)
    with mq.producer() as producer:
        sent = [producer.send(raymq.Message("orders", b"%d" % number * 100)) for number in range(9)]
    replicas.equal_end()
    [damaged] = mq.admin.query_by_id("orders", sent[4].message_id)
    roots = [box.data / f"{BROKER}-{replica}" for replica in range(REPLICAS)]
    for root in roots:
        flip(root, damaged.physical_offset, "body", file_size=SMALL_LOG_FILE_BYTES)
    # Delete the snapshots, because recovery reads the log only from the last snapshot on, and so would not find the
    # damage. Delete them again after the kill: a running store writes a snapshot every 10 s.
    for root in roots:
        (root / SNAPSHOT_FILE).unlink(missing_ok=True)
    kill_actors("Storage")
    for root in roots:
        (root / SNAPSHOT_FILE).unlink(missing_ok=True)
    replicas.settled()
    # Repeat the command until the damage is the only problem. On a loaded machine, a server that does not answer within
    # 5 s is a problem, too.
    found = eventually(lambda: of_each_replica(0, "status", "problems"), "a hole in each log", PATIENCE_S)
    for row in found:
        assert f"damaged bytes at {damaged.physical_offset} of its log" in row["seen"]
        assert "check the disk" in row["do"]
    assert eventually(lambda: of_each_replica(1, "doctor", "findings"), "the doctor's findings", PATIENCE_S) == found
    assert_shown(found[0], console)


def of_each_replica(code: int, command: str, key: str) -> list[dict[str, Any]]:
    """Run a `raymq` command, and return its findings. Returns an empty list if the exit code is not `code`, or if the
    findings are not exactly one for each store."""
    ended, found = findings(command, key)
    return found if ended == code and sorted(row["where"] for row in found) == STORES else []


def test_a_replica_whose_disk_is_broken_is_named_with_its_directory_and_the_remedy(
    mq: raymq.Client, machine: FaultyMachine, console: str
) -> None:
    replicas = RayReplicas(BROKER, REPLICAS)
    broken = replicas.settled()["master"]
    store = f"storage-{BROKER}-{broken}"
    marker = machine.marker(BROKER, broken, "flush")
    marker.touch()
    try:
        with mq.producer() as producer:  # send a message whose flush fails
            producer.send(raymq.Message("orders", b"last"))
        eventually(lambda: "cannot open" in why_out(BROKER, broken, patient=True), "a store that stays closed")
        [row] = eventually(lambda: closed_store(store, "status", "problems"), "a closed store", PATIENCE_S)
        assert str(machine.box.data / f"{BROKER}-{broken}") in row["seen"]
        assert "Input/output error" in row["seen"]
        assert "raymq drain" in row["do"]
        same = eventually(lambda: closed_store(store, "doctor", "findings"), "the doctor's finding", PATIENCE_S)
        assert same == [row]
        assert_shown(row, console)
    finally:
        marker.unlink()
    replicas.settled()
    eventually(lambda: not closed_store(store, "status", "problems"), "a store that is open again", PATIENCE_S)


def closed_store(store: str, command: str, key: str) -> list[dict[str, Any]]:
    """Run a `raymq` command. Returns its findings which state that `store` is not open; empty unless the command exits
    with code 1."""
    ended, found = findings(command, key)
    return [row for row in found if ended == 1 and (row["where"], row["check"]) == (store, "stores open")]
