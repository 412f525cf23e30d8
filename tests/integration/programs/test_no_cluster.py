"""Tests of connecting while no cluster runs. These tests have a module of their own, because the other modules share a
running cluster."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.clusters.cluster import sandbox

CONNECT = """
import sys
import raymq
try:
    raymq.connect()
except raymq.ClusterNotFoundError as error:
    sys.exit(f"refused: {error}")
"""


RAYMQ = str(Path(sys.executable).with_name("raymq"))


@pytest.mark.parametrize("command", [[sys.executable, "-c", CONNECT], [RAYMQ, "topic", "list"]])
def test_connecting_where_no_ray_runs_says_how_to_start_one(command: list[str]) -> None:
    with sandbox() as box:
        done = subprocess.run(command, cwd=box.work, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 1
        assert done.stderr.startswith(("refused: no Ray cluster runs on this machine", "raymq: no Ray cluster runs"))
        assert "start a Ray cluster with `raymq up`" in done.stderr
        assert "embedded=True" in done.stderr
        assert len(done.stderr.splitlines()) == 1
        assert list(Path(box.home).rglob("*")) == []
