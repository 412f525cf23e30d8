"""Tests of connecting a process to Ray: what the process tells Ray about its command line, and
which part of the program has connected it."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from raymq.client.cluster import attach

PROGRAM = """
import ray
from raymq.client.cluster.attach import described_as_utf8

before = ray._private.utils.get_entrypoint_name
try:
    before().encode()
except UnicodeEncodeError:
    print("refused")
with described_as_utf8():
    print(ray._private.utils.get_entrypoint_name().encode().decode("ascii").split()[-1])
print(ray._private.utils.get_entrypoint_name is before)
"""


def test_an_argument_that_is_not_utf8_does_not_keep_a_program_from_ray() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, b"caf\xe9"], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.splitlines() == ["refused", "caf\\udce9", "True"]


def test_a_connection_of_the_program_itself_is_not_taken_for_one_of_raymq(monkeypatch: pytest.MonkeyPatch) -> None:
    connected: list[str] = []
    fake = SimpleNamespace(
        is_initialized=lambda: bool(connected),
        get_runtime_context=lambda: SimpleNamespace(get_worker_id=lambda: connected[0]),
    )
    monkeypatch.setattr(attach, "ray", fake)
    monkeypatch.setattr(attach, "_own_workers", [])
    assert not attach.connected_by_raymq()
    connected[:] = ["one"]  # the program calls ray.init
    assert not attach.connected_by_raymq()
    attach.note_connection()
    assert attach.connected_by_raymq()
    connected.clear()  # raymq closes its connection
    assert not attach.connected_by_raymq()
    connected[:] = ["two"]
    assert not attach.connected_by_raymq()
