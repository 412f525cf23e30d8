"""Tests that a process imports raymq's own `storage`, `actors` and `placement` packages, even if a user has packages of
the same names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from raymq.client.cluster import server_path

REPOSITORY = Path(__file__).resolve().parents[5]
FLOORS = ("storage", "actors", "placement")

PROGRAM = """
import sys
import actors, placement, storage

def main():
    print(*(module.__file__ for module in (storage, actors, placement)), *sys.argv[1:], sep="\\n")
"""


def test_in_a_checkout_the_floors_lie_beside_raymq() -> None:
    assert server_path.floors() == REPOSITORY


def test_putting_the_floors_first_again_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["/a/users", "/site-packages"])
    server_path.put_floors_first()
    server_path.put_floors_first()
    assert sys.path == [str(REPOSITORY), "/a/users", "/site-packages"]


def test_the_floors_come_before_a_users_packages_on_pythonpath(tmp_path: Path) -> None:
    for floor in FLOORS:
        (tmp_path / floor).mkdir()
        (tmp_path / floor / "__init__.py").write_text("raise RuntimeError('the user\\'s own')")
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "raymq.client.cluster.server_path", "program"],
        cwd="/",
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.splitlines()[:3] == [str(REPOSITORY / floor / "__init__.py") for floor in FLOORS], done.stderr
