"""Statistics of topics and groups, as a broker counts them (spec/messaging.md §9.6)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import NamedTuple, TypeVar


class RequestFigures(NamedTuple):
    """The requests of one kind that wait for a thread of an actor: how many do `waiting` now and for how long the first
    of them has, in ms; the highest number and the longest wait since the actor's start, and in the last minute; and how
    many were refused since the start, because too many waited and because they had waited too long."""

    kind: str
    waiting: int
    head_wait_ms: float
    most: int
    longest_ms: float
    most_last_minute: int
    longest_last_minute_ms: float
    refused_full: int
    refused_late: int


@dataclass(frozen=True, slots=True)
class Figures:
    """A counter: `total` since the broker started, the sum and the rate per second over the last minute, hour, day."""

    total: int = 0
    minute: int = 0
    hour: int = 0
    day: int = 0
    minute_tps: float = 0.0
    hour_tps: float = 0.0
    day_tps: float = 0.0


@dataclass(frozen=True, slots=True)
class TopicStats:
    """Messages that were put into a topic, and bytes of their records."""

    messages: Figures = Figures()
    bytes: Figures = Figures()


@dataclass(frozen=True, slots=True)
class GroupStats:
    """Messages of a topic that a group has committed, and messages that it has sent back."""

    messages: Figures = Figures()
    sent_back: Figures = Figures()


@dataclass(frozen=True, slots=True)
class TopicReading:
    """A topic in one broker group: `messages` and `bytes` of records that were put into it since its store was opened,
    its read queues, its permission, and the messages that they hold. `rate` is in messages per second, `bytes_rate` in
    bytes, over the last minute."""

    messages: int = 0
    bytes: int = 0
    queues: int = 0
    perm: int = 0
    held: int = 0
    rate: float = 0.0
    bytes_rate: float = 0.0


@dataclass(frozen=True, slots=True)
class GroupReading:
    """A group's progress in a topic: messages `consumed` since the broker was started, the `lag` in messages, and the
    age `behind_ms` of the first unread message in the queue with the most of them; None if that was not looked at."""

    consumed: int = 0
    lag: int = 0
    behind_ms: int | None = 0


@dataclass(frozen=True, slots=True)
class GroupTotals:
    """A group in one broker group, over all topics: messages `consumed` since the broker was started, the `lag` in
    messages, and the age `lag_ms` of the oldest unread message that was looked at, None if none was. `retries` wait to
    be tried again now, `dead_letters` were given up and are held."""

    consumed: int = 0
    lag: int = 0
    lag_ms: int | None = 0
    retries: int = 0
    dead_letters: int = 0
    consume_enable: bool = True


@dataclass(frozen=True, slots=True)
class BrokerReadings:
    """A broker's figures at a moment: of each topic, of each group by group and topic, and of each group in
    `group_totals`. `left_out`: pairs of group and topic that are not in it, because there are too many."""

    topics: Mapping[str, TopicReading]
    groups: Mapping[tuple[str, str], GroupReading]
    left_out: int = 0
    group_totals: Mapping[str, GroupTotals] = field(default_factory=dict)


T = TypeVar("T", Figures, TopicStats, GroupStats)


def add_up(kind: type[T], parts: Iterable[T]) -> T:
    """The figures of several brokers as one."""
    table = list(parts)
    values = {}
    for name in (one.name for one in fields(kind)):
        column = [getattr(part, name) for part in table]
        values[name] = add_up(Figures, column) if column and isinstance(column[0], Figures) else sum(column)
    return kind(**values) if table else kind()
