"""Tests of the decorator `command`: the options that it adds to a command, when the command connects, and its
output."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner

from raymq.tools.cli.terminal import command as commands
from raymq.tools.cli.terminal.command import CommandResult, command, fields_result, rows_result
from raymq.tools.cli.terminal.output import Group, is_quiet

EVENTS: list[str] = []


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> click.Group:
    """Return a group of commands with a fake client that records when it is opened, used and closed."""
    EVENTS.clear()

    @contextmanager
    def client(address: str | None) -> Iterator[Any]:
        EVENTS.append(f"open {address}")
        yield SimpleNamespace(admin=SimpleNamespace(topics=lambda: EVENTS.append("use") or ["orders"]))
        EVENTS.append("close")

    monkeypatch.setattr(commands, "client_of", client)
    return Group("raymq")


def options(made: click.Command) -> list[str]:
    return [parameter.opts[-1] for parameter in made.params]


def test_a_command_has_the_options_that_its_function_needs(group: click.Group) -> None:
    @command(group)
    @click.option("--all", "everything", is_flag=True)
    def uses_admin(admin: Any, everything: bool) -> None: ...

    @command(group, quiet=True)
    def is_local() -> None: ...

    @command(group, "named", json=False)
    def has_steps(progress: Any, address: str | None) -> None: ...

    assert {name: options(made) for name, made in group.commands.items()} == {
        "uses-admin": ["--all", "--address", "--namespace", "--json"],
        "is-local": ["--json", "--quiet"],
        "named": ["--address", "--quiet"],
    }


def test_a_command_connects_at_the_first_use_and_prints_after_the_close(group: click.Group) -> None:
    @command(group, "list")
    @click.option("--refused", is_flag=True)
    def list_(client: Any, admin: Any, refused: bool) -> CommandResult:
        if refused:
            raise click.UsageError("refused")
        return rows_result("topics", ["topic"], [[topic] for topic in [*admin.topics(), *client.admin.topics()]])

    assert CliRunner().invoke(group, ["list", "--refused"]).exit_code == 2
    assert EVENTS == []
    done = CliRunner().invoke(group, ["list", "--json", "--address", "head:6379"])
    assert json.loads(done.output) == {"topics": [{"topic": "orders"}, {"topic": "orders"}]}
    assert EVENTS == ["open head:6379", "use", "use", "close"]


def test_a_failed_command_prints_its_result_and_its_errors_and_ends_with_1(group: click.Group) -> None:
    @command(group)
    def fields() -> CommandResult:
        return fields_result({"offset": 1700}, failed=True)

    @command(group)
    def texts() -> CommandResult:
        return CommandResult({"quiet": is_quiet()}, "for people", errors=["half of it"])

    done = CliRunner().invoke(group, ["fields"])
    assert done.exit_code == 1
    assert ["offset", "1,700"] in [line.replace("│", " ").split() for line in done.stdout.splitlines()]
    done = CliRunner().invoke(group, ["texts"])
    assert (done.exit_code, done.stdout, done.stderr) == (0, "for people\n", "raymq: half of it\n")
    assert json.loads(CliRunner().invoke(group, ["texts", "--json"]).stdout) == {"quiet": True}
