"""Run a part of the unit tests on the newest other Python version that raymq supports, or on all others in `make soak`.

`make test-pythons` runs all unit and component tests on each version, which takes too long for CI.
"""

from __future__ import annotations

import sys
import tomllib

import pytest

from tests.pythons import INSTALL_S, ROOT, SHORT_STEP_S, PythonRun, find_interpreter, pyenv_versions, run_short
from tests.support.cases import rounds

RUN_S = INSTALL_S + 2 * SHORT_STEP_S + 60.0
"""Time limit of one version in seconds, for two steps. Without an environment in build/, pip first installs 560 MB. The
installation and each step have limits of their own, which kill a process that hangs."""
_PREFIX = "Programming Language :: Python :: "
SUPPORTED = [
    text.removeprefix(_PREFIX)
    for text in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    if text.startswith(f"{_PREFIX}3.")
]
_VERSIONS = [version for version in SUPPORTED if version != f"{sys.version_info.major}.{sys.version_info.minor}"]
OTHERS = _VERSIONS[-rounds(1, len(_VERSIONS)) :]


@pytest.mark.long
@pytest.mark.timeout(RUN_S)
@pytest.mark.parametrize("version", OTHERS)
def test_modules_and_pure_unit_tests_run_on_the_other_pythons_of_this_machine(version: str) -> None:
    run = PythonRun(version, find_interpreter(version, pyenv_versions()))
    if run.interpreter is None:
        pytest.skip(f"this machine has no Python {version}")
    run_short(run)
    assert run.failed == []
