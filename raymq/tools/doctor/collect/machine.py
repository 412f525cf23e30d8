"""Collects facts about the machine of this process: versions, import path, token, limits, store directories.

The facts about a directory are its disk, its file system, its permissions, the locks of its stores, and the duration of
a flush. The temporary file for the test flushes has no name, so it disappears when it is closed.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import math
import os
import platform
import resource
import socket
import stat
import struct
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import Final

import psutil
import ray
from ray._common.utils import get_default_ray_temp_dir

from raymq.client.cluster.java import find_java, java_on_path, needed_java
from raymq.client.cluster.server_path import floors
from raymq.common.extras import missing_packages
from raymq.tools.doctor.facts import DirectoryFacts, MachineFacts

FLUSHES: Final = 50
_BLOCK: Final = bytes(4096)
FLUSHES_MAX_S: Final = 5.0
"""Time limit in seconds for all test flushes in one directory."""
FILES_LOOKED_AT_MAX: Final = 20_000
FILES_SHOWN_MAX: Final = 3
_FS_IOC_FIEMAP: Final = 0xC020660B
_FIEMAP: Final = struct.Struct("=QQLLLL")
"""Layout of a FIEMAP request (linux/fiemap.h): start, length, flags, number of extents, number of extents that the
reply can hold, reserved."""


def collect_directory(path: Path, max_used_ratio: float, refuse_ratio: float) -> DirectoryFacts:
    """Collect the facts about the store directory `path`, which need not exist. An OSError is not raised; its text is
    stored in `error`."""
    existing_path = path
    while not existing_path.exists() and existing_path != existing_path.parent:
        existing_path = existing_path.parent
    try:
        return _directory_facts(path, existing_path, max_used_ratio, refuse_ratio)
    except OSError as error:
        reason = f"{existing_path} cannot be used: {error.strerror or error}"
        return DirectoryFacts(str(path), str(existing_path), exists=path.exists(), error=reason)


def _directory_facts(path: Path, existing_path: Path, max_used_ratio: float, refuse_ratio: float) -> DirectoryFacts:
    space = os.statvfs(existing_path)
    used, available = (space.f_blocks - space.f_bfree) * space.f_frsize, space.f_bavail * space.f_frsize
    exists = path.is_dir()
    writable = os.access(existing_path, os.W_OK | os.X_OK)
    fiemap, times = _try_out(existing_path) if writable else (None, ())
    strangers = list(readable_by_others(path)) if exists else []
    return DirectoryFacts(
        str(path),
        str(existing_path),
        exists=exists,
        file_system=_file_system(existing_path),
        owner_uid=existing_path.stat().st_uid,
        uid=os.geteuid(),
        writable=writable,
        used_ratio=math.ceil(100 * used / max(used + available, 1)) / 100,
        free_bytes=available,
        max_used_ratio=max_used_ratio,
        refuse_ratio=refuse_ratio,
        readable=tuple(str(one) for one in strangers[:FILES_SHOWN_MAX]),
        readable_count=len(strangers),
        locks=_locks(path) if exists else {},
        fiemap=fiemap,
        fdatasync_ms=times,
    )


def readable_by_others(root: Path) -> Iterator[Path]:
    """Yield `root`, and the files and directories below it, if other users may access them. Symbolic links are
    skipped."""
    for path in islice(_walk(root), FILES_LOOKED_AT_MAX):
        try:
            if path.lstat().st_mode & 0o077 and not path.is_symlink():
                yield path
        except FileNotFoundError:
            continue  # The file was deleted after its directory was listed, for example by a running store.


def _walk(root: Path) -> Iterator[Path]:
    yield root
    for folder, folders, files in os.walk(root):
        yield from (Path(folder, name) for name in (*folders, *files))


def _file_system(path: Path) -> str:
    """Return the type of the file system that contains `path`, by the kernel's name for it."""
    mounts = [one for one in psutil.disk_partitions(all=True) if path.resolve().is_relative_to(one.mountpoint)]
    return max(mounts, key=lambda one: len(one.mountpoint)).fstype if mounts else ""


def _locks(root: Path) -> dict[str, int]:
    """Return the locked store directories below `root`, each with the pid of the process that holds the lock of its
    file `lock`.

    The locks are read from the kernel's list. It would be wrong to test a lock by taking it: a store could not open
    while this process held the lock.
    """
    stores = {path.stat().st_ino: path.parent.name for path in root.glob("*/lock")}
    held: dict[str, int] = {}
    for line in Path("/proc/locks").read_text().splitlines():
        words = line.split()
        if len(words) < 6 or "->" in words or words[1] not in ("FLOCK", "POSIX"):
            continue
        inode = int(words[-3].rpartition(":")[2])
        if inode in stores:
            held[stores[inode]] = int(words[-4])
    return held


def _try_out(directory: Path) -> tuple[bool | None, tuple[float, ...]]:
    """Return whether the directory's file system supports FIEMAP (None if unknown), and the durations in ms of up to
    FLUSHES small flushes, ascending."""
    with tempfile.TemporaryFile(dir=directory) as file:
        times_ms = timed_flushes(file.fileno())
        return _knows_fiemap(file.fileno()), times_ms


def timed_flushes(descriptor: int, max_s: float = FLUSHES_MAX_S) -> tuple[float, ...]:
    """Write and flush up to FLUSHES blocks of 4 KiB at the start of a file, for at most about `max_s`. Returns the
    durations of the flushes (fdatasync) in ms, ascending. Overwrites the first bytes of the file."""
    times_ms = []
    until_s = time.monotonic() + max_s
    for index in range(FLUSHES):
        os.pwrite(descriptor, _BLOCK, index * len(_BLOCK))
        started_s = time.perf_counter()
        os.fdatasync(descriptor)
        times_ms.append((time.perf_counter() - started_s) * 1000)
        if time.monotonic() > until_s:
            break
    return tuple(sorted(times_ms))


def _knows_fiemap(descriptor: int) -> bool | None:
    # If a FIEMAP request has no space for extents in the reply, the kernel only counts them.
    request = bytearray(_FIEMAP.pack(0, 4096, 0, 0, 0, 0))
    try:
        fcntl.ioctl(descriptor, _FS_IOC_FIEMAP, request)
    except OSError as error:
        return False if error.errno in (errno.EOPNOTSUPP, errno.ENOTTY, errno.ENOSYS, errno.EINVAL) else None
    return True


SERVER_PACKAGES: Final = ("storage", "actors", "placement")
_LONGEST_SOCKET: Final = "session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store"
"""The path of the socket with the longest name, relative to Ray's temporary directory, for a process id of seven
digits."""


def collect_machine(
    directories: Iterable[Path], max_used_ratio: float, refuse_ratio: float, *, in_ray: bool = False
) -> MachineFacts:
    """Return the facts about this machine and these store directories; collecting them takes a few seconds at
    most.

    `in_ray`: this process belongs to Ray, so Spark uses the `java` on its PATH. Any other process reports the Java
    with which `raymq up` starts Ray.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    socket_path = f"{get_default_ray_temp_dir()}/{_LONGEST_SOCKET}"
    token = token_path()
    need = needed_java()
    java = java_on_path() if in_ray else find_java() or java_on_path()
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
        spark=not missing_packages("spark"),
        java_home=java.home if java else "",
        java_version=java.version if java else "",
        java_need=str(need),
        java_problem=need.problem(java) if java else "",
        java_released=java.released if java else "",
        java_age_days=_days_since(java.released) if java else None,
        directories=tuple(collect_directory(path, max_used_ratio, refuse_ratio) for path in directories),
    )


def _days_since(day: str) -> int | None:
    """Return the number of days since a date in ISO form; None if the text is no date."""
    try:
        return (date.today() - date.fromisoformat(day)).days
    except ValueError:
        return None


def token_path() -> Path:
    """Return the path of the file that contains this user's Ray token."""
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser()


def _raymq_version() -> str:
    try:
        return version("raymq")
    except PackageNotFoundError:
        return "not installed"


def _copies(package: str) -> tuple[str, ...]:
    """Return the folders of the Python import path that contain the package `package`, in order, without
    repeats."""
    folders = [Path(entry or ".").resolve() for entry in sys.path]
    return tuple(dict.fromkeys(str(folder) for folder in folders if (folder / package / "__init__.py").is_file()))


def _mode(path: Path) -> int | None:
    try:
        return stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return None


def _digest(token: Path) -> str:
    """Return a short digest of this user's Ray token; empty without a token. As in Ray, the environment variable
    RAY_AUTH_TOKEN has precedence over the file `token`."""
    text = os.environ.get("RAY_AUTH_TOKEN", "")
    if not text:
        try:
            text = token.read_text().strip()
        except OSError:
            return ""
    return hashlib.sha256(b"raymq doctor " + text.encode()).hexdigest()[:12]


def _port_error() -> str:
    """Return the reason why no port can be opened on this machine; empty if a port can be opened."""
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
