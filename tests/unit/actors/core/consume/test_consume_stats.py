"""Tests of a consumer's statistics per topic over the last minute."""

from __future__ import annotations

from actors.core.consume.consume_stats import WINDOW_S, ConsumeStats


def test_rates_are_per_second_since_the_first_event_and_times_per_message():
    stats = ConsumeStats()
    stats.pulled("orders", 100, 1000.0)
    stats.consumed("orders", 60, 10, 1002.0)
    stats.took("orders", 50, 0.5, 1002.5)
    assert stats.figures(1010.0) == {
        "orders": {"PULL_TPS": 10.0, "CONSUME_OK_TPS": 6.0, "CONSUME_FAILED_TPS": 1.0, "CONSUME_RT": 10.0}
    }


def test_old_messages_leave_the_window():
    stats = ConsumeStats()
    stats.consumed("orders", 60, 0, 0.0)
    stats.consumed("orders", 30, 0, 30.0)
    assert stats.figures(WINDOW_S + 5)["orders"]["CONSUME_OK_TPS"] == 30 / (WINDOW_S + 5 - 30.0)
    assert stats.figures(10 * WINDOW_S)["orders"]["CONSUME_OK_TPS"] == 0.0
