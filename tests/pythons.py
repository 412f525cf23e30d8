"""Run the unit and component tests and the demo on each supported Python that this machine has: `make test-pythons`.

Each Python has an environment of its own in build/, with the packages of requirements-dev.lock. An interpreter is found
on PATH (`python3.12`) or in pyenv's folder (`~/.pyenv/versions/3.12.*`). The last lines name the versions that have no
interpreter. Such a version does not fail the run.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
BUILD: Final = ROOT / "build"
LOCK: Final = ROOT / "requirements-dev.lock"
TESTS: Final = ("tests/unit", "tests/component")
_ANSWER_TIMEOUT_S: Final = 60.0


@dataclass(slots=True)
class PythonRun:
    """The test results with one version of Python. `interpreter`: path of its interpreter, or None if the machine has
    none. `failed`: the names of the test steps that failed."""

    version: str
    interpreter: str | None
    seconds: float = 0.0
    failed: list[str] = field(default_factory=list)

    def row(self) -> str:
        """Return the line about this Python version for the table that the program prints at its end."""
        if self.interpreter is None:
            return f"Python {self.version}   not found"
        result = f"FAILED: {', '.join(self.failed)}" if self.failed else "passed"
        return f"Python {self.version}   {result}   {self.seconds:,.0f} s   {self.interpreter}"


def find_interpreter(version: str, pyenv: Path) -> str | None:
    """Return the path of an interpreter with this version, such as "3.12"; None if the machine lacks this version.

    `pyenv`: pyenv's folder of versions. A program on PATH counts only if it runs and has this version, because pyenv
    puts a `python3.12` on PATH that runs nothing until the version is chosen.
    """
    return next((path for path in _candidates(version, pyenv) if _version_of(path) == version), None)


def _candidates(version: str, pyenv: Path) -> Iterator[str]:
    on_path = shutil.which(f"python{version}")
    if on_path:
        yield on_path
    folders = [folder for folder in pyenv.glob(f"{version}.*") if folder.name.rpartition(".")[2].isdigit()]
    for folder in sorted(folders, key=lambda folder: int(folder.name.rpartition(".")[2]), reverse=True):
        yield str(folder / "bin" / "python")


def _version_of(interpreter: str) -> str:
    """Return the version of an interpreter, such as "3.12"; empty if it does not run."""
    program = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run(
            [interpreter, "-c", program], capture_output=True, text=True, timeout=_ANSWER_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def environment(version: str, interpreter: str) -> Path:
    """Make the virtual environment of a Python version, or bring it up to date. Returns the environment's `bin` folder.

    Raises subprocess.CalledProcessError if pip fails.
    """
    folder = BUILD / f"venv-{version}"
    python, installed = folder / "bin" / "python", folder / ".installed"
    state = hashlib.sha256(LOCK.read_bytes() + (ROOT / "pyproject.toml").read_bytes()).hexdigest()
    if not installed.exists() or installed.read_text() != state:
        subprocess.run([interpreter, "-m", "venv", str(folder)], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--require-hashes", "--requirement", str(LOCK)], check=True)
        subprocess.run([*pip, "--no-deps", "--no-build-isolation", "--editable", str(ROOT)], check=True)
        installed.write_text(state)
    return folder / "bin"


def run_steps(run: PythonRun) -> None:
    """Run all tests and the demo with the run's Python interpreter. Stores the seconds and the names of the failed
    steps in the run."""
    assert run.interpreter is not None
    started_s = time.monotonic()
    try:
        programs = environment(run.version, run.interpreter)
    except subprocess.CalledProcessError:
        run.failed.append("install")
        return
    # RAYMQ_QUICK limits the number of examples of property tests, as in `make test`.
    environ = {**os.environ, "RAYMQ_QUICK": "1"}
    workers = ("--numprocesses", "2", "--dist", "loadscope", "-m", "not long", "-p", "no:cacheprovider")
    steps = {
        "tests": [str(programs / "python"), "-m", "pytest", "-q", *workers, *TESTS],
        "demo": [str(programs / "raymq"), "demo"],
    }
    for name, command in steps.items():
        print(f"\nPython {run.version}: {' '.join(command)}", flush=True)
        if subprocess.run(command, cwd=ROOT, env=environ, check=False).returncode != 0:
            run.failed.append(name)
    run.seconds = time.monotonic() - started_s


def main(versions: Sequence[str]) -> int:
    """Run the tests and the demo on each of these Python versions. Returns 1 if a step failed or no interpreter was
    found, else 0."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or "~/.pyenv").expanduser() / "versions"
    runs = [PythonRun(version, find_interpreter(version, pyenv)) for version in versions]
    for run in runs:
        if run.interpreter is not None:
            run_steps(run)
    print("\n" + "\n".join(run.row() for run in runs))
    found = [run for run in runs if run.interpreter is not None]
    return int(not found or any(run.failed for run in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
