"""Tests of users' quotas: how much a quota allows, and how long further requests wait."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from raymq.common.errors import QuotaExceededError
from raymq.remoting.access.quotas import Quotas
from raymq.remoting.access.users import CONSUME_BOUNDS, User

USER = User("team", bytes(32), bytes_per_second=1000, messages_per_second=10)
READER = User("team", bytes(32), consume_bytes_per_second=1000)


def test_a_user_without_quota_never_waits():
    quotas = Quotas()
    assert [quotas.wait_ms(User("free", b""), 1 << 40, 1 << 20, 0) for _ in range(3)] == [0, 0, 0]


def test_a_seconds_worth_passes_at_once_and_then_the_answer_is_the_wait():
    quotas = Quotas()
    assert quotas.wait_ms(USER, 1000, 1, 0) == 0
    assert quotas.wait_ms(USER, 500, 1, 0) == 500
    assert quotas.wait_ms(USER, 500, 1, 499) == 1
    assert quotas.wait_ms(USER, 500, 1, 500) == 0


def test_a_request_that_waits_for_one_takes_nothing_of_the_other():
    quotas = Quotas()
    assert quotas.wait_ms(USER, 100, 10, 0) == 0
    assert quotas.wait_ms(USER, 900, 1, 0) == 100
    assert quotas.wait_ms(USER, 900, 0, 0) == 0


def test_the_error_has_the_user_the_quota_and_the_wait():
    quotas = Quotas()
    quotas.take(USER, 0, 10, 0)
    with pytest.raises(QuotaExceededError) as caught:
        quotas.take(USER, 0, 5, 0)
    assert (caught.value.user, caught.value.what, caught.value.retry_after_ms) == ("team", "messages", 500)
    assert caught.value.retryable


def test_a_request_larger_than_a_second_passes_when_full_and_leaves_a_debt():
    quotas = Quotas()
    assert quotas.wait_ms(USER, 3000, 1, 0) == 0
    assert quotas.wait_ms(USER, 1000, 1, 0) == 3000


def test_a_clock_that_goes_back_fills_nothing():
    quotas = Quotas()
    quotas.take(USER, 1000, 1, 5000)
    assert quotas.wait_ms(USER, 1000, 1, 0) == 1000


def test_a_read_over_the_quota_delays_the_next_read():
    quotas, reader = Quotas(CONSUME_BOUNDS, "consumed "), replace(READER, consume_messages_per_second=10)
    quotas.require_left(reader, 0)
    quotas.charge(reader, 3000, 5, 0)
    with pytest.raises(QuotaExceededError, match="'team' has used up its quota of consumed bytes per second") as caught:
        quotas.require_left(reader, 1000)
    assert caught.value.retry_after_ms == 1001
    quotas.require_left(reader, 2001)
    quotas.charge(reader, 0, 60, 2001)
    with pytest.raises(QuotaExceededError, match="consumed messages") as caught:
        quotas.require_left(reader, 2001)
    assert caught.value.retry_after_ms == 5100


def test_sends_and_reads_have_separate_quotas():
    sends, reads = Quotas(), Quotas(CONSUME_BOUNDS)
    assert sends.wait_ms(READER, 1 << 40, 1 << 20, 0) == 0
    reads.charge(USER, 1 << 40, 1 << 20, 0)
    reads.require_left(USER, 0)


@given(st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 1500)), min_size=1, max_size=40))
def test_the_rate_is_never_exceeded_and_a_request_fits_after_its_wait(requests):
    quotas, now_ms, passed, largest = Quotas(), 0, 0, 0
    for pause_ms, size in requests:
        now_ms += pause_ms
        wait = quotas.wait_ms(USER, size, 0, now_ms)
        if wait:
            now_ms += wait
            assert quotas.wait_ms(USER, size, 0, now_ms) == 0
        passed, largest = passed + size, max(largest, size)
        assert passed <= 1000 * now_ms / 1000 + 1000 + largest
