"""Tests of connecting a process to Ray: what the process tells Ray about its command line, which part of the program
has connected it and to which cluster, and a damaged description of the Ray head."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from raymq.client.cluster import attach
from raymq.common.errors import ClientStateError, ConfigError

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


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process be connected to a Ray cluster at 10.0.0.1:6379."""
    context = SimpleNamespace(gcs_address="10.0.0.1:6379")
    fake = SimpleNamespace(is_initialized=lambda: True, get_runtime_context=lambda: context)
    monkeypatch.setattr(attach, "ray", fake)


@pytest.mark.usefixtures("connected")
@pytest.mark.parametrize("address", [None, "auto", "10.0.0.1:6379", "127.0.0.1:6379", "localhost:6379", "[::1]:6379"])
def test_a_connected_process_may_name_its_own_cluster(address: str | None) -> None:
    assert not attach.attach_ray(address)


@pytest.mark.usefixtures("connected")
@pytest.mark.parametrize("address", ["127.0.0.1:1", "10.0.0.2:6379", "10.0.0.1", "", "ray://10.0.0.1:6379"])
def test_a_connected_process_cannot_connect_to_another_cluster(address: str) -> None:
    with pytest.raises(ClientStateError, match=r"connected to the Ray cluster at 10\.0\.0\.1:6379"):
        attach.attach_ray(address)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "{}", '{"pid": 1}', "\x00" * 40, '{"pid": "x", "create_time": 1, "address": ""}']
)
def test_a_damaged_description_of_the_ray_head_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    monkeypatch.setattr(attach, "run_directory", lambda: tmp_path)
    (tmp_path / "ray-head.json").write_text(text)
    with pytest.raises(ConfigError, match=r"ray-head\.json is damaged .* delete the file"):
        attach.read_head()
    assert (tmp_path / "ray-head.json").read_text() == text, "nothing is deleted"
