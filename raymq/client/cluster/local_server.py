"""Implements `raymq up`, `down`, `status`, `drain` and `balance`: servers that outlive the command, on any Ray cluster.

If no Ray runs on this machine, `up` starts one with `ray start --head`, as a separate process that runs until `down`
(raymq.client.cluster.attach). A Ray that was not started by `up` is used and left running.

`up` can first wait until the Ray cluster has all nodes that hold stores. If nodes join one after another, as with `ray
up`, stores must not be placed too early. Otherwise `up` would not find the stores of nodes that join later, and would
start empty stores in their place.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import ray

from raymq.client.cluster.attach import (
    RAY_STOP_TIMEOUT_S,
    RayHead,
    attach_ray,
    find_address,
    latest_started,
    latest_started_file,
    reachable_address,
    read_head,
    run_directory,
    write_head,
)
from raymq.client.cluster.embedded import STARTING_MAX
from raymq.client.cluster.java import java_environment
from raymq.client.cluster.launcher import ProgressCallback, launch
from raymq.common.config.cluster import load_settings
from raymq.common.errors import ClusterNotFoundError, RequestTimeoutError, ServiceNotAvailableError
from raymq.common.protocol.status import ClusterStatus
from raymq.remoting.access.credentials import CREDENTIAL_VARIABLES

RAY_START_TIMEOUT_S: Final = 90.0
"""Timeout in seconds for the start of Ray on this machine."""
UMASK: Final = 0o077
"""Umask of server processes. Only their user can read the files that they write, such as messages and the
token."""
WAIT_NODES_TIMEOUT_S: Final = 1800.0
"""Timeout in seconds for nodes to join. On the first `ray up`, each node installs all software before it joins."""


@dataclass(frozen=True, slots=True)
class StartResult:
    """The result of `up`: the names of all actors, and sentences about what was found on disk and what was changed.

    `data_dir`: the directory of the stores; None if raymq ran before.
    """

    actors: list[str]
    notes: list[str]
    data_dir: str | None = None


def up(
    config: Path | None,
    data_dir: Path | None,
    broker_groups: int | None,
    address: str | None,
    progress: ProgressCallback,
    *,
    wait_nodes: int | None = None,
    wait_timeout_s: float = WAIT_NODES_TIMEOUT_S,
    leave_out: Sequence[str] = (),
) -> StartResult:
    """Start raymq with all stores in the data directories, except the stores in `leave_out`. A repeated call changes
    nothing, and its result says so.

    With `wait_nodes`, first wait until the Ray cluster has this number of nodes. If the setting `placement.node_label`
    is set, only nodes with this label are counted, because only they may hold stores. With `wait_nodes`, this call
    starts no Ray, because that Ray would have one node only. Raises ConfigError before anything is started. If the
    servers do not start, a Ray that this call started is stopped again.
    """
    settings = load_settings(config, data_dir=data_dir, broker_groups=broker_groups, leave_out=tuple(leave_out) or None)
    head = None
    if address is None and wait_nodes is None and not ray.is_initialized() and find_address() is None:
        progress("starting Ray on this machine")
        head = _start_ray()
    try:
        if wait_nodes is not None:
            attach_ray(address)
            label = settings.placement.node_label
            await_nodes(wait_nodes, wait_timeout_s, progress, lambda: alive_nodes(label))
        result = launch("start", reachable_address(address), settings, progress, board=True)
    except BaseException:
        ray.shutdown()
        if head is not None:
            head.stop()
        raise
    ray.shutdown()
    return StartResult(result["actors"], result["notes"], result["data_dir"])


def down(address: str | None, progress: ProgressCallback) -> list[str]:
    """Stop raymq's actors, and also Ray if `up` started it. Returns the actors' names."""
    head = read_head() if address is None else None
    stopped: list[str] = launch("stop", reachable_address(address), progress=progress)
    if head is not None:
        progress("stopping Ray")
        head.stop()
    return stopped


def status(address: str | None) -> ClusterStatus:
    """Return the state of all servers. Raises ClusterNotFoundError if no Ray runs, or if no raymq runs on it."""
    found = ClusterStatus.of(launch("status", reachable_address(address)))
    if not found.actors:
        raise ClusterNotFoundError("this Ray cluster does not run raymq: start it with `raymq up`")
    return found


def drain(node: str, undo: bool, address: str | None, progress: ProgressCallback) -> dict[str, Any]:
    """Move all replicas away from a node; with `undo`, allow replicas on the node again (placement.operations)."""
    return _operate("drain", address, progress, node=node, undo=undo)


def balance(address: str | None, progress: ProgressCallback) -> dict[str, Any]:
    """In each broker group, make the in-sync replica that comes first by priority the master
    (placement.operations)."""
    return _operate("balance", address, progress)


def close_stores(address: str | None, progress: ProgressCallback) -> list[str]:
    """Close the stores on this node before the node is removed (placement.operations). Returns the stores'
    names."""
    closed: list[str] = launch("close", reachable_address(address), progress=progress)
    return closed


def install_board(output: str | None, address: str | None) -> dict[str, Any]:
    """Write the Grafana board on the head node (placement.operations). The folder `output` must exist on the
    head node."""
    return _operate("board", address, lambda step: None, output=output)


def start_console(config: Path | None, address: str | None, progress: ProgressCallback) -> dict[str, Any]:
    """Start the web console, unless it already runs with these settings.

    Returns the console's `url`, `host`, `port`, `pid`, and `loopback`, which is True if only the head node can reach
    the console. Raises ConfigError if the settings are invalid, and ClusterNotFoundError if no raymq runs.
    """
    settings = load_settings(config)
    progress("starting the console")
    found: dict[str, Any] = launch("console", reachable_address(address), settings, progress)
    return found


def stop_console(address: str | None) -> bool:
    """Stop the web console. Returns False if no console runs."""
    return bool(launch("stop_console", reachable_address(address)))


def start_gateways(config: Path | None, address: str | None, progress: ProgressCallback) -> list[dict[str, Any]]:
    """Start the gateway processes that the settings name, unless they already run with these settings. Stops gateway
    processes that the settings do not name.

    Returns the status of each process. Raises ConfigError if the settings are invalid or an address cannot be used, and
    ClusterNotFoundError if no raymq runs.
    """
    settings = load_settings(config)
    progress("starting the gateway")
    found: list[dict[str, Any]] = launch("gateways", reachable_address(address), settings, progress)
    return found


def stop_gateways(address: str | None, progress: ProgressCallback) -> list[str]:
    """Stop all gateway processes. Returns their names."""
    stopped: list[str] = launch("stop_gateways", reachable_address(address), progress=progress)
    return stopped


def _operate(action: str, address: str | None, progress: ProgressCallback, **arguments: Any) -> dict[str, Any]:
    """Run an action of placement.operations in the launch process, and return the action's result."""
    result: dict[str, Any] = launch(action, reachable_address(address), progress=progress, **arguments)
    return result


def _ray_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "ray.scripts.scripts", *arguments]


def _start_ray() -> RayHead:
    """Start a Ray head that outlives this process."""
    directory = run_directory()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    environment = {**os.environ, **java_environment(), "RAY_worker_maximum_startup_concurrency": str(STARTING_MAX)}
    # Remove credentials from the environment: every Ray worker inherits the environment, and runs jobs of any user.
    for name in CREDENTIAL_VARIABLES:
        environment.pop(name, None)
    if "RAY_AUTH_MODE" not in os.environ:
        # Generate an authentication token for the new Ray cluster. Ray uses a token by default, but `ray start` without
        # a token would turn authentication off.
        subprocess.run(
            _ray_command("get-auth-token", "--generate"),
            env=environment,
            check=True,
            capture_output=True,
            timeout=60,
            umask=UMASK,
        )
        _make_private(Path(environment.get("RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token")).expanduser())
        environment["RAY_AUTH_MODE"] = "token"
    log = directory / "ray-head.log"
    latest_started_file().unlink(missing_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            _ray_command(
                "start", "--head", "--block", "--port=0", "--include-dashboard=false", "--disable-usage-stats"
            ),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # the import path of Ray's workers begins with this working directory, so it must contain no packages of
            # users
            cwd="/",
            env=environment,
            start_new_session=True,
            umask=UMASK,
        )
    try:
        return write_head(process.pid, _await_address(process, log))
    except BaseException:
        process.terminate()
        try:
            process.wait(RAY_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
        raise


def _make_private(token: Path) -> None:
    """Remove other users' permissions from the token file, because anyone who reads the token can run code in the
    cluster. A file that existed before may be readable for all users."""
    if token.exists() and token.stat().st_mode & 0o077:
        token.chmod(0o600)


def _await_address(process: subprocess.Popen[bytes], log: Path) -> str:
    """Wait until the Ray that `process` starts is reachable. Returns its address."""
    deadline_s = time.monotonic() + RAY_START_TIMEOUT_S
    while True:
        address = latest_started()
        if address is not None and find_address() == address:
            return address
        if process.poll() is not None:
            raise ServiceNotAvailableError(f"Ray did not start; the end of {log}:\n{_tail(log)}")
        if time.monotonic() > deadline_s:
            raise RequestTimeoutError(f"Ray's start (log: {log})", RAY_START_TIMEOUT_S)
        time.sleep(0.2)


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-15:])


POLL_INTERVAL_S: Final = 0.5
"""Time in seconds between two reads of Ray's list of nodes."""


def alive_nodes(label: str | None = None) -> list[str]:
    """Return the addresses of the alive nodes of the Ray cluster to which this process is connected. With `label`,
    returns only nodes with this label, because other nodes hold no stores."""
    return sorted(
        node["NodeManagerAddress"]
        for node in ray.nodes()
        if node["Alive"] and (label is None or label in (node.get("Labels") or {}))
    )


def await_nodes(
    count: int, timeout_s: float, progress: ProgressCallback, alive: Callable[[], list[str]] = alive_nodes
) -> None:
    """Wait until `alive` returns at least `count` nodes. By default all alive nodes count, including the head.

    Raises ServiceNotAvailableError if fewer nodes joined within `timeout_s`; the error names the joined nodes.
    """
    deadline_s = time.monotonic() + timeout_s
    while len(nodes := alive()) < count:
        if time.monotonic() >= deadline_s:
            raise ServiceNotAvailableError(
                f"{len(nodes)} of {count} nodes joined the Ray cluster within {timeout_s:g} s "
                f"({', '.join(nodes)}), so no raymq server was started: check the missing nodes with `ray "
                "status`, then run `raymq up` again; if the missing nodes will not come back, use a smaller "
                "--wait-nodes"
            )
        progress(f"waiting for nodes: {len(nodes)} of {count} joined")
        time.sleep(POLL_INTERVAL_S)
