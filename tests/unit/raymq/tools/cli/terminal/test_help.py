"""Tests of the help texts of all commands, and of the options that every command shares."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner

from raymq.client import client as client_module
from raymq.tools.cli import cli
from raymq.tools.cli.entry import SECTIONS
from raymq.tools.cli.options import RenamedOption

Path = tuple[str, ...]


def commands(group: click.Group = cli, path: Path = ()) -> Iterator[tuple[Path, click.Command]]:
    """Yield all commands, except groups of commands. The key is the words of the command, such as ("topic",
    "create")."""
    for name in group.list_commands(click.Context(group)):
        found = group.get_command(click.Context(group), name)
        assert found is not None
        if isinstance(found, click.Group):
            yield from commands(found, (*path, name))
        else:
            yield (*path, name), found


ALL = dict(commands())
GROUPS = {words[:-1] for words in ALL}


def options(command: click.Command) -> set[str]:
    return {name for one in command.params if isinstance(one, click.Option) and not one.hidden for name in one.opts}


def test_every_command_has_json_output() -> None:
    assert len(ALL) > 60
    assert [" ".join(words) for words, command in ALL.items() if "--json" not in options(command)] == []


@pytest.mark.parametrize("words", sorted(GROUPS), ids=" ".join)
@pytest.mark.parametrize("option", ["--json", "--quiet", "-q"])
def test_an_option_of_commands_before_the_command_is_wrong_usage_that_shows_its_place(words: Path, option: str) -> None:
    done = CliRunner().invoke(cli, [*words, option, "list"])
    assert done.exit_code == 2
    assert f"Error: {option} stands after the command, such as: raymq status {option}" in done.output


@pytest.mark.parametrize("words", sorted(GROUPS), ids=" ".join)
def test_the_help_of_a_group_cuts_no_description(words: Path) -> None:
    done = CliRunner().invoke(cli, [*words, "--help"], env={"COLUMNS": "80"})
    assert done.exit_code == 0
    listed = done.output.partition("Options:")[2]
    assert "..." not in listed
    assert max(map(len, listed.splitlines())) <= 80


def test_the_help_of_raymq_has_each_command_once_below_a_title() -> None:
    output = CliRunner().invoke(cli, ["--help"], env={"COLUMNS": "80"}).output
    places = [output.index(f"\n{title}:\n") for title in SECTIONS]
    assert places == sorted(places)
    named = [name for names in SECTIONS.values() for name in names.split()]
    assert sorted(named) == sorted(cli.list_commands(click.Context(cli)))
    assert "\nOther:" not in output


def test_a_time_range_and_a_timeout_have_one_spelling_in_all_commands() -> None:
    """The options for the start, the end and the length of a time have the same names in all commands. Commands accept
    other names, such as former names, but do not list them."""
    listed = {name for command in ALL.values() for name in options(command)}
    assert not listed & {"--begin", "--end", "--before", "--after", "--since", "--until", "--wait", "--wait-s"}
    former = {
        f"{' '.join(words)} {name}"
        for words, command in ALL.items()
        for one in command.params
        if isinstance(one, RenamedOption)
        for name in one.former
    }
    assert former == {
        "query --begin", "query --end", "receive --wait", "up --wait-s", "acl import --to", "job archive --before",
    }  # fmt: skip


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str | None, str | None]]:
    """Replace `connect`. Returns a list of the addresses and namespaces with which commands connect."""
    asked: list[tuple[str | None, str | None]] = []
    fake = SimpleNamespace(admin=SimpleNamespace(list_groups=lambda: ["billing"]))

    def connect(address: str | None, *, namespace: str | None) -> Any:
        asked.append((address, namespace))
        return nullcontext(fake)

    monkeypatch.setattr(client_module, "connect", connect)
    return asked


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ("group list", (None, None)),
        ("--address h:1 --namespace a group list", ("h:1", "a")),
        ("group --address h:1 --namespace a list", ("h:1", "a")),
        ("group list --address h:1 --namespace a", ("h:1", "a")),
        ("--address h:1 group list --namespace a", ("h:1", "a")),
        ("--address h:1 --namespace a group list --address h:2 --namespace b", ("h:2", "b")),
    ],
)
def test_address_and_namespace_may_stand_before_and_after_the_command(
    connected: list[tuple[str | None, str | None]], arguments: str, wanted: tuple[str | None, str | None]
) -> None:
    done = CliRunner().invoke(cli, [*arguments.split(), "--json"])
    assert json.loads(done.output) == {"groups": ["billing"]}
    assert connected == [wanted]


def test_the_environment_names_a_namespace_and_an_option_overrides_it(connected: list[Any]) -> None:
    for arguments in ((), ("--namespace", "b")):
        CliRunner().invoke(cli, ["group", "list", *arguments], env={"RAYMQ_NAMESPACE": "a"})
    assert connected == [(None, "a"), (None, "b")]


def test_a_former_name_of_an_option_still_works_and_no_help_lists_it() -> None:
    for words, command in ALL.items():
        shown = CliRunner().invoke(cli, [*words, "--help"]).output
        for one in command.params:
            if isinstance(one, RenamedOption):
                assert not [name for name in one.former if f"{name} " in shown]
                for name in (*one.opts, *one.former):
                    with command.make_context("raymq", [name], resilient_parsing=True) as context:
                        assert one.name in context.params


def test_the_version_command_names_raymq_first() -> None:
    done = CliRunner().invoke(cli, ["version"])
    assert done.output.startswith("raymq ")
    assert done.output.splitlines()[0].split()[1] in CliRunner().invoke(cli, ["--version"]).output
    found = json.loads(CliRunner().invoke(cli, ["version", "--json"]).output)
    assert {"raymq", "python", "ray"} <= found.keys()
