"""Samples of the last hour: counters of the cluster, of each topic and of each group, in bounded memory. No clock: each
sample contains its time.

Each NamedHistory keeps at most HISTORIES_MAX names, with 8 bytes for each sample: 1.5 MB for all topics, and 1.5 MB for
all groups.

Also sparklines (small charts): a series of numbers as the points of an SVG polyline.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final

SPARK_WIDTH: Final = 90
SPARK_HEIGHT: Final = 20
SPARK_POINTS_MAX: Final = 45
"""Maximum number of points in a sparkline (small chart): one for every two pixels."""


def spark_points(figures: Sequence[float | None]) -> str:
    """Convert a series of numbers to the points of an SVG polyline: `x,y` pairs separated by spaces. The newest number
    is at the right end, the largest at the top, 0 at the bottom. If there are too many numbers, adjacent ones are
    averaged. Unknown values (None) are left out. Returns "" if fewer than two points are known.

    >>> spark_points([0, 5, 10])
    '0,19 45,10 90,1'
    """
    size = -(-len(figures) // SPARK_POINTS_MAX) or 1
    means: list[float | None] = []
    for end in range(len(figures), 0, -size):
        known = [one for one in figures[max(end - size, 0) : end] if one is not None]
        means.append(sum(known) / len(known) if known else None)
    means.reverse()
    highest = max((one for one in means if one is not None), default=0.0) or 1.0
    step = SPARK_WIDTH / max(len(means) - 1, 1)
    points = [
        f"{index * step:.3g},{SPARK_HEIGHT - 1 - (SPARK_HEIGHT - 2) * one / highest:.3g}"
        for index, one in enumerate(means)
        if one is not None
    ]
    return " ".join(points) if len(points) > 1 else ""


SAMPLE_INTERVAL_S: Final = 10.0
HISTORY_S: Final = 3600.0
SAMPLES_MAX: Final = int(HISTORY_S / SAMPLE_INTERVAL_S) + 1
HISTORIES_MAX: Final = 500
"""Maximum number of topics for which a history of values is kept. The same limit applies to groups."""
_NOT_KNOWN: Final = -1


@dataclass(frozen=True, slots=True)
class ClusterFigures:
    """A sample of the whole cluster's counters. Each counter grows from the start of its server until the server
    restarts.

    `messages_in`, `bytes_in`: messages and bytes stored in topics. `messages_out`: messages committed by groups.
    `dead_letters` and `delayed` are current numbers of messages, not counters. `at_ms`: the time of the sample.
    `topic_messages`: messages stored in each topic. `group_lags`: messages that each group currently has not committed.
    """

    at_ms: int
    messages_in: int
    messages_out: int
    bytes_in: int
    dead_letters: int = 0
    delayed: int = 0
    topic_messages: Mapping[str, int] = field(default_factory=dict)
    group_lags: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RatePoint:
    """Rates per second between two samples of the cluster's counters; `at_ms` is the time of the later sample. A rate
    is None if its counter shrank because a server restarted."""

    at_ms: int
    messages_in: float | None
    messages_out: float | None
    bytes_in: float | None


class NamedHistory:
    """The samples of the last hour of one value per name (topic or group), for up to HISTORIES_MAX names. A name is
    dropped when a sample does not contain it. If fewer than HISTORIES_MAX names remain, the new names with the largest
    values are added."""

    def __init__(self) -> None:
        self._times: deque[int] = deque(maxlen=SAMPLES_MAX)
        self._values: dict[str, array[int]] = {}
        """For each topic or group name, its values at the times in `_times`, in the same order."""

    def add(self, at_ms: int, values: Mapping[str, int]) -> None:
        """Add a sample: the values of all topics or groups at time `at_ms`."""
        self._times.append(at_ms)
        self._values = {name: series for name, series in self._values.items() if name in values}
        new = sorted(values.keys() - self._values.keys(), key=lambda name: (-values[name], name))
        for name in new[: HISTORIES_MAX - len(self._values)]:
            self._values[name] = array("q", [_NOT_KNOWN]) * (len(self._times) - 1)
        for name, series in self._values.items():
            series.append(values[name])
            del series[: -len(self._times)]

    def values(self, name: str) -> list[tuple[int, int | None]]:
        """Return the samples of a topic or group, oldest first, as (time in ms since 1970, value). The value is None
        for times before the name existed. Returns an empty list if the name has no history."""
        series = self._values.get(name, ())
        return [(at, None if value == _NOT_KNOWN else value) for at, value in zip(self._times, series, strict=False)]

    def growth(self, name: str) -> list[float | None]:
        """Return the growth per second of a topic's or group's value between adjacent samples. The growth is None if it
        is unknown, or if the value shrank because its server restarted."""
        return [
            None
            if old is None or new is None or new < old or after == before
            else (new - old) * 1000 / (after - before)
            for (before, old), (after, new) in pairwise(self.values(name))
        ]


class RateHistory:
    """The samples of the cluster's counters in the last hour, oldest first. `topics`: the messages stored in each
    topic. `groups`: the lag of each group."""

    def __init__(self) -> None:
        self._samples: deque[ClusterFigures] = deque(maxlen=SAMPLES_MAX)
        self.topics = NamedHistory()
        self.groups = NamedHistory()

    def add(self, sample: ClusterFigures) -> None:
        """Add a sample of the cluster's counters. Samples that are not newer than the last sample are ignored."""
        if not self._samples or sample.at_ms > self._samples[-1].at_ms:
            self.topics.add(sample.at_ms, sample.topic_messages)
            self.groups.add(sample.at_ms, sample.group_lags)
            self._samples.append(replace(sample, topic_messages={}, group_lags={}))

    @property
    def newest(self) -> ClusterFigures | None:
        """The newest sample of the cluster's counters, without the values of topics and groups; None if no sample was
        taken."""
        return self._samples[-1] if self._samples else None

    def points(self) -> Sequence[RatePoint]:
        """Return the rates between each two adjacent samples of the cluster's counters, oldest first."""
        return [_rates(before, after) for before, after in pairwise(self._samples)]


def _rates(before: ClusterFigures, after: ClusterFigures) -> RatePoint:
    seconds = (after.at_ms - before.at_ms) / 1000

    def rate(old: int, new: int) -> float | None:
        return (new - old) / seconds if new >= old else None

    return RatePoint(
        after.at_ms,
        rate(before.messages_in, after.messages_in),
        rate(before.messages_out, after.messages_out),
        rate(before.bytes_in, after.bytes_in),
    )
