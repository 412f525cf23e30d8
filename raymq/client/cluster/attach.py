"""Connects this process to a running Ray cluster, and keeps the file about the Ray head that `raymq up` started.

Without an address, the first existing cluster in this order is used: the Ray to which this process is connected;
RAY_ADDRESS; the Ray that `raymq up` started; the Ray that `ray start` last started on this machine.
`ray.init(address="auto")` is not used. It connects to any GCS process that it finds, even if the process belongs to
another user or program. After that it waits minutes for a token that this user does not have.

The file `~/.raymq/run/ray-head.json` describes the Ray head that `raymq up` started on this machine. The operating
system may reuse the process id for another process later, so the file also has the start time. raymq stops a process
only if both the id and the start time match.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final

import psutil
import ray
from ray._common.utils import get_ray_address_file
from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
from ray.exceptions import AuthenticationError, RayError

from raymq.common.errors import ClientStateError, ClusterNotFoundError, ConfigError
from raymq.common.names import NAMESPACE

RAY_STOP_TIMEOUT_S: Final = 30.0
"""Timeout in seconds of each wait for Ray's processes to end: once after SIGTERM, and once after they are
killed."""


@dataclass(frozen=True, slots=True)
class RayHead:
    """A `ray start --head --block` process and the address of its GCS."""

    pid: int
    create_time: float
    address: str

    def stop(self) -> None:
        """Stop the Ray head and all its child processes, and delete the file that describes the head."""
        family = _family(self)
        for process in family[:1]:
            process.send_signal(signal.SIGTERM)  # on SIGTERM, the Ray head stops its child processes
        _, alive = psutil.wait_procs(family, timeout=RAY_STOP_TIMEOUT_S)
        for process in alive:
            process.kill()
        psutil.wait_procs(alive, timeout=RAY_STOP_TIMEOUT_S)
        _file().unlink(missing_ok=True)


def run_directory() -> Path:
    """Return the directory `~/.raymq/run`, whose files describe running servers."""
    return Path("~/.raymq/run").expanduser()


def write_head(pid: int, address: str) -> RayHead:
    """Write the file that describes a Ray head that was just started."""
    head = RayHead(pid, psutil.Process(pid).create_time(), address)
    temporary = _file().with_suffix(".tmp")
    temporary.write_text(json.dumps(asdict(head)))
    temporary.replace(_file())
    return head


def read_head() -> RayHead | None:
    """Read the file that describes the Ray head. Returns None if the file does not exist, or if the head no longer
    runs. Raises ConfigError if the file is damaged: the caller would otherwise take a running head for ended."""
    try:
        head = RayHead(**json.loads(_file().read_bytes()))
        family = _family(head)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"the file {_file()} is damaged and does not describe a Ray head ({error}): delete the file, and end the "
            "Ray head with `ray stop` if it still runs"
        ) from error
    return head if family else None


def _file() -> Path:
    return run_directory() / "ray-head.json"


def _family(head: RayHead) -> list[psutil.Process]:
    """Return the Ray head's process, followed by all its child processes; empty if the head no longer runs."""
    try:
        process = psutil.Process(head.pid)
        if process.create_time() != head.create_time:
            return []
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


CONNECT_TIMEOUT_S: Final = 5.0
"""Timeout in seconds of the connection test, which checks whether a process listens at Ray's address."""

# Hide a warning that Ray's module for token authentication logs at each connection to a cluster with tokens.
logging.getLogger(maybe_enable_token_auth_if_token_available.__module__).setLevel(logging.ERROR)

_START_ONE: Final = (
    "start a Ray cluster with `raymq up` or `ray up cluster.yaml`, or name a Ray cluster with --address or "
    "RAY_ADDRESS; a single program can use raymq.connect(embedded=True)"
)
_NAME_ANOTHER: Final = "start it, or name another Ray cluster with --address or RAY_ADDRESS"


def attach_ray(address: str | None) -> bool:
    """Connect this process to Ray, unless it is connected already. Returns True if this call connected the process.

    `address`: host:port of the GCS. Raises ClusterNotFoundError if nothing answers at the address, or if the cluster
    requires a token that this user does not have. Raises ClientStateError if this process is connected to a Ray cluster
    at another address.
    """
    if ray.is_initialized():
        _refuse_other_cluster(address)
        return False
    found = reachable_address(address)
    # If `ray.init` gets an explicit address, it does not load the Ray token of the operating-system user, so load it
    # here. Ray has no public function that loads the token.
    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    try:
        with described_as_utf8():
            ray.init(address=found, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except AuthenticationError as error:
        raise ClusterNotFoundError(
            f"the Ray cluster at {found} needs a token that this user does not have: copy the cluster's token "
            "into ~/.ray/auth_token, or set RAY_AUTH_TOKEN_PATH to the token's file "
            f"({str(error).splitlines()[0]})"
        ) from None
    except (ConnectionError, ValueError, RayError) as error:
        reason = str(error).splitlines()[0]
        raise ClusterNotFoundError(f"cannot connect to Ray at {found} ({reason}): {_NAME_ANOTHER}") from None
    note_connection()
    return True


def reachable_address(address: str | None) -> str:
    """Return the address of the Ray cluster to use, host:port of its GCS, without connecting this process to Ray.

    A process listens at the returned address. `attach_ray` takes the same `address`, and raises the same errors. This
    function does not check the token.
    """
    if ray.is_initialized():
        _refuse_other_cluster(address)
        return str(ray.get_runtime_context().gcs_address)
    found = address or find_address()
    if found is None:
        raise ClusterNotFoundError(f"no Ray cluster runs on this machine: {_START_ONE}")
    # Test first whether a process listens at the address. Otherwise `ray.init` would wait a minute for a listener, and
    # then end the whole process.
    reason = _why_silent(found)
    if reason:
        raise ClusterNotFoundError(f"no Ray cluster runs at {found} ({reason}): {_NAME_ANOTHER}")
    return found


def connected_by_raymq() -> bool:
    """Return True if raymq has connected this process to its present Ray. False if the program itself has, or if this
    process is a worker of Ray: then Ray's own setting log_to_driver decides which output the program prints."""
    return ray.is_initialized() and ray.get_runtime_context().get_worker_id() in _own_workers


def note_connection() -> None:
    """Store that raymq has connected this process to Ray (`connected_by_raymq`)."""
    _own_workers[:] = [ray.get_runtime_context().get_worker_id()]


_own_workers: Final[list[str]] = []
"""Ray's id of this process, if raymq has connected the process to Ray; empty otherwise."""


@contextmanager
def described_as_utf8() -> Iterator[None]:
    """Let this process connect to Ray even if an argument of its command line is not UTF-8. Ray sends the command line
    to the GCS as UTF-8 text. Inside the block, bytes that are not UTF-8 are replaced by escapes in this text."""
    module: Any = ray._private.utils
    original = module.get_entrypoint_name
    module.get_entrypoint_name = lambda: original().encode(errors="backslashreplace").decode()
    try:
        yield
    finally:
        module.get_entrypoint_name = original


def find_address() -> str | None:
    """Find the address of the Ray cluster to use. Returns None if no cluster runs."""
    named = os.environ.get("RAY_ADDRESS")
    if named and named != "auto":
        return named
    head = read_head()
    if head is not None:
        return head.address
    latest = latest_started()
    return latest if latest and not _why_silent(latest) else None


def latest_started() -> str | None:
    """Return the address that `ray start` stored last on this machine; None if no address is stored. The cluster may
    have stopped after its address was stored."""
    try:
        return latest_started_file().read_text().strip() or None
    except OSError:
        return None


def latest_started_file() -> Path:
    """Return the path of the file in which Ray stores the address of the cluster that was started last."""
    return Path(get_ray_address_file(None))


def _refuse_other_cluster(address: str | None) -> None:
    """Raise ClientStateError if this process is connected to a Ray cluster at another address than `address`."""
    connected = ray.get_runtime_context().gcs_address
    if address in (None, "auto") or _is_same_place(address, connected):
        return
    raise ClientStateError(
        f"this process is connected to the Ray cluster at {connected}, and cannot connect to {address} as well: leave "
        "the address out, or call ray.shutdown() first"
    )


def _is_same_place(one: str, other: str) -> bool:
    """Return True if two addresses host:port can name the same port of the same machine. A loopback address can name
    any machine, because Ray itself replaces it by the machine's address."""
    (one_host, _, one_port), (other_host, _, other_port) = one.rpartition(":"), other.rpartition(":")
    if one_port != other_port:
        return False
    places, other_places = _places_of(one_host), _places_of(other_host)
    return any(ip_address(place).is_loopback for place in places | other_places) or bool(places & other_places)


def _places_of(host: str) -> set[str]:
    """Return the IP addresses of a host name; empty if the name is unknown."""
    try:
        return {str(found[4][0]).partition("%")[0] for found in socket.getaddrinfo(host.strip("[]"), None)}
    except OSError:
        return set()


def _why_silent(address: str) -> str:
    """Return the reason why no process can be reached at host:port; empty if a process listens there."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return "write the address as host:port, such as 10.0.0.1:6379"
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""
