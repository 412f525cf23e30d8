"""The Ray head that `raymq up` started on this machine, as noted in `~/.raymq/run/ray-head.json`.

A process id alone may have been given to another process since, so the file has its start time, too; only the process
with both is ours to end.
"""

from __future__ import annotations

import json
import signal
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import psutil

RAY_STOP_TIMEOUT_S: Final = 30.0
"""Bounds the wait for Ray's processes to end, before and after they are killed."""


@dataclass(frozen=True, slots=True)
class RayHead:
    """A `ray start --head --block` process and the address of its GCS."""

    pid: int
    create_time: float
    address: str

    def stop(self) -> None:
        """End the head and all processes below it, and delete the file."""
        family = _family(self)
        for process in family[:1]:
            process.send_signal(signal.SIGTERM)  # the head ends the others
        _, alive = psutil.wait_procs(family, timeout=RAY_STOP_TIMEOUT_S)
        for process in alive:
            process.kill()
        psutil.wait_procs(alive, timeout=RAY_STOP_TIMEOUT_S)
        _file().unlink(missing_ok=True)


def run_directory() -> Path:
    """The directory of the files about running servers, `~/.raymq/run`."""
    return Path("~/.raymq/run").expanduser()


def write_head(pid: int, address: str) -> RayHead:
    """Write the file about a head that was just started."""
    head = RayHead(pid, psutil.Process(pid).create_time(), address)
    _file().write_text(json.dumps(asdict(head)))
    return head


def read_head() -> RayHead | None:
    """The head that the file is about, None if it runs no longer or there is no file."""
    try:
        head = RayHead(**json.loads(_file().read_text()))
    except FileNotFoundError:
        return None
    return head if _family(head) else None


def _file() -> Path:
    return run_directory() / "ray-head.json"


def _family(head: RayHead) -> list[psutil.Process]:
    """The head's process first, then all below it; empty if it is gone."""
    try:
        process = psutil.Process(head.pid)
        if process.create_time() != head.create_time:
            return []
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
