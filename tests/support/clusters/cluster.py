"""Runs an embedded raymq in a sandbox, for tests that start Ray, and checks that raymq leaves nothing behind.

    ROOT/home    $HOME       must stay empty
    ROOT/tmp     $TMPDIR     Ray's files and sockets; must be empty again at the end
    ROOT/work    the current directory, with a `raymq.yaml`
    ROOT/data    the stores
    ROOT/java    temporary files of JVMs: killed JVMs leave some

A sandbox is locked while a test session uses it. The next sandbox removes the directories of killed test sessions. The
path ROOT is short because Ray puts sockets below $TMPDIR, and a socket's path has 107 characters at most.
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
"""Settings of Ray's health checks, as in cluster.yaml. With these settings, Ray declares a killed or unreachable node
dead after about 2 s."""

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
"""Delay levels for retries: each of the 18 levels lasts one second, so that a failed message passes through several
levels during a test."""
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
    """Return the settings, in YAML, of a cluster with one broker group and small files. `replication`: the value of the
    key `replication`, a YAML mapping in braces."""
    return f"""\
broker_groups: 1
store:
  mapped_file_size_commit_log_bytes: {SMALL_LOG_FILE_BYTES}
  mapped_file_size_consume_queue_bytes: 60000
replication: {replication}
"""


@dataclass(frozen=True, slots=True)
class Sandbox:
    """The directories of one test's sandbox: home, temporary files, current directory, stores, and files of
    JVMs."""

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
    """Set HOME, TMPDIR and the current directory of this process and its children to a new sandbox, and yield the
    sandbox."""
    _remove_abandoned()
    box = Sandbox(Path(tempfile.mkdtemp(prefix=PREFIX, dir="/tmp")))
    lock = _lock(box.root)
    try:
        for directory in (box.home, box.tmp, box.work, box.java):
            directory.mkdir()
        (box.work / "raymq.yaml").write_text(settings + f"data_dir: {box.data}\n")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HOME", str(box.home))
            # XDG_CACHE_HOME is the directory of the files from which shell completion reads names.
            patch.setenv("XDG_CACHE_HOME", str(box.root / "cache"))
            patch.setenv("TMPDIR", str(box.tmp))
            patch.setattr(tempfile, "tempdir", None)  # make the tempfile module read TMPDIR again
            patch.chdir(box.work)
            yield box
    finally:
        shutil.rmtree(box.root, ignore_errors=True)
        os.close(lock)


def _remove_abandoned() -> None:
    """Remove the sandbox directories that killed test sessions have left. No process holds the lock of such a
    directory."""
    for root in Path("/tmp").glob(f"{PREFIX}*"):
        try:
            if time.time() - root.stat().st_ctime < YOUNG_S:
                continue  # a new sandbox directory is kept: its maker may not have locked it yet
            lock = _lock(root)
        except OSError:
            continue  # the sandbox directory is in use, belongs to another user, or was just removed
        shutil.rmtree(root, ignore_errors=True)
        os.close(lock)


def _lock(root: Path) -> int:
    """Lock a directory and return the lock's file descriptor. Closing the descriptor unlocks the directory. Raises
    BlockingIOError if another process holds the lock."""
    descriptor = os.open(root, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def embedded(box: Sandbox) -> Iterator[raymq.Client]:
    """Yield a client of an embedded raymq in the sandbox. Checks at the end that no process of raymq is left, and that
    raymq wrote no file outside of the sandbox's data directory."""
    before = set(descendants())
    with raymq.connect(embedded=True) as client:
        yield client
        started = [process for process in descendants() if process not in before]
        outside = files_written_outside(started, box.root)
    assert outside == []
    assert_gone(started)
    # List this process's descendants again: some may have started after the first list was taken.
    assert_gone([process for process in descendants() if process not in before])
    assert_untouched(box)


def descendants(pid: int | None = None) -> list[psutil.Process]:
    """Return the descendant processes of this process, or of the process `pid`."""
    return psutil.Process(pid).children(recursive=True)


def assert_gone(processes: Sequence[psutil.Process], timeout_s: float = 60.0) -> None:
    """Check that every process in `processes` ends by itself within the timeout."""
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    assert [describe(process) for process in alive] == []


def without_rays_agents(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Return `processes` without Ray's two agent processes of each node. These agents may outlive their node by up to a
    minute."""
    agents = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
    return [process for process in processes if not title(process).startswith(agents)]


def title(process: psutil.Process) -> str:
    """Return a process's first argument, which Ray sets to the process's role; empty if the process has ended."""
    command = command_of(process)
    return command[0] if command else ""


def command_of(process: psutil.Process) -> list[str]:
    """Return a process's command line; empty if the process has ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def assert_untouched(box: Sandbox) -> None:
    """Check that HOME is empty, that Ray's temporary files are gone, and that the sandbox's work directory contains
    only `raymq.yaml`."""
    assert [str(path) for path in box.home.rglob("*")] == []
    assert [str(path) for path in box.tmp.rglob("*")] == []
    assert (left := sorted(path.name for path in box.work.iterdir())) == ["raymq.yaml"], left


def describe(process: psutil.Process) -> str:
    """Describe a process that should have ended, for the message of a failed test."""
    try:
        return f"{process.pid} {process.status()} {' '.join(process.cmdline())[:200]}"
    except psutil.NoSuchProcess:
        return f"{process.pid} (ended)"


def files_written_outside(processes: Sequence[psutil.Process], root: Path) -> list[str]:
    """Return the regular files outside of `root` that the processes hold open for writing."""
    found = set()
    for process in processes:
        try:
            opened = process.open_files()
        except psutil.NoSuchProcess:
            continue  # the process ended after the caller had listed the processes
        for file in opened:
            if file.mode != "r" and not Path(file.path).is_relative_to(root) and not file.path.startswith("/dev/"):
                found.add(f"{file.path} by {describe(process)}")
    return sorted(found)


def actor_processes(actor: str) -> list[psutil.Process]:
    """Return all processes of the actors of one class. The title of such a process is, for example, `ray::Broker`, or
    during a call `ray::Broker.groups`."""
    return [process for process in descendants() if title(process).split(".")[0] == f"ray::{actor}"]


def kill_actors(actor: str) -> None:
    """SIGKILL every process of the actors of one class, and wait until all these processes have ended."""
    processes = actor_processes(actor)
    assert processes, f"no process of a {actor}"
    for process in processes:
        process.kill()
    psutil.wait_procs(processes, timeout=30)


def user_environment() -> dict[str, str]:
    """Return the environment variables for a user's program. Its import path has only installed packages."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def poll_until(consumer: raymq.PullConsumer, count: int, timeout_s: float = 60.0) -> list[MessageExt]:
    """Poll the consumer until `count` messages have arrived, and return the messages."""
    messages: list[MessageExt] = []

    def enough() -> bool:
        messages.extend(consumer.poll(max_messages=count - len(messages), timeout_s=0.2))
        return len(messages) >= count

    eventually(enough, f"{count} messages", timeout_s)
    return messages
