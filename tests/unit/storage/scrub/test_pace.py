"""Tests of the speed of a store's verification: spread over its period, and bounded by the rate and by processor
time."""

from __future__ import annotations

import pytest

from storage.scrub.pace import (
    CPU_SHARE_MAX,
    FIRST_DELAY_S,
    FIRST_SPREAD_S,
    PERIOD_SHARE,
    RATE_MIN_BYTES,
    SCRUB_HOUR_MS,
    StepCost,
    even_rate,
    first_delay_s,
    is_overdue,
    ms_until_due,
    pause_s,
)

WEEK_HOURS = 168
WEEK_MS = WEEK_HOURS * SCRUB_HOUR_MS
RATE = 5_000_000


def test_a_small_store_is_read_at_the_minimum_rate():
    assert even_rate(1 << 20, 0, WEEK_HOURS, RATE) == RATE_MIN_BYTES


def test_a_store_that_fits_the_period_is_read_evenly():
    size = 1_000_000_000_000
    rate = even_rate(size, 0, WEEK_HOURS, RATE)
    assert RATE_MIN_BYTES < rate < RATE
    assert size / rate == pytest.approx(WEEK_MS * PERIOD_SHARE / 1000)
    # After half of the bytes in half of the time, the rate is still the same.
    assert even_rate(size // 2, int(WEEK_MS * PERIOD_SHARE / 2), WEEK_HOURS, RATE) == pytest.approx(rate)


@pytest.mark.parametrize("elapsed_ms", [WEEK_MS, 3 * WEEK_MS])
def test_a_late_verification_never_exceeds_the_maximum_rate(elapsed_ms):
    assert even_rate(1 << 40, elapsed_ms, WEEK_HOURS, RATE) == RATE


def test_a_clock_that_was_set_back_does_not_change_the_rate():
    assert even_rate(1 << 40, -WEEK_MS, WEEK_HOURS, RATE) == even_rate(1 << 40, 0, WEEK_HOURS, RATE)


def test_the_pauses_keep_the_rate():
    cost = StepCost(500_000, cpu_s=0.0001, elapsed_s=0.02)
    assert pause_s(cost, RATE) + cost.elapsed_s == pytest.approx(0.1)


def test_the_pauses_keep_the_share_of_processor_time():
    cost = StepCost(500_000, cpu_s=0.01, elapsed_s=0.02)
    assert cost.cpu_s / (pause_s(cost, RATE) + cost.elapsed_s) == pytest.approx(CPU_SHARE_MAX)


def test_a_step_that_took_long_needs_no_pause():
    assert pause_s(StepCost(500_000, cpu_s=0.001, elapsed_s=30), RATE) == 0


def test_stores_of_one_machine_begin_at_different_times():
    delays = {first_delay_s(f"/data/broker-{number}-0") for number in range(20)}
    assert len(delays) > 10
    assert all(FIRST_DELAY_S <= delay < FIRST_DELAY_S + FIRST_SPREAD_S for delay in delays)


@pytest.mark.parametrize(
    ("now_ms", "began_ms", "wait_ms"),
    [(5, 0, 0), (WEEK_MS, 10, 10), (2 * WEEK_MS, 10, 0), (10, 10, WEEK_MS), (10, 5 * WEEK_MS, WEEK_MS)],
)
def test_the_next_verification_begins_one_period_after_the_last(now_ms, began_ms, wait_ms):
    assert ms_until_due(now_ms, began_ms, WEEK_HOURS) == wait_ms


@pytest.mark.parametrize(
    ("now_ms", "verified_ms", "period", "overdue"),
    [
        (1 + WEEK_MS, 1, WEEK_HOURS, False),
        (2 * WEEK_MS, 1, WEEK_HOURS, True),
        (2 * WEEK_MS, 0, WEEK_HOURS, False),
        (9 * WEEK_MS, 1, 0, False),
        (1, WEEK_MS, WEEK_HOURS, False),
    ],
)
def test_a_verification_is_overdue_after_one_and_a_half_periods(now_ms, verified_ms, period, overdue):
    assert is_overdue(now_ms, verified_ms, period) is overdue
