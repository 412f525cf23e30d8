"""Tests of the options start_offset and end_offset of a read, on queues with known bounds."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from raymq.common.errors import (
    DataLossError,
    IllegalNameError,
    InvalidArgumentError,
    OffsetOutOfRangeError,
    TopicNotExistError,
)
from raymq.common.message import MessageQueue
from raymq.data.offsets import resolve_ranges
from tests.unit.raymq.data.fake_source import FIRST_MS, FakeSource

A0, A1 = MessageQueue("orders", "broker-a", 0), MessageQueue("orders", "broker-a", 1)
B0 = MessageQueue("orders", "broker-b", 0)
C0 = MessageQueue("customers", "broker-a", 0)
ONE_GROUP = {A0: (10, 100), A1: (0, 50)}
TWO_GROUPS = {**ONE_GROUP, B0: (0, 30), C0: (5, 20)}


def spans(bounds: dict[MessageQueue, tuple[int, int]], topics: Any = "orders", **options: Any) -> dict[str, Any]:
    """Return the offset range that a read with the options `options` covers in each queue."""
    merged = {"start_offset": "earliest", "end_offset": "latest", "lenient": False, **options}
    source = FakeSource(bounds)
    ranges = resolve_ranges(source, topics, **merged)
    assert source.asked == 1
    return {f"{one.topic}/{one.broker_name}:{one.queue_id}": (one.start_offset, one.end_offset) for one in ranges}


def test_everything_is_read_by_default() -> None:
    expected = {"orders/broker-a:0": (10, 100), "orders/broker-a:1": (0, 50), "orders/broker-b:0": (0, 30)}
    assert spans(TWO_GROUPS) == expected


def test_a_start_that_is_later_than_the_end_is_refused() -> None:
    start = datetime.fromtimestamp(FIRST_MS / 1000 + 1, UTC)
    with pytest.raises(InvalidArgumentError, match=r"start_offset .* is later than end_offset"):
        spans(ONE_GROUP, start_offset=start + timedelta(milliseconds=1), end_offset=start)
    assert spans(ONE_GROUP, start_offset=start, end_offset=start) == {}


def test_several_topics_are_read_each_once_and_sorted() -> None:
    found = spans(TWO_GROUPS, ["orders", "customers", "orders"])
    assert list(found) == ["customers/broker-a:0", "orders/broker-a:0", "orders/broker-a:1", "orders/broker-b:0"]


def test_offsets_by_queue_leave_the_other_queues_at_their_ends() -> None:
    found = spans(
        TWO_GROUPS,
        start_offset={"orders": {"broker-a:0": 20, "broker-b:0": "earliest"}},
        end_offset={"orders": {"broker-b:0": 7}},
    )
    assert found == {"orders/broker-a:0": (20, 100), "orders/broker-a:1": (0, 50), "orders/broker-b:0": (0, 7)}


def test_with_one_broker_group_a_number_is_an_offset_of_each_queue_and_a_queue_id_names_a_queue() -> None:
    assert spans(ONE_GROUP, start_offset=12, end_offset=40) == {
        "orders/broker-a:0": (12, 40),
        "orders/broker-a:1": (12, 40),
    }
    assert spans(ONE_GROUP, end_offset={"orders": {1: 9}})["orders/broker-a:1"] == (0, 9)


def test_an_end_beyond_the_data_is_the_end_of_the_data() -> None:
    assert spans(ONE_GROUP, end_offset=1000) == {"orders/broker-a:0": (10, 100), "orders/broker-a:1": (0, 50)}


@pytest.mark.parametrize(
    "time",
    [
        datetime(2023, 11, 14, 22, 13, 20, 20_000),  # a time without a time zone means UTC
        datetime(2023, 11, 14, 22, 13, 20, 20_000, tzinfo=UTC),
        datetime(2023, 11, 15, 0, 13, 20, 20_000, tzinfo=timezone(timedelta(hours=2))),
    ],
)
def test_a_time_is_the_first_offset_stored_then_or_later(time: datetime) -> None:
    assert datetime.fromtimestamp(FIRST_MS / 1000, UTC) == datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)
    assert spans(ONE_GROUP, start_offset=time)["orders/broker-a:0"] == (20, 100)
    assert spans(ONE_GROUP, end_offset=time)["orders/broker-a:1"] == (0, 20)
    assert spans(ONE_GROUP, start_offset=time, end_offset=time) == {}


def test_a_start_in_the_future_reads_nothing() -> None:
    assert spans(ONE_GROUP, start_offset=datetime(2100, 1, 1)) == {}


def test_offsets_that_are_gone_are_an_error_unless_the_read_is_lenient() -> None:
    with pytest.raises(DataLossError, match=r"offsets 3 to 9 of queue .* no longer exist"):
        spans(ONE_GROUP, start_offset=3)
    assert spans(ONE_GROUP, start_offset=3, lenient=True)["orders/broker-a:0"] == (10, 100)


def test_a_start_that_no_message_has_yet_is_an_error_unless_the_read_is_lenient() -> None:
    with pytest.raises(OffsetOutOfRangeError):
        spans(ONE_GROUP, start_offset={"orders": {"broker-a:1": 51}})
    assert spans(ONE_GROUP, start_offset={"orders": {"broker-a:1": 51}}, lenient=True) == {
        "orders/broker-a:0": (10, 100)
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start_offset": "latest"}, "start_offset cannot be 'latest' in a bounded read"),
        ({"end_offset": "earliest"}, "end_offset cannot be 'earliest' in a bounded read"),
        ({"start_offset": "latest of all"}, "not 'latest of all'"),
        ({"start_offset": -1}, "not -1"),
        ({"end_offset": True}, "not True"),
        ({"end_offset": None}, "not None"),
        ({"start_offset": 2**63}, "not 9223372036854775808"),
        ({"start_offset": {"orders": {"broker-a:0": "latest"}}}, "cannot be 'latest'"),
        ({"start_offset": {"orders": 7}}, "not 7"),
        ({"start_offset": {"orders": {"broker-a:0": 1.5}}}, "not 1.5"),
        ({"start_offset": {"customers": {"broker-a:0": 1}}}, "'customers', which this read does not include"),
        ({"start_offset": {"orders": {"broker-a:7": 1}}}, "no queue 'broker-a:7'; its queues are broker-a:0, broker-a"),
        ({"start_offset": 50, "end_offset": 40}, "start_offset 50 is after end_offset 40"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        spans(ONE_GROUP, **options)


def test_with_several_broker_groups_a_bare_number_is_ambiguous() -> None:
    with pytest.raises(InvalidArgumentError, match="broker-a, broker-b"):
        spans(TWO_GROUPS, start_offset=12)
    with pytest.raises(InvalidArgumentError, match="no queue 0"):
        spans(TWO_GROUPS, start_offset={"orders": {0: 12}})


def test_topics_are_checked() -> None:
    with pytest.raises(TopicNotExistError):
        spans(ONE_GROUP, "nothing")
    with pytest.raises(IllegalNameError):
        spans(ONE_GROUP, "or ders")
    with pytest.raises(InvalidArgumentError, match="empty"):
        spans(ONE_GROUP, [])
