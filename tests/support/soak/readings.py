"""Reads the memory, descriptors and threads of raymq's processes, and decides whether one of them grows.

Memory is memory without mapped files (RssAnon): pages of mapped files belong to the page cache. A killed process has a
successor with less memory. So growth is judged twice: over all servers together, and over the life of each process.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

import psutil

from tests.bench.machine import own_memory_mib
from tests.support.clusters.cluster import descendants, title

SERVERS: Final = ("NameServer", "Controller", "Broker", "Storage", "Replicator", "Rebalance")
CLIENTS: Final = ("LoadProducer", "LoadConsumer")
MEASURES: Final = ("memory_mib", "descriptors", "threads", "maps")
GROWTH_MAX: Final = 0.05
SMALL: Final = {"memory_mib": 4.0, "descriptors": 6.0, "threads": 4.0, "maps": 24.0}
"""Growth of a process that is not judged, whatever its share: a few connections or buffers more."""
WARM_S: Final = 240.0
"""Age from which a process counts as warm. A younger process fills its caches, and a store deletes nothing in its first
minute, so its files become more until the topic's messages expire."""
READINGS_MIN: Final = 6
"""Minimum number of readings of a warm process for a judgement of its growth."""


class Reading(NamedTuple):
    """One process at one time: its kind (the class of its actor), process id, age in s, memory in MiB without mapped
    files and with them, and its numbers of open descriptors, threads and mapped regions."""

    kind: str
    pid: int
    age_s: float
    memory_mib: float
    resident_mib: float
    descriptors: int
    threads: int
    maps: int


def read_processes(kinds: Sequence[str]) -> list[Reading]:
    """Return a reading of each process of the actors of these kinds. Processes that end during the reading are left
    out."""
    readings = []
    for process in descendants():
        kind = title(process).removeprefix("ray::").split(".")[0]
        if kind in kinds:
            try:
                readings.append(_read(kind, process))
            except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
                continue  # the process was killed after it was listed
    return sorted(readings)


def _read(kind: str, process: psutil.Process) -> Reading:
    maps = Path(f"/proc/{process.pid}/maps").read_text().count("\n")
    resident = process.memory_info().rss / (1 << 20)
    age_s = time.time() - process.create_time()
    return Reading(
        kind,
        process.pid,
        age_s,
        own_memory_mib(process),
        resident,
        process.num_fds(),
        process.num_threads(),
        maps,
    )


def total(readings: Iterable[Reading], measure: str, kinds: Sequence[str] = SERVERS) -> float:
    """Return the sum of a measure over all processes of these kinds."""
    return float(sum(getattr(one, measure) for one in readings if one.kind in kinds))


def change(first: Sequence[float], last: Sequence[float]) -> float:
    """Return the growth from the median of `first` to the median of `last`, as a share of the former."""
    before = median(first)
    return (median(last) - before) / before if before else 0.0


class Growth(NamedTuple):
    """The growth of one measure of a process over its warm life: the median, the increase over this life by the median
    slope, and the life's length in s."""

    kind: str
    pid: int
    measure: str
    median: float
    increase: float
    life_s: float

    @property
    def excessive(self) -> bool:
        """Return whether the process has grown by more than 5 %, and by more than a few connections or buffers."""
        return self.increase > max(GROWTH_MAX * self.median, SMALL[self.measure])

    def __str__(self) -> str:
        return (
            f"{self.kind} ({self.pid}): {self.measure} {self.increase:+.1f} at {self.median:.1f} in {self.life_s:.0f} s"
        )


def growths(minutes: Iterable[Sequence[Reading]], *, warm_s: float = WARM_S) -> list[Growth]:
    """Return the growth of each process that was read at least READINGS_MIN times while it was warm.

    The slope is the median over all pairs of readings (Theil and Sen), which a few outliers do not change.
    """
    lives: defaultdict[tuple[str, int], list[Reading]] = defaultdict(list)
    for readings in minutes:
        for one in readings:
            if one.age_s >= warm_s:
                lives[one.kind, one.pid].append(one)
    found = []
    for (kind, pid), life in sorted(lives.items()):
        if len(life) < READINGS_MIN:
            continue
        life_s = life[-1].age_s - life[0].age_s
        for measure in MEASURES:
            values = [float(getattr(one, measure)) for one in life]
            slopes = [
                (values[later] - values[earlier]) / (life[later].age_s - life[earlier].age_s)
                for earlier, later in combinations(range(len(life)), 2)
            ]
            found.append(Growth(kind, pid, measure, median(values), median(slopes) * life_s, life_s))
    return found


def leaks(before: Sequence[Reading], after: Sequence[Reading], more: dict[str, float]) -> list[str]:
    """Compare the servers and clients of two times. Returns a sentence for each kind whose number of processes has
    changed, and for each process that has more of a measure than `more` beyond the largest process of its kind."""
    sentences = []
    for kind in sorted({one.kind for one in (*before, *after)}):
        old, new = ([one for one in readings if one.kind == kind] for readings in (before, after))
        if len(old) != len(new):
            sentences.append(f"{len(new)} processes of {kind}, {len(old)} before")
            continue
        for measure, allowed in more.items():
            most = max(getattr(one, measure) for one in old)
            sentences += [
                f"{kind} ({one.pid}) has {getattr(one, measure):g} {measure}, at most {most:g} before"
                for one in new
                if getattr(one, measure) > most + allowed
            ]
    return sentences
