"""Bounded topics: the limit of a topic's backlog, and what happens to further messages at the limit.

A topic's bound is a part of its attributes, under raymq's own names:

    backlog.max.messages   the limit in messages, over all queues of the topic
    backlog.max.bytes      the limit in bytes of stored records
    backlog.policy         block, refuse or drop; block if absent
    backlog.groups         the consumer groups that count, separated by commas; all stored messages count if absent

The backlog is what the slowest of the groups has not committed. Each broker group has its share of the limit, in
proportion to its queues (`share_of`), so brokers need no agreement. A broker measures the backlog from its stored
offsets, about twice a second, and sends the result to its store with BoundedTopic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, NamedTuple, Self

from raymq.common.errors import InvalidArgumentError
from raymq.common.names import check_group
from raymq.common.numbers import NumberRange, number_in

BACKLOG_MAX_MESSAGES: Final = "backlog.max.messages"
BACKLOG_MAX_BYTES: Final = "backlog.max.bytes"
BACKLOG_POLICY: Final = "backlog.policy"
BACKLOG_GROUPS: Final = "backlog.groups"
BOUND_LIMITS: Final = (BACKLOG_MAX_MESSAGES, BACKLOG_MAX_BYTES)
"""The names of the attributes that limit a topic's backlog."""
BOUND_ATTRIBUTES: Final = (*BOUND_LIMITS, BACKLOG_POLICY, BACKLOG_GROUPS)
"""The names of the attributes that are a topic's bound."""

MAX_BACKLOG: Final = NumberRange(1, 1 << 40, otherwise=0)
"""The allowed limits of a backlog in messages; 0 removes the limit."""
MAX_BACKLOG_BYTES: Final = NumberRange(4096, 1 << 50, otherwise=0)
"""The allowed limits of a backlog in bytes; 0 removes the limit."""
BOUND_GROUPS_MAX: Final = 16
"""Maximum number of consumer groups that a topic's bound names."""


class BacklogPolicy(StrEnum):
    """The treatment of messages for a full topic.

    BLOCK: a producer waits, up to its timeout, and then raises TopicFullError. REFUSE: the send raises TopicFullError
    at once. DROP: the message is stored, and the groups skip their oldest messages. The broker moves a group's
    committed offset, counts the skipped messages, and deletes no bytes.
    """

    BLOCK = "block"
    REFUSE = "refuse"
    DROP = "drop"


@dataclass(frozen=True, slots=True)
class BacklogBound:
    """The bound of a topic. `max_messages`, `max_bytes`: the limits of the backlog over all broker groups; None for no
    limit. `groups`: the consumer groups that count; if empty, all stored messages count."""

    max_messages: int | None
    max_bytes: int | None
    policy: BacklogPolicy = BacklogPolicy.BLOCK
    groups: tuple[str, ...] = ()

    @classmethod
    def parse(cls, attributes: Mapping[str, str]) -> Self | None:
        """Parse the bound in a topic's attributes; None if the topic has no bound.

        Raises InvalidArgumentError if a value is invalid, if there is a policy or a group without a limit, or if
        messages shall be dropped and no group is named. Raises IllegalNameError if a group's name is illegal.
        """
        max_messages = _limit(BACKLOG_MAX_MESSAGES, attributes.get(BACKLOG_MAX_MESSAGES, ""), MAX_BACKLOG)
        max_bytes = _limit(BACKLOG_MAX_BYTES, attributes.get(BACKLOG_MAX_BYTES, ""), MAX_BACKLOG_BYTES)
        policy = _policy(attributes.get(BACKLOG_POLICY) or BacklogPolicy.BLOCK)
        groups = parse_groups(attributes.get(BACKLOG_GROUPS, ""))
        if max_messages is None and max_bytes is None:
            if attributes.get(BACKLOG_POLICY) or groups:
                raise InvalidArgumentError(
                    f"a topic has a {BACKLOG_POLICY} or {BACKLOG_GROUPS} but no limit: set {BACKLOG_MAX_MESSAGES} or "
                    f"{BACKLOG_MAX_BYTES}, or remove both"
                )
            return None
        if policy is BacklogPolicy.DROP and not groups:
            raise InvalidArgumentError(
                f"a topic with the {BACKLOG_POLICY} drop needs {BACKLOG_GROUPS}: the groups that skip their oldest "
                "messages"
            )
        return cls(max_messages, max_bytes, policy, groups)

    def mapping(self) -> dict[str, str]:
        """Return the bound as attributes, which `parse` can read. Default values are left out."""
        texts = {
            BACKLOG_MAX_MESSAGES: "" if self.max_messages is None else str(self.max_messages),
            BACKLOG_MAX_BYTES: "" if self.max_bytes is None else str(self.max_bytes),
            BACKLOG_POLICY: "" if self.policy is BacklogPolicy.BLOCK else str(self.policy),
            BACKLOG_GROUPS: ",".join(self.groups),
        }
        return {name: text for name, text in texts.items() if text}


def parse_groups(text: str) -> tuple[str, ...]:
    """Parse a list of consumer groups, separated by commas. The result is sorted and has no group twice. Raises
    IllegalNameError for an illegal name, and InvalidArgumentError for more than BOUND_GROUPS_MAX groups."""
    groups = tuple(sorted({check_group(name.strip()) for name in text.split(",") if name.strip()}))
    if len(groups) > BOUND_GROUPS_MAX:
        raise InvalidArgumentError(
            f"{BACKLOG_GROUPS} names {len(groups)} groups; at most {BOUND_GROUPS_MAX} are allowed"
        )
    return groups


def bound_changes(
    max_backlog: int | None, max_backlog_bytes: int | None, policy: str | None, groups: tuple[str, ...] | None
) -> dict[str, str]:
    """Return the attribute changes that a request for a bound makes. None requests no change. A limit of 0 removes the
    limit, and no groups mean that all stored messages count. Raises InvalidArgumentError if a value is not allowed.

    >>> bound_changes(1000, None, "refuse", ("billing",))
    {'backlog.max.messages': '1000', 'backlog.policy': 'refuse', 'backlog.groups': 'billing'}
    """
    changes: dict[str, str] = {}
    if max_backlog is not None:
        changes[BACKLOG_MAX_MESSAGES] = str(number_in("max_backlog", max_backlog, MAX_BACKLOG) or "")
    if max_backlog_bytes is not None:
        changes[BACKLOG_MAX_BYTES] = str(number_in("max_backlog_bytes", max_backlog_bytes, MAX_BACKLOG_BYTES) or "")
    if policy is not None:
        member = _policy(str(policy).lower())
        changes[BACKLOG_POLICY] = "" if member is BacklogPolicy.BLOCK else str(member)
    if groups is not None:
        changes[BACKLOG_GROUPS] = ",".join(parse_groups(",".join(groups)))
    return changes


def bound_arguments(bound: BacklogBound | None) -> dict[str, Any]:
    """Return the arguments of `Admin.update_topic` that give a topic this bound, or that remove its bound."""
    if bound is None:
        return {"max_backlog": 0, "max_backlog_bytes": 0}
    return {
        "max_backlog": bound.max_messages or 0,
        "max_backlog_bytes": bound.max_bytes or 0,
        "backlog_policy": bound.policy,
        "backlog_groups": list(bound.groups),
    }


def share_of(limit: int, broker_name: str, queues: Mapping[str, int]) -> int:
    """Return the share of a topic's limit that belongs to one broker group, at least 1. `queues`: the topic's number of
    queues in each broker group.

    The shares add up to the limit, except if the limit is smaller than the number of broker groups.

    >>> [share_of(10, name, {"a": 1, "b": 2}) for name in ("a", "b")]
    [3, 7]
    """
    total, before = sum(queues.values()), 0
    if broker_name not in queues or not total:
        return limit
    for name in sorted(queues):
        if name == broker_name:
            break
        before += queues[name]
    return max(1, limit * (before + queues[broker_name]) // total - limit * before // total)


class BoundedTopic(NamedTuple):
    """The bound of a topic in one broker group, as its broker sends it to the store. `queues`: the number of queues in
    this group. `max_messages`, `max_bytes`: this group's share of the limits, None for no limit. `inner`: the topic's
    records are inner batches. `committed`: the committed offsets of each group that counts, by queue id."""

    topic: str
    queues: int
    max_messages: int | None
    max_bytes: int | None
    policy: str
    inner: bool
    committed: Mapping[str, Mapping[int, int]]


class TopicBacklog(NamedTuple):
    """The backlog of a bounded topic in one broker group, as the store measured it. `group`: the group with the largest
    backlog; empty if all stored messages count. `messages`, `bytes`: that backlog. `bounds`: the first offset and the
    next visible offset of each queue. `refused`: messages that were refused since the store was opened. `waiting`:
    producers that wait for room."""

    topic: str
    group: str
    messages: int
    bytes: int
    bounds: list[tuple[int, int]]
    refused: int = 0
    waiting: int = 0


def _limit(name: str, text: str, allowed: NumberRange) -> int | None:
    if not text:
        return None
    if not (text.isascii() and text.isdecimal()) or len(text) > 20 or not allowed.low <= int(text) <= allowed.high:
        raise InvalidArgumentError(
            f"{text[:40]!r} is not a {name}: write a whole number from {allowed.low:.0f} to {allowed.high:.0f}"
        )
    return int(text)


def _policy(text: str) -> BacklogPolicy:
    try:
        return BacklogPolicy(text)
    except ValueError:
        raise InvalidArgumentError(f"{text!r} is not a {BACKLOG_POLICY}: write {', '.join(BacklogPolicy)}") from None
