"""Tests of the environment variables that `raymq up` sets for the processes of Ray that it starts."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raymq.client.cluster import local_server
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
