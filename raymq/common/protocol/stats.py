"""Statistics of topics and groups, counted by a broker (spec/messaging.md §9.6)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import NamedTuple, TypeVar


class RequestFigures(NamedTuple):
    """The requests of one kind that wait for a thread of an actor: the number that is `waiting` now, and the longest
    present wait in ms; the maxima of both since the actor's start and in the last minute; and the requests refused
    since the start, because too many waited or because they waited too long."""

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
    """A counter: the `total` since the broker's start, and the sum and rate per second over the last minute, hour and
    day."""

    total: int = 0
    minute: int = 0
    hour: int = 0
    day: int = 0
    minute_tps: float = 0.0
    hour_tps: float = 0.0
    day_tps: float = 0.0


@dataclass(frozen=True, slots=True)
class TopicStats:
    """Messages that were stored in a topic, and bytes of their records."""

    messages: Figures = Figures()
    bytes: Figures = Figures()


@dataclass(frozen=True, slots=True)
class GroupStats:
    """Messages of a topic that a group has committed, and messages that the group has sent back."""

    messages: Figures = Figures()
    sent_back: Figures = Figures()


@dataclass(frozen=True, slots=True)
class TopicReading:
    """A topic in one broker group. `messages` and `bytes`: records stored since the store was opened. `rate`: messages
    per second over the last minute; `bytes_rate`: bytes per second. Further fields: the read queues, their permission,
    and the stored messages."""

    messages: int = 0
    bytes: int = 0
    queues: int = 0
    perm: int = 0
    held: int = 0
    rate: float = 0.0
    bytes_rate: float = 0.0


@dataclass(frozen=True, slots=True)
class GroupReading:
    """A group's progress in a topic. `consumed`: messages since the broker's start. `lag`: in messages. `behind_ms`:
    the age of the first unread message in the queue with the largest lag; None if it was not read."""

    consumed: int = 0
    lag: int = 0
    behind_ms: int | None = 0


@dataclass(frozen=True, slots=True)
class GroupTotals:
    """A group in one broker group, over all topics. `consumed`: messages since the broker's start. `lag`: in messages.
    `lag_ms`: the age of the oldest unread message that was read for this; None if none was read. `retries`: messages
    that are due for another attempt. `dead_letters`: messages that failed in all attempts and are stored."""

    consumed: int = 0
    lag: int = 0
    lag_ms: int | None = 0
    retries: int = 0
    dead_letters: int = 0
    consume_enable: bool = True


@dataclass(frozen=True, slots=True)
class BrokerReadings:
    """A broker's statistics at one moment: of each topic, of each pair of group and topic, and in `group_totals` of
    each group. `left_out`: the number of pairs of group and topic beyond the limit."""

    topics: Mapping[str, TopicReading]
    groups: Mapping[tuple[str, str], GroupReading]
    left_out: int = 0
    group_totals: Mapping[str, GroupTotals] = field(default_factory=dict)


T = TypeVar("T", Figures, TopicStats, GroupStats)


def add_up(kind: type[T], parts: Iterable[T]) -> T:
    """Add up the statistics of several brokers."""
    table = list(parts)
    values = {}
    for name in (one.name for one in fields(kind)):
        column = [getattr(part, name) for part in table]
        values[name] = add_up(Figures, column) if column and isinstance(column[0], Figures) else sum(column)
    return kind(**values) if table else kind()
