"""Tests of `raymq gateway`: its output, and its exit codes. The servers are fakes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner, Result

from raymq.client.cluster import local_server
from raymq.common.protocol.status import ClusterStatus
from raymq.tools import cli
from raymq.tools.cli.terminal.output import out

SERVING = {"actor": "gateway-3f9a-0", "error": "", "node": "10.0.0.1", "listens": "127.0.0.1:8081", "tls": False}
RUNS = {**SERVING, "http": "", "pid": 17, "clients": {"JAVA": 2, "NODE_JS": 1}, "streams": 3}
FAILS = {"actor": "gateway-3f9a-1", "error": "the gateway cannot listen at 127.0.0.1:8081"}

Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(out, "_width", 200)
    return lambda *arguments: CliRunner().invoke(cli.cli, list(arguments))


def shows(monkeypatch: pytest.MonkeyPatch, *gateways: dict[str, Any]) -> None:
    report = {"actors": ["broker-a"], "gateways": list(gateways)}
    monkeypatch.setattr(local_server, "status", lambda address: ClusterStatus.of(report))


def lines(result: Result) -> list[list[str]]:
    return [line.replace("│", " ").split() for line in result.stdout.splitlines()]


def test_start_prints_each_process(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_server, "start_gateways", lambda config, address, progress: [RUNS])
    assert ["gateway-3f9a-0", "10.0.0.1", "127.0.0.1:8081", "no", "no", "17"] in lines(run("gateway", "start"))
    assert json.loads(run("gateway", "start", "--json").stdout) == {"gateways": [RUNS]}
    http = {**RUNS, "http": "127.0.0.1:8082"}
    monkeypatch.setattr(local_server, "start_gateways", lambda config, address, progress: [http])
    row = ["gateway-3f9a-0", "10.0.0.1", "127.0.0.1:8081", "127.0.0.1:8082", "no", "17"]
    assert row in lines(run("gateway", "start"))


def test_stop_names_what_it_has_stopped(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = ["gateway-3f9a-0"]
    monkeypatch.setattr(local_server, "stop_gateways", lambda address, progress: stopped)
    assert run("gateway", "stop").stdout == "stopped gateway-3f9a-0\n"
    assert json.loads(run("gateway", "stop", "--json").stdout) == {"stopped": stopped}
    stopped.clear()
    assert "nothing was stopped" in run("gateway", "stop").stdout


def test_status_shows_the_clients_by_language(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    shows(monkeypatch, RUNS)
    result = run("gateway", "status")
    assert result.exit_code == 0
    assert any(row[:5] == ["gateway-3f9a-0", "10.0.0.1", "listens", "at", "127.0.0.1:8081"] for row in lines(result))
    assert "2 JAVA, 1 NODE_JS" in result.stdout
    assert json.loads(run("gateway", "status", "--json").stdout) == {"gateways": [RUNS]}
    shows(monkeypatch, {**RUNS, "http": "127.0.0.1:8082"})
    assert "127.0.0.1:8082" in run("gateway", "status").stdout
    overview = run("status").stdout
    assert "gateway-3f9a-0" in overview
    assert "3 clients" in overview


@pytest.mark.parametrize(("gateways", "reason"), [((), "raymq gateway start"), ((RUNS, FAILS), "cannot listen")])
def test_status_fails_if_a_gateway_does_not_serve(
    run: Run, monkeypatch: pytest.MonkeyPatch, gateways: tuple[dict[str, Any], ...], reason: str
) -> None:
    shows(monkeypatch, *gateways)
    result = run("gateway", "status")
    assert result.exit_code == 1
    assert reason in result.stdout
