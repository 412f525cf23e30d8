"""Tests of the rule for tests that need an installed program. On a machine without the program such tests are skipped,
but in CI, which installs the program, they fail."""

from __future__ import annotations

import _pytest.outcomes
import pytest

from tests.support.metrics.prometheus import program


def test_a_missing_program_skips_a_test_here_and_fails_it_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(_pytest.outcomes.Skipped, match="Debian's package prometheus"):
        program("promtool")
    monkeypatch.setenv("CI", "1")
    with pytest.raises(_pytest.outcomes.Failed, match="ci/run installs"):
        program("promtool")
