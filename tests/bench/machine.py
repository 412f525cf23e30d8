"""Measurements of the machine that runs a benchmark: CPU time and memory of processes, and memory for the page
cache."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil


def touch_memory(directory: Path, size: int) -> None:
    """Fill the page cache with `size` bytes and free them again, so that the page cache uses memory that the machine
    has used before.

    In a virtual machine the first use of a memory page costs 10 us and more, which would hide the store's own cost.
    """
    path = directory / "touch"
    with path.open("wb", buffering=0) as file:
        for _ in range(size >> 20):
            file.write(bytes(1 << 20))
    path.unlink()


def processes(without: set[int] = frozenset()) -> list[psutil.Process]:  # type: ignore[assignment]
    """Return this process and all its descendants, except the processes in `without` and their descendants."""
    me = psutil.Process()
    left_out = set(without)
    for pid in without:
        if psutil.pid_exists(pid):
            left_out |= {child.pid for child in psutil.Process(pid).children(recursive=True)}
    return [process for process in (me, *me.children(recursive=True)) if process.pid not in left_out]


def cpu_s(without: set[int] = frozenset()) -> float:  # type: ignore[assignment]
    """Return the CPU time in s that all `processes` have used: this process and its descendants, except the processes
    in `without`. Processes that have ended do not count."""
    return _others_cpu_s(without) + time.process_time()


def timed(work: Callable[[], object], without: set[int]) -> tuple[float, float]:
    """Return the duration of `work` in s, and the CPU time in s that this process and its descendants use during
    `work`, except the processes in `without`.

    Reading the CPU times of other processes costs this process some milliseconds, which the results do not include.
    """
    others_s, own_s, start_s = _others_cpu_s(without), time.process_time(), time.perf_counter()
    work()
    seconds, own_s = time.perf_counter() - start_s, time.process_time() - own_s
    return seconds, own_s + _others_cpu_s(without) - others_s


def _others_cpu_s(without: set[int]) -> float:
    """Return the CPU time in s of this process's descendants, except the processes in `without`."""
    total = 0.0
    for process in processes(without):
        if process.pid != os.getpid():
            with suppress(psutil.NoSuchProcess):
                total += process_cpu_s(process.pid)
    return total


def cpu_of(pid: int) -> float | None:
    """Return the CPU time that a process has used, in s; None if the process has ended."""
    try:
        return process_cpu_s(pid)
    except psutil.NoSuchProcess:
        return None


def process_cpu_s(pid: int | None = None) -> float:
    """Return the CPU time in s that a single process has used; without `pid`, of this process."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def server_name(process: psutil.Process) -> str:
    """Return a readable name of a process: the Ray actor's class, or the program."""
    try:
        line = process.cmdline()
    except psutil.Error:
        return "?"
    if not line:
        return process.name()
    return line[0] if line[0].startswith("ray::") else Path(line[0]).name


def own_memory_mib(process: psutil.Process) -> float:
    """Return the memory of a process except mapped files (RssAnon), in MiB.

    Pages of mapped files belong to the page cache, and the kernel reclaims them when necessary.
    """
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    [kib] = [line.split()[1] for line in lines if line.startswith("RssAnon:")] or ["0"]
    return int(kib) / 1024


def copy_bytes_per_s(directory: Path, data: bytes, seconds: float = 0.3) -> float:
    """Return the speed of copying `data` into a mapped file whose pages are all present, in bytes per s."""
    path = directory / "baseline"
    with path.open("w+b") as file:
        file.truncate(256 << 20)
        mapped = mmap.mmap(file.fileno(), 256 << 20)
        for page in range(0, len(mapped), mmap.PAGESIZE):
            mapped[page] = 1
        position = copied = 0
        start = time.perf_counter()
        while (elapsed := time.perf_counter() - start) < seconds:
            if position + len(data) > len(mapped):
                position = 0
            mapped[position : position + len(data)] = data
            position += len(data)
            copied += len(data)
        mapped.close()
    path.unlink()
    return copied / elapsed


def latencies_us(call: Callable[[], object], count: int, pause_s: float = 0.0) -> list[float]:
    """Return the durations of `count` calls in us, in ascending order."""
    times = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
        if pause_s:
            time.sleep(pause_s)
    return sorted(times)
