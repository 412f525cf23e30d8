"""An environment with RocketMQ's official Python client, whose messages the gateway's own messages must equal."""

from __future__ import annotations

import json
import os
import pwd
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from tests.support.clusters.cluster import user_environment

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "build" / "venv-rocketmq"
"""The virtual environment. It stays for the next run."""
CLIENT: Final = (
    "rocketmq-python-client==5.1.2 --hash=sha256:b527020694cb6a91bb490b158a63c0b34e4b46b790dde2d435e4c5ba54a621f6"
)
"""The official client, as a line of a requirements file."""
RUN_S = 300


def official_python(directory: Path) -> Path:
    """Install the official client and the locked protobuf, without their dependencies, into a virtual environment.
    Returns its Python. `directory`: for pip's file of requirements.

    Raises AssertionError, with pip's output, if pip fails.
    """
    lock = (ROOT / "requirements-dev.lock").read_text()
    [protobuf] = re.findall(r"^protobuf==.*?(?=\n    #)", lock, re.MULTILINE | re.DOTALL)
    requirements, python = directory / "requirements.txt", FOLDER / "bin" / "python"
    requirements.write_text(f"{CLIENT}\n{protobuf}\n")
    state = f"{sys.version}\n{requirements.read_text()}"
    installed = FOLDER / ".installed"
    if not installed.exists() or installed.read_text() != state:
        _run([sys.executable, "-m", "venv", "--clear", str(FOLDER)])
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        _run([*pip, "--no-deps", "--require-hashes", "--requirement", str(requirements)])
        installed.write_text(state)
    return python


def compare(python: Path, seed: int, rounds: int) -> dict[str, Any]:
    """Run wire_program.py in the official client's environment, and return its report."""
    program = Path(__file__).with_name("wire_program.py")
    # Python puts the program's folder first on the import path; -P leaves it out.
    done = _run([str(python), "-P", str(program), str(seed), str(rounds)], PYTHONPATH=str(ROOT))
    report: dict[str, Any] = json.loads(done)
    return report


def _run(command: list[str], **variables: str) -> str:
    """Run a program with the user's own home directory, below which pip has its cache. Returns its output."""
    environ = {**user_environment(), "HOME": pwd.getpwuid(os.getuid()).pw_dir, "TMPDIR": "/tmp", **variables}
    environ.pop("XDG_CACHE_HOME", None)
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=RUN_S, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout
