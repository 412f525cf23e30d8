"""Tests of what `raymq up` passes to the processes of Ray that it starts, and of commands that only the launch process
connects to Ray."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raymq.client.cluster import attach, local_server
from raymq.common.errors import ClusterNotFoundError
from raymq.remoting.access.credentials import CREDENTIAL_VARIABLES


def test_the_ray_that_up_starts_inherits_no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    for name in CREDENTIAL_VARIABLES:
        monkeypatch.setenv(name, "of the user who runs the command")
    started: list[dict[str, str]] = []

    def start(command: list[str], **options: Any) -> SimpleNamespace:
        started.append(options["env"])
        return SimpleNamespace(pid=os.getpid())

    monkeypatch.setattr(local_server, "java_environment", dict)  # `java_environment` runs `java` to get its version
    monkeypatch.setattr(local_server.subprocess, "Popen", start)
    monkeypatch.setattr(local_server, "_await_address", lambda process, log: "127.0.0.1:6379")
    monkeypatch.setattr(local_server, "latest_started_file", lambda: tmp_path / "latest")
    assert local_server._start_ray().address == "127.0.0.1:6379"
    [environment] = started
    assert environment["HOME"] == str(tmp_path)
    assert not environment.keys() & set(CREDENTIAL_VARIABLES)


def ignore(step: str) -> None:
    """Ignore a step of the progress."""


CALLS: dict[str, Callable[[str], object]] = {
    "stop": lambda address: local_server.down(address, ignore),
    "drain": lambda address: local_server.drain("10.0.0.7", False, address, ignore),
    "balance": lambda address: local_server.balance(address, ignore),
    "close": lambda address: local_server.close_stores(address, ignore),
    "board": lambda address: local_server.install_board(None, address),
    "stop_console": local_server.stop_console,
    "stop_gateways": lambda address: local_server.stop_gateways(address, ignore),
}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Record the action and the address of each launch process, instead of starting one. A connection of this process
    to Ray fails the test."""
    launches: list[tuple[str, str]] = []
    monkeypatch.setattr(local_server, "launch", lambda action, address, **options: launches.append((action, address)))
    monkeypatch.setattr(attach.ray, "init", lambda **options: pytest.fail("the command connects to Ray itself"))
    return launches


@pytest.mark.parametrize("action", CALLS)
def test_only_the_launch_process_of_a_command_connects_to_ray(launched: list[tuple[str, str]], action: str) -> None:
    """A connection takes more than a second, so a command does not connect a second process."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        CALLS[action](address)
    assert launched == [(action, address)]


@pytest.mark.parametrize("action", CALLS)
def test_a_command_starts_no_launch_process_if_no_process_listens(launched: list[tuple[str, str]], action: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    with pytest.raises(ClusterNotFoundError, match=f"no Ray cluster runs at {address}"):
        CALLS[action](address)
    assert launched == []
