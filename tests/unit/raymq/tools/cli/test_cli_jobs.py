"""Tests of `raymq job`, which loads its commands on demand from the files in raydp_jobs/jobs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from raymq.tools.cli import JobCommands, cli

JOBS = Path(__file__).parents[5] / "raydp_jobs/jobs"


def files_with_a_main() -> set[str]:
    return {path.stem.replace("_", "-") for path in JOBS.glob("*.py") if "\ndef main()" in path.read_text()}


def test_every_job_with_a_main_is_a_command_under_its_name() -> None:
    commands = JobCommands()
    assert set(commands) == files_with_a_main()
    assert {command.name for command in commands.values()} == set(commands)


@pytest.mark.parametrize("name", sorted(files_with_a_main()))
def test_every_job_has_an_example_in_its_help_and_takes_json(name: str) -> None:
    result = CliRunner().invoke(cli, ["job", name, "--help"])
    assert result.exit_code == 0, result.output
    assert f"Example: raymq job {name} " in " ".join(result.output.split())
    assert "--json" in result.output


def test_an_unknown_job_is_wrong_usage() -> None:
    result = CliRunner().invoke(cli, ["job", "nothing"])
    assert (result.exit_code, "No such command 'nothing'" in result.output) == (2, True)


def test_a_command_can_be_added_and_removed() -> None:
    commands = JobCommands()
    commands["mine"] = click.Command("mine")
    assert commands["mine"].name == "mine"
    del commands["mine"]
    assert "mine" not in commands
    assert len(commands) == len(list(commands))


def test_the_help_of_raymq_does_not_load_spark() -> None:
    program = "import sys, raymq.tools.cli; print('pyspark' in sys.modules, 'raydp_jobs' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False False\n"


def test_a_job_is_a_program_of_its_own() -> None:
    command = [sys.executable, "-m", "raydp_jobs.jobs.topic_stats", "orders", "--picture", "/nowhere/orders.png"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "raymq: directory /nowhere for the picture does not exist; create the directory first\n"
