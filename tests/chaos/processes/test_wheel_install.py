"""Tests of raymq as users install it: from its wheel, into an environment that other programs use as well.

Other packages have the same names as raymq's packages `storage`, `actors` and `placement`. They are in three places:

- a second distribution has `storage` and `actors` at the top of site-packages
- a library on PYTHONPATH has `storage` and `placement`
- the user's own directory has `storage` and `placement`

Importing the packages in the first two places raises an error; a listener uses the user's packages. The environment has
this interpreter's dependencies, but not the raymq under development.
"""

from __future__ import annotations

import json
import subprocess
import sysconfig
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

import psutil
import pytest

from tests.support.clusters.cluster import Sandbox, assert_gone, one_group, sandbox, user_environment
from tests.support.clusters.wheels import build_raymq, make_wheel

SETTINGS = one_group("{replicas: 2, spread: false}")
COUNT = 20
UNUSABLE = "raise RuntimeError('not the package that was meant')\n"
OTHER = "storage-of-others"
USERS = {
    "storage/__init__.py": """
        def save(path, text):
            with open(path, "a") as file:
                file.write(text + chr(10))
    """,
    "placement/__init__.py": "SEATS = 7",
    "program.py": """
        import os, sys, time
        import placement
        import raymq
        import storage

        group, journal, count = sys.argv[1], sys.argv[2], int(sys.argv[3])

        def listen(message):
            import placement, storage
            storage.save(journal, f"{placement.SEATS} {message.body.decode()}")

        def heard():
            return len(set(open(journal))) if os.path.exists(journal) else 0

        first = raymq.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET
        with raymq.connect() as mq:
            push = mq.push_consumer(group, consume_from=first).subscribe("orders").on_message(listen)
            with push.start() as subscription:
                deadline_s = time.monotonic() + 90
                while heard() < count:
                    assert time.monotonic() < deadline_s, f"{heard()} of {count} heard"
                    subscription.raise_listener_error()
                    time.sleep(0.05)
    """,
}


@dataclass(frozen=True, slots=True)
class Installed:
    """A virtual environment in which raymq's wheel is installed. `user`: the directory in which the environment's
    programs run."""

    root: Path
    user: Path
    library: Path

    def run(self, program: str, *arguments: str, lines: str = "") -> str:
        """Run one of the virtual environment's programs in the user's directory, with `lines` as its input. Returns the
        program's output. Raises AssertionError if the program fails."""
        done = subprocess.run(
            [str(self.root / "bin" / program), *arguments],
            cwd=self.user,
            env=user_environment() | {"PYTHONPATH": str(self.library)},
            input=lines,
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def raymq(self, *arguments: str) -> Any:
        """Run a raymq command with --json. Returns its decoded output."""
        return json.loads(self.run("raymq", *arguments, "--json"))

    def pip(self, *arguments: str) -> None:
        """Run pip in the virtual environment. The caller must pass arguments with which pip uses no package
        index."""
        self.run("python", "-I", "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments)

    @property
    def site_packages(self) -> Path:
        return Path(sysconfig.get_path("purelib", "venv", {"base": str(self.root), "platbase": str(self.root)}))


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    """A sandbox in which Ray listens only on loopback."""
    tmp_path_factory.getbasetemp()  # Make pytest choose its temporary directory before TMPDIR changes.
    with pytest.MonkeyPatch.context() as patch, sandbox(SETTINGS) as made:
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        yield made


@pytest.fixture(scope="module")
def installed(box: Sandbox, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Install raymq's wheel into a virtual environment. Also install a second distribution, whose packages have the
    same names as raymq's packages, and copy the user's files."""
    built = tmp_path_factory.mktemp("built")
    made = Installed(box.root / "venv", box.work, built / "library")
    for package in ("storage", "placement"):
        (made.library / package).mkdir(parents=True)
        (made.library / package / "__init__.py").write_text(UNUSABLE)
    venv.create(made.root, with_pip=True, symlinks=True)
    _, wheel = build_raymq(built)
    other = make_wheel(
        built,
        OTHER.replace("-", "_"),
        {"storage/__init__.py": UNUSABLE, "storage/files/disk.py": UNUSABLE, "actors/__init__.py": UNUSABLE},
    )
    for file in (wheel, other):
        made.pip("install", "--no-index", "--no-deps", str(file))
    # This .pth file makes the packages of the development environment importable. Write it after the install, or pip
    # would replace the raymq of that environment. Python ignores further .pth files in the added directory, so an
    # editable raymq there is not found.
    (made.site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for name, text in USERS.items():
        (made.user / name).parent.mkdir(exist_ok=True)
        (made.user / name).write_text(dedent(text).lstrip())
    return made


@contextmanager
def running(installed: Installed, box: Sandbox) -> Iterator[list[str]]:
    """Run raymq in its own Ray cluster with `raymq up`. Yields the names of its actors. Checks at the end that no
    process still runs."""
    actors = installed.raymq("up")["actors"]
    head = psutil.Process(json.loads((box.home / ".raymq/run/ray-head.json").read_text())["pid"])
    family = [head, *head.children(recursive=True)]
    try:
        yield actors
    finally:
        installed.raymq("down")
        assert_gone(family)


def test_only_raymq_and_raydp_jobs_are_found_where_users_import(installed: Installed) -> None:
    program = """
        import importlib.util, pathlib, raymq, raydp_jobs
        found = [importlib.util.find_spec(name) for name in ("storage", "actors", "placement")]
        for place in (raymq.__file__, raydp_jobs.__file__, *(spec and spec.origin for spec in found)):
            print(place and pathlib.Path(place).parent)
    """
    places = installed.run("python", "-I", "-c", dedent(program)).splitlines()
    expected = [str(installed.site_packages / name) for name in ("raymq", "raydp_jobs", "storage", "actors")]
    assert places == [*expected, "None"]


def test_raymq_works_beside_packages_of_the_same_names_and_after_one_is_uninstalled(
    installed: Installed, box: Sandbox, tmp_path: Path
) -> None:
    bodies = {str(number) for number in range(COUNT)}
    with running(installed, box) as actors:
        assert actors == ["broker-a", "controller", "nameserver-0", *actors[3:]]
        assert {"storage-broker-a-0", "storage-broker-a-1"} <= set(actors)
        installed.raymq("topic", "create", "orders", "--queues", "4")
        installed.run("raymq", "send", "orders", lines="\n".join(bodies))
        assert consumed(installed, "billing") == bodies
        assert listener_lines(installed, "audit", tmp_path / "first") == {f"7 {body}" for body in bodies}

    installed.pip("uninstall", "--yes", OTHER)
    assert not (installed.site_packages / "storage").exists()
    with running(installed, box) as again:
        assert {name for name in actors if not name.startswith("replicator-")} <= set(again)
        assert consumed(installed, "shipping") == bodies
        assert listener_lines(installed, "archive", tmp_path / "second") == {f"7 {body}" for body in bodies}


def consumed(installed: Installed, group: str) -> set[str]:
    """Return the bodies of the messages that a new consumer group receives."""
    options = ("--from", "first", "--max", str(COUNT), "--timeout", "60", "--json")
    lines = installed.run("raymq", "consume", group, "orders", *options).splitlines()
    return {json.loads(line)["body"] for line in lines}


def listener_lines(installed: Installed, group: str, journal: Path) -> set[str]:
    """Return the lines that a listener in a user's program writes. The listener uses the user's own packages."""
    installed.run("python", "program.py", group, str(journal), str(COUNT))
    return set(journal.read_text().splitlines())
