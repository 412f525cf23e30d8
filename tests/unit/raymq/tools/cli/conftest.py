"""The fixture with which the tests of a command family run commands."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from raymq.tools import cli
from tests.support.clients.fakes import connect_commands


@pytest.fixture
def run(admin: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs a command with the fake `admin` of the test module, and checks the exit code."""
    connect_commands(monkeypatch, SimpleNamespace(admin=admin))

    def invoke(*arguments: str, code: int = 0, typed: str = "") -> Result:
        result = CliRunner().invoke(cli.cli, list(arguments), input=typed)
        assert result.exit_code == code, result.output
        return result

    return invoke
