"""Tests of `raymq status`, `drain` and `balance`: their output about replicas, and their exit codes. The servers are
fakes."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from click.testing import CliRunner, Result

from raymq.client.cluster import local_server
from raymq.client.cluster.local_server import StartResult
from raymq.common.protocol.stats import RequestFigures
from raymq.common.protocol.status import ClusterStatus
from raymq.tools import cli
from raymq.tools.cli.cluster.servers import NEXT_COMMANDS
from raymq.tools.cli.terminal.output import out


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setattr(out, "_width", 200)

    def invoke(*arguments: str) -> Result:
        return CliRunner().invoke(cli.cli, list(arguments))

    return invoke


def report(**changes: Any) -> dict[str, Any]:
    replicas = [
        {"replica": 0, "role": "SILENT", "node": None, "note": "", "error": "no answer"},
        {"replica": 1, "role": "MASTER", "node": "10.0.0.2", "note": "", "error": ""},
        {"replica": 2, "role": "SLAVE", "node": "10.0.0.3", "note": "", "error": ""},
    ]
    for replica, lag_bytes, lag_s in zip(replicas, (None, 0, 4096), (None, 0.0, 75.25), strict=True):
        replica.update(lag_bytes=lag_bytes, lag_s=lag_s)
    group = {"broker": "broker-a", "master": 1, "epoch": 104, "in_sync": [1], "reason": "", "replicas": replicas}
    controller = {"actor": "controller", "error": "", "groups": [{**group, **changes}]}
    nothing: dict[str, Any] = {"actors": [], "brokers": [], "stores": [], "rebalances": [], "pulls": []}
    return {**nothing, "groups": [], "instances": [], "replication": [controller]}


def test_status_shows_the_master_the_in_sync_replicas_and_the_lag(run, monkeypatch):
    monkeypatch.setattr(local_server, "status", lambda address: ClusterStatus.of(report()))
    result = run("status")
    lines = [line.replace("│", " ").split() for line in result.output.splitlines()]
    assert ["broker-a", "1", "104", "1", "led"] in lines
    assert ["broker-a-0", "SILENT", "-", "-", "-", "-", "no", "answer"] in lines
    assert ["broker-a-1", "MASTER", "10.0.0.2", "0", "0", "s", "-", "in", "sync"] in lines
    assert ["broker-a-2", "SLAVE", "10.0.0.3", "4,096", "1", "m", "15", "s", "-", "catching", "up"] in lines
    assert result.exit_code == 0


def test_status_fails_with_the_reason_if_a_group_has_no_master(run, monkeypatch):
    monkeypatch.setattr(local_server, "status", lambda address: ClusterStatus.of(report(reason="none of them answers")))
    result = run("status")
    assert "none of them answers" in result.output
    assert result.exit_code == 1


def test_status_shows_messages_that_the_elected_master_lacked(run, monkeypatch):
    lost = (
        "replica 1 lacks acknowledged messages: its log ends at physical offset 80, but all messages before 100 were "
        "confirmed"
    )
    monkeypatch.setattr(local_server, "status", lambda address: ClusterStatus.of(report(loss=lost)))
    result = run("status")
    assert "led; elected although replica 1 lacks acknowledged messages" in result.output
    assert result.exit_code == 0


@pytest.mark.parametrize(
    ("changes", "exit_code"),
    [
        ({"writable": True}, 0),
        ({"not_writable_reason": "the disk is 95% full"}, 1),
        ({"not_writable_reason": "the disk is 95% full", "role": "MASTER"}, 1),
        ({"not_writable_reason": "it is not the master", "role": "SLAVE"}, 0),
        ({"not_writable_reason": "the disk failed: EIO", "role": "SLAVE", "disk_failure": "EIO"}, 1),
    ],
)
def test_status_fails_where_a_store_that_leads_takes_no_messages_or_a_disk_failed(run, monkeypatch, changes, exit_code):
    store = {"actor": "storage-broker-a-0", "error": "", "writable": False, "queues": 1, "root": "/data"}
    store |= {"max_physical_offset": 9, "min_physical_offset": 0, "flushed_physical_offset": 9, **changes}
    monkeypatch.setattr(local_server, "status", lambda address: ClusterStatus.of({**report(), "stores": [store]}))
    result = run("status")
    assert changes.get("not_writable_reason", "writable")[:12] in result.output
    assert result.exit_code == exit_code


def test_drain_hands_the_node_on_and_fails_while_replicas_are_left(run, monkeypatch):
    asked: list[Any] = []

    def drain(node: str, undo: bool, address: str | None, progress: Any) -> dict[str, Any]:
        asked.append((node, undo))
        return {"node_id": "abcdef0123", "drained": not undo, "left": [] if undo else ["broker-a-1"]}

    monkeypatch.setattr(local_server, "drain", drain)
    kept, allowed = run("drain", "10.0.0.7"), run("drain", "10.0.0.7", "--undo", "--json")
    assert asked == [("10.0.0.7", False), ("10.0.0.7", True)]
    assert "broker-a-1" in kept.output
    assert kept.exit_code == 1
    assert json.loads(allowed.output)["left"] == []
    assert allowed.exit_code == 0


@pytest.mark.parametrize(("left", "code"), [([], 0), (["broker-a"], 1)])
def test_balance_reports_the_groups_it_moved_and_fails_if_one_is_left(run, monkeypatch, left, code):
    monkeypatch.setattr(local_server, "balance", lambda address, progress: {"wanted": {"broker-a": 0}, "left": left})
    result = run("balance")
    assert "broker-a to replica 0" in result.output
    assert ("not yet" in result.output) == bool(left)
    assert result.exit_code == code


@pytest.mark.parametrize("late", [0, 7])
def test_status_reports_requests_that_were_refused_as_busy(run, monkeypatch, late):
    kinds = [RequestFigures("heartbeat", 0, 0.0, 9, 1.0, 9, 1.0, 0, 0)._asdict()]
    kinds.append(RequestFigures("client", 1, 2.0, 40, 5003.2, 4, 12.0, 0, late)._asdict())
    broker = {"actor": "broker-a", "error": "", "ready": True, "waiting_for": "", "topics": [], "groups": []}
    whole = {**report(), "brokers": [{**broker, "requests": kinds}], "stores": []}
    monkeypatch.setattr(local_server, "status", lambda address: ClusterStatus.of(whole))
    lines = [line.replace("│", " ").split() for line in run("status").output.splitlines()]
    assert (["broker-a", "client", "0", "7", "40", "5,003"] in lines) == bool(late)
    assert not [line for line in lines if line[1:2] == ["heartbeat"]]


@pytest.mark.parametrize("files", [0, 3])
def test_status_reports_files_a_full_disk_took_and_the_groups_that_had_not_read_them(run, monkeypatch, files):
    unread = [{"group": "billing", "topic": "orders", "messages": 56_911}] if files else []
    broker = {"actor": "broker-a", "error": "", "ready": True, "waiting_for": "", "topics": [], "groups": []}
    store = {"actor": "storage-broker-a-0", "error": "", "writable": True, "queues": 1, "root": "/data"}
    offsets = dict.fromkeys(("min_physical_offset", "max_physical_offset", "flushed_physical_offset"), 0)
    taken = {"retention": {"young_files_deleted": files}}
    whole = {**report(), "brokers": [{**broker, "deleted_unread": unread}], "stores": [{**store, **offsets, **taken}]}
    monkeypatch.setattr(local_server, "status", lambda address: ClusterStatus.of(whole))
    result = run("status")
    lines = [line.replace("│", " ").split() for line in result.output.splitlines()]
    assert ("a full disk took 3 log files before their time" in result.output) == bool(files)
    assert (["billing", "orders", "56,911"] in lines) == bool(files)
    assert result.exit_code == 0


@pytest.mark.parametrize("writable", [True, False])
def test_status_reports_transactions_that_wait_at_the_store_that_leads(run, monkeypatch, writable):
    store = {"actor": "storage-broker-a-0", "error": "", "writable": writable, "queues": 1, "root": "/data"}
    store["not_writable_reason"] = "it follows"
    offsets = dict.fromkeys(("min_physical_offset", "max_physical_offset", "flushed_physical_offset"), 0)
    born_ms = time.time_ns() // 1_000_000 - 3_600_500
    waiting = [{"topic": "orders", "producer_group": "shop", "waiting": 12, "oldest_born_timestamp_ms": born_ms}]
    transactions = {"waiting": waiting, "committed": 3, "rolled_back": 0, "given_up": 0, "checked": 1}
    whole = {**report(), "stores": [{**store, **offsets, "transactions": transactions}]}
    monkeypatch.setattr(local_server, "status", lambda address: ClusterStatus.of(whole))
    lines = [line.replace("│", " ").split()[:4] for line in run("status").output.splitlines()]
    assert (["storage-broker-a-0", "orders", "shop", "12"] in lines) == writable


def test_status_lists_servers_that_only_super_users_see(run, monkeypatch):
    whole = {**report(), "refused": ["storage-broker-a-0", "rebalance-0"]}
    monkeypatch.setattr(local_server, "status", lambda address: ClusterStatus.of(whole))
    result = run("status")
    assert "super users see more: storage-broker-a-0, rebalance-0" in result.output
    assert result.exit_code == 0


def test_status_names_stores_on_disk_that_do_not_run(run, monkeypatch):
    stopped = {"store": "broker-b-0", "broker": "broker-b", "directory": "/data/broker-b-0"}
    monkeypatch.setattr(
        local_server, "status", lambda address: ClusterStatus.of({**report(), "stopped_stores": [stopped]})
    )
    assert "/data/broker-b-0" in run("status").output


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replace the function that starts the servers by a fake. Returns the fields of the fake's StartResult, which a
    test may change."""
    fields: dict[str, Any] = {"actors": ["broker-a"], "notes": [], "data_dir": "/srv/raymq"}

    def up(config: Any, data_dir: Any, groups: Any, address: Any, progress: Any, **options: Any) -> StartResult:
        progress("starting Ray on this machine")
        return StartResult(**fields)

    monkeypatch.setattr(local_server, "up", up)
    return fields


def test_the_first_start_names_the_data_directory_and_the_next_commands(run, starts):
    result = run("up")
    lines = result.stdout.splitlines()
    assert lines[:2] == ["raymq is up: broker-a", "messages are stored in /srv/raymq"]
    for command in ("raymq topic create", "raymq send", "raymq consume", "raymq console"):
        assert command in result.stdout
    assert result.stderr == "raymq: starting Ray on this machine …\n"


def test_a_start_that_finds_raymq_running_names_no_directory(run, starts):
    starts |= {"data_dir": None, "notes": ["nothing was started"]}
    assert run("up").stdout.splitlines() == ["raymq is up: broker-a", "nothing was started"]


@pytest.mark.parametrize("option", ["--json", "--quiet"])
def test_a_quiet_start_prints_no_steps(run, starts, option):
    result = run("up", option)
    assert result.stderr == ""
    if option == "--json":
        assert json.loads(result.stdout) == {"actors": ["broker-a"], "notes": [], "data_dir": "/srv/raymq"}


def test_the_commands_that_the_first_start_shows_exist(run, starts):
    words = [text.split("   ")[0].split("&&")[0].split() for text in " ".join(NEXT_COMMANDS).split("raymq ")[1:]]
    assert len(words) == 4
    for arguments in words:
        assert run(*arguments, "--help").exit_code == 0, arguments


def test_the_console_says_how_to_log_in(run, monkeypatch):
    found = {"url": "http://127.0.0.1:8300/", "host": "127.0.0.1", "port": 8300, "pid": 1, "loopback": False}
    monkeypatch.setattr(local_server, "start_console", lambda config, address, progress: found)
    first, login = run("console").stdout.splitlines()
    assert first == found["url"]
    assert "log in with the token" in login
    assert "ray get-auth-token" in login
    assert json.loads(run("console", "--json").stdout) == found
