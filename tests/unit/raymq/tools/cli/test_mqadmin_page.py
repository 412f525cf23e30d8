"""Tests that docs/mqadmin.md names only raymq commands that exist, and lists each command of RocketMQ's mqadmin exactly
once."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from raymq.client.admin.admin import Admin
from raymq.tools.cli import cli

ROOT = Path(__file__).parents[5]
PAGE = (ROOT / "docs" / "mqadmin.md").read_text()
ROWS = [line.strip("|").split(" | ") for line in PAGE.splitlines() if line.startswith("| `")]
NAMED = sorted(set(re.findall(r"`raymq ([^`]*)`", PAGE)))


@pytest.mark.parametrize("words", NAMED)
def test_each_command_and_option_exists(words: str) -> None:
    command: click.Command = cli
    for word in words.split():
        if word.startswith("-"):
            assert any(word in option.opts for option in command.params), f"raymq {words}: no {word}"
        elif isinstance(command, click.Group):
            assert word in command.commands, f"raymq {words}: no {word}"
            command = command.commands[word]
    assert not isinstance(command, click.Group), f"raymq {words} is a group of commands"


def test_each_method_exists() -> None:
    names = re.findall(r"`client\.admin\.(\w+)`", PAGE)
    assert names
    assert [name for name in names if not hasattr(Admin, name)] == []


def test_each_command_of_mqadmin_is_there_once() -> None:
    theirs = [name for first, *_ in ROWS for name in re.findall(r"`(\w+)`", first)]
    assert len(theirs) == len(set(theirs)) == 91
    assert {"updateTopic", "clusterRT", "consumerStatus", "queryMsgTraceById", "electMaster", "listAcl"} <= set(theirs)
    assert all(len(row) == 2 and row[1].strip() for row in ROWS)
