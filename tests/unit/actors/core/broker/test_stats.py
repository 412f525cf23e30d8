"""Tests of a broker's counters and of their rates over the last minute, hour and day."""

from __future__ import annotations

import pytest

from actors.core.broker.stats import GROUP_GET_NUMS, TOPIC_PUT_NUMS, BrokerStats
from raymq.common.protocol.stats import Figures, GroupStats, TopicStats, add_up


def steady(seconds: int, per_second: int) -> BrokerStats:
    stats = BrokerStats()
    stats.sample(0.0)
    for second in range(seconds + 1):
        if second:
            stats.add(TOPIC_PUT_NUMS, "orders", per_second)
        stats.sample(float(second))
    return stats


def test_a_steady_rate_is_found_in_every_span():
    figures = steady(2 * 86_400, 5).figures(TOPIC_PUT_NUMS, "orders")
    assert figures.total == 2 * 86_400 * 5
    assert (figures.minute, figures.hour, figures.day) == (300, 18_000, 432_000)
    assert figures.minute_tps == figures.hour_tps == figures.day_tps == pytest.approx(5.0)


def test_before_a_second_sample_there_is_no_rate():
    stats = BrokerStats()
    stats.sample(0.0)
    stats.add(TOPIC_PUT_NUMS, "orders", 7)
    stats.sample(9.0)
    assert stats.figures(TOPIC_PUT_NUMS, "orders") == Figures(7)
    stats.sample(10.0)
    assert stats.figures(TOPIC_PUT_NUMS, "orders").minute_tps == pytest.approx(0.7)


def test_old_messages_do_not_count_in_the_last_minute():
    stats = steady(100, 5)
    for second in range(101, 201):
        stats.sample(float(second))
    figures = stats.figures(TOPIC_PUT_NUMS, "orders")
    assert (figures.total, figures.minute, figures.minute_tps) == (500, 0, 0.0)


def test_a_total_continues_when_the_source_counter_restarts():
    stats = BrokerStats()
    for total in (10, 15, 3, 4):
        stats.take_total(TOPIC_PUT_NUMS, "orders", total)
    assert stats.figures(TOPIC_PUT_NUMS, "orders").total == 15 + 4


def test_figures_of_an_unknown_topic_are_zero():
    assert BrokerStats().figures(TOPIC_PUT_NUMS, "orders") == Figures()


def test_counters_go_with_their_topic_or_group():
    stats = BrokerStats()
    stats.add(TOPIC_PUT_NUMS, "orders", 1)
    for key in ("orders@billing", "orders@audit", "bills@billing", "bills@audit"):
        stats.add(GROUP_GET_NUMS, key, 1)
    stats.forget(topic="orders")
    assert (stats.keys(TOPIC_PUT_NUMS), stats.keys(GROUP_GET_NUMS)) == ([], ["bills@audit", "bills@billing"])
    stats.forget(group="billing")
    assert stats.keys(GROUP_GET_NUMS) == ["bills@audit"]


def test_the_figures_of_several_brokers_add_up():
    one, two = Figures(10, 5, 6, 7, 0.5, 0.25, 0.125), Figures(1, 1, 1, 1, 1.0, 1.0, 1.0)
    both = Figures(11, 6, 7, 8, 1.5, 1.25, 1.125)
    assert add_up(TopicStats, [TopicStats(one, two), TopicStats(two, one)]) == TopicStats(both, both)
    assert add_up(GroupStats, []) == GroupStats()
