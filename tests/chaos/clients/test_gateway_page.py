"""Tests of docs/gateway.md: its programs run as they are printed, with RocketMQ's official clients, where Ray is not
installed.

A program gets an environment with a home directory and the system's programs only, as `env -i` makes it. The page's
address, topic and group are replaced by the test's own.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray

import raymq
from tests.support.cases import SUMMARY
from tests.support.gateway.gateways import HOST
from tests.support.gateway.official import InstallError, official_node, official_python, or_skip
from tests.support.ports import free_port

pytestmark = pytest.mark.timeout(900)  # The first run installs the clients.

PAGE = Path(__file__).parents[3] / "docs" / "gateway.md"
PRINTED_ENDPOINTS = "127.0.0.1:8081"
SYSTEM_PATH = "/usr/bin:/bin"
PROGRAM_S = 300
RAYMQ = str(Path(sys.executable).with_name("raymq"))
Record = Callable[[str, object], None]


class StartedGateway:
    """A gateway that `raymq gateway start` has started. `start_s`: how long the command took, in seconds."""

    def __init__(self, endpoints: str, start_s: float) -> None:
        self.endpoints, self.start_s = endpoints, start_s


@pytest.fixture(scope="module")
def gateway(mq: raymq.Client, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartedGateway]:
    port, config = free_port(), tmp_path_factory.mktemp("gateway") / "raymq.yaml"
    config.write_text(f"gateway: {{port: {port}}}\n")
    begin_s = time.monotonic()
    raymq_gateway("start", "--config", str(config))
    yield StartedGateway(f"{HOST}:{port}", time.monotonic() - begin_s)
    raymq_gateway("stop")


def raymq_gateway(*arguments: str) -> None:
    """Run `raymq gateway` on this process's cluster, in a process of its own."""
    address = ray.get_runtime_context().gcs_address
    command = [RAYMQ, "gateway", *arguments, "--address", address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_S, check=False)
    assert done.returncode == 0, done.stderr


def page_program(language: str, endpoints: str, mq: raymq.Client) -> str:
    """Return the page's program in a language, with another address, and with a topic and a group of its own. Creates
    the topic, as the page demands."""
    text = PAGE.read_text()
    [program] = re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert "raymq topic create orders" in text
    for printed, own in (
        (PRINTED_ENDPOINTS, endpoints),
        ("orders", f"page-{language}-orders"),
        ("billing", f"page-{language}-billing"),
    ):
        assert printed in program
        program = program.replace(printed, own)
    mq.admin.create_topic(f"page-{language}-orders", queues=8)
    return program


def run_without_ray(command: list[str], folder: Path) -> str:
    """Run a program in `folder`, its home directory, without this process's environment. Returns what it prints."""
    assert [shutil.which(name, path=SYSTEM_PATH) for name in ("ray", "raymq")] == [None, None]
    environ = {"PATH": SYSTEM_PATH, "HOME": str(folder)}
    done = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=PROGRAM_S, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def timed_program(command: list[str], folder: Path, gateway: StartedGateway, record: Record) -> list[str]:
    """Run a program, report how long it takes after the gateway's start, and return the lines that it prints."""
    begin_s = time.monotonic()
    lines = run_without_ray(command, folder).splitlines()
    record(SUMMARY, f"gateway start {gateway.start_s:.1f} s, program {time.monotonic() - begin_s:.1f} s")
    return lines


def test_the_python_program_of_the_page_sends_and_receives_without_ray(
    mq: raymq.Client, gateway: StartedGateway, tmp_path: Path, record_property: Record
) -> None:
    try:
        python = str(official_python())
    except InstallError as error:
        or_skip(error)
    look = "from importlib.util import find_spec; print(find_spec('ray'), find_spec('raymq'), find_spec('rocketmq'))"
    assert run_without_ray([python, "-c", look], tmp_path).startswith("None None ModuleSpec")
    file = tmp_path / "program.py"
    file.write_text(page_program("python", gateway.endpoints, mq))
    [message_id, body] = timed_program([python, str(file)], tmp_path, gateway, record_property)
    assert (len(message_id), body) == (34, "b'17'")
    assert mq.admin.group_summary("page-python-billing").lag == 0


def test_the_node_program_of_the_page_sends_and_receives_without_ray(
    mq: raymq.Client, gateway: StartedGateway, tmp_path: Path, record_property: Record
) -> None:
    try:
        node, installed = official_node()
    except InstallError as error:
        or_skip(error)
    (tmp_path / "node_modules").symlink_to(installed / "node_modules")
    file = tmp_path / "program.js"
    file.write_text(page_program("js", gateway.endpoints, mq))
    assert timed_program([str(node), str(file)], tmp_path, gateway, record_property) == ["18"]
    assert mq.admin.group_summary("page-js-billing").lag == 0
