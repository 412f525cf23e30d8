"""Measures what the disk and the machine of a raymq bench can do, and collects the settings of its broker groups.

The figures explain those of raymq: a store that flushes each message is as fast as the disk's flushes. The disk is
measured in a temporary file without a name, so nothing is left if the command is killed.
"""

from __future__ import annotations

import os
import platform
import socket
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import psutil

from raymq.common.errors import InvalidArgumentError, RaymqError
from raymq.tools.bench.latencies import percentile
from raymq.tools.doctor.collect.machine import timed_flushes

DISK_BYTES: Final = 64 << 20
DISK_MAX_S: Final = 1.5
"""Time limit in s for the sequential writes on each disk."""
FLUSHES_S: Final = 1.0
"""Time limit in s for the small flushes on each disk."""
_BLOCK_BYTES: Final = 1 << 20
_BLOCKS_PER_FLUSH: Final = 8
DISKS_MAX: Final = 4
"""Maximum number of directories whose disk is measured."""
FREE_FACTOR: Final = 2
"""How many times the bytes of a run must be free on the disk of a store of this machine."""


@dataclass(frozen=True, slots=True)
class BrokerSetup:
    """The settings of a broker group. `local`: True if its master is on this machine's node. `flush`: the setting
    flush_disk_type; None if unknown. `replicas`: number of copies. `min_in_sync`: how many of them acknowledge a
    message; None if unknown. `error`: why a value is unknown."""

    broker: str
    replicas: int
    local: bool
    flush: str | None = None
    min_in_sync: int | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class DiskFigures:
    """The speed of the disk with a store's directory: sequential writes of `written_bytes` with a flush (fdatasync)
    after each 8 MiB, and percentiles of flushes of 4 KiB, in ms. `error`: why the disk was not measured."""

    directory: str
    written_bytes: int = 0
    write_bytes_per_s: float = 0.0
    flush_p50_ms: float = 0.0
    flush_p99_ms: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True)
class MachineFigures:
    """The machine of the command. `cores`: the processor cores that this process may use. `load`: the load averages of
    the last minute, before and after the phases."""

    host: str
    cores: int
    memory_bytes: int
    load: tuple[float, float]
    kernel: str
    python: str
    raymq: str


def machine_figures(load_before: float) -> MachineFigures:
    """Return the facts about this machine. `load_before`: the load average before the phases."""
    return MachineFigures(
        host=socket.gethostname(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().total,
        load=(load_before, os.getloadavg()[0]),
        kernel=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        raymq=version("raymq"),
    )


def broker_setups(client: Any) -> list[BrokerSetup]:
    """Return the settings of each broker group, by name. A group whose settings cannot be read has an `error`."""
    found = []
    for name, data in sorted(client.admin.brokers().items()):
        setup = name, len(data.storages), data.nodes.get(min(data.storages, default=0)) == client.node_id
        try:
            settings = client.admin.config(name)[name].effective
        except RaymqError as error:
            found.append(BrokerSetup(*setup, error=str(error)))
            continue
        least = settings.get("replication.min_in_sync_replicas", 1)
        found.append(BrokerSetup(*setup, str(settings["store.flush_disk_type"]), int(least)))
    return found


def local_directories(client: Any) -> list[Path]:
    """Return a directory of the stores on each disk (device) of this machine that a store uses. A store that does not
    answer, or whose directory this user cannot see, is left out."""
    found: dict[int, Path] = {}
    for data in client.admin.brokers().values():
        for replica, actor in sorted(data.storages.items()):
            if data.nodes.get(replica) != client.node_id:
                continue
            try:
                description = client.storages.get(actor).describe()
            except RaymqError:
                continue  # the command measures the other stores' disks; `raymq status` shows the reason
            for path in (Path(description.root).parent, *map(Path, description.commit_log_directories)):
                if path.is_absolute() and path.is_dir():
                    found.setdefault(path.stat().st_dev, path)
    return list(found.values())[:DISKS_MAX]


def check_free_space(directories: Iterable[Path], wanted_bytes: int) -> None:
    """Raise InvalidArgumentError if a disk of this machine has less than FREE_FACTOR times `wanted_bytes` free."""
    for directory in directories:
        space = os.statvfs(directory)
        free = space.f_bavail * space.f_frsize
        if free < FREE_FACTOR * wanted_bytes:
            raise InvalidArgumentError(
                f"the run may write {wanted_bytes >> 20:,} MiB, and the disk of {directory} has only "
                f"{free >> 20:,} MiB free: choose smaller --messages or --size"
            )


def measure_disk(
    directory: Path,
    *,
    size: int = DISK_BYTES,
    max_s: float = DISK_MAX_S,
    clock_s: Callable[[], float] = time.perf_counter,
) -> DiskFigures:
    """Measure the disk with `directory`: write up to `size` bytes in order, for at most about `max_s`, then small
    flushes. An OSError, such as a missing permission, is not raised; its text is in `error`."""
    block = os.urandom(_BLOCK_BYTES)
    written = 0
    try:
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            start_s = clock_s()
            while written < size and clock_s() - start_s < max_s:
                for _ in range(_BLOCKS_PER_FLUSH):
                    written += file.write(block)
                os.fdatasync(file.fileno())
            seconds = clock_s() - start_s
            flushes_ms = timed_flushes(file.fileno(), FLUSHES_S)
    except OSError as error:
        return DiskFigures(str(directory), error=f"{directory} cannot be written: {error.strerror or error}")
    return DiskFigures(
        str(directory), written, written / seconds, percentile(flushes_ms, 50), percentile(flushes_ms, 99)
    )
