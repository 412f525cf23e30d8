"""Completion, help and version: on standard output, with the installed command and real shells."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent
RAYMQ = str(BIN / "raymq")


def run(*command: str, home: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command with raymq on its path. It must succeed and print nothing on standard error."""
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", **variables}
    if home is not None:
        environment["HOME"] = str(home)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done


def shell(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


def test_the_candidates_for_bash_are_all_that_is_on_standard_output() -> None:
    def candidates(words: str, position: int) -> list[str]:
        variables = {"COMP_WORDS": words, "COMP_CWORD": str(position)}
        return run(RAYMQ, _RAYMQ_COMPLETE="bash_complete", **variables).stdout.split("\n")

    assert candidates("raymq to", 1) == ["plain,topic", ""]
    assert candidates("raymq topic de", 2) == ["plain,delete", "plain,describe", ""]
    assert "plain,--deliver-at" in candidates("raymq send orders --d", 3)
    assert candidates("raymq consume g t --from f", 5) == ["plain,first", ""]


def test_the_candidates_for_zsh_are_on_standard_output_with_their_help() -> None:
    found = run(RAYMQ, _RAYMQ_COMPLETE="zsh_complete", COMP_WORDS="raymq topic des", COMP_CWORD="2").stdout.split("\n")
    assert found[:2] == ["plain", "describe"]
    assert "queues" in found[2]


@pytest.mark.parametrize("name", ["bash", "zsh", "fish"])
def test_the_command_prints_the_same_script_as_the_variable(name: str) -> None:
    script = run(RAYMQ, "completion", name).stdout
    assert "_RAYMQ_COMPLETE" in script
    if name != "bash" or shutil.which("bash"):
        assert run(RAYMQ, _RAYMQ_COMPLETE=f"{name}_source").stdout == script


def test_bash_completes_after_its_script_was_read(tmp_path: Path) -> None:
    program = """
        eval "$(raymq completion bash)"
        complete -p raymq
        COMP_WORDS=(raymq topic des) COMP_CWORD=2
        _raymq_completion raymq
        echo "${COMPREPLY[@]}"
    """
    lines = run(shell("bash"), "--norc", "-c", program, home=tmp_path).stdout.splitlines()
    assert "_raymq_completion" in lines[0]
    assert lines[1:] == ["describe"]


def test_zsh_reads_its_script(tmp_path: Path) -> None:
    program = 'autoload -Uz compinit; compinit -D; eval "$(raymq completion zsh)"; print $_comps[raymq]'
    assert run(shell("zsh"), "-f", "-c", program, home=tmp_path).stdout == "_raymq_completion\n"


def test_an_unknown_shell_is_wrong_usage() -> None:
    done = subprocess.run([RAYMQ, "completion", "tcsh"], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (2, "")


@pytest.mark.parametrize("arguments", [["--help"], ["topic", "create", "--help"], ["--version"]])
def test_help_and_version_are_answers(arguments: list[str]) -> None:
    assert "raymq" in run(RAYMQ, *arguments).stdout
