"""Computes the rates of topics and groups for `raymq top` from two readings of the brokers' totals. No I/O."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from raymq.common.protocol.stats import BrokerReadings, GroupReading, TopicReading

SortKey = Literal["name", "in", "out", "lag", "behind"]
SORT_KEYS: Final[Mapping[str, SortKey]] = {"n": "name", "i": "in", "o": "out", "l": "lag", "b": "behind"}
"""Maps each key of the keyboard to the column by which the key sorts the tables of `raymq top`."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The totals that all brokers reported at time `at_s`. The value of a broker that did not answer is None."""

    at_s: float
    brokers: Mapping[str, BrokerReadings | None]


@dataclass(frozen=True, slots=True)
class TopicRates:
    """The rates of a topic per second: stored messages, stored bytes, and messages that the topic's groups consumed.

    `lag` is the largest lag, in messages, of all groups of the topic.
    """

    topic: str
    in_per_s: float
    in_bytes_per_s: float
    out_per_s: float
    lag: int


@dataclass(frozen=True, slots=True)
class GroupRates:
    """The rate of a group in a topic (consumed messages per second), and the number of messages that the group has not
    read.

    `behind_ms` is the age of the oldest unread message in the queue with the largest lag; None if it is unknown.
    """

    group: str
    topic: str
    out_per_s: float
    lag: int
    behind_ms: int | None


@dataclass(frozen=True, slots=True)
class TopFigures:
    """All rows of `raymq top`. The rows do not include the brokers in `silent`, because these did not answer.

    `left_out`: the number of (group, topic) pairs for which the brokers reported no totals.
    """

    topics: tuple[TopicRates, ...] = ()
    groups: tuple[GroupRates, ...] = ()
    silent: tuple[str, ...] = ()
    left_out: int = 0


def figures_between(before: Reading, now: Reading) -> TopFigures:
    """Return the totals of the reading `now`, with rates computed from the earlier reading `before`. A broker that is
    missing in `before` has rates of 0."""
    passed_s = max(now.at_s - before.at_s, 1e-9)
    puts: dict[str, list[TopicReading]] = defaultdict(list)
    parts: dict[tuple[str, str], list[GroupRates]] = defaultdict(list)
    answers = {name: readings for name, readings in now.brokers.items() if readings is not None}
    for name, readings in answers.items():
        earlier = before.brokers.get(name) or readings
        for topic, reading in readings.topics.items():
            known = earlier.topics.get(topic, TopicReading())
            grown = TopicReading(_since(known.messages, reading.messages), _since(known.bytes, reading.bytes))
            puts[topic].append(grown)
        for (group, topic), progress in readings.groups.items():
            consumed_before = earlier.groups.get((group, topic), GroupReading()).consumed
            rate = _since(consumed_before, progress.consumed) / passed_s
            parts[group, topic].append(GroupRates(group, topic, rate, progress.lag, progress.behind_ms))
    groups = tuple(_joined(rows) for rows in parts.values())
    by_topic: dict[str, list[GroupRates]] = defaultdict(list)
    for row in groups:
        by_topic[row.topic].append(row)
    return TopFigures(
        tuple(_topic_row(topic, grown, by_topic.get(topic, []), passed_s) for topic, grown in puts.items()),
        groups,
        tuple(sorted(now.brokers.keys() - answers.keys())),
        sum(readings.left_out for readings in answers.values()),
    )


def _since(before: int, now: int) -> int:
    """Return the growth of a counter from the reading `before` to the reading `now`. If the counter shrank, its server
    has restarted and counted from 0, so the growth is `now`."""
    return now - before if now >= before else now


def _topic_row(topic: str, grown: Sequence[TopicReading], groups: Sequence[GroupRates], passed_s: float) -> TopicRates:
    """Return a topic's row of `raymq top`: the sum of its rates over all brokers, with the groups that consume the
    topic."""
    return TopicRates(
        topic,
        sum(part.messages for part in grown) / passed_s,
        sum(part.bytes for part in grown) / passed_s,
        sum(row.out_per_s for row in groups),
        max((row.lag for row in groups), default=0),
    )


def _joined(parts: Sequence[GroupRates]) -> GroupRates:
    """Return the sum of a group's rates in a topic over all brokers."""
    ages = [row.behind_ms for row in parts if row.behind_ms is not None]
    return GroupRates(
        parts[0].group,
        parts[0].topic,
        sum(row.out_per_s for row in parts),
        sum(row.lag for row in parts),
        max(ages, default=None),
    )


def sorted_topics(rows: Sequence[TopicRates], key: SortKey) -> list[TopicRates]:
    """Return the topics' rates, sorted by the column `key`, largest value first. If topics do not have this column,
    they are sorted by name."""

    def value(row: TopicRates) -> float:
        return {"in": row.in_per_s, "out": row.out_per_s, "lag": row.lag}.get(key, 0)

    return sorted(rows, key=lambda row: (-value(row), row.topic))


def sorted_groups(rows: Sequence[GroupRates], key: SortKey) -> list[GroupRates]:
    """Return the groups sorted by column `key`, largest value first; by name if groups have no such column."""

    def value(row: GroupRates) -> float:
        return {"out": row.out_per_s, "lag": row.lag, "behind": row.behind_ms or 0}.get(key, 0)

    return sorted(rows, key=lambda row: (-value(row), row.group, row.topic))
