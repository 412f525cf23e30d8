"""Tests that modules can be imported by their former names, because pickles and actors of an earlier raymq use these
names. A module is loaded only once, under whichever name."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module

import pytest

from raymq.common.former_names import FORMER_NAMES, accept_former_names, present_name

SAME_MODULES = """
import sys
from importlib import import_module
import raymq
for former, present in zip(sys.argv[1::2], sys.argv[2::2]):
    module = import_module(former)
    assert module is import_module(present), former
    assert (module.__name__, module.__spec__.name) == (present, present), former
from raymq.errors import DataLossError
from raymq.client import Client, connect
import raymq.message
assert (DataLossError, Client, connect) == (raymq.DataLossError, raymq.Client, raymq.connect)
assert raymq.message.Message is raymq.Message
print("the same")
"""


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a separate process, because importing a module by a former name changes the importing
    process."""
    command = [sys.executable, *arguments]
    environment = {**os.environ, **variables}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_a_former_name_is_the_module_with_the_present_name() -> None:
    names = dict(FORMER_NAMES)
    for former in ("raymq.protocol.route", "raymq.record.encode", "raymq.consumer.push.consumer"):
        present = present_name(former)
        assert present is not None
        names[former] = present
    done = run("-c", SAME_MODULES, *(word for pair in names.items() for word in pair))
    assert (done.stdout.strip(), done.stderr) == ("the same", "")


def test_the_present_name_follows_from_the_room() -> None:
    assert present_name("raymq.record.encode") == "raymq.records.format.encode"
    assert present_name("raymq.errors") == "raymq.common.errors"
    for name in ("raymq", "raymq.client", "raymq.data.reading", "raymq.records.format", "errors", "raymq_errors", ""):
        assert present_name(name) is None


@pytest.mark.parametrize("name", ["raymq.no_such_module", "raymq.protocol.no_such_module"])
def test_a_module_that_does_not_exist_is_not_found_by_a_former_name_either(name: str) -> None:
    done = run("-c", f"import raymq, {name}")
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("ModuleNotFoundError: No module named 'raymq.")


def test_a_program_that_is_started_by_its_former_name_runs(tmp_path) -> None:
    (tmp_path / "program.py").write_text("def main(): print('it runs')\n")
    done = run("-P", "-m", "raymq.cluster.server_path", "program", PYTHONPATH=str(tmp_path))
    assert (done.stdout.strip(), done.stderr) == ("it runs", "")


def test_former_names_are_accepted_once() -> None:
    before = list(sys.meta_path)
    accept_former_names()
    assert sys.meta_path == before
    for present in FORMER_NAMES.values():
        assert import_module(present).__name__ == present
