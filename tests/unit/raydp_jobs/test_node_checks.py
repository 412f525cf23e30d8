"""Tests of the check of a node before Spark starts on it. The tests run the check on this machine, with its real
software, and with Java or Python hidden from the check."""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from raydp_jobs.executor_places import _probe_by_value, node_needs
from raymq.client.cluster.java import java_environment, needed_java

probe = _probe_by_value()


@pytest.fixture
def java(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in java_environment().items():
        monkeypatch.setenv(name, value)


SPARK3 = "Spark 3.5.7 needs Java 11 or 17"
SPARK4 = "Spark 4.2.1 needs Java 17 to 25 with the module jdk.incubator.vector"


@pytest.fixture
def spark4(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the needs of Spark 4 of a node."""
    monkeypatch.setattr("raydp_jobs.executor_places.needed_java", lambda: needed_java("4.2.1"))
    return node_needs(sys.executable)


def only_java(directory: Path, monkeypatch: pytest.MonkeyPatch, version: str, *, modules: bool = True) -> str:
    """Put a Java that only reports its version first on the PATH. Without `modules` it fails if it is asked for a
    module. Returns its path."""
    java = directory / "java"
    refuse = "" if modules else 'case "$1" in --add-modules=*) exit 1;; esac; '
    java.write_text(f"#!/bin/sh\n{refuse}echo 'openjdk version \"{version}\" 2026' >&2\n")
    java.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}{os.pathsep}{os.environ['PATH']}")
    return str(java)


def test_this_machine_fulfills_the_requirements_of_spark(java: None, tmp_path: Path) -> None:
    assert probe(node_needs(sys.executable), str(tmp_path)) == []


def test_a_node_without_java_is_reported_with_a_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    [problem] = probe(node_needs(sys.executable), str(tmp_path))
    assert problem.startswith(
        f"Ray's PATH on this node has no Java, but {SPARK3}; start Ray on the node with `raymq up`"
    )
    assert problem.endswith("(apt install openjdk-17-jre-headless)")


@pytest.mark.parametrize(
    ("version", "shown"), [("25.0.1", "Java 25.0.1"), ("1.8.0_402", "Java 1.8.0_402"), ("none", "an unknown Java")]
)
def test_a_java_that_spark_does_not_run_on_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, shown: str
) -> None:
    path = only_java(tmp_path, monkeypatch, version)
    [problem] = probe(node_needs(sys.executable), str(tmp_path))
    assert problem.startswith(f"Ray's PATH on this node has {shown} in {path}, but {SPARK3}; start Ray")


@pytest.mark.parametrize("version", ["11.0.24", "17.0.9"])
def test_spark_3_runs_on_two_versions_of_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str) -> None:
    only_java(tmp_path, monkeypatch, version)
    assert probe(node_needs(sys.executable), str(tmp_path)) == []


@pytest.mark.parametrize("version", ["17.0.15", "21.0.8", "25.0.3"])
def test_spark_4_needs_a_module_of_java(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, spark4: dict[str, Any], version: str
) -> None:
    only_java(tmp_path, monkeypatch, version)
    assert probe(spark4, str(tmp_path)) == []
    path = only_java(tmp_path, monkeypatch, version, modules=False)
    [problem] = probe(spark4, str(tmp_path))
    assert problem.startswith(f"Java {version} in {path} lacks a module, and {SPARK4}; start Ray")


def test_spark_4_refuses_an_older_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, spark4: dict[str, Any]) -> None:
    path = only_java(tmp_path, monkeypatch, "11.0.24")
    [problem] = probe(spark4, str(tmp_path))
    assert problem.startswith(f"Ray's PATH on this node has Java 11.0.24 in {path}, but {SPARK4}; start Ray")


def test_another_spark_in_rays_python_is_named(java: None, tmp_path: Path) -> None:
    needs = node_needs(sys.executable)
    installed = f"pyspark {version('pyspark')} and raydp {version('raydp')}"
    [problem] = probe({**needs, "versions": {"pyspark": "4.2.1", "raydp": "1.7.0"}}, str(tmp_path))
    assert problem == (
        f"Ray's Python {sys.executable} on this node has {installed}, but this program has pyspark 4.2.1 and raydp "
        "1.7.0; install the same versions, and start Ray again"
    )
    [problem] = probe({**needs, "versions": {"no-such-package": "1.0"}}, str(tmp_path))
    assert "has no-such-package none, but this program has no-such-package 1.0" in problem


def test_a_missing_python_is_reported(java: None, tmp_path: Path) -> None:
    assert probe(node_needs(str(tmp_path / "python")), str(tmp_path)) == [
        f"the node has no Python at {tmp_path / 'python'}; install the same Python on the node, or set "
        "PYSPARK_PYTHON to an existing Python"
    ]


def test_missing_packages_are_reported(java: None, tmp_path: Path) -> None:
    [problem] = probe(node_needs(sys.executable, ("raymq", "no_such_package", "nor_this")), str(tmp_path))
    advice = "run pip install 'raymq[spark]' on the node"
    assert problem == f"{sys.executable} cannot import no_such_package, nor_this; {advice}"
