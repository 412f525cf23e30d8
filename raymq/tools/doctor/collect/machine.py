"""Looks at the machine of this process: versions, import path, token, limits, and the directories of stores."""

from __future__ import annotations

import hashlib
import os
import platform
import resource
import socket
import stat
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import ray
from ray._common.utils import get_default_ray_temp_dir

from raymq.client.cluster.server_path import floors
from raymq.tools.doctor.collect.disk import look_at_directory
from raymq.tools.doctor.facts import MachineFacts

SERVER_PACKAGES: Final = ("storage", "actors", "placement")
_LONGEST_SOCKET: Final = "session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store"
"""The part of a socket's path below Ray's directory, with a process id of seven digits."""


def look_at_machine(directories: Iterable[Path], max_used_ratio: float, refuse_ratio: float) -> MachineFacts:
    """The facts about this machine and these directories of stores. Takes a few seconds at most."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    socket_path = f"{get_default_ray_temp_dir()}/{_LONGEST_SOCKET}"
    token = token_path()
    return MachineFacts(
        host=socket.gethostname(),
        python=platform.python_version(),
        ray=ray.__version__,
        raymq=_raymq_version(),
        copies={name: _copies(name) for name in ("raymq", "raydp_jobs")},
        floors_missing=tuple(name for name in SERVER_PACKAGES if not (floors() / name / "__init__.py").is_file()),
        auth_mode=os.environ.get("RAY_AUTH_MODE", ""),
        token_path=str(token),
        token_mode=_mode(token),
        token_digest=_digest(token),
        port_error=_port_error(),
        files_soft=soft,
        files_hard=hard,
        shm_bytes=_size_of(Path("/dev/shm")),
        socket_path=socket_path,
        socket_path_bytes=len(os.fsencode(socket_path)),
        directories=tuple(look_at_directory(path, max_used_ratio, refuse_ratio) for path in directories),
    )


def token_path() -> Path:
    """The file with Ray's token of this user."""
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser()


def _raymq_version() -> str:
    try:
        return version("raymq")
    except PackageNotFoundError:
        return "not installed"


def _copies(package: str) -> tuple[str, ...]:
    """The folders of the import path that have this package, in order, each once."""
    folders = [Path(entry or ".").resolve() for entry in sys.path]
    return tuple(dict.fromkeys(str(folder) for folder in folders if (folder / package / "__init__.py").is_file()))


def _mode(path: Path) -> int | None:
    try:
        return stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return None


def _digest(token: Path) -> str:
    """A few digits by which tokens can be told apart; empty without one. A token in RAY_AUTH_TOKEN wins, as in Ray."""
    text = os.environ.get("RAY_AUTH_TOKEN", "")
    if not text:
        try:
            text = token.read_text().strip()
        except OSError:
            return ""
    return hashlib.sha256(b"raymq doctor " + text.encode()).hexdigest()[:12]


def _port_error() -> str:
    """The reason why no port can be opened here; empty if one can."""
    try:
        with socket.create_server(("127.0.0.1", 0)):
            return ""
    except OSError as error:
        return str(error)


def _size_of(directory: Path) -> int | None:
    try:
        found = os.statvfs(directory)
    except OSError:
        return None
    return found.f_blocks * found.f_frsize
