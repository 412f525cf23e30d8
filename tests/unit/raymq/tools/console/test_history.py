"""Tests of the console's ring buffers with the metrics of the last hour, and of the lines in their charts. A buffer is
limited in time and in number of names."""

from __future__ import annotations

import pytest

from raymq.tools.console.web import history as module
from raymq.tools.console.web.history import (
    SAMPLES_MAX,
    SPARK_HEIGHT,
    SPARK_POINTS_MAX,
    SPARK_WIDTH,
    ClusterFigures,
    NamedHistory,
    RateHistory,
    spark_points,
)


def test_a_name_that_came_later_has_values_from_then_on() -> None:
    history = NamedHistory()
    history.add(0, {"a": 10})
    history.add(10_000, {"a": 30, "b": 5})
    history.add(20_000, {"a": 20, "b": 45})
    assert history.values("a") == [(0, 10), (10_000, 30), (20_000, 20)]
    assert history.values("b") == [(0, None), (10_000, 5), (20_000, 45)]
    assert history.growth("a") == [2.0, None]  # a server has restarted, so the total decreased
    assert history.growth("b") == [None, 4.0]
    assert (history.values("c"), history.growth("c")) == ([], [])


def test_history_keeps_one_hour_and_drops_removed_names() -> None:
    history = NamedHistory()
    for step in range(SAMPLES_MAX + 3):
        history.add(step * 10_000, {"a": step, "b": 0})
    values = history.values("a")
    assert len(values) == SAMPLES_MAX == 361
    assert values[0] == (30_000, 3)
    assert values[-1] == (10_000 * (SAMPLES_MAX + 2), SAMPLES_MAX + 2)
    history.add(10_000_000, {"a": 1})
    assert history.values("b") == []
    assert len(history.values("a")) == SAMPLES_MAX


def test_names_are_bounded_and_the_largest_of_new_ones_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HISTORIES_MAX", 2)
    history = NamedHistory()
    history.add(0, {"small": 1, "large": 9, "middle": 5})
    history.add(1, {"small": 1, "large": 9, "middle": 5, "larger": 10})
    assert [name for name in ("small", "middle", "large", "larger") if history.values(name)] == ["middle", "large"]
    history.add(2, {"small": 1, "large": 9, "larger": 10})
    assert history.values("larger") == [(0, None), (1, None), (2, 10)]


def test_samples_do_not_duplicate_figures_by_name() -> None:
    history = RateHistory()
    history.add(ClusterFigures(1_000, 10, 5, 100, topic_messages={"t": 10}, group_lags={"g": 5}))
    # The history ignores this sample, because its time is not later than the last sample's time.
    history.add(ClusterFigures(1_000, 11, 5, 100, topic_messages={"t": 99}, group_lags={"g": 99}))
    history.add(ClusterFigures(2_000, 12, 6, 120, topic_messages={"t": 12}, group_lags={"g": 6}))
    assert history.newest == ClusterFigures(2_000, 12, 6, 120)
    assert history.topics.growth("t") == [2.0]
    assert history.groups.values("g") == [(1_000, 5), (2_000, 6)]
    assert [point.messages_in for point in history.points()] == [2.0]


@pytest.mark.parametrize("figures", [[], [3.0], [None, None, 1.0]])
def test_there_is_no_line_of_fewer_than_two_figures(figures: list[float | None]) -> None:
    assert spark_points(figures) == ""


def test_a_line_is_within_its_box_however_many_figures_there_are() -> None:
    assert spark_points([0, 5, 10]) == "0,19 45,10 90,1"
    assert spark_points([0, 0]) == "0,19 90,19"
    points = [tuple(map(float, one.split(","))) for one in spark_points([float(n % 50) for n in range(360)]).split()]
    assert len(points) == SPARK_POINTS_MAX
    assert all(0 <= x <= SPARK_WIDTH and 1 <= y <= SPARK_HEIGHT for x, y in points)
    assert points[-1][0] == SPARK_WIDTH
    assert min(y for _, y in points) == 1.0


def test_unknown_figures_leave_a_gap_in_the_means() -> None:
    assert spark_points([None, 4, 4]) == "45,1 90,1"
