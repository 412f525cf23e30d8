"""Run the unit and component tests and the demo on each supported Python that this machine has: `make test-pythons`.

Each Python has an environment of its own in build/, with the packages of requirements-dev.lock. An interpreter is found
on PATH (`python3.12`) or in pyenv's folder (`~/.pyenv/versions/3.12.*`). The last lines name the versions that have no
interpreter. Such a version does not fail the run.

A short run takes less than a minute for each Python (`run_short`). Its environment has the packages of `raymq` without
extras, and pytest.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Final

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT: Final = Path(__file__).parents[1]
BUILD: Final = ROOT / "build"
LOCK: Final = ROOT / "requirements-dev.lock"
TESTS: Final = ("tests/unit", "tests/component")
SHORT_TOOLS: Final = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "setuptools")
SHORT_TESTS: Final = (
    "tests/unit/raymq/common",
    "tests/unit/raymq/client/test_interpreter_exit.py",
    "tests/unit/raymq/client/producer",
    "tests/unit/raymq/client/request",
    "tests/unit/raymq/client/transactions",
    "tests/unit/placement",
    "--ignore=tests/unit/raymq/client/producer/test_table.py",  # needs pandas
)
COMPILED: Final = ("raymq", "storage", "actors", "placement", "raydp_jobs", "tests")
INSTALL_S: Final = 600.0
"""Time limit in seconds for making an environment, with all calls of pip."""
SHORT_STEP_S: Final = 600.0
"""Time limit in seconds of one step of a short run."""
STEP_S: Final = 7200.0
"""Time limit in seconds of one step of a whole run."""
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


def pyenv_versions() -> Path:
    """Return the folder in which pyenv keeps its Python versions. The folder may not exist."""
    return Path(os.environ.get("PYENV_ROOT") or "~/.pyenv").expanduser() / "versions"


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

    Raises subprocess.CalledProcessError if pip fails, and subprocess.TimeoutExpired after INSTALL_S.
    """
    return _installed(BUILD / f"venv-{version}", interpreter, LOCK.read_text())


def short_environment(version: str, interpreter: str) -> Path:
    """Make the virtual environment of a short run, or bring it up to date. Returns the environment's `bin` folder.

    The environment has what `raymq` without extras needs, and SHORT_TOOLS. Raises subprocess.CalledProcessError if pip
    fails, and subprocess.TimeoutExpired after INSTALL_S.
    """
    return _installed(BUILD / f"venv-short-{version}", interpreter, short_lock(version), short=True)


def short_lock(version: str) -> str:
    """Return the entries of requirements-dev.lock that an environment of a short run needs, with their hashes. The
    metadata of this environment's packages name the dependencies for a Python version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed: set[tuple[str, str]] = set()
    markers = {**default_environment(), "python_version": version, "python_full_version": f"{version}.0"}
    for text in (*project["dependencies"], *SHORT_TOOLS):
        _add_needed(Requirement(text), markers, needed)
    names = {name for name, _ in needed}
    entries = re.split(r"\n(?=[a-z0-9])", LOCK.read_text())
    return "\n".join(entry for entry in entries if canonicalize_name(re.split(r"[=\[ ]", entry)[0]) in names)


def _add_needed(requirement: Requirement, markers: dict[str, str], needed: set[tuple[str, str]]) -> None:
    """Add a requirement and all its dependencies to `needed`: pairs of a package and an extra ("" for no extra)."""
    for extra in ("", *requirement.extras):
        if (key := (canonicalize_name(requirement.name), extra)) in needed:
            continue
        needed.add(key)
        try:
            dependencies = metadata.requires(requirement.name) or ()
        except metadata.PackageNotFoundError:  # another Python version needs the package, and this one lacks it
            dependencies = ()
        for dependency in map(Requirement, dependencies):
            if dependency.marker is None or dependency.marker.evaluate({**markers, "extra": extra}):
                _add_needed(dependency, markers, needed)


def _installed(folder: Path, interpreter: str, lock: str, *, short: bool = False) -> Path:
    """Make a virtual environment with the packages of a lock file's text, unless it exists already. Returns the
    environment's `bin` folder.

    With `short`, pip takes half of its usual processor time: it resolves and compiles nothing, and the environment gets
    no pip of its own.
    """
    python, installed, locked = folder / "bin" / "python", folder / ".installed", folder / "requirements.lock"
    state = hashlib.sha256(lock.encode() + (ROOT / "pyproject.toml").read_bytes()).hexdigest()
    until_s = time.monotonic() + INSTALL_S

    def call(*command: str) -> None:
        subprocess.run(command, check=True, timeout=max(0.0, until_s - time.monotonic()))

    if not installed.exists() or installed.read_text() != state:
        call(interpreter, "-m", "venv", *(["--without-pip"] if short else []), str(folder))
        locked.write_text(lock)
        pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "--quiet"]
        options = ["--no-deps", "--no-compile"] if short else []
        call(*pip, "install", *options, "--require-hashes", "--requirement", str(locked))
        call(*pip, "install", "--no-deps", "--no-build-isolation", "--editable", str(ROOT))
        installed.write_text(state)
    return folder / "bin"


def run_steps(run: PythonRun) -> None:
    """Run all tests and the demo with the Python interpreter of `run`. Stores the total duration in seconds, and the
    names of the failed steps, in `run`."""
    workers = ("--numprocesses", "2", "--dist", "loadscope", "-m", "not long", "-p", "no:cacheprovider")

    def steps(programs: Path) -> dict[str, list[str]]:
        return {
            "tests": [str(programs / "python"), "-m", "pytest", "-q", *workers, *TESTS],
            "demo": [str(programs / "raymq"), "demo"],
        }

    _run(run, environment, steps, STEP_S)


def run_short(run: PythonRun) -> None:
    """Compile all modules with warnings as errors, and run SHORT_TESTS, with the run's Python interpreter. Stores the
    seconds and the names of the failed steps in the run."""

    def steps(programs: Path) -> dict[str, list[str]]:
        python = str(programs / "python")
        return {
            "compile": [python, "-W", "error", "-m", "compileall", "-q", "-f", *COMPILED],
            "tests": [python, "-m", "pytest", "-q", "-m", "not long", "-p", "no:cacheprovider", *SHORT_TESTS],
        }

    _run(run, short_environment, steps, SHORT_STEP_S)


def _run(
    run: PythonRun,
    make_environment: Callable[[str, str], Path],
    steps: Callable[[Path], dict[str, list[str]]],
    step_s: float,
) -> None:
    """Make the environment of a run, and run its steps. `steps` returns the command of each step for a `bin` folder.
    A step that takes longer than `step_s` seconds is killed and has failed."""
    assert run.interpreter is not None
    started_s = time.monotonic()
    try:
        programs = make_environment(run.version, run.interpreter)
    except subprocess.SubprocessError as error:
        print(f"\nPython {run.version}: {error}", flush=True)
        run.failed.append("install")
        return
    # RAYMQ_QUICK limits the number of examples of property tests, as in `make test`. A test that starts the run sets
    # variables of pytest, which are not for the run's own pytest.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environ["RAYMQ_QUICK"] = "1"
    for name, command in steps(programs).items():
        print(f"\nPython {run.version}: {' '.join(command)}", flush=True)
        try:
            subprocess.run(command, cwd=ROOT, env=environ, check=True, timeout=step_s)
        except subprocess.SubprocessError as error:
            print(f"\nPython {run.version}: {error}", flush=True)
            run.failed.append(name)
    run.seconds = time.monotonic() - started_s


def main(versions: Sequence[str]) -> int:
    """Run the tests and the demo on each of these Python versions. Returns 1 if a step failed or no interpreter was
    found, else 0."""
    runs = [PythonRun(version, find_interpreter(version, pyenv_versions())) for version in versions]
    for run in runs:
        if run.interpreter is not None:
            run_steps(run)
    print("\n" + "\n".join(run.row() for run in runs))
    found = [run for run in runs if run.interpreter is not None]
    return int(not found or any(run.failed for run in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
