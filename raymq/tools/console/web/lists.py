"""Computes the lists of topics and of groups, and the counters of the whole cluster, from the readings (totals) of the
brokers.

A list needs one or two calls to each broker group, whatever the number of topics and groups (`Admin.readings`). The
console caches each list for some seconds (raymq.tools.console.web.snapshots), so that more viewers cause no more calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from raymq.client.admin.admin import Admin
from raymq.common.errors import ServiceNotAvailableError
from raymq.common.protocol.attributes import TopicAttributes
from raymq.common.protocol.clients import ConsumerConnection
from raymq.common.protocol.stats import BrokerReadings, GroupTotals, TopicReading
from raymq.tools.console.web.history import ClusterFigures
from raymq.tools.console.web.texts import permission

BROKER_READINGS_TIMEOUT_S: Final = 3.0
"""Timeout in seconds of the call that reads the totals of one broker. It is shorter than the 5 s that a page
waits."""
NO_ANSWER: Final = f"no answer within {BROKER_READINGS_TIMEOUT_S:g} s; see `raymq status`"

Row_co = TypeVar("Row_co", covariant=True)


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """A server that did not answer in time. `reason`: the error as text."""

    server: str
    reason: str


@dataclass(frozen=True, slots=True)
class Listing(Generic[Row_co]):
    """A list of topics or groups. It has the rows from the servers that answered, and the `missing` servers, whose rows
    are not in the list."""

    rows: tuple[Row_co, ...]
    missing: tuple[NoAnswer, ...] = ()


@dataclass(frozen=True, slots=True)
class TopicRow:
    """One row of the topic list, for all broker groups together. `perm`: "RW", "R", "W" or "". `messages`: the number
    of messages in the topic. `rate`: messages per second stored in the topic over the last minute. `attributes`: the
    topic's attributes in the form of `raymq topic list --json`."""

    topic: str
    queues: int
    perm: str
    messages: int
    rate: float
    groups: int
    attributes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GroupRow:
    """One row of the group list, for all broker groups together. `consume_type`: "PUSH", "PULL", "POP", or several of
    these with commas; "" if the group has no members. `message_model` has the same form. `lag`: the number of messages
    that the group has not consumed. `lag_ms`: the age of the oldest of these messages, None if unknown. `retries`: the
    number of messages that wait for a retry."""

    group: str
    consume_type: str
    message_model: str
    members: int
    lag: int
    lag_ms: int | None
    retries: int
    dead_letters: int
    consume_enable: bool = True


def broker_readings(admin: Admin, *, with_pairs: bool = True) -> tuple[list[BrokerReadings], tuple[NoAnswer, ...]]:
    """Read the totals of all brokers. Returns the readings of the brokers that answered, and the brokers that did not
    answer."""
    found = admin.readings(BROKER_READINGS_TIMEOUT_S, with_pairs=with_pairs)
    silent = tuple(NoAnswer(name, NO_ANSWER) for name, one in sorted(found.items()) if one is None)
    return [one for one in found.values() if one is not None], silent


def list_topics(admin: Admin) -> Listing[TopicRow]:
    """List all topics except internal ones, sorted by name."""
    answers, missing = broker_readings(admin)
    attributes = admin.topic_attributes({name for one in answers for name in one.topics})
    return Listing(topic_rows(answers, attributes), missing)


def list_groups(admin: Admin) -> Listing[GroupRow]:
    """List all groups, sorted by name."""
    answers, missing = broker_readings(admin)
    return Listing(group_rows(answers, admin.consumer_connections()), missing)


def cluster_figures(admin: Admin, now_ms: int) -> ClusterFigures:
    """Sample the counters of the whole cluster at time `now_ms` (ms since 1970).

    Raises ServiceNotAvailableError if a broker does not answer. A sum without this broker would be smaller than the
    last sum, and the console would take it for a restart of a server.
    """
    answers, missing = broker_readings(admin, with_pairs=False)
    if missing:
        raise ServiceNotAvailableError(f"{missing[0].server}: {missing[0].reason}")
    topics, groups = topic_parts(answers), group_parts(answers)
    return ClusterFigures(
        now_ms,
        sum(one.messages for parts in topics.values() for one in parts),
        sum(one.consumed for parts in groups.values() for one in parts),
        sum(one.bytes for parts in topics.values() for one in parts),
        sum(one.dead_letters for parts in groups.values() for one in parts),
        sum(admin.delayed(now_ms, now_ms, limit=1).levels.values()),
        {topic: sum(one.messages for one in parts) for topic, parts in topics.items()},
        {group: sum(one.lag for one in parts) for group, parts in groups.items()},
    )


def topic_parts(answers: Iterable[BrokerReadings]) -> dict[str, list[TopicReading]]:
    """Group the figures that the brokers report about topics by topic, sorted by topic. A topic has one TopicReading
    for each broker group that has the topic."""
    found: dict[str, list[TopicReading]] = {}
    for answer in answers:
        for topic, reading in answer.topics.items():
            found.setdefault(topic, []).append(reading)
    return {topic: found[topic] for topic in sorted(found)}


def group_parts(answers: Iterable[BrokerReadings]) -> dict[str, list[GroupTotals]]:
    """Group the brokers' totals by consumer group, sorted by name. A consumer group has one entry for each broker group
    that has the consumer group."""
    found: dict[str, list[GroupTotals]] = {}
    for answer in answers:
        for group, totals in answer.group_totals.items():
            found.setdefault(group, []).append(totals)
    return {group: found[group] for group in sorted(found)}


def topic_rows(answers: Sequence[BrokerReadings], attributes: Mapping[str, TopicAttributes]) -> tuple[TopicRow, ...]:
    """Build the rows of the topic list: add up the brokers' readings of each topic. `attributes`: the attributes of
    topics, if they are known."""
    groups: dict[str, set[str]] = {}
    for group, topic in {pair for answer in answers for pair in answer.groups}:
        groups.setdefault(topic, set()).add(group)
    return tuple(
        TopicRow(
            topic,
            sum(one.queues for one in parts),
            permission(parts[0].perm),
            sum(one.held for one in parts),
            sum(one.rate for one in parts),
            len(groups.get(topic, ())),
            dict(attributes[topic].mapping()) if topic in attributes else {},
        )
        for topic, parts in topic_parts(answers).items()
    )


def group_rows(answers: Iterable[BrokerReadings], connections: Iterable[ConsumerConnection]) -> tuple[GroupRow, ...]:
    """Build the rows of the group list: add up the brokers' totals of each group. `connections`: the connected
    consumers of all groups."""
    members: dict[str, list[ConsumerConnection]] = {}
    for one in connections:
        members.setdefault(one.consumer.group, []).append(one)
    return tuple(_group_row(group, parts, members.get(group, [])) for group, parts in group_parts(answers).items())


def _group_row(group: str, parts: Sequence[GroupTotals], members: Sequence[ConsumerConnection]) -> GroupRow:
    ages = [one.lag_ms for one in parts if one.lag_ms is not None]
    return GroupRow(
        group,
        ",".join(sorted({one.consumer.consume_type for one in members})),
        ",".join(sorted({one.consumer.message_model.value for one in members})),
        len(members),
        sum(one.lag for one in parts),
        max(ages, default=None),
        sum(one.retries for one in parts),
        sum(one.dead_letters for one in parts),
        all(one.consume_enable for one in parts),
    )
