"""Tests of latency fault tolerance: golden fact 11 of spec/messaging.md, and which brokers a producer avoids after slow
or failed sends."""

from __future__ import annotations

import pytest

from raymq.client.producer.senders.latency_fault import FAILING_S, ISOLATED_LATENCY_MS, BrokerFaults, not_available_ms


@pytest.mark.parametrize(
    ("latency_ms", "pause_ms"),
    [
        (0, 0),
        (99, 0),
        (549, 0),
        (550, 2000),
        (1799, 2000),
        (1800, 5000),
        (3000, 6000),
        (5000, 10000),
        (14999, 10000),
        (ISOLATED_LATENCY_MS, 10000),
        (15000, 30000),
    ],
)
def test_fact_11_how_long_a_slow_broker_is_left_out(latency_ms, pause_ms):
    assert not_available_ms(latency_ms) == pause_ms


def test_a_slow_broker_stays_reachable_and_is_available_again_later():
    faults = BrokerFaults(latency_enabled=True)
    faults.answered("a", 550.0, now_s=100.0)
    assert faults.reachable("a", 100.0)
    assert not faults.available("a", 101.9)
    assert faults.available("a", 102.0)
    assert faults.available("b", 100.0)


def test_the_time_at_which_a_broker_is_available_again_only_moves_later():
    faults = BrokerFaults(latency_enabled=True)
    faults.answered("a", 5000.0, now_s=100.0)
    faults.answered("a", 1.0, now_s=101.0)
    faults.answered("a", 550.0, now_s=102.0)
    assert not faults.available("a", 109.9)
    assert faults.available("a", 110.0)


def test_a_broker_without_an_answer_is_isolated_as_if_it_had_taken_ten_seconds():
    faults = BrokerFaults(latency_enabled=True)
    faults.failed("a", now_s=100.0)
    assert not faults.reachable("a", 100.0 + FAILING_S - 0.1)
    assert faults.reachable("a", 100.0 + FAILING_S)
    assert not faults.available("a", 109.9)
    assert faults.available("a", 110.0)


def test_without_latency_fault_tolerance_only_failures_count_and_an_answer_ends_them():
    faults = BrokerFaults(latency_enabled=False)
    faults.answered("a", 15000.0, now_s=100.0)
    assert faults.available("a", 100.0)
    faults.failed("a", now_s=100.0)
    assert not faults.available("a", 100.1)
    faults.answered("a", 1.0, now_s=100.2)
    assert faults.available("a", 100.2)
