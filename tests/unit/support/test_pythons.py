"""Tests of `make test-pythons`: which interpreters it finds, and when it fails."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import pythons
from tests.pythons import SHORT_TOOLS, PythonRun, find_interpreter, short_lock

ROOT = Path(__file__).parents[3]


def fake_python(path: Path, version: str, exit_code: int = 0) -> str:
    """Make a program that answers as a Python of this version does, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho {version}\nexit {exit_code}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make an empty folder the only folder of PATH, and return it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def test_an_interpreter_on_the_path_is_found_first(on_path: Path, tmp_path: Path) -> None:
    fake_python(tmp_path / "versions/3.12.9/bin/python", "3.12")
    assert find_interpreter("3.12", tmp_path / "versions") == str(tmp_path / "versions/3.12.9/bin/python")
    chosen = fake_python(on_path / "python3.12", "3.12")
    assert find_interpreter("3.12", tmp_path / "versions") == chosen


def test_the_newest_release_in_pyenvs_folder_is_found(on_path: Path, tmp_path: Path) -> None:
    versions = tmp_path / "versions"
    assert find_interpreter("3.13", versions) is None
    fake_python(versions / "3.13.9/bin/python", "3.13")
    newest = fake_python(versions / "3.13.10/bin/python", "3.13")
    fake_python(versions / "3.13-dev/bin/python", "3.13")
    fake_python(versions / "3.1.3/bin/python", "3.1")
    assert find_interpreter("3.13", versions) == newest


def test_a_program_that_fails_or_has_another_version_is_passed_over(on_path: Path, tmp_path: Path) -> None:
    # the fake program exits with code 127, like pyenv's python3.12 if pyenv has no version selected
    fake_python(on_path / "python3.12", "3.12", exit_code=127)
    assert find_interpreter("3.12", tmp_path / "versions") is None
    fake_python(on_path / "python3.12", "3.13")
    assert find_interpreter("3.12", tmp_path / "versions") is None
    good = fake_python(tmp_path / "versions/3.12.1/bin/python", "3.12")
    assert find_interpreter("3.12", tmp_path / "versions") == good


def test_the_run_fails_if_a_step_fails_or_no_interpreter_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {"3.11": "/bin/a", "3.12": None, "3.13": "/bin/b"}
    failed: dict[str, list[str]] = {}
    monkeypatch.setattr(pythons, "find_interpreter", lambda version, pyenv: found[version])
    monkeypatch.setattr(pythons, "run_steps", lambda run: run.failed.extend(failed.get(run.version, [])))
    assert pythons.main(["3.11", "3.12", "3.13"]) == 0
    assert "Python 3.12   not found" in capsys.readouterr().out
    failed["3.13"] = ["demo"]
    assert pythons.main(["3.11", "3.12", "3.13"]) == 1
    assert "Python 3.13   FAILED: demo" in capsys.readouterr().out
    assert pythons.main(["3.12"]) == 1
    assert PythonRun("3.11", None).row() == "Python 3.11   not found"


def test_every_supported_python_is_run_by_default() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    prefix = "Programming Language :: Python :: 3."
    supported = [text.removeprefix(prefix) for text in project["classifiers"] if text.startswith(prefix)]
    default = next(line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith("PYTHONS ?="))
    assert default.split()[2:] == [f"3.{minor}" for minor in supported]
    assert project["requires-python"] == f">=3.{supported[0]},<3.{int(supported[-1]) + 1}"


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_a_short_run_installs_what_raymq_needs_without_its_extras(version: str) -> None:
    lock = short_lock(version)
    entries = [entry for entry in re.split(r"\n(?=[a-z0-9])", lock) if entry]
    assert [entry for entry in entries if "--hash=sha256:" not in entry] == []
    names = {re.split(r"[=\[ ]", entry)[0] for entry in entries}
    assert {"ray", "pyarrow", "msgspec", "aiohttp", *SHORT_TOOLS} <= names
    assert not {"pyspark", "raydp", "pandas", "matplotlib", "fastapi", "sphinx", "mypy", "playwright"} & names


def test_a_short_run_names_the_step_that_failed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\necho "$PYTEST_CURRENT_TEST|$*" >> {calls}\ncase "$*" in *pytest*) exit 1;; esac\n')
    program.chmod(0o755)
    monkeypatch.setattr(pythons, "short_environment", lambda version, interpreter: tmp_path)
    run = PythonRun("3.12", str(program))
    pythons.run_short(run)
    assert run.failed == ["tests"]
    compiling, testing = calls.read_text().splitlines()
    assert compiling.startswith("|-W error -m compileall")
    assert testing.startswith("|-m pytest")
    assert "FAILED: tests" in run.row()


def test_the_files_and_folders_of_the_short_run_exist() -> None:
    paths = [name.removeprefix("--ignore=") for name in (*pythons.SHORT_TESTS, *pythons.COMPILED)]
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("hangs", ["venv", "install"])
def test_an_installation_that_takes_too_long_is_killed_and_has_failed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path, hangs: str
) -> None:
    pids, program = tmp_path / "pids", tmp_path / "python"
    program.write_text(f'#!/bin/sh\ncase "$*" in *{hangs}*) echo $$ >> {pids}; exec sleep 1000;; esac\nmkdir -p "$3"\n')
    program.chmod(0o755)
    (tmp_path / "venv-3.12").mkdir()
    monkeypatch.setattr(pythons, "BUILD", tmp_path)
    monkeypatch.setattr(pythons, "INSTALL_S", 3.0)
    monkeypatch.setattr(pythons, "sys", SimpleNamespace(executable=str(program)))
    run = PythonRun("3.12", str(program))
    pythons.run_steps(run)
    assert run.failed == ["install"]
    assert "timed out" in capfd.readouterr().out
    for pid in pids.read_text().split() if pids.exists() else ():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def test_a_step_that_takes_too_long_is_killed_and_has_failed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\ncase "$*" in *pytest*) exec sleep 1000;; esac\n')
    program.chmod(0o755)
    monkeypatch.setattr(pythons, "short_environment", lambda version, interpreter: tmp_path)
    monkeypatch.setattr(pythons, "SHORT_STEP_S", 5.0)
    run = PythonRun("3.12", str(program))
    pythons.run_short(run)
    assert run.failed == ["tests"]
