"""Tests that the planner of a batch read gives the same guarantees about offsets as Spark's Kafka source."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, strategies as st

from raymq.client.scan.ranges import OffsetRange, plan_ranges
from raymq.common.errors import (
    DataLossError,
    IllegalNameError,
    InvalidArgumentError,
    OffsetOutOfRangeError,
    TopicNotExistError,
)
from tests.support.clients.scan_source import Queues

TOPIC = "orders"
BOUNDS = {("broker-a", 0): (10, 100), ("broker-a", 1): (0, 30), ("broker-b", 0): (5, 5)}
ALL_EARLIEST = {"broker-a": {"0": -2, "1": -2}, "broker-b": {"0": -2}}


def spans(ranges: Sequence[OffsetRange]) -> list[tuple[str, int, int, int]]:
    return [(item.broker_name, item.queue_id, item.start_offset, item.end_offset) for item in ranges]


def with_first(offset: int) -> dict[str, dict[str, int]]:
    return {"broker-a": {"0": offset, "1": -2}, "broker-b": {"0": -2}}


def with_last(offset: int) -> dict[str, dict[str, int]]:
    return {"broker-a": {"0": offset, "1": -1}, "broker-b": {"0": -1}}


def test_defaults_read_every_queue_from_its_first_to_its_last_message_and_leave_empty_ones_out() -> None:
    assert spans(plan_ranges(Queues(BOUNDS), TOPIC)) == [("broker-a", 0, 10, 100), ("broker-a", 1, 0, 30)]


@pytest.mark.parametrize("form", [dict, json.dumps])
def test_offsets_per_queue_work_as_a_mapping_and_as_json(form: type) -> None:
    ranges = plan_ranges(
        Queues(BOUNDS), TOPIC, starting_offsets=form(with_first(50)), ending_offsets=form(with_last(60))
    )
    assert spans(ranges) == [("broker-a", 0, 50, 60), ("broker-a", 1, 0, 30)]


def test_words_are_read_without_regard_to_case_and_space() -> None:
    ranges = plan_ranges(Queues(BOUNDS), TOPIC, starting_offsets=" Earliest ", ending_offsets="LATEST")
    assert spans(ranges) == spans(plan_ranges(Queues(BOUNDS), TOPIC))


def test_a_queue_with_nothing_between_its_offsets_has_no_range() -> None:
    ranges = plan_ranges(Queues(BOUNDS), TOPIC, starting_offsets=with_first(100))
    assert spans(ranges) == [("broker-a", 1, 0, 30)]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"starting_offsets": "latest"}, "cannot be 'latest'"),
        ({"ending_offsets": "earliest"}, "cannot be 'earliest'"),
        ({"starting_offsets": with_first(-1)}, "of queue broker-a:0 cannot be 'latest'"),
        ({"ending_offsets": with_last(-2)}, "of queue broker-a:0 cannot be 'earliest'"),
        ({"starting_offsets": with_first(-3)}, "must be a number from 0"),
        ({"starting_offsets": {"broker-a": {"0": True}}}, "must be a number from 0"),
        ({"starting_offsets": {"broker-a": {"0": "12"}}}, "must be a number from 0"),
        ({"starting_offsets": {"broker-a": {"0": -2, "1": -2}}}, "missing: broker-b:0"),
        ({"starting_offsets": {**ALL_EARLIEST, "broker-c": {"7": 0}}}, "unknown: broker-c:7"),
        ({"starting_offsets": {"broker-a": {"0": -2, "00": -2}}}, "names queue broker-a:0 twice"),
        ({"starting_offsets": {"broker-a": {"first": 0}}}, "'first' is not a queue id"),
        ({"starting_offsets": {"broker-a": 3}}, "must be 'earliest', 'latest' or offsets per queue"),
        ({"starting_offsets": "sometime"}, "must be 'earliest', 'latest' or offsets per queue"),
        ({"starting_offsets": "[1, 2]"}, "must be 'earliest', 'latest' or offsets per queue"),
        ({"starting_offsets": with_first(60), "ending_offsets": with_last(50)}, "60 is after ending offset 50"),
        ({"max_offsets": 0}, "max_offsets must be 1 to"),
        ({"max_offsets": True}, "max_offsets must be a whole number"),
    ],
)
def test_options_that_make_no_sense_are_refused_with_the_reason(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        plan_ranges(Queues(BOUNDS), TOPIC, **options)
    assert said in str(caught.value)


def test_an_unknown_topic_and_an_illegal_name_raise_different_errors() -> None:
    with pytest.raises(TopicNotExistError):
        plan_ranges(Queues(BOUNDS), "payments")
    with pytest.raises(IllegalNameError):
        plan_ranges(Queues(BOUNDS), "no spaces")


@pytest.mark.parametrize("options", [{"starting_offsets": with_first(3)}, {"ending_offsets": with_last(3)}])
def test_offsets_below_the_first_offset_are_a_data_loss(options: dict[str, Any]) -> None:
    with pytest.raises(DataLossError, match=r"offsets 3 to 9 of queue .* no longer exist"):
        plan_ranges(Queues(BOUNDS), TOPIC, **options)


def test_without_fail_on_data_loss_remaining_messages_are_read_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        ranges = plan_ranges(Queues(BOUNDS), TOPIC, starting_offsets=with_first(3), fail_on_data_loss=False)
    assert spans(ranges) == [("broker-a", 0, 10, 100), ("broker-a", 1, 0, 30)]
    assert "offsets 3 to 9 of queue orders@broker-a:0 no longer exist" in caplog.text


@pytest.mark.parametrize("options", [{"starting_offsets": with_first(101)}, {"ending_offsets": with_last(101)}])
def test_offsets_beyond_the_end_are_refused_or_left_out(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(OffsetOutOfRangeError, match="offset 101 is outside queue orders@broker-a:0"):
        plan_ranges(Queues(BOUNDS), TOPIC, **options)
    with caplog.at_level(logging.WARNING):
        ranges = plan_ranges(Queues(BOUNDS), TOPIC, fail_on_data_loss=False, **options)
    assert all(end <= 100 for broker_name, queue_id, start, end in spans(ranges))
    assert "the queue ends at 100" in caplog.text


@given(
    st.dictionaries(
        st.tuples(st.sampled_from(["broker-a", "broker-b"]), st.integers(0, 5)),
        st.tuples(st.integers(0, 1000), st.integers(0, 1000)).map(sorted).map(tuple),
        min_size=1,
    ),
    st.data(),
)
def test_a_lenient_plan_stays_within_the_queues(
    bounds: dict[tuple[str, int], tuple[int, int]], data: st.DataObject
) -> None:
    starting: dict[str, dict[str, int]] = {}
    for broker_name, queue_id in bounds:
        offset = data.draw(st.just(-2) | st.integers(0, 1200))
        starting.setdefault(broker_name, {})[str(queue_id)] = offset
    ranges = plan_ranges(Queues(bounds), TOPIC, starting_offsets=starting, fail_on_data_loss=False)
    for item in ranges:
        low, high = bounds[item.broker_name, item.queue_id]
        asked = starting[item.broker_name][str(item.queue_id)]
        assert (item.start_offset, item.end_offset) == (max(low, asked), high)
    planned = {(item.broker_name, item.queue_id) for item in ranges}
    for key in bounds.keys() - planned:
        assert bounds[key][0] == bounds[key][1] or starting[key[0]][str(key[1])] >= bounds[key][1]
