"""Tests of the options of a batch read. Each option is checked on a cluster with known offsets, times and
commits."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given, strategies as st

from raymq.client.scan.ranges import OffsetRange, limit_ranges, plan_ranges
from raymq.common.errors import InvalidArgumentError, TopicNotExistError
from raymq.common.message import MessageQueue
from tests.support.clients.scan_source import T0_MS, Queues

# Each queue stores one message per second: the message at offset n was stored at n × 1000 ms.
BOUNDS = {("broker-a", 0): (10, 100), ("broker-a", 1): (0, 30), ("broker-b", 0): (5, 5)}
TOPICS = ("orders", "orders-eu", "payments")


def spans(options: dict[str, Any], topic: Any = "orders", **cluster: Any) -> dict[str, tuple[int, int]]:
    """Return the planned offset range of each queue. A queue's key has the topic's name, unless the topic is
    "orders"."""
    ranges = plan_ranges(Queues(BOUNDS, topics=TOPICS, **cluster), topic, **options)
    prefix = {"orders": ""}
    return {
        f"{prefix.get(one.topic, one.topic + '/')}{one.broker_name[-1]}{one.queue_id}": (
            one.start_offset,
            one.end_offset,
        )
        for one in ranges
    }


ALL = {"a0": (10, 100), "a1": (0, 30)}
ALL_EU = {f"orders-eu/{queue}": span for queue, span in ALL.items()}


def times(first: Any, second: Any, third: Any = 0) -> dict[str, dict[str, Any]]:
    return {"broker-a": {"0": first, "1": second}, "broker-b": {"0": third}}


@pytest.mark.parametrize(
    ("topic", "pattern"),
    [(["orders-eu", "orders", "orders"], None), (("orders", "orders-eu"), None), (None, "orders(-.*)?")],
)
def test_several_topics_are_read_together(topic: Any, pattern: str | None) -> None:
    assert spans({"topic_pattern": pattern}, topic) == ALL | ALL_EU


def test_a_pattern_matches_whole_names() -> None:
    assert spans({"topic_pattern": "orders"}, None) == ALL
    with pytest.raises(TopicNotExistError, match=r"^no topic's whole name matches the pattern 'order'") as caught:
        spans({"topic_pattern": "order"}, None)
    assert "create" not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"starting_timestamp": T0_MS + 2, "ending_timestamp": T0_MS + 1},
        {"starting_offsets_by_timestamp": times(0, T0_MS + 2), "ending_timestamp": T0_MS + 1},
        {"starting_timestamp": T0_MS + 2, "ending_offsets_by_timestamp": times(T0_MS + 9, T0_MS + 1, T0_MS + 9)},
    ],
)
def test_a_start_that_is_later_than_the_end_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=r"starting_\w+ \d+2 is later than ending_\w+ \d+1"):
        spans({"starting_offsets_by_timestamp_strategy": "latest", **options})


def test_equal_times_read_nothing() -> None:
    late = {"starting_offsets_by_timestamp_strategy": "latest"}
    assert spans({"starting_timestamp": T0_MS + 20_000, "ending_timestamp": T0_MS + 20_000, **late}) == {}


@pytest.mark.parametrize(
    ("topic", "options", "said"),
    [
        (None, {}, "choose the topics to read"),
        ("orders", {"topic_pattern": "o.*"}, "choose the topics to read"),
        ([], {}, "the list of topics to read is empty"),
        (None, {"topic_pattern": "("}, "is not a regular expression"),
    ],
)
def test_topics_are_given_in_exactly_one_way(topic: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgumentError, match=said):
        spans(options, topic)


def test_an_option_that_there_is_not_is_refused() -> None:
    with pytest.raises(TypeError, match="starting_offset"):
        plan_ranges(Queues(BOUNDS), "orders", starting_offset="earliest")  # type: ignore[call-arg]  # the test's point


@pytest.mark.parametrize("form", [dict, json.dumps])
def test_offsets_of_several_topics_are_named_by_topic(form: Any) -> None:
    offsets = {"orders": times(20, -2, -2), "orders-eu": times(-2, 7, -2)}
    found = spans({"starting_offsets": form(offsets)}, ["orders", "orders-eu"])
    assert found == {"a0": (20, 100), "a1": (0, 30), "orders-eu/a0": (10, 100), "orders-eu/a1": (7, 30)}


def test_offsets_of_one_topic_may_be_named_by_it() -> None:
    assert spans({"starting_offsets": {"orders": times(20, 7, -2)}}) == {"a0": (20, 100), "a1": (7, 30)}


def test_offsets_of_several_topics_name_all_of_them() -> None:
    with pytest.raises(InvalidArgumentError, match="missing: orders-eu:broker-a:0"):
        spans({"starting_offsets": {"orders": times(20, 7, -2)}}, ["orders", "orders-eu"])
    with pytest.raises(InvalidArgumentError, match="must be 'earliest', 'latest' or offsets per queue"):
        spans({"starting_offsets": times(20, 7, -2)}, ["orders", "orders-eu"])


@pytest.mark.parametrize(
    "moment",
    [
        T0_MS + 25_000,
        datetime(2023, 11, 14, 22, 13, 45),
        datetime(2023, 11, 14, 22, 13, 45, tzinfo=UTC),
        datetime(2023, 11, 15, 0, 13, 45, tzinfo=timezone(timedelta(hours=2))),
    ],
)
def test_a_timestamp_bounds_every_queue(moment: Any) -> None:
    late = {"starting_offsets_by_timestamp_strategy": "latest"}
    assert spans({"starting_timestamp": moment, **late}) == {"a0": (25, 100), "a1": (25, 30)}
    assert spans({"ending_timestamp": moment}) == {"a0": (10, 25), "a1": (0, 25)}
    assert spans({"starting_timestamp": T0_MS + 20_001, "ending_timestamp": moment, **late}) == {
        "a0": (21, 25),
        "a1": (21, 25),
    }


def test_an_ending_timestamp_after_everything_is_the_end() -> None:
    assert spans({"ending_timestamp": 10**15}) == ALL


def test_a_starting_timestamp_that_a_queue_has_nothing_for_is_an_error_or_its_end() -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"no message was stored at that time or later in queue orders@broker-a:1, .*b:0;"
    ):
        spans({"starting_timestamp": T0_MS + 30_000})
    assert spans({"starting_timestamp": T0_MS + 30_000, "starting_offsets_by_timestamp_strategy": "latest"}) == {
        "a0": (30, 100)
    }
    with pytest.raises(InvalidArgumentError, match="must be one of error, latest"):
        spans({"starting_offsets_by_timestamp_strategy": "earliest"})


@pytest.mark.parametrize("form", [dict, json.dumps])
def test_timestamps_per_queue(form: Any) -> None:
    options = {
        "starting_offsets_by_timestamp": form(times(T0_MS + 25_000, T0_MS + 3_000)),
        "starting_offsets_by_timestamp_strategy": "latest",
        "ending_offsets_by_timestamp": form(times(T0_MS + 40_000, T0_MS + 10_500)),
    }
    assert spans(options) == {"a0": (25, 40), "a1": (3, 11)}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"starting_timestamp": -1}, "starting_timestamp must be milliseconds"),
        ({"starting_timestamp": "yesterday"}, "starting_timestamp must be milliseconds"),
        (
            {"starting_timestamp": 1_764_000_000},
            r"starting_timestamp .* not 1764000000 \(is it in milliseconds",
        ),
        (
            {"ending_offsets_by_timestamp": times(T0_MS, 9, T0_MS)},
            r"_timestamp of queue broker-a:1 must be .*milliseconds\?",
        ),
        ({"ending_timestamp": True}, "ending_timestamp must be milliseconds"),
        (
            {"starting_offsets_by_timestamp": times(T0_MS, "x")},
            "starting_offsets_by_timestamp of queue broker-a:1 must be milli",
        ),
        ({"starting_offsets_by_timestamp": {"broker-a": {"0": T0_MS}}}, "missing: broker-a:1, broker-b:0"),
        ({"starting_offsets_by_timestamp": 7}, "must be times per queue"),
        ({"starting_timestamp": 1, "starting_offsets": times(20, 7, -2)}, "exclude each other"),
        ({"starting_timestamp": 1, "starting_offsets_by_timestamp": times(1, 1)}, "exclude each other"),
        ({"ending_offsets": "group:billing"}, "only starting_offsets can"),
        ({"starting_offsets": "group:"}, "group name"),
    ],
)
def test_times_and_groups_that_make_no_sense_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgumentError, match=said):
        spans(options)


def test_a_group_starts_the_read_at_its_committed_offsets_and_at_the_earliest_where_it_has_none() -> None:
    committed = {"billing": {MessageQueue("orders", "broker-a", 0): 42}}
    assert spans({"starting_offsets": "group:billing"}, committed=committed) == {"a0": (42, 100), "a1": (0, 30)}
    assert spans({"starting_offsets": "group:others"}, committed=committed) == ALL


def test_the_bounds_of_all_queues_are_asked_for_once() -> None:
    source = Queues(BOUNDS, topics=TOPICS)
    plan_ranges(source, TOPICS)
    assert source.calls["bounds"] == 1


def test_max_offsets_is_shared_in_proportion() -> None:
    assert spans({"max_offsets": 40}) == {"a0": (10, 40), "a1": (0, 10)}
    assert spans({"max_offsets": 120}) == ALL
    assert spans({"max_offsets": 1}) == {"a0": (10, 11)}


sizes = st.lists(st.integers(1, 10**6) | st.integers(1, 5), min_size=1, max_size=12)


@given(sizes, st.integers(1, 10**6))
def test_a_limit_is_kept_exactly_and_starves_no_queue(sizes: list[int], most: int) -> None:
    ranges = [OffsetRange("orders", "a", number, 5, 5 + size) for number, size in enumerate(sizes)]
    limited = limit_ranges(ranges, most)
    assert sum(one.size for one in limited) == min(most, sum(sizes))
    by_queue = {one.queue_id: one for one in limited}
    if most >= len(sizes):
        assert by_queue.keys() == set(range(len(sizes)))
    for number, one in by_queue.items():
        assert one.start_offset == 5
        # `limit_ranges` gives each queue a share of the `most` offsets, in proportion to the queue's size. A queue may
        # get two offsets more than its share: one because shares are rounded, and one because each queue first gets one
        # offset, before the rest is divided.
        assert one.size <= min(sizes[number], sizes[number] * most / sum(sizes) + 2)
    assert limit_ranges(ranges, most) == limited
