"""The programs of tests/bench can be started: what they import is there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench" / "programs"


@pytest.mark.parametrize("program", sorted(BENCH.glob("bench_*.py")), ids=lambda path: path.stem)
def test_a_bench_says_how_it_is_used(program: Path) -> None:
    done = subprocess.run([sys.executable, program, "--help"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: {program.name}")
