"""An embedded raymq: servers, and a local Ray if this process has none, for as long as one program runs.

Everything listens on loopback only. Ray's temporary files, its sockets and its token have a directory of their own,
which is removed when raymq stops; the stores stay in `data_dir`. If the program is killed, Ray's processes end by
themselves, and the stores recover when they are opened again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import ray

from raymq.client.cluster.attach import described_as_utf8, note_connection
from raymq.client.cluster.java import java_environment
from raymq.client.cluster.launcher import ProgressCallback, launch
from raymq.common.errors import StoreError
from raymq.common.names import NAMESPACE

if TYPE_CHECKING:
    from raymq.common.config.cluster import ClusterSettings

OBJECT_STORE_BYTES: Final = 256 * 1024 * 1024
"""Size in bytes of the local Ray's object store."""
STARTING_MAX: Final = 16
"""Maximum number of Ray worker processes that may start at the same time."""
UNUSED_PROCESSES: Final = ("start_monitor", "start_log_monitor")
"""Methods of Ray's class Node that start processes which an embedded raymq does not use. The autoscaler has no machines
to add. The log monitor has no driver that prints the workers' output (`log_to_driver` is false). The API server stays,
because Ray Data asks it for its tasks: without an API server, Ray waits 40 s for its address."""
SOCKET_DIRECTORY_MAX: Final = 40
"""Maximum length in characters of the directory in which Ray's temporary directory is made. Ray appends about 60
characters to this directory to name its sockets, and the path of a socket has at most 107."""


class EmbeddedCluster:
    """The servers of one embedded raymq. `start` starts the servers and `stop` stops them; each method may be called
    once."""

    def __init__(self, settings: ClusterSettings) -> None:
        self._settings = settings
        self._ray: LocalRay | None = None

    def start(self, progress: ProgressCallback = lambda step: None) -> None:
        """Start Ray if this process has none, then the servers. If a step fails, stops everything that was
        started."""
        _check_can_write(self._settings.data_dir)
        if not ray.is_initialized():
            progress("starting Ray")
            self._ray = LocalRay()
            self._ray.start()
        try:
            launch("start", ray.get_runtime_context().gcs_address, self._settings, progress)
        except BaseException:
            self._stop_ray()
            raise

    def stop(self, progress: ProgressCallback = lambda step: None) -> None:
        """Close the stores, stop the servers, then stop Ray if `start` started it."""
        try:
            if ray.is_initialized():
                launch("stop", ray.get_runtime_context().gcs_address, self._settings, progress)
        finally:
            self._stop_ray()

    def _stop_ray(self) -> None:
        if self._ray is not None:
            self._ray.stop()
            self._ray = None


class LocalRay:
    """A Ray cluster on this machine, made of this process and its child processes."""

    def __init__(self) -> None:
        self._directory: Path | None = None
        self._environment: dict[str, str | None] = {}
        self._terminal: int | None = None

    def start(self) -> None:
        """Start Ray. The PATH of Ray's processes includes Java, which Spark needs."""
        base = tempfile.gettempdir()
        self._directory = Path(tempfile.mkdtemp(prefix="rmq", dir=base if len(base) < SOCKET_DIRECTORY_MAX else "/tmp"))
        token = self._directory / "token"
        token.touch(mode=0o600)
        token.write_text(_process_token())
        self._set_environment(
            {
                **java_environment(),
                "RAY_AUTH_TOKEN_PATH": str(token),
                # If RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER is 0, Ray keeps the address 127.0.0.1. By default, Ray replaces
                # it by the machine's address and listens on all interfaces.
                "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
                "RAY_USAGE_STATS_ENABLED": "0",
            }
        )
        self._terminal = _foreground_group()
        try:
            _init_ray(str(self._directory))
        except BaseException:
            self.stop()
            raise
        _take_terminal(self._terminal)

    def stop(self) -> None:
        """Stop Ray and remove its files."""
        ray.shutdown()
        _give_terminal_back(self._terminal)
        for name, value in self._environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._environment = {}
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def _set_environment(self, values: dict[str, str]) -> None:
        for name in (*values, "RAY_AUTH_MODE"):  # restore RAY_AUTH_MODE at the end too, because Ray itself changes it
            self._environment[name] = os.environ.get(name)
        os.environ.update(values)


def _check_can_write(data_dir: Path) -> None:
    """Raise StoreError if stores cannot be created in `data_dir`. Called before Ray is started, so that a bad directory
    fails early."""
    existing = next(path for path in (data_dir, *data_dir.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise StoreError(
            f"cannot open the store directories in {data_dir}: {existing} is not a writable directory; check that "
            f"the disk has free space and that user {os.getuid()} may write to the directory, or set data_dir"
        )


@cache
def _process_token() -> str:
    """Return the token of every local Ray that this process starts. All of them use the same token, because Ray reads
    the token only once per process."""
    return secrets.token_hex(32)


def _init_ray(directory: str) -> None:
    with ExitStack() as replaced:
        replaced.enter_context(described_as_utf8())
        # Set the constant ENABLE_RAY_CLUSTER in Ray's module. Setting the environment variable would be too late: Ray
        # has read it when Ray was imported, and only uses the constant at a start.
        replaced.enter_context(_attribute(sys.modules["ray._private.ray_constants"], "ENABLE_RAY_CLUSTER", False))
        for name in filter(partial(hasattr, ray._private.node.Node), UNUSED_PROCESSES):
            replaced.enter_context(_attribute(ray._private.node.Node, name, _start_nothing))
        ray.init(
            address="local",
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            namespace=NAMESPACE,
            object_store_memory=OBJECT_STORE_BYTES,
            _temp_dir=directory,
            _system_config={
                "enable_worker_prestart": False,
                "prestart_worker_first_driver": False,
                # By default, Ray starts at most as many worker processes at a time as the machine has CPUs. If more
                # workers are starting, Ray prints warnings to standard output.
                "worker_maximum_startup_concurrency": STARTING_MAX,
            },
        )
    note_connection()


def _start_nothing(node: Any, **options: Any) -> None:
    """Replace a method of Ray's class Node that would start an unused process."""


@contextlib.contextmanager
def _attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an existing attribute of a module or class of Ray to `value`, and restore the attribute at the end."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


# Ray makes this process the leader of a new process group. If the process was in its terminal's foreground group, as
# under `make`, the new group would be in the background. Then ctrl-C would no longer reach the process.


def _foreground_group() -> int | None:
    """Return this process's group if it is the terminal's foreground group, otherwise None."""
    try:
        group = os.tcgetpgrp(sys.stdin.fileno())
    except (OSError, ValueError, AttributeError):
        return None  # standard input is not a terminal, so no process group is in the foreground
    return group if group == os.getpgrp() else None


def _take_terminal(group: int | None) -> None:
    if group is not None and group != os.getpgrp():
        _set_foreground(os.getpgrp())


def _give_terminal_back(group: int | None) -> None:
    if group is not None and group != os.getpgrp():
        _set_foreground(group)
        # Ignore the error: if all other processes of this process group have ended, the group no longer exists.
        with contextlib.suppress(OSError):
            os.setpgid(0, group)


def _set_foreground(group: int) -> None:
    # The signal SIGTTOU stops a background process that takes the terminal. So block this signal first.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
    try:
        with contextlib.suppress(OSError):  # the terminal may already be closed
            os.tcsetpgrp(sys.stdin.fileno(), group)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
