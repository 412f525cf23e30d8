"""Percentiles of latencies, for `raymq bench` and for the benchmarks of the repository (tests/bench)."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

PERCENTS: Final = (50.0, 99.0, 99.9, 100.0)
"""The percentiles in a LatencySummary, in the order of its fields."""


def percentile(values: Sequence[float] | NDArray[np.float64], percent: float) -> float:
    """Return a percentile of `values`: the smallest value such that `percent` percent of all values are not greater.

    The result is one of the values, and no mean of two values. Raises IndexError if `values` is empty.
    """
    return _at(np.sort(values), percent)


def _at(ascending: NDArray[np.float64], percent: float) -> float:
    rank = math.ceil(round(len(ascending) * percent / 100, 6))  # rounded, because 99.9 has no exact float
    return float(ascending[max(rank, 1) - 1])


class LatencySummary(NamedTuple):
    """Percentiles of latencies, in ms. With fewer than 1,000 latencies `p999_ms` is the longest latency."""

    p50_ms: float
    p99_ms: float
    p999_ms: float
    max_ms: float


def summarize(parts_s: Iterable[array[float]]) -> LatencySummary | None:
    """Return the percentiles of the latencies in `parts_s`, which are in s, over all parts together. Returns None if
    all parts are empty."""
    values_s = np.sort(np.concatenate([np.zeros(0), *(np.frombuffer(part, np.float64) for part in parts_s if part)]))
    if not len(values_s):
        return None
    return LatencySummary(*(_at(values_s, percent) * 1000 for percent in PERCENTS))
