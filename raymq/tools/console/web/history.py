"""The last hour: rings of samples of the cluster's counters, of each topic and of each group. Pure: a sample has its
time.

A ring holds at most HISTORIES_MAX names, with 8 bytes for each sample: 1.5 MB for all topics, and for all groups.

Sparklines: a row of figures as the points of an SVG polyline. Pure.
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
"""The most points: two pixels for each."""


def spark_points(figures: Sequence[float | None]) -> str:
    """The points, `x,y` with spaces between them, of figures from 0 on, the newest at the right end; the largest is at
    the top. Many figures become means of as many that follow each other. Those that are None are left out; without
    two that are known there are no points.

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
"""The most topics, and the most groups, that have a history."""
_NOT_KNOWN: Final = -1


@dataclass(frozen=True, slots=True)
class ClusterFigures:
    """Counters of the whole cluster since its servers started. A counter grows until a server restarts.

    `messages_in`, `bytes_in`: put into topics. `messages_out`: committed by groups. `dead_letters` and `delayed` are
    numbers of messages now, and no counters. `at_ms`: the time of the sample. `topic_messages`: put into each topic.
    `group_lags`: messages that each group has not committed now.
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
    """Rates per second between two samples, of which the later one is at `at_ms`. None if a counting server has
    restarted."""

    at_ms: int
    messages_in: float | None
    messages_out: float | None
    bytes_in: float | None


class NamedHistory:
    """The last hour of one figure of each name, for up to HISTORIES_MAX names. A name leaves when a sample lacks it;
    then new names follow, those with the largest figures first."""

    def __init__(self) -> None:
        self._times: deque[int] = deque(maxlen=SAMPLES_MAX)
        self._values: dict[str, array[int]] = {}
        """By name, a value for each time."""

    def add(self, at_ms: int, values: Mapping[str, int]) -> None:
        """Keep a sample."""
        self._times.append(at_ms)
        self._values = {name: series for name, series in self._values.items() if name in values}
        new = sorted(values.keys() - self._values.keys(), key=lambda name: (-values[name], name))
        for name in new[: HISTORIES_MAX - len(self._values)]:
            self._values[name] = array("q", [_NOT_KNOWN]) * (len(self._times) - 1)
        for name, series in self._values.items():
            series.append(values[name])
            del series[: -len(self._times)]

    def values(self, name: str) -> list[tuple[int, int | None]]:
        """Return the samples of a name, oldest first, with their times in ms since 1970; None before the name existed.
        Empty for a name without a history."""
        series = self._values.get(name, ())
        return [(at, None if value == _NOT_KNOWN else value) for at, value in zip(self._times, series, strict=False)]

    def growth(self, name: str) -> list[float | None]:
        """Return the growth per second between adjacent samples; None if unknown, or if the figure went back, as after
        a restart of the server that counts."""
        return [
            None
            if old is None or new is None or new < old or after == before
            else (new - old) * 1000 / (after - before)
            for (before, old), (after, new) in pairwise(self.values(name))
        ]


class RateHistory:
    """The samples of the last hour, oldest first. `topics`: messages put into each topic. `groups`: the lag of each
    group."""

    def __init__(self) -> None:
        self._samples: deque[ClusterFigures] = deque(maxlen=SAMPLES_MAX)
        self.topics = NamedHistory()
        self.groups = NamedHistory()

    def add(self, sample: ClusterFigures) -> None:
        """Add a sample, unless it is not later than the last sample."""
        if not self._samples or sample.at_ms > self._samples[-1].at_ms:
            self.topics.add(sample.at_ms, sample.topic_messages)
            self.groups.add(sample.at_ms, sample.group_lags)
            self._samples.append(replace(sample, topic_messages={}, group_lags={}))

    @property
    def newest(self) -> ClusterFigures | None:
        """The last sample, without topics and groups."""
        return self._samples[-1] if self._samples else None

    def points(self) -> Sequence[RatePoint]:
        """Return the rates between adjacent samples."""
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
