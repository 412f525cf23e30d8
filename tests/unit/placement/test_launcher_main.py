"""Tests of the launch process: it reports the settings with which each store opens, and loads the code of servers only
to start them."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from placement import launch, launcher_main
from placement.launcher_main import _log_bytes
from placement.plan import make_plan
from placement.replica_nodes import Node
from raymq.common.config.access import AccessOptions
from raymq.common.config.cluster import ClusterSettings


def test_the_start_shows_each_store_with_the_bytes_on_its_node():
    nodes = [Node("n1", "10.0.0.1", {"broker-a-0": 5 << 20, "other": 7})]
    plan = make_plan(ClusterSettings(data_dir=Path("/data"), broker_groups=2), nodes)
    assert _log_bytes(plan, nodes) == {"storage-broker-a-0": 5 << 20, "storage-broker-b-0": 0}


def test_a_store_on_a_removed_node_has_unknown_bytes():
    nodes = [Node("n1", "10.0.0.1", {"broker-a-0": 5 << 20})]
    plan = make_plan(ClusterSettings(data_dir=Path("/data")), nodes)
    elsewhere = replace(plan, storages=tuple(replace(storage, node_id="gone") for storage in plan.storages))
    assert _log_bytes(elsewhere, nodes) == {"storage-broker-a-0": 0}


@pytest.mark.parametrize("enable", [True, False])
def test_a_start_starts_the_gateway_last_if_the_settings_ask_for_it(
    monkeypatch: pytest.MonkeyPatch, enable: bool
) -> None:
    steps: list[str] = []
    settings = ClusterSettings.model_validate({"gateway": {"enable": enable}, "console": {"enable": True}})
    monkeypatch.setattr(launcher_main.access, "prepare", lambda *arguments: None)
    monkeypatch.setattr(launcher_main.operations, "placed_replicas", lambda: ({}, frozenset()))
    monkeypatch.setattr(launcher_main, "inventory", lambda *arguments, **options: [Node("n1", "10.0.0.1", {})])
    monkeypatch.setattr(launcher_main, "running", list)
    monkeypatch.setattr(launch, "start", lambda *arguments, **options: steps.append("servers"))
    for name in ("console", "gateways"):
        monkeypatch.setattr(launcher_main, f"_start_{name}", lambda settings, name=name: steps.append(name))
    request: dict[str, Any] = {"settings": settings.model_dump(mode="json"), "given": []}
    launcher_main._start(request)
    assert steps == ["servers", "console", *(["gateways"] if enable else [])]


def test_a_gateway_of_its_own_command_gets_the_users_of_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    settings = ClusterSettings.model_validate(
        {"data_dir": "/data", "access": {"enable": True, "super_secret_file": "/secret"}}
    )

    def prepare(options: AccessOptions, data_dir: Path) -> None:
        assert (options, data_dir) == (settings.access, settings.data_dir)
        steps.append("prepare")

    monkeypatch.setattr(launcher_main.access, "prepare", prepare)
    monkeypatch.setattr(launcher_main, "running", lambda: ["nameserver-0"])
    monkeypatch.setattr(launcher_main, "_start_gateways", lambda settings: steps.append("gateways"))
    launcher_main._carry_out({"action": "gateways", "settings": settings.model_dump(mode="json")})
    assert steps == ["prepare", "gateways"]


def test_a_process_that_stops_servers_loads_neither_their_code_nor_the_consoles():
    """A stop takes 0.5 s less of processor time without these modules."""
    program = "import sys, placement.launcher_main; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    loaded = set(done.stdout.split())
    assert "placement.actor_lifecycle" in loaded
    servers = {"actors.broker.actor", "actors.replica.storage_actor", "actors.nameserver", "placement.controller"}
    others = {"storage.message_store", "raymq.client.client", "raymq.tools.console.app", "pyarrow"}
    assert loaded & (servers | others) == set()
