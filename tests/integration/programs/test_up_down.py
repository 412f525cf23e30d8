"""Tests of `raymq up`, `raymq status` and `raymq down`, run as separate processes. No Ray cluster runs before `raymq
up`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.clusters.cluster import Sandbox, assert_gone, sandbox
from tests.support.stores.live_directory import stats_below

RAYMQ = str(Path(sys.executable).with_name("raymq"))
COMMAND_TIMEOUT_S = 300.0
"""Timeout of one command in seconds. On a loaded machine, Ray alone may need two minutes to start."""


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    """Yield a sandbox in which Ray listens only on loopback."""
    with pytest.MonkeyPatch.context() as patch, sandbox() as box:
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        yield box
        run_directory = box.home / ".raymq" / "run"
        # Stop the cluster if it still runs, because a failed test has not stopped it.
        if (run_directory / "ray-head.json").exists():
            subprocess.run([RAYMQ, "down"], cwd=box.work, capture_output=True, timeout=COMMAND_TIMEOUT_S, check=True)
        for directory in (run_directory, run_directory.parent, box.home / ".ray"):
            if directory.exists():  # `raymq up` creates the directories when it starts Ray
                for file in directory.iterdir():
                    file.unlink()
                directory.rmdir()


def raymq(box: Sandbox, *arguments: str, code: int = 0) -> Any:
    """Run a `raymq` command with --json. Returns its decoded output, or its error text if `code` is not 0."""
    done = subprocess.run(
        [RAYMQ, *arguments, "--json"],
        cwd=box.work,
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout) if code == 0 else done.stderr


@pytest.mark.long
@pytest.mark.timeout(900)
def test_up_starts_everything_once_down_ends_it_and_up_again_has_the_messages(box: Sandbox) -> None:
    assert "no Ray cluster runs on this machine" in raymq(box, "status", code=1)
    started = raymq(box, "up", "--data-dir", str(box.data))["actors"]
    rebalances, storages = ["rebalance-0", "rebalance-1"], ["storage-broker-a-0", "storage-broker-b-0"]
    assert started == ["broker-a", "broker-b", "nameserver-0", *rebalances, *storages]
    head = json.loads((box.home / ".raymq/run/ray-head.json").read_text())
    family = [psutil.Process(head["pid"]), *psutil.Process(head["pid"]).children(recursive=True)]
    raymq(box, "topic", "create", "orders", "--queues", "4")
    assert (box.home / ".ray/auth_token").stat().st_mode & 0o777 == 0o600
    assert [path for path, one in stats_below(box.data).items() if one.st_mode & 0o077] == []
    [sent] = raymq(box, "send", "orders", "hello", "--tags", "paid")["sent"]
    again = raymq(box, "up", "--data-dir", str(box.data))
    assert again["actors"] == started
    assert "nothing was started" in again["notes"][0]
    assert "--broker-groups 2" in raymq(box, "up", "--data-dir", str(box.data), "--broker-groups", "1", code=1)
    report = raymq(box, "status")
    assert [store["writable"] for store in report["stores"]] == [True, True]
    board_is_there_and_can_be_installed_again(box)
    assert raymq(box, "down")["stopped"] == [*rebalances, *started[:3], *storages]
    assert_gone(family)
    assert "no Ray cluster runs on this machine" in raymq(box, "down", code=1)

    one_group = ("up", "--data-dir", str(box.data), "--broker-groups", "1", "--leave-out", "broker-b")
    assert "broker-b" not in raymq(box, *one_group)["actors"]
    [stopped] = raymq(box, "status")["stopped_stores"]
    assert stopped == {"store": "broker-b-0", "broker": "broker-b", "directory": str(box.data / "broker-b-0")}
    whole = (box.work / "raymq.yaml").read_text()
    (box.work / "no-number.yaml").write_text(re.sub(r"broker_groups: \d+\n", "", whole))
    grown = raymq(box, "up", "--config", "no-number.yaml", "--data-dir", str(box.data))
    assert grown["actors"] == started
    assert "raymq was already running: started broker-b, storage-broker-b-0" in grown["notes"]
    assert raymq(box, "status")["stopped_stores"] == []
    broker_and_queue = sent["queue"].partition("@")[2]
    message = raymq(box, "query", "orders", "--offset", f"{broker_and_queue}:{sent['offset']}")
    assert (message["body"], message["message_id"]) == ("hello", sent["message_id"])
    assert raymq(box, "store", "close")["closed"] == storages
    raymq(box, "down")


def board_is_there_and_can_be_installed_again(box: Sandbox) -> None:
    """Check that `raymq up` has written the Grafana dashboard into the Ray session's directory, and that `raymq metrics
    install` writes it again. This command also reports that no Grafana server reads the directory."""
    [board] = box.tmp.glob("ray/session_2*/metrics/grafana/dashboards/raymq*.json")
    text = board.read_text()
    board.unlink()
    assert raymq(box, "metrics", "install") == {"path": str(board), "watched": False}
    assert board.read_text() == text


def test_up_with_a_bad_setting_starts_nothing(box: Sandbox) -> None:
    (box.work / "bad.yaml").write_text("brokr_groups: 3\n")
    said = raymq(box, "up", "--config", "bad.yaml", code=1)
    assert "unknown key 'brokr_groups'" in said
    assert not (box.home / ".raymq/run/ray-head.json").exists()
