"""Injects faults into the processes of raymq's servers. Python imports this module at the start of each process whose
import path contains this module's directory.

Marker files switch faults on, in stores' directories and in the directory FAULTS that RAYMQ_TEST_FAULTS names:

    STORE/flush, write, read     fdatasync, pwrite, reads of the store's log and queues fail with EIO
    STORE/bus                    the next access to a mapped file ends the process by SIGBUS, and preads fail with EIO
    FAULTS/clock                 the error of the clock of a server that starts now, in s
    FAULTS/wrong-PID             a process whose clock is wrong
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

FAULTS = os.environ["RAYMQ_TEST_FAULTS"]
STORES = os.environ["RAYMQ_TEST_STORES"]
_REAL = {name: getattr(os, name) for name in ("fdatasync", "pwrite", "pread", "stat")}


def _has(path: str, *markers: str) -> bool:
    """Return True if this process is a storage process, and the store that contains `path` has one of the
    marker files."""
    if not path.startswith(STORES) or "storage.message_store" not in sys.modules:
        return False
    name = path[len(STORES) :].strip("/").split("/")[0]
    return any(_exists(f"{STORES}/{name}/{marker}") for marker in markers)


def _exists(path: str) -> bool:
    try:
        _REAL["stat"](path)
    except FileNotFoundError:
        return False
    return True


def _fail() -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def _fdatasync(descriptor: int) -> None:
    if _has(os.readlink(f"/proc/self/fd/{descriptor}"), "flush"):
        _fail()
    _REAL["fdatasync"](descriptor)


def _pwrite(descriptor: int, *rest: Any) -> int:
    if _has(os.readlink(f"/proc/self/fd/{descriptor}"), "write"):
        _fail()
    written: int = _REAL["pwrite"](descriptor, *rest)
    return written


def _pread(descriptor: int, *rest: Any) -> bytes:
    if _has(os.readlink(f"/proc/self/fd/{descriptor}"), "read", "bus"):
        _fail()
    data: bytes = _REAL["pread"](descriptor, *rest)
    return data


def _stat(path: Any, *rest: Any, **more: Any) -> os.stat_result:
    """Replacement for `os.stat` that injects faults. raymq calls `os.stat` before each use of a memory map
    (raymq.records.logfiles.file_maps)."""
    caller = sys._getframe(1).f_code
    if caller.co_name == "get" and caller.co_filename.endswith("file_maps.py"):
        if _has(str(path), "bus"):
            os.kill(os.getpid(), signal.SIGBUS)
        if _has(str(path), "read"):
            _fail()
    found: os.stat_result = _REAL["stat"](path, *rest, **more)
    return found


class _SetClock(MetaPathFinder):
    """An import hook that sets the clock of a process when the process imports `actors`. Only servers import
    `actors`."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> None:
        if name == "actors" and _exists(f"{FAULTS}/clock"):
            sys.meta_path.remove(self)
            with open(f"{FAULTS}/clock") as file:
                _set_clock(float(file.read()))


def _set_clock(wrong_s: float) -> None:
    real_s, real_ns = time.time, time.time_ns
    time.time = lambda: real_s() + wrong_s
    time.time_ns = lambda: real_ns() + int(wrong_s * 1e9)
    with open(f"{FAULTS}/wrong-{os.getpid()}", "w"):
        pass


os.fdatasync, os.pwrite, os.pread, os.stat = _fdatasync, _pwrite, _pread, _stat  # type: ignore[assignment]
sys.meta_path.insert(0, _SetClock())
