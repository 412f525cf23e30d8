"""Tests of the filters that Spark pushes down. For random filters and messages, a read that uses the pushed filters
keeps each message that passes the filters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import pytest

from raydp_jobs.data_source.pushed_filters import (
    PUSHED_VALUES_MAX,
    ColumnCondition,
    conditions_of,
    narrow_ranges,
    tags_of,
)
from raymq.client.scan.ranges import OffsetRange, plan_ranges
from raymq.common.message import MessageQueue
from raymq.common.protocol.store import QueueBounds
from tests.support.cases import chaos_seed, examples
from tests.support.clients.scan_source import T0_MS, Queues


@dataclass(frozen=True)
class OneFilter:
    """A filter of Spark 4, which pyspark 3.5 does not have. The names of its subclasses are the names of Spark's
    classes."""

    attribute: tuple[str, ...]
    value: Any = None


KINDS = ("EqualTo", "EqualNullSafe", "In", "GreaterThan", "GreaterThanOrEqual", "LessThan", "LessThanOrEqual")
FILTERS = {name: type(name, (OneFilter,), {}) for name in (*KINDS, "IsNull", "StringStartsWith", "Not")}


def only(column: str, kind: str, value: Any = None) -> Any:
    """Return a filter of Spark on one column."""
    return FILTERS[kind]((column,), value)


def at(ms: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=ms)


def bounds_of(filters: list[Any], column: str) -> tuple[int, int]:
    condition = conditions_of(filters)[column]
    return condition.low, condition.high


def test_comparisons_become_bounds_that_include_their_ends() -> None:
    both = [only("queue_offset", "GreaterThan", 4), only("queue_offset", "LessThan", 9)]
    assert bounds_of(both, "queue_offset") == (5, 8)
    both = [only("queue_id", "GreaterThanOrEqual", 4), only("queue_id", "LessThanOrEqual", 9)]
    assert bounds_of(both, "queue_id") == (4, 9)
    assert bounds_of([only("queue_offset", "In", (7, None, 3))], "queue_offset") == (3, 7)


def test_a_time_between_two_milliseconds_keeps_the_whole_millisecond() -> None:
    between = at(T0_MS) + timedelta(microseconds=300)
    for kind in ("GreaterThan", "GreaterThanOrEqual"):
        assert conditions_of([only("store_timestamp", kind, between)])["store_timestamp"].low == T0_MS
    for kind in ("LessThan", "LessThanOrEqual"):
        assert conditions_of([only("store_timestamp", kind, between)])["store_timestamp"].high == T0_MS


@pytest.mark.parametrize(
    "one",
    [
        only("tags", "IsNull"),
        only("tags", "StringStartsWith", "pa"),
        only("tags", "GreaterThan", "paid"),
        only("tags", "EqualTo", ""),
        only("tags", "EqualTo", None),
        only("tags", "In", (None,)),
        only("tags", "In", ("paid", 7)),
        only("tags", "In", tuple(map(str, range(PUSHED_VALUES_MAX + 1)))),
        only("queue_id", "EqualTo", True),
        only("queue_id", "LessThan", 1.5),
        only("queue_offset", "EqualTo", "7"),
        only("store_timestamp", "GreaterThan", datetime(2026, 3, 1)),  # the point
        only("born_timestamp", "GreaterThan", at(T0_MS)),
        only("message_id", "EqualTo", "x"),
        FILTERS["EqualTo"](("properties", "price"), "5"),
        FILTERS["Not"](("tags",), "paid"),
    ],
    ids=str,
)
def test_filters_that_the_store_cannot_apply_stay_with_spark(one: Any) -> None:
    assert conditions_of([one]) == {}


def test_the_tags_of_the_option_and_of_the_filters_must_both_match() -> None:
    option = frozenset(("paid", "refunded"))
    assert tags_of(conditions_of([], option)) == option
    assert tags_of(conditions_of([only("tags", "In", ("paid", "lost"))], option)) == {"paid"}
    assert tags_of(conditions_of([only("tags", "EqualTo", "lost")])) == {"lost"}
    assert tags_of(conditions_of([])) == frozenset()
    none = conditions_of([only("tags", "EqualTo", "lost")], option)
    assert narrow_ranges(Queues({}), [OffsetRange("orders", "a", 0, 0, 9)], none) == []


def test_a_read_without_conditions_on_time_asks_for_no_offsets_by_time() -> None:
    asked: list[Mapping[MessageQueue, int]] = []

    class Asked(Queues):
        def offsets_by_time(self, times: Mapping[MessageQueue, int]) -> Mapping[MessageQueue, int]:
            asked.append(times)
            return super().offsets_by_time(times)

    queues = Asked({("a", 0): (0, 50), ("a", 1): (0, 50)})
    ranges = plan_ranges(queues, "orders")
    assert narrow_ranges(queues, ranges, conditions_of([only("queue_id", "EqualTo", 1)])) == ranges[1:]
    assert asked == []
    early = [only("store_timestamp", "LessThan", at(T0_MS + 9_000)), only("queue_id", "EqualTo", 1)]
    assert narrow_ranges(queues, ranges, conditions_of(early)) == [OffsetRange("orders", "a", 1, 0, 10)]
    assert asked == [{MessageQueue("orders", "a", 1): T0_MS + 9_001}]


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_end_that_a_new_master_shows_too_low_shortens_no_range(when: str) -> None:
    """A failover between the plan and the lookup by time: the new master does not show the last messages yet."""
    times_asked = 0

    class FailedOver(Queues):
        def bounds(self, queues: Sequence[MessageQueue]) -> Mapping[MessageQueue, QueueBounds]:
            nonlocal times_asked
            times_asked += 1
            low = when == "before" if times_asked == 1 else when == "after"
            shown = Queues({("a", 0): (0, 40)}) if low else self
            return Queues.bounds(shown, queues)

        def offsets_by_time(self, times: Mapping[MessageQueue, int]) -> Mapping[MessageQueue, int]:
            return dict.fromkeys(times, 40)

    late = conditions_of([only("store_timestamp", "LessThan", at(T0_MS + 90_000))])
    planned = [OffsetRange("orders", "a", 0, 0, 50)]
    assert narrow_ranges(FailedOver({("a", 0): (0, 50)}), planned, late) == planned
    assert times_asked == 2


def passes(one: Any, message: Mapping[str, Any]) -> bool:
    """Return whether a message passes a filter, as Spark evaluates the filter."""
    value, wanted = message[one.attribute[0]], one.value
    if type(one).__name__ == "In":
        return value in [each for each in wanted if each is not None]
    if value is None or wanted is None:
        return type(one).__name__ == "EqualNullSafe" and value is wanted
    return {
        "EqualTo": value == wanted,
        "EqualNullSafe": value == wanted,
        "GreaterThan": value > wanted,
        "GreaterThanOrEqual": value >= wanted,
        "LessThan": value < wanted,
        "LessThanOrEqual": value <= wanted,
    }[type(one).__name__]


def random_filter(random: Random) -> Any:
    values: dict[str, Any] = {
        "topic": lambda: random.choice(("orders", "payments", None)),
        "broker_name": lambda: random.choice(("a", "b", "c")),
        "tags": lambda: random.choice(("paid", "lost", "", None)),
        "queue_id": lambda: random.randrange(-1, 4),
        "queue_offset": lambda: random.randrange(-2, 45),
        "store_timestamp": lambda: at(T0_MS) + timedelta(microseconds=random.randrange(-2_000, 42_000) * 1_000 + 500),
    }
    column, kind = random.choice(sorted(values)), random.choice(KINDS)
    if kind == "In":
        return only(column, kind, tuple(values[column]() for _ in range(random.randint(1, 4))))
    return only(column, kind, values[column]())


def test_a_narrowed_read_keeps_each_message_that_passes_random_filters() -> None:
    random = Random(chaos_seed())
    tags = ["paid", "lost", None]
    narrowed = 0
    for _ in range(examples(600)):
        bounds = {
            (broker, number): (low, low + random.randrange(0, 20))
            for broker in "ab"
            for number in range(2)
            for low in [random.randrange(20)]
        }
        queues = Queues(bounds)
        ranges = plan_ranges(queues, "orders")
        filters = [random_filter(random) for _ in range(random.randint(0, 3))]
        conditions = conditions_of(filters)
        kept = narrow_ranges(queues, ranges, conditions)
        narrowed += sum(one.size for one in kept) < sum(one.size for one in ranges)
        read = {(one.queue, offset) for one in kept for offset in range(one.start_offset, one.end_offset)}
        for one in ranges:
            for offset in range(one.start_offset, one.end_offset):
                message = {
                    "topic": one.topic,
                    "broker_name": one.broker_name,
                    "queue_id": one.queue_id,
                    "queue_offset": offset,
                    "tags": tags[offset % 3],
                    "store_timestamp": at(T0_MS + offset * 1_000),
                }
                if all(passes(each, message) for each in filters):
                    assert (one.queue, offset) in read, (filters, message)
                    assert not tags_of(conditions) or message["tags"] in tags_of(conditions), (filters, message)
        assert read <= {(one.queue, offset) for one in ranges for offset in range(one.start_offset, one.end_offset)}
    assert narrowed


def test_conditions_of_a_column_are_intersected() -> None:
    left = ColumnCondition(frozenset((1, 2, 3)), 1, 3)
    assert left.and_also(ColumnCondition(low=2)) == ColumnCondition(frozenset((1, 2, 3)), 2, 3)
    assert [value for value in range(5) if left.and_also(ColumnCondition(low=2)).has(value)] == [2, 3]
    assert left.and_also(ColumnCondition(frozenset((3, 4)), 3, 4)) == ColumnCondition(frozenset((3,)), 3, 3)
