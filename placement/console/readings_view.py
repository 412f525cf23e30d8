"""The lists of topics and of groups, from the brokers' readings. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from raymq.common.protocol.attributes import TopicAttributes
from raymq.common.protocol.clients import ConsumerConnection
from raymq.common.protocol.route import PERM_READ, PERM_WRITE
from raymq.common.protocol.stats import BrokerReadings, GroupReading, GroupTotals, TopicReading
from raymq.tools.console.backend.groups import GroupRow
from raymq.tools.console.backend.topics import TopicGroup, TopicRow


def topic_parts(answers: Iterable[BrokerReadings]) -> dict[str, list[TopicReading]]:
    """The readings of each topic, one for each broker group that has it, sorted by topic."""
    found: dict[str, list[TopicReading]] = {}
    for answer in answers:
        for topic, reading in answer.topics.items():
            found.setdefault(topic, []).append(reading)
    return {topic: found[topic] for topic in sorted(found)}


def group_parts(answers: Iterable[BrokerReadings]) -> dict[str, list[GroupTotals]]:
    """The totals of each group, one for each broker group that knows it, sorted by group."""
    found: dict[str, list[GroupTotals]] = {}
    for answer in answers:
        for group, totals in answer.group_totals.items():
            found.setdefault(group, []).append(totals)
    return {group: found[group] for group in sorted(found)}


def topic_rows(answers: Sequence[BrokerReadings], attributes: Mapping[str, TopicAttributes]) -> tuple[TopicRow, ...]:
    """The list of topics. `attributes`: by topic, where known."""
    groups: dict[str, set[str]] = {}
    for group, topic in {pair for answer in answers for pair in answer.groups}:
        groups.setdefault(topic, set()).add(group)
    return tuple(
        TopicRow(
            topic,
            sum(one.queues for one in parts),
            shown_perm(parts[0].perm),
            sum(one.held for one in parts),
            sum(one.rate for one in parts),
            len(groups.get(topic, ())),
            dict(attributes[topic].mapping()) if topic in attributes else {},
        )
        for topic, parts in topic_parts(answers).items()
    )


def topic_groups(answers: Iterable[BrokerReadings], topic: str, members: Mapping[str, int]) -> tuple[TopicGroup, ...]:
    """The groups that consume a topic, with their lag in it. `members`: how many each group has."""
    found: dict[str, list[GroupReading]] = {}
    for answer in answers:
        for (group, name), reading in answer.groups.items():
            if name == topic:
                found.setdefault(group, []).append(reading)
    return tuple(
        TopicGroup(
            group,
            members.get(group, 0),
            sum(one.lag for one in parts),
            max((one.behind_ms for one in parts if one.behind_ms is not None), default=0),
        )
        for group, parts in sorted(found.items())
    )


def group_rows(answers: Iterable[BrokerReadings], connections: Iterable[ConsumerConnection]) -> tuple[GroupRow, ...]:
    """The list of groups, with their members as they are connected."""
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


def shown_perm(perm: int) -> str:
    """``"RW"``, ``"R"``, ``"W"`` or nothing."""
    return ("R" if perm & PERM_READ else "") + ("W" if perm & PERM_WRITE else "")
