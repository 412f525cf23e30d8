"""Benchmark of memory: measures an idle client's process and each server's process. Mapped files do not count."""

from __future__ import annotations

import os
from collections.abc import Iterator

import raymq
from tests.bench.cluster import workers
from tests.bench.figures import Figure, Sample
from tests.bench.machine import own_memory_mib, processes, server_name


def memory(client: raymq.Client) -> Iterator[Figure]:
    """Yield the memory of each server of raymq, and of a worker process with an idle client."""
    with workers(1):
        found = sorted(
            (server_name(process), own_memory_mib(process)) for process in processes() if process.pid != os.getpid()
        )
    for name, mib in found:
        if name.startswith("ray::") and not name.startswith("ray::IDLE"):
            what = "an idle client's worker process" if "Worker" in name else name.removeprefix("ray::").split(".")[0]
            yield Figure("memory", what, "MiB", False, ours=[Sample(mib)])
