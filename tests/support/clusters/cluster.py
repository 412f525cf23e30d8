"""An embedded raymq in a sandbox, for tests that start Ray; and proof afterwards that it left nothing behind.

    ROOT/home    $HOME       must stay empty
    ROOT/tmp     $TMPDIR     Ray's files and sockets; must be empty again at the end
    ROOT/work    the current directory, with a `raymq.yaml`
    ROOT/data    the stores
    ROOT/java    temporary files of JVMs: those that are killed leave some

A sandbox is locked while it is in use; the next one removes what killed test sessions left.
ROOT is short: Ray puts sockets below $TMPDIR, and a socket's path has 107 characters at most.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

import raymq
from raymq.common.message import MessageExt
from tests.support.history.waiting import eventually

LOG_FILE_BYTES = 64 << 20
SMALL_LOG_FILE_BYTES = 1 << 20
BROKER_GROUPS = 2
PREFIX = "rmqs"
YOUNG_S = 600.0

HEALTH_CHECKS = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}
"""Ray's, as in cluster.yaml: a node that was killed, or cut off, is given up after about 2 s."""

SETTINGS = f"""\
broker_groups: {BROKER_GROUPS}
store:
  mapped_file_size_commit_log_bytes: {LOG_FILE_BYTES}
  mapped_file_size_consume_queue_bytes: 600000
  transaction_time_out_ms: 2000
broker:
  transaction_check_interval_ms: 1000
"""

RETRY_LEVELS = " ".join(["1s"] * 18)
"""Delay levels of one second each, so that a failed message walks them while a test waits."""
SERVER_SETTINGS = (
    SETTINGS.replace(
        "store:\n",
        f"""\
store:
  enable_lmq: true
  enable_multi_dispatch: true
  message_delay_level: {RETRY_LEVELS}
""",
    )
    + "  auto_create_topic_enable: true\nname_servers: 2\n"
)
"""Settings of the cluster that most modules of tests/integration/servers share."""


def one_group(replication: str) -> str:
    """Settings of one broker group with small files; `replication` is its mapping, in braces."""
    return f"""\
broker_groups: 1
store:
  mapped_file_size_commit_log_bytes: {SMALL_LOG_FILE_BYTES}
  mapped_file_size_consume_queue_bytes: 60000
replication: {replication}
"""


@dataclass(frozen=True, slots=True)
class Sandbox:
    """Directories of one test's own; see the module."""

    root: Path

    @property
    def home(self) -> Path:
        return self.root / "home"

    @property
    def tmp(self) -> Path:
        return self.root / "tmp"

    @property
    def work(self) -> Path:
        return self.root / "work"

    @property
    def java(self) -> Path:
        return self.root / "java"

    @property
    def data(self) -> Path:
        return self.root / "data"


@contextmanager
def sandbox(settings: str = SETTINGS) -> Iterator[Sandbox]:
    """Point HOME, TMPDIR and the current directory of this process, and of those it starts, into a new sandbox."""
    _remove_abandoned()
    box = Sandbox(Path(tempfile.mkdtemp(prefix=PREFIX, dir="/tmp")))
    lock = _lock(box.root)
    try:
        for directory in (box.home, box.tmp, box.work, box.java):
            directory.mkdir()
        (box.work / "raymq.yaml").write_text(settings + f"data_dir: {box.data}\n")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HOME", str(box.home))
            patch.setenv("XDG_CACHE_HOME", str(box.root / "cache"))  # names for completion
            patch.setenv("TMPDIR", str(box.tmp))
            patch.setattr(tempfile, "tempdir", None)  # it is read from TMPDIR again
            patch.chdir(box.work)
            yield box
    finally:
        shutil.rmtree(box.root, ignore_errors=True)
        os.close(lock)


def _remove_abandoned() -> None:
    """Remove the sandboxes of test sessions that were killed: nobody holds their locks."""
    for root in Path("/tmp").glob(f"{PREFIX}*"):
        try:
            if time.time() - root.stat().st_ctime < YOUNG_S:
                continue  # it may be locked in a moment
            lock = _lock(root)
        except OSError:
            continue  # it is in use, another's, or just removed
        shutil.rmtree(root, ignore_errors=True)
        os.close(lock)


def _lock(root: Path) -> int:
    """Lock a directory; BlockingIOError if another process has locked it. Closing the descriptor unlocks it."""
    descriptor = os.open(root, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def embedded(box: Sandbox) -> Iterator[raymq.Client]:
    """An embedded raymq in the sandbox; at the end no process of it is left, and no file outside its data."""
    before = set(descendants())
    with raymq.connect(embedded=True) as client:
        yield client
        started = [process for process in descendants() if process not in before]
        outside = files_written_outside(started, box.root)
    assert outside == []
    assert_gone(started)
    assert_gone([process for process in descendants() if process not in before])  # started after the look
    assert_untouched(box)


def descendants(pid: int | None = None) -> list[psutil.Process]:
    """The processes below this one, or below `pid`."""
    return psutil.Process(pid).children(recursive=True)


def assert_gone(processes: Sequence[psutil.Process], timeout_s: float = 60.0) -> None:
    """Every one of them ends by itself."""
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    assert [describe(process) for process in alive] == []


def without_rays_agents(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """The processes without the two agents of a node, which notice only after up to a minute that all else is gone."""
    agents = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
    return [process for process in processes if not title(process).startswith(agents)]


def title(process: psutil.Process) -> str:
    """A process's first argument, which Ray sets to what it does; empty when it has ended."""
    try:
        command = process.cmdline()
    except psutil.NoSuchProcess:
        return ""
    return command[0] if command else ""


def assert_untouched(box: Sandbox) -> None:
    """Nothing is in HOME, Ray's temporary files are gone, and the current directory is as it was."""
    assert [str(path) for path in box.home.rglob("*")] == []
    assert [str(path) for path in box.tmp.rglob("*")] == []
    assert (left := sorted(path.name for path in box.work.iterdir())) == ["raymq.yaml"], left


def describe(process: psutil.Process) -> str:
    """A leftover process in words, for a failing test's message."""
    try:
        return f"{process.pid} {process.status()} {' '.join(process.cmdline())[:200]}"
    except psutil.NoSuchProcess:
        return f"{process.pid} (ended)"


def files_written_outside(processes: Sequence[psutil.Process], root: Path) -> list[str]:
    """Regular files that the processes hold open for writing and that are not below `root`."""
    found = set()
    for process in processes:
        try:
            opened = process.open_files()
        except psutil.NoSuchProcess:
            continue  # a worker that ended meanwhile
        for file in opened:
            if file.mode != "r" and not Path(file.path).is_relative_to(root) and not file.path.startswith("/dev/"):
                found.add(f"{file.path} by {describe(process)}")
    return sorted(found)


def actor_processes(actor: str) -> list[psutil.Process]:
    """All processes of actors of one class, by what Ray titles them: `ray::Broker`, at work `ray::Broker.groups`."""
    return [process for process in descendants() if title(process).split(".")[0] == f"ray::{actor}"]


def kill_actors(actor: str) -> None:
    """SIGKILL every process of one class of actors, and wait until they have ended."""
    processes = actor_processes(actor)
    assert processes, f"no process of a {actor}"
    for process in processes:
        process.kill()
    psutil.wait_procs(processes, timeout=30)


def user_environment() -> dict[str, str]:
    """The environment for a program of a user: nothing on the import path but what is installed."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def poll_until(consumer: raymq.PullConsumer, count: int, timeout_s: float = 60.0) -> list[MessageExt]:
    """Poll until `count` messages came."""
    messages: list[MessageExt] = []

    def enough() -> bool:
        messages.extend(consumer.poll(max_messages=count - len(messages), timeout_s=0.2))
        return len(messages) >= count

    eventually(enough, f"{count} messages", timeout_s)
    return messages
