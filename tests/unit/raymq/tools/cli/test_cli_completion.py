"""Tests of shell completion, and of help and version on standard output. They use the installed command and real
shells."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from raymq.tools.cli import known_names

BIN = Path(sys.executable).parent
RAYMQ = str(BIN / "raymq")


def run(*command: str, home: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command with raymq on its path. Fails if the command fails or prints to standard error."""
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

    assert candidates("raymq topi", 1) == ["plain,topic", ""]
    assert candidates("raymq to", 1) == ["plain,top", "plain,topic", ""]
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


@pytest.mark.parametrize(("name", "startup"), [("bash", ".bashrc"), ("zsh", ".zshrc")])
def test_an_installation_adds_one_line_to_the_shells_startup_file(tmp_path: Path, name: str, startup: str) -> None:
    (tmp_path / startup).write_text("alias ll='ls -l'")  # the user's startup file has no newline at its end
    assert startup in run(RAYMQ, "completion", name, "--install", home=tmp_path).stdout
    first = (tmp_path / startup).read_text()
    assert "reads it already" in run(RAYMQ, "completion", name, "--install", home=tmp_path).stdout
    assert (tmp_path / startup).read_text() == first
    assert first.splitlines()[0] == "alias ll='ls -l'"
    assert len(first.splitlines()) == 2
    script = tmp_path / f".local/share/raymq/completion.{name}"
    assert script.read_text() == run(RAYMQ, "completion", name, home=tmp_path).stdout
    assert str(script) in first


def test_a_new_bash_completes_after_an_installation(tmp_path: Path) -> None:
    run(RAYMQ, "completion", "bash", "--install", home=tmp_path)
    program = 'COMP_WORDS=(raymq topic des) COMP_CWORD=2; _raymq_completion raymq; echo "${COMPREPLY[@]}"'
    command = [shell("bash"), "--rcfile", str(tmp_path / ".bashrc"), "-i", "-c", program]
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "HOME": str(tmp_path)}
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "describe\n"


def test_an_installation_for_fish_is_a_file_that_fish_reads_by_itself(tmp_path: Path) -> None:
    run(RAYMQ, "completion", "fish", "--install", home=tmp_path)
    assert "_RAYMQ_COMPLETE" in (tmp_path / ".config/fish/completions/raymq.fish").read_text()


def test_names_that_commands_saw_are_candidates_where_such_a_name_is_wanted(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    known_names.remember_all_names("topics", ["orders", "orders-eu", "invoices"])
    known_names.remember_all_names("groups", ["billing"])
    known_names.remember_all_names("brokers", ["broker-a"])

    def candidates(words: str) -> list[str]:
        variables = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
        return run(RAYMQ, _RAYMQ_COMPLETE="bash_complete", **variables).stdout.split("\n")[:-1]

    assert candidates("raymq send ord") == ["plain,orders", "plain,orders-eu"]
    assert candidates("raymq consume bil") == ["plain,billing"]
    assert candidates("raymq consume billing inv") == ["plain,invoices"]
    assert candidates("raymq store stats bro") == ["plain,broker-a"]
    assert candidates("raymq job topic-stats orders inv") == ["plain,invoices"]
    assert candidates("raymq replay orders --to-group b") == ["plain,billing"]


@pytest.fixture
def names(tmp_path: Path, monkeypatch) -> Path:
    """Return the path of the cache file that holds the names for TAB completion. The file does not exist at the start
    of a test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return known_names.names_file()


def test_names_are_listed_added_and_forgotten(names: Path) -> None:
    assert known_names.known_names("topics") == []
    known_names.remember_name("topics", "b")
    known_names.remember_name("topics", "a")
    known_names.remember_name("groups", "g")
    assert known_names.known_names("topics") == ["a", "b"]
    known_names.forget_name("topics", "b")
    known_names.forget_name("topics", "never")
    assert known_names.known_names("topics") == ["a"]
    known_names.remember_all_names("topics", ["c"])
    assert (known_names.known_names("topics"), known_names.known_names("groups")) == (["c"], ["g"])


def test_the_file_of_names_is_its_users_only_and_bounded(names: Path) -> None:
    known_names.remember_all_names("topics", [f"t{index:05d}" for index in range(known_names.NAMES_MAX + 7)])
    known_names.remember_name("topics", "one more")
    assert len(known_names.known_names("topics")) == known_names.NAMES_MAX
    assert names.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in names.parent.iterdir()] == ["names.json"]


def test_names_are_forgotten_after_a_day_which_one_more_does_not_put_off(names: Path, monkeypatch) -> None:
    now_s = time.time()
    monkeypatch.setattr(known_names.time, "time", lambda: now_s)
    known_names.remember_all_names("topics", ["old"])
    now_s += known_names.NAMES_KEPT_S - 1
    known_names.remember_name("topics", "new")
    assert known_names.known_names("topics") == ["new", "old"]
    now_s += 1
    assert known_names.known_names("topics") == []


@pytest.mark.parametrize("content", ["", "[]", "{", '{"topics": 3}', '{"topics": {"names": ["a"]}}', '{"topics": []}'])
def test_an_unreadable_completion_file_is_ignored_and_replaced(names: Path, content: str) -> None:
    names.parent.mkdir()
    names.write_text(content)
    assert known_names.known_names("topics") == []
    known_names.remember_name("topics", "a")
    assert known_names.known_names("topics") == ["a"]


def test_a_name_that_is_no_line_of_text_is_no_candidate(names: Path) -> None:
    known_names.remember_all_names("topics", ["a", "b\nplain,rm"])
    assert known_names.known_names("topics") == ["a"]


def test_a_cache_that_cannot_be_written_does_not_fail_the_command(names: Path) -> None:
    names.parent.parent.joinpath("raymq").write_text("a file where the directory should be")
    known_names.remember_name("topics", "a")
    assert known_names.known_names("topics") == []


def test_an_unknown_shell_is_wrong_usage() -> None:
    done = subprocess.run([RAYMQ, "completion", "tcsh"], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (2, "")


@pytest.mark.parametrize("arguments", [["--help"], ["topic", "create", "--help"], ["--version"]])
def test_help_and_version_are_answers(arguments: list[str]) -> None:
    assert "raymq" in run(RAYMQ, *arguments).stdout
