"""Tests of the queues in which delayed messages wait, and of the delay times that users write."""

from __future__ import annotations

import pytest

from raymq.common.delay import (
    DELAY_LEVELS_MS,
    TIMER_BUCKETS,
    TIMER_ROLL_MS,
    TIMER_ROLL_QUEUE,
    TIMER_TOPIC,
    delivery_producer_id,
    delivery_source,
    level_delay_ms,
    parse_delay_levels,
    parse_duration_ms,
    parse_time,
    timer_queue,
    waiting_code,
)
from raymq.common.errors import InvalidArgumentError
from raymq.common.names import SCHEDULE_TOPIC

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
NOW_MS = 1_700_000_000_000


def test_the_default_levels_are_rocketmqs():
    """Golden fact 19 of spec/storage.md: the default delay levels."""
    seconds = (1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)
    assert tuple(1000 * value for value in seconds) == DELAY_LEVELS_MS


@pytest.mark.parametrize(
    ("text", "expected"), [("30s", 30_000), (" 5m ", 300_000), ("2h", 2 * HOUR_MS), ("1d", DAY_MS)]
)
def test_a_length_of_time_is_read_from_text(text, expected):
    assert parse_duration_ms(text) == expected


@pytest.mark.parametrize("text", ["", "1x", "1", "0s", "1d 2h", "-1d", "1.5h", "soon"])
def test_text_that_is_no_length_of_time_is_refused_as_one(text):
    with pytest.raises(InvalidArgumentError, match="is not a length of time: write one number and s, m, h or d"):
        parse_duration_ms(text)


def test_a_level_beyond_the_last_waits_as_long_as_the_last():
    assert level_delay_ms(99, DELAY_LEVELS_MS) == 7_200_000
    assert level_delay_ms(3, (1000, 2000)) == 2000
    assert level_delay_ms(0, DELAY_LEVELS_MS) == 1000


def test_a_level_with_a_sign_is_read_as_in_java():
    assert waiting_code(SCHEDULE_TOPIC, 16, {"DELAY": "+17"}, 1000) == 1000 + 3_600_000
    assert waiting_code(SCHEDULE_TOPIC, 16, {"DELAY": "-1"}, 1000) is None


def test_levels_are_read_in_rocketmqs_form():
    assert parse_delay_levels(" 1s 2m  3h 1d ") == (1000, 120_000, 3 * HOUR_MS, DAY_MS)


@pytest.mark.parametrize("text", ["", "1", "s", "1 s", "0s", "-1s", "1.5s", "1w", "1s,2s", " ".join(["1s"] * 19)])
def test_levels_of_another_form_are_refused(text):
    with pytest.raises(InvalidArgumentError, match="delay"):
        parse_delay_levels(text)


def test_a_time_within_a_day_waits_in_the_queue_of_its_hour():
    assert timer_queue(NOW_MS + 1, NOW_MS) == NOW_MS // HOUR_MS % TIMER_BUCKETS
    assert timer_queue(NOW_MS + DAY_MS, NOW_MS) == (NOW_MS + DAY_MS) // HOUR_MS % TIMER_BUCKETS


def test_a_later_time_waits_in_the_roll_queue_and_is_filed_again_before_it_is_due():
    later = NOW_MS + DAY_MS + HOUR_MS + 1
    assert timer_queue(later, NOW_MS) == TIMER_ROLL_QUEUE
    again = waiting_code(TIMER_TOPIC, TIMER_ROLL_QUEUE, {"TIMER_DELIVER_MS": str(later)}, NOW_MS)
    assert again == NOW_MS + TIMER_ROLL_MS < later


def test_a_unit_of_a_timer_queue_has_the_messages_time_but_not_one_before_it_was_stored():
    properties = {"TIMER_DELIVER_MS": str(NOW_MS)}
    assert waiting_code(TIMER_TOPIC, 5, properties, NOW_MS - 9000) == NOW_MS
    assert waiting_code(TIMER_TOPIC, 5, properties, NOW_MS + 9000) == NOW_MS + 9001
    assert waiting_code(TIMER_TOPIC, 5, {}, NOW_MS) == NOW_MS + 1


@pytest.mark.parametrize(
    ("delay", "code"), [("3", NOW_MS + 10_000), ("99", NOW_MS + 7_200_000), ("0", None), ("x", None)]
)
def test_a_unit_of_a_schedule_queue_has_the_time_of_its_level(delay, code):
    assert waiting_code(SCHEDULE_TOPIC, 2, {"DELAY": delay}, NOW_MS) == code


def test_a_scheduler_is_known_by_its_producer_id():
    assert delivery_source(delivery_producer_id(TIMER_TOPIC, 7)) == (TIMER_TOPIC, 7)
    assert delivery_source(delivery_producer_id(SCHEDULE_TOPIC, 17)) == (SCHEDULE_TOPIC, 17)
    assert delivery_source("0123456789abcdef") is None
    assert delivery_source(delivery_producer_id("orders", 7)) is None
    assert delivery_source("rmq_sys_delivery/" + TIMER_TOPIC) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("+30s", NOW_MS + 30_000),
        ("+2h", NOW_MS + 2 * HOUR_MS),
        ("2023-11-14T22:13:20Z", NOW_MS),
        ("2023-11-14T22:13:20", NOW_MS),
        ("2023-11-14T23:13:20.250+01:00", NOW_MS + 250),
    ],
)
def test_a_time_of_delivery_is_read_from_text(text, expected):
    assert parse_time(text, NOW_MS) == expected


@pytest.mark.parametrize("text", ["1970-01-01", "1999-12-31T23:59:59", "-40000d"])
def test_a_time_before_2001_is_the_beginning_of_time(text):
    assert parse_time(text, NOW_MS) == 0


@pytest.mark.parametrize("text", ["", "+", "30s", "+30", "-1x", "-1d 2h", "tomorrow", "2023-11-14T25:00:00"])
def test_text_that_is_no_time_is_refused(text):
    with pytest.raises(InvalidArgumentError):
        parse_time(text, NOW_MS)
