"""Statistics of topics and groups, counted by a broker (spec/messaging.md §9.6)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import NamedTuple, TypeVar


class RequestFigures(NamedTuple):
    """Metrics of the requests of one kind that wait for a thread of an actor. The first fields are the number of
    requests that wait now (`waiting`) and the longest current wait in ms. The next fields are the maxima of these two
    values, since the actor's start and in the last minute. The last fields count the requests that were refused since
    the actor's start, because too many requests waited or because the request waited too long."""

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
    """A counter's values: the `total` since the broker's start, and the sum and the rate per second over the last
    minute, hour and day."""

    total: int = 0
    minute: int = 0
    hour: int = 0
    day: int = 0
    minute_tps: float = 0.0
    hour_tps: float = 0.0
    day_tps: float = 0.0


@dataclass(frozen=True, slots=True)
class TopicStats:
    """Counters of a topic: the messages stored in the topic, and the bytes of their records."""

    messages: Figures = Figures()
    bytes: Figures = Figures()


@dataclass(frozen=True, slots=True)
class GroupStats:
    """Counters of a group in a topic: the messages that the group has committed, and the messages that the group has
    sent back."""

    messages: Figures = Figures()
    sent_back: Figures = Figures()


@dataclass(frozen=True, slots=True)
class TopicReading:
    """Metrics of a topic in one broker group. `messages` and `bytes`: records stored since the store was opened.
    `rate`: messages per second over the last minute; `bytes_rate`: bytes per second over the last minute. `queues`:
    number of read queues. `perm`: the topic's permission. `held`: number of messages in the store."""

    messages: int = 0
    bytes: int = 0
    queues: int = 0
    perm: int = 0
    held: int = 0
    rate: float = 0.0
    bytes_rate: float = 0.0


@dataclass(frozen=True, slots=True)
class GroupReading:
    """A group's progress in a topic. `consumed`: messages consumed since the broker's start. `lag`: number of messages
    not consumed yet. `behind_ms`: the age of the first unread message in the queue with the largest lag; None if the
    message's store time was not read."""

    consumed: int = 0
    lag: int = 0
    behind_ms: int | None = 0


@dataclass(frozen=True, slots=True)
class GroupTotals:
    """A group's progress in one broker group, over all topics. `consumed`: messages consumed since the broker's start.
    `lag`: number of messages not consumed yet. `lag_ms`: the age of the oldest unread message whose store time was
    read; None if no store time was read. `retries`: messages that are due for another attempt. `dead_letters`: stored
    messages that failed in all attempts."""

    consumed: int = 0
    lag: int = 0
    lag_ms: int | None = 0
    retries: int = 0
    dead_letters: int = 0
    consume_enable: bool = True


@dataclass(frozen=True, slots=True)
class BrokerReadings:
    """A broker's statistics at one moment. `topics`: metrics by topic. `groups`: metrics by pair of group and topic.
    `group_totals`: metrics by group. `left_out`: number of (group, topic) pairs that are omitted because the number of
    reported pairs is limited."""

    topics: Mapping[str, TopicReading]
    groups: Mapping[tuple[str, str], GroupReading]
    left_out: int = 0
    group_totals: Mapping[str, GroupTotals] = field(default_factory=dict)


T = TypeVar("T", Figures, TopicStats, GroupStats)


def add_up(kind: type[T], parts: Iterable[T]) -> T:
    """Add up the statistics of several brokers, and return the total."""
    table = list(parts)
    values = {}
    for name in (one.name for one in fields(kind)):
        column = [getattr(part, name) for part in table]
        values[name] = add_up(Figures, column) if column and isinstance(column[0], Figures) else sum(column)
    return kind(**values) if table else kind()
