"""Tests of raymq.client.cluster.embedded, which keeps a program in its terminal's foreground although Ray makes the
program the leader of a new process group. The tests do not start Ray."""

from __future__ import annotations

import json
import os
import pty
import signal
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest

from raymq.client import client as client_module
from raymq.client.client import connect
from raymq.client.cluster import embedded
from raymq.common.errors import StoreError


def in_a_terminal(program: Callable[[], object]) -> object:
    """Run `program` in the foreground process group of a terminal. Another process leads the group, as under `make`.
    Returns the program's output."""
    read, write = os.pipe()
    shell, terminal = pty.fork()
    if shell == 0:
        worker = os.fork()
        if worker == 0:
            signal.alarm(10)
            sys.stdin = open(0)  # noqa: SIM115 (this process ends without closing anything)
            try:
                answer: object = program()
            # catch every error: an uncaught exception would continue with pytest's code in the forked child
            except BaseException as error:
                answer = repr(error)
            os.write(write, json.dumps(answer).encode())
            os._exit(0)
        os.waitpid(worker, os.WUNTRACED)
        os._exit(0)
    os.close(write)
    try:
        with os.fdopen(read) as answers:
            text = answers.read()
    finally:
        os.waitpid(shell, 0)
        os.close(terminal)
    assert text, "the process in the terminal was stopped or killed"
    return json.loads(text)


def test_a_program_that_ray_moved_to_a_group_of_its_own_stays_in_the_foreground_and_goes_back():
    def program():
        before = os.getpgrp()
        group = embedded._foreground_group()
        os.setpgid(0, 0)  # make this process the leader of a new process group, as Ray does when it starts
        moved = (os.getpgrp() != before, os.tcgetpgrp(0) == before)
        embedded._take_terminal(group)
        taken = os.tcgetpgrp(0) == os.getpgrp() == os.getpid()
        embedded._give_terminal_back(group)
        back = os.tcgetpgrp(0) == os.getpgrp() == before
        return [group == before, moved, taken, back]

    assert in_a_terminal(program) == [True, [True, True], True, True]


def test_a_program_that_stayed_in_its_group_changes_nothing():
    def program():
        group = embedded._foreground_group()
        embedded._take_terminal(group)
        embedded._give_terminal_back(group)
        return os.tcgetpgrp(0) == os.getpgrp() == group

    assert in_a_terminal(program) is True


def test_a_program_in_the_background_does_not_take_the_terminal():
    def program():
        before = os.tcgetpgrp(0)
        os.setpgid(0, 0)
        group = embedded._foreground_group()
        embedded._take_terminal(group)
        embedded._give_terminal_back(group)
        return [group, os.tcgetpgrp(0) == before]

    assert in_a_terminal(program) == [None, True]


def test_the_signal_mask_is_as_before():
    def program():
        group = embedded._foreground_group()
        os.setpgid(0, 0)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        embedded._take_terminal(group)
        return before == signal.pthread_sigmask(signal.SIG_BLOCK, [])

    assert in_a_terminal(program) is True


@pytest.mark.parametrize("stdin", [None, "a pipe", "closed"])
def test_without_a_terminal_there_is_no_group(monkeypatch, stdin):
    read, write = os.pipe()
    file = None if stdin is None else os.fdopen(read)
    if stdin == "closed":
        file.close()
    monkeypatch.setattr(sys, "stdin", file)
    try:
        assert embedded._foreground_group() is None
        embedded._take_terminal(None)
        embedded._give_terminal_back(None)
    finally:
        os.close(write)
        if file is None:
            os.close(read)
        else:
            file.close()


class FakeTerminal(StringIO):
    """Stand-in for standard error. `is_terminal`: the result of `isatty`."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


class FailingCluster:
    """Fake EmbeddedCluster. Its start reports one step to `progress`, and then raises an error."""

    def __init__(self, settings: object) -> None: ...

    def start(self, progress: Callable[[str], None]) -> None:
        progress("starting Ray")
        raise StoreError("the disk is full")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_an_embedded_start_prints_its_steps_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_terminal: bool
) -> None:
    monkeypatch.setattr(client_module, "EmbeddedCluster", FailingCluster)
    monkeypatch.setattr(sys, "stderr", terminal := FakeTerminal(is_terminal))
    with pytest.raises(StoreError):
        connect(embedded=True, data_dir=tmp_path)
    assert terminal.getvalue() == ("raymq: starting Ray\n" if is_terminal else "")
    steps: list[str] = []
    with pytest.raises(StoreError):
        connect(embedded=True, data_dir=tmp_path, progress=steps.append)
    assert steps == ["starting Ray"]
    assert terminal.getvalue().count("starting") == is_terminal
