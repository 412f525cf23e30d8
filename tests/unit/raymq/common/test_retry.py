"""Tests that the pauses between retries grow up to a limit."""

from __future__ import annotations

import random

from raymq.common.retry import Backoff


def test_pauses_double_up_to_the_limit_each_shortened_by_a_quarter_at_most():
    random.seed(1)
    backoff = Backoff(0.5, 4.0)
    for full in (0.5, 1.0, 2.0, 4.0, 4.0, *[4.0] * 100):
        assert 0.75 * full <= backoff.next() <= full


def test_a_success_starts_again():
    backoff = Backoff(0.5, 4.0)
    for _ in range(10):
        backoff.next()
    backoff.reset()
    assert backoff.next() <= 0.5


def test_clients_that_fail_together_do_not_come_back_together():
    random.seed(2)
    assert len({Backoff().next() for _ in range(100)}) > 90
