"""Tests of `raymq top`: the numbers that it shows, and its screen in a real terminal. The cluster is a fake."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

import raymq
from raymq.common.protocol.stats import BrokerReadings, GroupReading, TopicReading
from raymq.tools import cli
from raymq.tools.cli.cluster.top_figures import GroupRates, Reading, figures_between, sorted_groups, sorted_topics
from raymq.tools.cli.terminal import command

REPOSITORY = Path(raymq.__file__).parents[1]
"""Root of the repository. The path does not depend on the place of this file, because `Terminal` runs a copy of this
file in a temporary folder."""
PAIR = ("billing", "orders")


def broker(messages: int, consumed: int = 0, lag: int = 0, behind_ms: int | None = 0) -> BrokerReadings:
    return BrokerReadings(
        {"orders": TopicReading(messages, messages * 100)}, {PAIR: GroupReading(consumed, lag, behind_ms)}
    )


def test_rates_are_growth_by_time_and_brokers_are_added_up():
    before = Reading(10.0, {"a": broker(100, 50), "b": broker(10, 0)})
    now = Reading(12.0, {"a": broker(300, 150, lag=7, behind_ms=500), "b": broker(20, 4, lag=3, behind_ms=900)})
    figures = figures_between(before, now)
    [topic] = figures.topics
    assert (topic.in_per_s, topic.in_bytes_per_s, topic.out_per_s, topic.lag) == (105.0, 10_500.0, 52.0, 10)
    assert figures.groups == (GroupRates("billing", "orders", 52.0, 10, 900),)
    assert figures.silent == ()


def test_a_restarted_total_counts_from_zero():
    before = Reading(0.0, {"a": BrokerReadings({}, {})})
    assert figures_between(before, Reading(1.0, {"a": broker(5)})).topics[0].in_per_s == 5.0
    restarted = figures_between(Reading(0.0, {"a": broker(100)}), Reading(1.0, {"a": broker(30)}))
    assert restarted.topics[0].in_per_s == 30.0


def test_a_broker_without_an_answer_is_named_and_one_that_is_back_has_no_rates_yet():
    silent = Reading(0.0, {"a": None, "b": broker(5)})
    figures = figures_between(silent, silent)
    assert figures.silent == ("a",)
    assert [row.topic for row in figures.topics] == ["orders"]
    back = figures_between(silent, Reading(2.0, {"a": broker(100), "b": broker(5)}))
    assert back.topics[0].in_per_s == 0.0


def test_the_age_of_a_lag_nobody_looked_at_is_not_known():
    unknown = Reading(0.0, {"a": broker(1, lag=3, behind_ms=None)})
    assert figures_between(unknown, unknown).groups[0].behind_ms is None


def test_rows_are_sorted_by_any_column_the_largest_first():
    rows = [GroupRates("a", "t", 1.0, 5, None), GroupRates("b", "t", 2.0, 5, 9), GroupRates("c", "t", 0.0, 6, 1)]
    order = {key: "".join(row.group for row in sorted_groups(rows, key)) for key in ("name", "out", "lag", "behind")}
    assert order == {"name": "abc", "out": "bac", "lag": "cab", "behind": "bca"}
    names = {f"t{index}": TopicReading() for index in (2, 0, 1)}
    figures = figures_between(Reading(0, {}), Reading(1, {"a": BrokerReadings(names, {})}))
    assert [row.topic for row in sorted_topics(figures.topics, "behind")] == ["t0", "t1", "t2"]


@contextmanager
def client(address: str | None) -> Iterator[Any]:
    """Yield a fake client. Its brokers receive 50 messages between two readings, and one more broker does not
    answer."""
    looks = iter(range(1_000_000))
    admin = SimpleNamespace(
        readings=lambda: {"broker-a": broker(50 * next(looks), lag=3, behind_ms=65_000), "broker-b": None}
    )
    yield SimpleNamespace(admin=admin)


def test_once_as_json_has_every_row(monkeypatch):
    monkeypatch.setattr(command, "client_of", client)
    result = CliRunner().invoke(cli.cli, ["top", "--once", "--json", "--interval", "0.5"])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    [topic], [group] = answer["topics"], answer["groups"]
    assert (topic["topic"], topic["lag"]) == ("orders", 3)
    assert topic["in_per_s"] > 0
    assert (group["group"], group["lag"], group["behind_ms"]) == ("billing", 3, 65_000)
    assert answer["silent"] == ["broker-b"]


@pytest.mark.parametrize("arguments", [["top"], ["top", "--json"]])
def test_without_a_terminal_only_one_table_can_be_printed(monkeypatch, arguments):
    monkeypatch.setattr(command, "client_of", client)
    result = CliRunner().invoke(cli.cli, arguments)
    assert result.exit_code == 2
    assert "--once" in result.stderr


PROGRAM = """
import sys
sys.path.insert(0, {root!r})
from raymq.tools.cli import cli
from raymq.tools.cli.terminal import command
from raymq.tools.cli.entry import run_command
from {module} import client
command.client_of = client
sys.argv = ["raymq", "top", "--interval", "0.5"]
run_command(cli)
"""


class Terminal:
    """Runs this file as a program in a pseudo-terminal of its own."""

    def __init__(self, tmp_path: Path) -> None:
        self._ours, self._its = pty.openpty()
        termios.tcsetwinsize(self._its, (30, 100))
        self.before = termios.tcgetattr(self._its)
        file = tmp_path / "stand_in_for_top.py"
        file.write_text(Path(__file__).read_text())
        text = PROGRAM.format(root=str(tmp_path), module=file.stem)
        self.process = subprocess.Popen(
            [sys.executable, "-c", text],
            stdin=self._its,
            stdout=self._its,
            stderr=self._its,
            env={**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(REPOSITORY)},
            start_new_session=True,
        )
        self.shown = ""

    def wait_for(self, pattern: str) -> None:
        """Read the terminal's output until the part since this call began matches `pattern`."""
        start, deadline_s = len(self.shown), time.monotonic() + 60
        while not re.search(pattern, self.shown[start:], re.DOTALL):
            ready, _, _ = select.select([self._ours], [], [], max(deadline_s - time.monotonic(), 0))
            assert ready, f"{pattern} was not shown: {self.shown[-2000:]}"
            self.shown += os.read(self._ours, 65536).decode(errors="replace")

    def press(self, key: str) -> None:
        os.write(self._ours, key.encode())

    def end(self) -> int:
        """Read the terminal's output until the program ends. Returns the program's exit code."""
        while self.process.poll() is None:
            if select.select([self._ours], [], [], 0.1)[0]:
                self.shown += os.read(self._ours, 65536).decode(errors="replace")
        while select.select([self._ours], [], [], 0)[0]:
            self.shown += os.read(self._ours, 65536).decode(errors="replace")
        return self.process.returncode

    def is_as_before(self) -> bool:
        """Return whether the terminal is restored: it echoes keys, has line editing, and shows the normal screen with a
        cursor."""
        screens, cursors = re.findall(r"\x1b\[\?1049([hl])", self.shown), re.findall(r"\x1b\[\?25([hl])", self.shown)
        return termios.tcgetattr(self._its) == self.before and (screens[-1], cursors[-1]) == ("l", "h")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._ours)
        os.close(self._its)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    made = Terminal(tmp_path)
    try:
        yield made
    finally:
        made.close()


def test_the_screen_updates_handles_keys_and_restores_the_terminal(terminal: Terminal):
    terminal.wait_for("billing.*by lag")
    assert "1 m 5 s" in terminal.shown
    assert "no answer from broker-b" in terminal.shown
    terminal.press("o")
    terminal.wait_for("by out")
    terminal.press("xn")
    terminal.wait_for("by name")
    terminal.press("q")
    assert terminal.end() == 0
    assert terminal.is_as_before()


def test_ctrl_c_ends_it_and_leaves_the_terminal_clean(terminal: Terminal):
    terminal.wait_for("by lag")
    os.kill(terminal.process.pid, signal.SIGINT)
    assert terminal.end() == 130
    assert terminal.is_as_before()
