"""Tests of the programs in tests/bench. Each program can start, because all modules that it imports exist. A report
names the versions of the peers (other queue systems)."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.bench import peers
from tests.bench.__main__ import LIBRARIES
from tests.bench.figures import Figure, Goal, as_markdown

BENCH = Path(__file__).parents[2] / "bench" / "programs"
ASK_ALL = """
import contextlib, io, runpy, sys

path = sys.path[:]
for program in sys.argv[1:]:
    sys.argv[:], sys.path[:] = [program, "--help"], path  # each program finds the modules of the tests by itself
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(program, run_name="__main__")
    except SystemExit as ended:
        print(ended.code, *printed.getvalue().split()[:2])
"""


def test_every_benchmark_prints_its_usage() -> None:
    """Each benchmark program prints its usage. One process prints the usage of all programs, so that Ray is imported
    only once."""
    programs = sorted(BENCH.glob("bench_*.py"))
    command = [sys.executable, "-c", ASK_ALL, *map(str, programs)]
    done = subprocess.run(command, cwd=BENCH, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"0 usage: {program.name}" for program in programs]
    assert programs


@pytest.mark.parametrize(
    ("program", "name", "line", "found"),
    [
        ("redis-server", "redis", "Redis server v=7.0.15 sha=00000000:0 malloc=jemalloc-5.3.0 bits=64", "7.0.15"),
        ("nats-server", "nats", "nats-server: v2.10.7", "2.10.7"),
        ("nats-server", "nats", "a server of today", "a server of today"),
    ],
)
def test_a_report_has_the_versions_of_the_installed_peers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, name: str, line: str, found: str
) -> None:
    server = tmp_path / program
    server.write_text(f"#!/bin/sh\necho '{line}'\n")
    server.chmod(0o755)
    monkeypatch.setattr(peers, "_program", lambda wanted: str(server) if wanted == program else "")
    assert peers.peer_versions() == {"ray": version("ray"), name: found}


def test_a_report_has_the_versions_of_all_clients_of_the_peers() -> None:
    """A report records the version of each library that `make bench` installs. hiredis parses Redis' answers, so its
    version changes the speed of Redis."""
    pyproject = tomllib.loads((BENCH.parents[2] / "pyproject.toml").read_text())
    clients = pyproject["project"]["optional-dependencies"]["bench"]
    assert clients
    assert {re.split(r"[<>=~!\[ ;]", client)[0] for client in clients} <= set(LIBRARIES)


def test_a_round_in_which_a_peer_measures_0_has_no_ratio() -> None:
    figure = Figure("waiting", "processor time", "%", False, [Goal("<=", 1.0, "redis")])
    figure.add_round(lambda: 1.0, {"redis": lambda: 0.0})
    assert (figure.ratios("redis"), figure.reached(), figure.as_dict()["peers"]["redis"]["ratio"]) == ([], None, None)
    assert "| waiting: processor time | 1.00 % |  |  | redis <= 1 |  |" in as_markdown([figure])
    figure.add_round(lambda: 1.0, {"redis": lambda: 2.0})
    assert (figure.ratios("redis"), figure.reached(), figure.as_dict()["peers"]["redis"]["ratio"]) == ([0.5], True, 0.5)
