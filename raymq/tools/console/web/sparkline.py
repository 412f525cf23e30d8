"""Sparklines: a row of figures as the points of an SVG polyline. Pure."""

from __future__ import annotations

from collections.abc import Sequence
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
