"""Runs the example of a documentation page: a Python program, followed by its output."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import ray

from tests.support.clusters.cluster import user_environment

DOCS = Path(__file__).parents[3] / "docs"


def assert_prints_what_it_says(page: str, index: int = 0) -> None:
    """Run an example of docs/`page` in a separate process that connects to this process's cluster. Checks that the
    program prints the output that the page shows. `index`: which of the page's programs with an output."""
    found = re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```$", (DOCS / page).read_text(), re.M | re.S)
    program, printed = found[index]
    assert run_program(program) == printed


def run_program(program: str) -> str:
    """Run a Python program in a separate process that connects to this process's cluster. Returns the program's
    output."""
    environment = {**user_environment(), "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    done = subprocess.run(
        [sys.executable, "-"], input=program, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
