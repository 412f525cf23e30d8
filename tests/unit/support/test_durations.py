"""Tests of the order in which pytest's workers run tests, and of the recorded durations of the tests."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import durations
from tests.conftest import next_scope, scope_of
from tests.durations import DurationRecorder, recorded_seconds

RAY, SPARK, HOOKS = "integration/programs/test_guide.py", "spark", "integration/servers/test_hooks.py"
DOCS, NEW = "unit/test_docs.py", "unit/test_new.py"


def test_a_worker_takes_the_longest_of_its_own_scopes_and_then_of_the_others() -> None:
    seconds = {RAY: 80, SPARK: 90, DOCS: 3, "nodes": 300}
    left = [NEW, DOCS, "nodes", HOOKS, RAY, SPARK]
    taken = []
    while left:
        taken.append(next_scope(left, ("ray", "", "nodes"), seconds))
        left.remove(taken[-1])
    assert taken == [SPARK, RAY, HOOKS, DOCS, NEW, "nodes"]
    assert next_scope(taken, ("", "nodes", "ray"), seconds) == DOCS


def test_a_scope_is_a_shared_cluster_or_a_file() -> None:
    assert scope_of("tests/integration/clients/groups/test_any.py::test_one[a::b]") == "clients"
    assert scope_of("tests/chaos/nodes/test_any.py::test_one") == "nodes"
    assert scope_of("tests/component/spark/jobs/test_any.py::test_one") == "local_spark"
    assert scope_of("tests/unit/test_docs.py::test_one") == DOCS


def test_a_run_updates_only_the_durations_of_its_scopes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durations, "RECORDED", tmp_path / "durations.json")
    (tmp_path / "unit").mkdir()
    for name in (DOCS, NEW):
        (tmp_path / name).write_text("")
    (tmp_path / "durations.json").write_text(json.dumps({"clients": 9, DOCS: 7, NEW: 4, "unit/test_removed.py": 5}))
    recorder = DurationRecorder(scope_of)
    for test, seconds in (("test_docs.py::a", 1.2), ("test_docs.py::b", 0.9), ("test_new.py::a", 0.4)):
        report: Any = SimpleNamespace(nodeid=f"tests/unit/{test}", duration=seconds)
        recorder.pytest_runtest_logreport(report)
    recorder.pytest_sessionfinish()
    assert recorded_seconds() == {"clients": 9, DOCS: 2}


def test_the_recorded_scopes_name_test_files() -> None:
    """The names with recorded durations look like names of tests. The test files may have been moved, so the test
    checks only the form of the names."""
    recorded = recorded_seconds()
    assert len(recorded) > 50
    assert all(seconds > 0 for seconds in recorded.values())
    assert [scope for scope in recorded if scope.startswith(("tests/", "/"))] == []


def test_make_chaos_runs_each_file_that_has_long_tests() -> None:
    """`make test` leaves out the tests marked `long`. If `make chaos` missed a file, the file's long tests would never
    run."""
    tests = Path(durations.__file__).parent
    commands = subprocess.run(
        ["make", "--dry-run", "chaos"], cwd=tests.parent, capture_output=True, text=True, check=True, timeout=60
    ).stdout
    run = {word for word in commands.split() if word.startswith("tests/") and word.endswith(".py")}
    marked = {
        path.relative_to(tests.parent).as_posix()
        for path in tests.rglob("test_*.py")
        if re.search(r"pytest\.mark\.long", path.read_text()) and "chaos" not in path.relative_to(tests).parts
    }
    assert len(marked) > 10
    assert marked == run
