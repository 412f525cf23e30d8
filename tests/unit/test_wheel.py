"""Tests of the contents of raymq's wheel: it has two packages at the top level and the server packages inside the
package raymq, and servers import these packages."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.support.clusters.wheels import REPOSITORY, build_raymq

TOP = ("raymq", "raydp_jobs")
FLOORS = ("storage", "actors", "placement")

# A test program. It first imports `storage` as a user's process does. Then `put_floors_first` puts raymq's server
# packages first on the import path. After that, imports behave as in a server process in the same directory.
PROBE = """
import sys
import storage
print(storage.__file__)
del sys.modules["storage"]
from raymq.client.cluster import server_path
server_path.put_floors_first()
import actors.core.nameserver.route_table, placement.replica_nodes, storage
print(storage.__file__)
print(actors.core.nameserver.route_table.__file__)
print(placement.replica_nodes.__file__)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Build raymq's source distribution and its wheel, and return their paths."""
    return build_raymq(tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="module")
def names(built: tuple[Path, Path]) -> set[str]:
    """Return the names of the files in raymq's wheel."""
    with zipfile.ZipFile(built[1]) as wheel:
        return set(wheel.namelist())


def source_files(package: str) -> set[str]:
    files = (path for path in (REPOSITORY / package).rglob("*") if path.is_file())
    return {str(path.relative_to(REPOSITORY)) for path in files if "__pycache__" not in path.parts}


def test_raymq_and_raydp_jobs_are_all_that_is_at_the_top(names: set[str]) -> None:
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(TOP)


def test_every_file_of_every_package_is_in_the_wheel(names: set[str]) -> None:
    expected = {name for package in TOP for name in source_files(package)}
    expected |= {f"raymq/_floors/{name}" for package in FLOORS for name in source_files(package)}
    assert {name for name in names if ".dist-info/" not in name} == expected
    for name in ("raymq/py.typed", "raymq/_floors/storage/py.typed", "raydp_jobs/log4j2.properties"):
        assert name in names


def test_the_source_distribution_has_the_tests_and_their_files(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as source:
        inside = {name.partition("/")[2] for name in source.getnames()}
    expected = source_files("tests") | source_files("docs")
    assert expected - inside == set()
    assert {"pyproject.toml", "setup.py", "Makefile", "cluster.yaml", "README.md"} <= inside
    assert {"requirements.lock", "requirements-dev.lock"} <= inside


def test_servers_get_raymqs_floors_and_users_their_own_packages(built: tuple[Path, Path], tmp_path: Path) -> None:
    installed, user = tmp_path / "installed", tmp_path / "user"
    with zipfile.ZipFile(built[1]) as wheel:
        wheel.extractall(installed)
    for floor in FLOORS:
        (user / floor).mkdir(parents=True)
        (user / floor / "__init__.py").touch()
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        cwd=user,
        env={**os.environ, "PYTHONPATH": f"{user}{os.pathsep}{installed}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    inside = installed / "raymq" / "_floors"
    assert done.stdout.splitlines() == [
        str(user / "storage/__init__.py"),
        str(inside / "storage/__init__.py"),
        str(inside / "actors/core/nameserver/route_table.py"),
        str(inside / "placement/replica_nodes.py"),
    ], done.stderr
