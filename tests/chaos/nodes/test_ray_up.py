"""Test of `ray up cluster.yaml` with a head machine and a worker machine, each with its own sshd
(tests/support/clusters/machines.py).

The test uses the released cluster.yaml with three changes: the placeholders are filled in, the settings fit three
machines, and this interpreter's environment replaces the commands that install packages.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.support.clusters.cluster import descendants, title
from tests.support.clusters.machines import OPERATOR, REPOSITORY, SSHD, World, why_impossible, world

HEAD, WORKER = "127.0.0.2", "127.0.0.3"
IMPOSSIBLE = why_impossible("ssh", "ssh-keygen", "rsync", SSHD)
UP_S = 240.0
COUNT = 500


def filled_in(key: Path) -> dict[str, Any]:
    """Return the content of the released cluster.yaml, adapted to the two test machines."""
    text = (REPOSITORY / "cluster.yaml").read_text()
    for shipped, here in {
        "--wait-nodes 3": "--wait-nodes 2 --wait-s 120",
        "broker_groups: 3": "broker_groups: 2",
        "  replicas: 3": "  replicas: 2",
        "--disable-usage-stats": "--disable-usage-stats --include-dashboard=false",
    }.items():
        assert text.count(shipped) == 1, shipped
        text = text.replace(shipped, here)
    config: dict[str, Any] = yaml.safe_load(text)
    config["provider"] |= {"head_ip": HEAD, "worker_ips": [WORKER]}
    config["auth"] = {"ssh_user": "root", "ssh_private_key": str(key)}
    venv, *pip, environment, bashrc = config["setup_commands"]
    assert "-m venv" in venv
    assert all("pip install" in command for command in pip)
    config["setup_commands"] = [f"mkdir -p ~/.raymq && ln -sfn {sys.prefix} ~/.raymq/venv", environment, bashrc]
    return config


class RayCommand:
    """Runs `ray` commands on the operator's machine."""

    def __init__(self, machines: World, config: Path) -> None:
        self._machines, self._config = machines, config
        config.write_text(yaml.safe_dump(filled_in(machines.key)))
        machines.run("ray", "get-auth-token", "--generate", timeout_s=UP_S)

    def up(self) -> None:
        """Run `ray up`, and check that raymq runs after the command has returned."""
        print(self._machines.run("ray", "up", "--yes", str(self._config), timeout_s=UP_S))

    def down(self) -> None:
        """Run `ray down`."""
        print(self._machines.run("ray", "down", "--yes", str(self._config), timeout_s=UP_S))

    def on_head(self, command: str) -> str:
        """Run a command on the head node of the Ray cluster, and return its standard output."""
        answer = self._machines.root("head") / "answer.json"
        shell = f"{{ {command}; }} > ~/{answer.name}"
        print(self._machines.run("ray", "exec", str(self._config), shell, timeout_s=UP_S))
        return answer.read_text()


def stores(machines: World, name: str) -> set[str]:
    """Return the names of the store directories on a machine's disk."""
    return {path.parent.name for path in (machines.root(name) / ".raymq/store").glob("*/commitlog")}


def raylets() -> list[psutil.Process]:
    """Return the raylet processes of all machines."""
    return [process for process in descendants() if Path(title(process)).name == "raylet"]


@pytest.mark.skipif(bool(IMPOSSIBLE), reason=IMPOSSIBLE)
@pytest.mark.timeout(900)
def test_messages_sent_before_ray_down_are_consumed_after_ray_up(tmp_path: Path) -> None:
    """Messages that were sent before `ray down` are consumed after `ray up`. Each node has the token and Java, and
    keeps its own stores."""
    with world(tmp_path) as machines:
        machines.start("head", HEAD)
        machines.start("worker", WORKER)
        ray = RayCommand(machines, tmp_path / "cluster.yaml")
        ray.up()
        tokens = {(machines.root(name) / ".ray/auth_token").read_text() for name in (OPERATOR, "head", "worker")}
        assert len(tokens) == 1
        assert len(raylets()) == 2
        for raylet in raylets():
            assert raylet.environ()["RAY_AUTH_MODE"] == "token"
            first_of_path = raylet.environ()["PATH"].split(":")[:2]
            assert first_of_path == ["/root/.raymq/venv/bin", f"{raylet.environ()['JAVA_HOME']}/bin"]
        on_head, on_worker = stores(machines, "head"), stores(machines, "worker")
        assert sorted([*on_head, *on_worker]) == ["broker-a-0", "broker-a-1", "broker-b-0", "broker-b-1"]
        assert len(on_head) == 2

        ray.on_head("raymq topic create orders --queues 4")
        sent = json.loads(ray.on_head(f"seq {COUNT} | raymq send orders --json"))["sent"]
        assert {row["status"] for row in sent} == {"SEND_OK"}
        ray.down()
        ray.up()
        assert (stores(machines, "head"), stores(machines, "worker")) == (on_head, on_worker)
        lines = ray.on_head(f"raymq consume billing orders --from first --max {COUNT} --timeout 20 --json").splitlines()
        messages = [json.loads(line) for line in lines]
        assert sorted(int(message["body"]) for message in messages) == list(range(1, COUNT + 1))
        assert {message["message_id"] for message in messages} == {row["message_id"] for row in sent}
