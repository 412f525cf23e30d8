"""Tests of file permissions: another user of the same machine can read no store file and no token, and cannot connect
to a broker's socket."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import raymq
from raymq.remoting.actor_ref import ActorRef
from raymq.remoting.lane.address import LaneAddress
from raymq.remoting.lane.client import Lane
from raymq.remoting.lane.handshake import LaneSecretError
from tests.support.clusters.cluster import Sandbox, embedded, sandbox
from tests.support.stores.live_directory import stats_below

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can run a process of another user"),
]

NOBODY = 65534
CALL_S = 60.0
SERVERS = ("storage-broker-a-0", "broker-a")

ANOTHER_USER = """
import json, os, socket, sys

wanted = json.load(sys.stdin)
os.setgroups([])
os.setgid(65534)
os.setuid(65534)


def opens(path):
    try:
        os.close(os.open(path, os.O_RDONLY))
    except PermissionError:
        return False
    return True


def writes(path):
    try:
        os.close(os.open(path + "/x" if os.path.isdir(path) else path, os.O_WRONLY | os.O_CREAT))
    except PermissionError:
        return False
    return True


def connects(path):
    with socket.socket(socket.AF_UNIX) as stream:
        stream.settimeout(60)
        try:
            stream.connect(path)
        except PermissionError:
            return False
    return True


def answers(name):
    with socket.socket(socket.AF_UNIX) as stream:
        stream.settimeout(60)
        stream.connect("\\0" + name)
        return stream.recv(1000) != b""


tried = {"opens": opens, "writes": writes, "connects": connects, "answers": answers}
json.dump({what: [one for one in wanted[what] if tried[what](one)] for what in wanted}, sys.stdout)
"""


def another_user(**wanted: list[str]) -> dict[str, list[str]]:
    """Return the files, sockets and lanes (socket connections) in `wanted` that the user `nobody` can open."""
    told = subprocess.run(
        [sys.executable, "-c", ANOTHER_USER],
        input=json.dumps(wanted),
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    got: dict[str, list[str]] = json.loads(told.stdout)
    return got


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    """Run a cluster with one message in a directory that every user may enter, so that only the permissions of raymq's
    own files protect the cluster."""
    with sandbox("broker_groups: 1\n") as box:
        for path in (box.root, box.tmp, box.work, box.home):
            path.chmod(0o755)
        with embedded(box) as client:
            client.admin.create_topic("orders")
            client.producer("shop").send(raymq.Message("orders", b"a secret", keys=["k"]))
            yield box


def lane_of(server: str) -> LaneAddress:
    description: Any = ActorRef(server).call("describe", timeout_s=CALL_S)
    lane: LaneAddress = description.lane
    return lane


def test_everything_below_a_data_directory_is_for_its_user_only(box: Sandbox) -> None:
    found = stats_below(box.data)
    assert any(stat.S_ISREG(one.st_mode) and one.st_size for one in found.values())
    open_to_others = [f"{stat.filemode(one.st_mode)} {path}" for path, one in found.items() if one.st_mode & 0o077]
    assert open_to_others == []
    paths = [str(path) for path in found]
    assert another_user(opens=paths, writes=paths) == {"opens": [], "writes": []}


def test_the_test_can_fail(box: Sandbox, tmp_path_factory: pytest.TempPathFactory) -> None:
    settings = box.work / "raymq.yaml"
    settings.chmod(0o644)
    assert another_user(opens=[str(settings)]) == {"opens": [str(settings)]}


def test_the_token_and_the_sockets_of_ray_are_out_of_reach(box: Sandbox) -> None:
    token = os.environ["RAY_AUTH_TOKEN_PATH"]
    assert Path(token).read_text()
    sockets = [str(path) for path, one in stats_below(box.tmp).items() if stat.S_ISSOCK(one.st_mode)]
    assert sockets
    got = another_user(opens=[token], writes=[token], connects=sockets)
    assert got == {"opens": [], "writes": [], "connects": []}


@pytest.mark.parametrize("server", SERVERS)
def test_no_lane_is_opened(box: Sandbox, server: str) -> None:
    address = lane_of(server)
    assert another_user(answers=[address.name[1:]]) == {"answers": []}, "not even a hello is sent"
    wrong = LaneAddress(address.name, bytes(32), address.host, address.port)
    assert address.port
    # If a client has a wrong secret, the server closes the client's connection without sending anything.
    with pytest.raises((EOFError, LaneSecretError)):
        Lane(wrong, remote=True, timeout_s=CALL_S)
    Lane(address, remote=True, timeout_s=CALL_S).close()
