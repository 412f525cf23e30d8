"""Tests of the check of a node before Spark starts on it. The tests run the check on this machine, with its real
software, and with Java or Python hidden from the check."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from raydp_jobs.executor_places import JAVA_VERSIONS, PACKAGES, _probe_by_value
from raymq.client.cluster.java import java_environment

probe = _probe_by_value()


@pytest.fixture
def java(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in java_environment().items():
        monkeypatch.setenv(name, value)


def test_this_machine_fulfills_the_requirements_of_spark(java: None, tmp_path: Path) -> None:
    assert probe(sys.executable, PACKAGES, JAVA_VERSIONS, str(tmp_path)) == []


def test_a_node_without_java_is_reported_with_a_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    [problem] = probe(sys.executable, PACKAGES, JAVA_VERSIONS, str(tmp_path))
    assert problem.startswith("Ray's PATH on this node has no Java; start Ray on the node with `raymq up`")
    assert problem.endswith("(apt install openjdk-17-jre-headless)")


def test_a_java_that_spark_does_not_run_on_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    old = tmp_path / "java"
    old.write_text("#!/bin/sh\necho 'openjdk version \"25.0.1\" 2026' >&2\n")
    old.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    [problem] = probe(sys.executable, PACKAGES, JAVA_VERSIONS, str(tmp_path))
    assert problem.startswith("the node has Java version 25, but Spark needs 17")


def test_a_missing_python_is_reported(java: None, tmp_path: Path) -> None:
    assert probe(str(tmp_path / "python"), PACKAGES, JAVA_VERSIONS, str(tmp_path)) == [
        f"the node has no Python at {tmp_path / 'python'}; install the same Python on the node, or set "
        "PYSPARK_PYTHON to an existing Python"
    ]


def test_missing_packages_are_reported(java: None, tmp_path: Path) -> None:
    [problem] = probe(sys.executable, ("raymq", "no_such_package", "nor_this"), JAVA_VERSIONS, str(tmp_path))
    advice = "run pip install 'raymq[spark]' on the node"
    assert problem == f"{sys.executable} cannot import no_such_package, nor_this; {advice}"
