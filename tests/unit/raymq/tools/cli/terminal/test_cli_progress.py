"""Tests that long commands show progress on standard error only if standard error is a terminal."""

from __future__ import annotations

import json
import re
from concurrent.futures import Future
from contextlib import nullcontext
from io import StringIO
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from rich.console import Console
from rich.progress import Progress

from raymq.common.message import Message, MessageQueue, SendResult, SendStatus
from raymq.tools import cli
from raymq.tools.cli.terminal import progress
from tests.support.clients.fakes import connect_commands

LINES = 4_000
FEW_LINES = 500
"""Number of messages in the tests of commands that print a line for each message and also show a progress bar."""


class Producer:
    """Fake producer that acknowledges each message at once."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    def send_async(self, message: Message, sharding_key: str | None) -> Future[SendResult]:
        future: Future[SendResult] = Future()
        queue = MessageQueue(message.topic, "broker-a", 0)
        future.set_result(SendResult(SendStatus.SEND_OK, "M", "O", queue, len(self.bodies)))
        self.bodies.append(message.body)
        return future


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> StringIO:
    """Return a stand-in for standard error that claims to be a terminal, and keeps all output."""
    shown = StringIO()
    console = Console(force_terminal=True, color_system=None, width=100, file=shown, markup=False, emoji=False)
    monkeypatch.setattr(progress, "err", console)
    return shown


def send(monkeypatch: pytest.MonkeyPatch, *arguments: str, count: int = LINES) -> tuple[Producer, str]:
    producer = Producer()
    connect_commands(monkeypatch, SimpleNamespace(producer=lambda group: nullcontext(producer)))
    lines = "".join(f"{number}\n" for number in range(count))
    result = CliRunner().invoke(cli.cli, ["send", "orders", *arguments], input=lines)
    assert result.exit_code == 0, result.output
    return producer, result.stdout


def test_many_lines_are_sent_with_their_number_and_rate(monkeypatch: pytest.MonkeyPatch, terminal: StringIO) -> None:
    producer, _ = send(monkeypatch)
    assert len(producer.bodies) == LINES
    assert "sending" in terminal.getvalue()
    assert f"{LINES}/{LINES}" in terminal.getvalue()
    assert re.search(r"[1-9][\d,]*/s", terminal.getvalue())


@pytest.mark.parametrize("option", ["--json", "--quiet", "-q"])
def test_progress_is_off_for_machines_and_for_who_wants_quiet(
    monkeypatch: pytest.MonkeyPatch, terminal: StringIO, option: str
) -> None:
    producer, output = send(monkeypatch, option, count=FEW_LINES)
    assert len(producer.bodies) == FEW_LINES
    assert terminal.getvalue() == ""
    if option == "--json":
        assert len(json.loads(output)["sent"]) == FEW_LINES


def test_a_bar_is_shown_on_a_terminal_and_nowhere_else(monkeypatch: pytest.MonkeyPatch, terminal: StringIO) -> None:
    send(monkeypatch, count=FEW_LINES)
    assert f"{FEW_LINES}/{FEW_LINES}" in terminal.getvalue()
    shown = StringIO()
    monkeypatch.setattr(progress, "err", Console(file=shown))
    send(monkeypatch, count=FEW_LINES)
    assert shown.getvalue() == ""


@pytest.mark.parametrize("talks", [True, False])
def test_a_command_that_prints_lines_on_the_terminal_has_no_bar_between_them(terminal: StringIO, talks: bool) -> None:
    with progress.counting("consuming", 3, talks=talks) as counter:
        counter.advance(3)
    assert ("3/3" in terminal.getvalue()) is not talks


def test_a_step_is_shown_literally(terminal: StringIO) -> None:
    with progress.steps() as step:
        step("looking in [bold]x[/]\x1b[2J")
        progress.err.print("done")  # printing a line also redraws the current progress step
    assert "looking in [bold]x[/]\\x1b[2J …" in terminal.getvalue()


def shown_steps(*texts: str) -> list[tuple[str, bool]]:
    """Begin the progress steps `texts` one after another. Returns a pair for each step that is visible at the end: its
    text, and True if the step is done."""
    bar = Progress(disable=True)
    steps = progress.Steps(bar)
    for text in texts:
        steps.begin(text)
    return [(task.description, task.finished) for task in bar.tasks]


def test_steps_that_are_done_stay_and_news_of_a_step_replace_it() -> None:
    assert shown_steps("starting", "opening: a", "opening: b") == [("starting", True), ("opening: b …", False)]
    assert shown_steps("opening: a", "opening: b", "ready") == [("opening: b", True), ("ready …", False)]


def test_no_more_than_the_last_steps_are_seen() -> None:
    seen = shown_steps(*(f"step {number}" for number in range(progress.STEPS_SHOWN + 3)))
    assert len(seen) == progress.STEPS_SHOWN
    assert seen[0] == ("step 3", True)


def test_a_steps_time_is_shown(terminal: StringIO) -> None:
    with progress.steps() as step:
        step("starting")
        step("ready")
    assert re.search(r"✓ starting +0:00:0", terminal.getvalue())


def test_steps_are_shown_on_a_terminal_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = StringIO()
    monkeypatch.setattr(progress, "err", Console(file=shown))
    with progress.steps() as step:
        step("starting")
    assert shown.getvalue() == ""


def test_the_time_left_follows_from_the_rate() -> None:
    now_s = 100.0
    bar = Progress(progress.TimeLeftColumn(), get_time=lambda: now_s, disable=True)
    column = bar.columns[0]
    assert isinstance(column, progress.TimeLeftColumn)
    number = bar.add_task("archiving", total=None)
    assert column.render(bar.tasks[number]).plain == ""
    bar.update(number, total=1000)
    assert column.render(bar.tasks[number]).plain == ""
    for _ in range(4):
        now_s += 10
        bar.advance(number, 100)
    assert column.render(bar.tasks[number]).plain == "1 m left"
    bar.update(number, completed=1000)
    assert column.render(bar.tasks[number]).plain == ""
