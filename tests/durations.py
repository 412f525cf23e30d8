"""Seconds that each scope of tests takes: recorded with `make durations`, read when workers are given their tests.

A scope is what one worker runs as a whole: the tests of a file, or all that share a cluster. Its name is the cluster's,
or the file's path below tests/. A scope that is not recorded counts as short, and a recorded one may be gone.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

RECORDED = Path(__file__).with_suffix(".json")


def recorded_seconds() -> dict[str, int]:
    """The recorded seconds of each scope, without scopes shorter than half a second."""
    return dict(json.loads(RECORDED.read_text()))


class DurationRecorder:
    """A pytest plugin that adds up the seconds of each scope and, at the end of the run, writes them to `RECORDED`.

    Scopes that did not run keep their seconds, except files that do not exist any more.
    """

    def __init__(self, scope_of: Callable[[str], str]) -> None:
        """`scope_of` returns the scope of a test, which is given as a pytest node id."""
        self._scope_of = scope_of
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[self._scope_of(report.nodeid)] += report.duration

    def pytest_sessionfinish(self) -> None:
        new = {scope: round(seconds) for scope, seconds in self._seconds.items()}
        merged = {scope: seconds for scope, seconds in (recorded_seconds() | new).items() if seconds and exists(scope)}
        RECORDED.write_text(json.dumps(merged, indent=0, sort_keys=True) + "\n")


def exists(scope: str) -> bool:
    """True for the name of a cluster, and for a file that exists."""
    return not scope.endswith(".py") or (RECORDED.parent / scope).exists()
