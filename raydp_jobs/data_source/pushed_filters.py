"""Filters that Spark pushes down to a batch read: which offsets, queues and tags a query can still need.

Spark evaluates each filter again after the read. So a pushed filter only has to keep each message that the filter
accepts, and may keep others. Filters on other columns, and kinds of filters that are not in the table below, stay with
Spark alone.

    topic, broker_name          =, <=>, IN                       the queues that are read
    queue_id                    =, <=>, IN, <, <=, >, >=         the queues that are read
    queue_offset                =, <=>, IN, <, <=, >, >=         the offset ranges that are read
    store_timestamp             =, <=>, IN, <, <=, >, >=         the offset ranges, by the ascending store times
    tags                        =, <=>, IN                       messages are skipped by their tag codes

The module does not import Spark: it recognizes Spark's filters by the names of their classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from raymq.client.scan.ranges import OffsetRange, ScanSource
from raymq.common.message import MessageQueue
from raymq.common.numbers import NUMBER_MAX

PUSHED_VALUES_MAX: Final = 1_000
"""Maximum number of values of an IN list that is pushed down. Spark alone evaluates a longer list."""


@dataclass(frozen=True, slots=True)
class ColumnCondition:
    """The values of a column that a query can still need: the values between `low` and `high`, both included, that are
    in `values`. If `values` is None, `low` and `high` are the only limits. Texts have no `low` and `high`."""

    values: frozenset[Any] | None = None
    low: int = -NUMBER_MAX
    high: int = NUMBER_MAX

    def has(self, value: Any) -> bool:
        """True if a query can need a message with this value of the column."""
        within = not isinstance(value, int) or self.low <= value <= self.high
        return within and (self.values is None or value in self.values)

    def and_also(self, other: ColumnCondition) -> ColumnCondition:
        """Return the condition that accepts a value if both conditions accept it."""
        values = self.values if other.values is None else other.values
        if self.values is not None and other.values is not None:
            values = self.values & other.values
        return ColumnCondition(values, max(self.low, other.low), min(self.high, other.high))


ANY_VALUE: Final = ColumnCondition()
Conditions = Mapping[str, ColumnCondition]
"""The conditions of a query, by column. A query can need all values of a column without an entry."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)


def _text_value(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _int_value(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _time_value(value: object) -> int | None:
    """Convert a time to the milliseconds that have begun since 1970. Returns None for a time without a time zone, which
    Spark compares in another way."""
    if not isinstance(value, datetime) or value.tzinfo is None:
        return None
    return (value - _EPOCH) // _MILLISECOND


_READERS: Final[Mapping[str, Callable[[object], Any]]] = {
    "topic": _text_value,
    "broker_name": _text_value,
    "tags": _text_value,
    "queue_id": _int_value,
    "queue_offset": _int_value,
    "store_timestamp": _time_value,
}
_TEXTS: Final = frozenset(("topic", "broker_name", "tags"))
_LOWER: Final[Mapping[str, int]] = {"GreaterThan": 1, "GreaterThanOrEqual": 0}
_UPPER: Final[Mapping[str, int]] = {"LessThan": -1, "LessThanOrEqual": 0}


def conditions_of(filters: Iterable[Any], tags: frozenset[str] = frozenset()) -> Conditions:
    """Return the conditions that all `filters` and the option `tags` set together.

    `filters`: objects of the classes in `pyspark.sql.datasource`; a message must pass all of them. A filter that cannot
    be pushed down sets no condition. `tags`: the tags that the option names; empty for all messages.
    """
    conditions: dict[str, ColumnCondition] = {"tags": ColumnCondition(tags)} if tags else {}
    for one in filters:
        found = _condition_of(one)
        if found is not None:
            column, condition = found
            conditions[column] = conditions.get(column, ANY_VALUE).and_also(condition)
    return conditions


def _condition_of(one: Any) -> tuple[str, ColumnCondition] | None:
    path: tuple[str, ...] = getattr(one, "attribute", ())
    kind = type(one).__name__
    if len(path) != 1 or path[0] not in _READERS:
        return None
    column, read = path[0], _READERS[path[0]]
    if kind == "In":
        # A null in the list accepts no message.
        given = [value for value in one.value if value is not None]
        values = [read(value) for value in given]
        if not values or None in values or len(values) > PUSHED_VALUES_MAX:
            return None
        return column, _one_of(column, values)
    value = read(getattr(one, "value", None))
    if value is None:
        return None
    if kind in ("EqualTo", "EqualNullSafe"):
        return column, _one_of(column, [value])
    if column in _TEXTS:
        return None
    # Spark's times have microseconds. `value` is the millisecond in which such a time lies, and a message of this
    # millisecond may be on either side of the time. So the whole millisecond is read.
    strict = column != "store_timestamp"
    if kind in _LOWER:
        return column, ColumnCondition(low=value + (_LOWER[kind] if strict else 0))
    if kind in _UPPER:
        return column, ColumnCondition(high=value + (_UPPER[kind] if strict else 0))
    return None


def _one_of(column: str, values: Sequence[Any]) -> ColumnCondition:
    if column in _TEXTS:
        return ColumnCondition(frozenset(values))
    return ColumnCondition(frozenset(values), min(values), max(values))


def narrow_ranges(source: ScanSource, ranges: Sequence[OffsetRange], conditions: Conditions) -> list[OffsetRange]:
    """Return the parts of `ranges` that can contain messages which meet the `conditions`, in the order of `ranges`.

    Looks up offsets by time in the cluster, but only if `conditions` limit the store time. A condition on tags shortens
    no range (`tags_of`), but if no tag can meet it, the result is empty.
    """
    if conditions.get("tags", ANY_VALUE).values == frozenset():
        return []
    offsets, times = (conditions.get(name, ANY_VALUE) for name in ("queue_offset", "store_timestamp"))
    kept = [
        replace(one, start_offset=max(one.start_offset, offsets.low), end_offset=min(one.end_offset, offsets.high + 1))
        for one in ranges
        if all(conditions.get(name, ANY_VALUE).has(getattr(one, name)) for name in ("topic", "broker_name", "queue_id"))
    ]
    kept = [one for one in kept if one.size > 0]
    if times.low > times.high:
        return []
    if kept and times.low > 0:
        first = source.offsets_by_time(_each(kept, times.low))
        kept = [replace(one, start_offset=max(one.start_offset, first[one.queue])) for one in kept]
    if kept and times.high < NUMBER_MAX:
        after = _ends_by_time(source, kept, max(0, times.high + 1))
        kept = [replace(one, end_offset=min(one.end_offset, after[one.queue])) for one in kept]
    return [one for one in kept if one.size > 0]


def _ends_by_time(source: ScanSource, ranges: Sequence[OffsetRange], time_ms: int) -> Mapping[MessageQueue, int]:
    """Return, for each range's queue, an offset from which on no message of the range has a store time before
    `time_ms`.

    The lookup by time answers with the queue's end if no message is as late as `time_ms`. After a failover a new master
    at first shows an end that lies before messages of the range. So the answer counts only if the whole range was
    visible before and after the lookup; otherwise the result is the range's end.
    """
    queues = [one.queue for one in ranges]
    before = source.bounds(queues)
    found = source.offsets_by_time(dict.fromkeys(queues, time_ms))
    seen = (before, source.bounds(queues))
    return {
        one.queue: found[one.queue]
        if all(bounds[one.queue].max_offset >= one.end_offset for bounds in seen)
        else one.end_offset
        for one in ranges
    }


def tags_of(conditions: Conditions) -> frozenset[str]:
    """Return the tags to which `conditions` limit a read, as `open_ranges` takes them; empty if there is no limit.

    Call `narrow_ranges` first: it returns no ranges if no tag can meet the conditions.
    """
    return conditions.get("tags", ANY_VALUE).values or frozenset()


def _each(ranges: Iterable[OffsetRange], time_ms: int) -> dict[MessageQueue, int]:
    return {one.queue: time_ms for one in ranges}
