"""Tests of the settings of pull consumers: RocketMQ's default values, and the limits of the values."""

from __future__ import annotations

from typing import Any

import pytest

from raymq.client.consumer.pull.settings import RANGES, PullSettings
from raymq.client.consumer.simple.settings import SimpleSettings
from raymq.common.errors import IllegalNameError, InvalidArgumentError
from raymq.common.message import ConsumeFromWhere
from raymq.common.protocol.group import StartOffsetQuery
from raymq.common.protocol.membership import AllocateStrategy, Allocation


def test_the_defaults_are_rocketmqs_except_for_the_read_ahead_limit():
    """The default values are RocketMQ's (spec/messaging.md §6), except the limits of the read-ahead, which
    count bytes."""
    settings = PullSettings.of("billing")
    assert settings.start == StartOffsetQuery(ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET)
    assert (settings.auto_commit, settings.auto_commit_interval_s) == (True, 5.0)
    assert settings.allocation.strategy is AllocateStrategy.AVG
    assert (settings.threshold_count, settings.threshold_bytes, settings.span_max) == (65_535, 100 << 20, 65_535)
    assert (settings.threshold_all_count, settings.threshold_all_bytes) == (655_350, 8 << 20)
    assert settings.queue_check_interval_s == 30.0


def test_options_become_settings():
    allocation = Allocation(AllocateStrategy.MACHINE_ROOM, machine_rooms=frozenset({"r1"}))
    settings = PullSettings.of(
        "billing",
        consume_from=ConsumeFromWhere.CONSUME_FROM_TIMESTAMP,
        consume_timestamp_ms=1_700_000_000_000,
        allocate_strategy=allocation,
        auto_commit_interval_s=1,
        threshold_count=7,
    )
    assert settings.start == StartOffsetQuery(ConsumeFromWhere.CONSUME_FROM_TIMESTAMP, 1_700_000_000_000)
    assert settings.allocation is allocation
    assert (settings.auto_commit_interval_s, settings.threshold_count) == (1, 7)
    sticky = PullSettings.of("billing", allocate_strategy=AllocateStrategy.STICKY)
    assert sticky.allocation == Allocation(AllocateStrategy.STICKY)


@pytest.mark.parametrize("name", RANGES)
def test_every_number_has_bounds(name):
    low, high, _ = RANGES[name]
    assert PullSettings.of("billing", **{name: low}) != PullSettings.of("billing", **{name: high})
    for value in (low - 1, high + 1, "7", True, None):
        with pytest.raises(InvalidArgumentError, match=f"{name} must be"):
            PullSettings.of("billing", **{name: value})


def test_counts_are_whole_numbers():
    with pytest.raises(InvalidArgumentError, match="threshold_count"):
        PullSettings.of("billing", threshold_count=7.5)


def test_a_start_by_time_needs_the_time():
    with pytest.raises(InvalidArgumentError, match="consume_timestamp_ms"):
        PullSettings.of("billing", consume_from=ConsumeFromWhere.CONSUME_FROM_TIMESTAMP)


def test_a_group_has_a_legal_name():
    with pytest.raises(IllegalNameError):
        PullSettings.of("a b")


@pytest.mark.parametrize("settings_of", [PullSettings.of, SimpleSettings.of])
def test_a_start_that_is_no_consume_from_where_is_refused(settings_of: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"consume_from .* not 'end'.* CONSUME_FROM_END"):
        settings_of("billing", consume_from="end")
    with pytest.raises(InvalidArgumentError, match=r"consume_timestamp_ms .*is it in milliseconds\?"):
        settings_of("billing", consume_from=ConsumeFromWhere.CONSUME_FROM_TIMESTAMP, consume_timestamp_ms=1_764_000_000)
