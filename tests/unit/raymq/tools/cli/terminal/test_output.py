"""Tests of a command's output: durations as text, and messages of Ray's raylets on standard error."""

from __future__ import annotations

import sys

import click
import pytest
from click.testing import CliRunner
from ray._private.worker import print_worker_logs

from raymq.tools.cli.terminal.output import Command, duration


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [
        (0, "0 s"),
        (850, "850 ms"),
        (12_400, "12 s"),
        (185_000, "3 m 5 s"),
        (7_800_000, "2 h 10 m"),
        (356_400_000, "4 d 3 h"),
    ],
)
def test_lengths_of_time_are_formatted_for_people(milliseconds: int, text: str) -> None:
    assert duration(milliseconds) == text


def test_messages_of_raylets_have_no_colours_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command(cls=Command)
    def command() -> None:
        print_worker_logs({"lines": ["8 workers have been started"], "pid": "raylet"}, sys.stdout)  # type: ignore[dict-item]  # Ray's own lines are a list

    monkeypatch.setenv("RAY_COLOR_PREFIX", "")
    monkeypatch.delenv("RAY_COLOR_PREFIX")
    result = CliRunner().invoke(command)
    assert result.exit_code == 0, result.exception
    assert (result.stdout, result.stderr) == ("", "(raylet) 8 workers have been started\n")
