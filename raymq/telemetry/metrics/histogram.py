"""A histogram that counts in plain Python numbers. A Reporter converts it into Prometheus series."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raymq.telemetry.metrics.instruments import INSTRUMENTS


class HistogramFigures(NamedTuple):
    """A snapshot of a histogram. `counts`: for each bound, the number of values above the previous bound and up to this
    bound; the last count is for values above all bounds. `sum`: the sum of all values."""

    counts: tuple[int, ...]
    sum: float


class Histogram:
    """The distribution of one metric's values since the process started. Thread-safe. Adding a value takes less than a
    microsecond; callers add one value per batch."""

    def __init__(self, name: str) -> None:
        """`name`: the name of a histogram in the table of metrics (instruments.py). Raises KeyError if the table has no
        such histogram."""
        self._bounds = INSTRUMENTS[name].bounds
        self._lock = threading.Lock()
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Add a value to the histogram, `times` times."""
        index = bisect_left(self._bounds, value)
        with self._lock:
            self._counts[index] += times
            self._sum += value * times

    def add_many(self, values: Sequence[float] | NDArray[np.float64], times: Sequence[int] | None = None) -> None:
        """Add several values to the histogram. `times[i]` is the number of times that value i is counted; by default
        each value is counted once."""
        if not len(values):
            return
        indices = np.searchsorted(self._bounds, values)
        counts = np.bincount(indices, times, len(self._counts)).astype(np.int64).tolist()
        total = float(np.dot(values, np.ones(len(values)) if times is None else times))
        with self._lock:
            self._counts = [count + more for count, more in zip(self._counts, counts, strict=True)]
            self._sum += total

    def figures(self) -> HistogramFigures:
        """Return a snapshot of the histogram's counts and sum."""
        with self._lock:
            return HistogramFigures(tuple(self._counts), self._sum)
