"""Durations of scopes of tests. `make durations` records them, and the scheduler of pytest-xdist reads them.

A scope is a set of tests that one worker runs together: the tests of a file, or all tests that share a cluster. A
scope's name is the name of the cluster, or the file's path below tests/. A scope without a recorded duration counts as
short. A recorded scope may no longer exist.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

RECORDED = Path(__file__).with_suffix(".json")


def recorded_seconds() -> dict[str, int]:
    """Return the recorded seconds of each scope (set of tests that run together). Scopes shorter than half a second are
    omitted."""
    return dict(json.loads(RECORDED.read_text()))


class DurationRecorder:
    """A pytest plugin that adds up the seconds of each scope (set of tests that run together). At the end of the run it
    writes the sums to the file `RECORDED`.

    Scopes that did not run keep their recorded seconds, except scopes of files that no longer exist.
    """

    def __init__(self, scope_of: Callable[[str], str]) -> None:
        """Create the pytest plugin. `scope_of`: returns the scope (set of tests that run together) of a test, which is
        given as a pytest node id."""
        self._scope_of = scope_of
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[self._scope_of(report.nodeid)] += report.duration

    def pytest_sessionfinish(self) -> None:
        new = {scope: round(seconds) for scope, seconds in self._seconds.items()}
        merged = {scope: seconds for scope, seconds in (recorded_seconds() | new).items() if seconds and exists(scope)}
        RECORDED.write_text(json.dumps(merged, indent=0, sort_keys=True) + "\n")


def exists(scope: str) -> bool:
    """Return True if `scope` is the name of a shared cluster or the path of an existing test file."""
    return not scope.endswith(".py") or (RECORDED.parent / scope).exists()
