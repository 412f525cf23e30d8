"""Tests of the times between a message's retries: lists, times that grow exponentially, and their texts."""

from __future__ import annotations

import pytest

import raymq
from raymq.common.errors import InvalidArgumentError
from raymq.common.protocol.group import (
    RETRY_INTERVALS_MAX,
    GroupConfig,
    check_group_config,
    exponential_intervals,
    intervals_text,
    parse_intervals,
    retry_interval_s,
)


def test_intervals_grow_up_to_the_longest_which_repeats() -> None:
    assert raymq.exponential_intervals(1, 10) == (1.0, 2.0, 4.0, 8.0, 10.0)
    assert exponential_intervals(0.1, 0.1) == (0.1,)
    assert exponential_intervals(1, 100, 10) == (1.0, 10.0, 100.0)
    intervals_s = exponential_intervals(1, 600)
    assert [retry_interval_s(intervals_s, failures) for failures in (1, 2, 10, 11, 999)] == [1, 2, 512, 600, 600]
    config = GroupConfig("billing", retry_intervals_s=intervals_s)
    check_group_config(config)
    assert config.retry_intervals_s == intervals_s


def test_no_more_intervals_are_made_than_a_group_has() -> None:
    assert len(exponential_intervals(1, 1.1**63, 1.1)) <= RETRY_INTERVALS_MAX
    with pytest.raises(InvalidArgumentError, match=r"more than 64: use a larger multiplier than 1\.1"):
        exponential_intervals(0.1, 3_000_000, 1.1)
    with pytest.raises(InvalidArgumentError, match="longest_s of retry intervals must be at least first_s, 10, not 5"):
        exponential_intervals(10, 5)


@pytest.mark.parametrize(
    ("text", "intervals_s"),
    [
        ("10s,30s,5m", (10.0, 30.0, 300.0)),
        ("1s*2..10s", (1.0, 2.0, 4.0, 8.0, 10.0)),
        ("1s * 1.5 .. 3s", (1.0, 1.5, 2.25, 3.0)),
        ("1m*60..2h", (60.0, 3600.0, 7200.0)),
        ("default", ()),
    ],
)
def test_texts_are_read(text: str, intervals_s: tuple[float, ...]) -> None:
    assert parse_intervals(text) == intervals_s
    if all(one_s.is_integer() for one_s in intervals_s):
        assert parse_intervals(intervals_text(intervals_s)) == intervals_s


@pytest.mark.parametrize(
    "text", ["1s*..10s", "1s*1..10s", "1s*2", "*2..10s", "10s*2..1s", "1s*2..41d", "1s*2..", "1s*1000..1d"]
)
def test_wrong_texts_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError):
        parse_intervals(text)
