"""A topic's attributes: the types of its messages and queues, the retention time, the cleanup policy, and the bound.

Names and values are RocketMQ's (`+message.type=FIFO`, `+cleanup.policy=COMPACTION`, `+reserve.time=3600000`).
Attributes are stored and sent as RocketMQ's mapping of text to text. An attribute that is not set has no key.
Attributes that this version of raymq does not support are stored and sent unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Self, TypeVar

from raymq.common.errors import InvalidArgumentError
from raymq.common.numbers import NumberRange, number_in
from raymq.common.protocol.bounds import BOUND_ATTRIBUTES, BOUND_LIMITS, BacklogBound, bound_changes

MESSAGE_TYPE: Final = "message.type"
CLEANUP_POLICY: Final = "cleanup.policy"
QUEUE_TYPE: Final = "queue.type"
RESERVE_TIME: Final = "reserve.time"
"""Key of the attribute with a topic's retention time, in ms."""

NO_ATTRIBUTES: Final[Mapping[str, str]] = {}
"""An empty mapping, for a topic without attributes, or for a request that changes no attributes."""

E = TypeVar("E", bound=StrEnum)

RESERVE_TIME_MIN_S: Final = 60
"""Minimum retention time of a topic, in seconds. A shorter time would not be reliable, because a store reads a topic's
new attributes some seconds after they are set."""
RESERVE_TIME_MAX_MS: Final = 10 * 365 * 86_400_000
RESERVE_TIME_RANGE: Final = NumberRange(float(RESERVE_TIME_MIN_S), RESERVE_TIME_MAX_MS / 1000, otherwise=0)
"""The allowed retention times of a topic, in seconds; 0 means the store's default retention time."""


class TopicMessageType(StrEnum):
    """The type of messages that a topic accepts. Producers check each message before they send it.

    UNSPECIFIED (the default) and MIXED accept all messages. FIFO accepts messages with a sharding key, a queue or a
    selector. DELAY accepts messages with a delay level or a delivery time. TRANSACTION accepts half messages. PRIORITY
    accepts messages with a priority, and no sharding key, queue or selector. NORMAL accepts messages that have none of
    these properties.

    A topic of the type PRIORITY has one queue for each priority in each broker group, its level. A message with the
    priority p goes to queue p of a broker group, or to the group's last queue if the group has fewer queues.
    """

    UNSPECIFIED = "UNSPECIFIED"
    NORMAL = "NORMAL"
    FIFO = "FIFO"
    DELAY = "DELAY"
    TRANSACTION = "TRANSACTION"
    MIXED = "MIXED"
    PRIORITY = "PRIORITY"


class CleanupPolicy(StrEnum):
    """The cleanup policy for a topic's old messages. DELETE: old messages are deleted. COMPACTION: the newest message
    of each key is kept."""

    DELETE = "DELETE"
    COMPACTION = "COMPACTION"


class QueueType(StrEnum):
    """How a topic stores messages. SIMPLE: each message is a record of the log. BATCH: messages that are sent together
    are one record (an inner batch) with one consume-queue entry (unit). Queue offsets count messages in both cases."""

    SIMPLE = "SimpleCQ"
    BATCH = "BatchCQ"


@dataclass(frozen=True, slots=True)
class TopicAttributes:
    """A topic's attributes as typed values. `reserve_time_ms`: the retention time in ms; None if the store's settings
    define it. `bound`: the limit of the topic's backlog; None for a topic without a limit."""

    message_type: TopicMessageType = TopicMessageType.UNSPECIFIED
    cleanup_policy: CleanupPolicy = CleanupPolicy.DELETE
    reserve_time_ms: int | None = None
    queue_type: QueueType = QueueType.SIMPLE
    bound: BacklogBound | None = None

    @classmethod
    def parse(cls, attributes: Mapping[str, str]) -> Self:
        """Parse a mapping of attributes. Raises InvalidArgumentError if a value is invalid. A compaction topic keeps
        the newest message of each key forever. So the method also raises InvalidArgumentError if a compaction topic has
        inner batches, a retention time, or a limit of its backlog."""
        values = cls(
            _member(TopicMessageType, MESSAGE_TYPE, attributes.get(MESSAGE_TYPE) or "UNSPECIFIED"),
            _member(CleanupPolicy, CLEANUP_POLICY, attributes.get(CLEANUP_POLICY) or "DELETE"),
            _reserve_time_ms(attributes.get(RESERVE_TIME) or "-1"),
            _member(QueueType, QUEUE_TYPE, attributes.get(QUEUE_TYPE) or "SimpleCQ"),
            BacklogBound.parse(attributes),
        )
        if values.is_compacted and values.reserve_time_ms is not None:
            raise InvalidArgumentError(
                f"a topic has a {RESERVE_TIME} or the {CLEANUP_POLICY} COMPACTION, which keeps the newest message "
                "of each key for ever, but not both: leave one out"
            )
        if values.is_compacted and values.has_inner_batches:
            raise InvalidArgumentError(
                f"a topic with the {CLEANUP_POLICY} COMPACTION keeps each message by its key, so it cannot have "
                f"the {QUEUE_TYPE} BatchCQ, whose records contain many messages: leave one out"
            )
        if values.is_compacted and values.bound is not None:
            raise InvalidArgumentError(
                f"a topic with the {CLEANUP_POLICY} COMPACTION keeps the newest message of each key, so its backlog "
                "cannot have a limit: leave one out"
            )
        return values

    def mapping(self) -> dict[str, str]:
        """Return the topic's attributes as a mapping of names to texts, which `parse` can read. An attribute that has
        its default value is left out."""
        texts = {
            MESSAGE_TYPE: "" if self.message_type is TopicMessageType.UNSPECIFIED else str(self.message_type),
            CLEANUP_POLICY: "" if self.cleanup_policy is CleanupPolicy.DELETE else str(self.cleanup_policy),
            RESERVE_TIME: "" if self.reserve_time_ms is None else str(self.reserve_time_ms),
            QUEUE_TYPE: "" if self.queue_type is QueueType.SIMPLE else str(self.queue_type),
        }
        bound = {} if self.bound is None else self.bound.mapping()
        return {name: text for name, text in texts.items() if text} | bound

    @property
    def is_compacted(self) -> bool:
        """True if the topic is compacted: it keeps only the newest message of each key."""
        return self.cleanup_policy is CleanupPolicy.COMPACTION

    @property
    def has_inner_batches(self) -> bool:
        """True if the topic stores messages that are sent together as one record."""
        return self.queue_type is QueueType.BATCH

    @property
    def has_levels(self) -> bool:
        """True if the topic's queues are levels: each message goes to the queue of its priority."""
        return self.message_type is TopicMessageType.PRIORITY

    @property
    def restricts(self) -> bool:
        """True if the topic's attributes make producers refuse some messages."""
        return (
            self.is_compacted
            or self.has_inner_batches
            or self.message_type not in (TopicMessageType.UNSPECIFIED, TopicMessageType.MIXED)
        )

    @property
    def takes_normal(self) -> bool:
        """True if the topic accepts messages that have no sharding key, delay or transaction, and stores each of them
        as a separate record."""
        if self.is_compacted or self.has_inner_batches:
            return False
        return not self.restricts or self.message_type is TopicMessageType.NORMAL


PLAIN_ATTRIBUTES: Final = TopicAttributes()
"""The attributes of a topic for which no attribute is set."""


def attribute_changes(
    message_type: TopicMessageType | str | None = None,
    cleanup_policy: CleanupPolicy | str | None = None,
    reserve_time_s: float | None = None,
    queue_type: QueueType | str | None = None,
    *,
    max_backlog: int | None = None,
    max_backlog_bytes: int | None = None,
    backlog_policy: str | None = None,
    backlog_groups: Sequence[str] | None = None,
) -> dict[str, str]:
    """Return the attribute changes that the arguments request. None requests no change; an empty value removes the
    attribute. Types may be written in upper or lower case (a queue type is "batch" or RocketMQ's "BatchCQ"). A
    `reserve_time_s` of 0 means the store's default retention time. The last four arguments are the topic's bound
    (raymq.common.protocol.bounds.bound_changes). Raises InvalidArgumentError if a value is not allowed.

    >>> attribute_changes("fifo", None, 3600)
    {'message.type': 'FIFO', 'reserve.time': '3600000'}
    """
    changes: dict[str, str] = {}
    if message_type is not None:
        member: StrEnum = _member(TopicMessageType, MESSAGE_TYPE, str(message_type).upper())
        changes[MESSAGE_TYPE] = "" if member is TopicMessageType.UNSPECIFIED else str(member)
    if cleanup_policy is not None:
        member = _member(CleanupPolicy, CLEANUP_POLICY, str(cleanup_policy).upper())
        changes[CLEANUP_POLICY] = "" if member is CleanupPolicy.DELETE else str(member)
    if reserve_time_s is not None:
        reserve_time_s = number_in("reserve_time_s", reserve_time_s, RESERVE_TIME_RANGE)
        changes[RESERVE_TIME] = str(round(reserve_time_s * 1000)) if reserve_time_s else ""
    if queue_type is not None:
        named = {str(one).lower(): one for one in QueueType} | {one.name.lower(): one for one in QueueType}
        if str(queue_type).lower() not in named:
            raise InvalidArgumentError(f"{queue_type!r} is not a {QUEUE_TYPE}: write simple or batch")
        member = named[str(queue_type).lower()]
        changes[QUEUE_TYPE] = "" if member is QueueType.SIMPLE else str(member)
    groups = (backlog_groups,) if isinstance(backlog_groups, str) else backlog_groups
    groups = None if groups is None else tuple(groups)
    return changes | bound_changes(max_backlog, max_backlog_bytes, backlog_policy, groups)


def changed_attributes(topic: str, known: Mapping[str, str], changes: Mapping[str, str]) -> dict[str, str]:
    """Return a topic's attributes after `changes`. Changes that remove the last limit of a topic's backlog remove its
    policy and its groups, too. Raises InvalidArgumentError if a value is invalid, or if the changes
    include another cleanup policy: messages that one policy deleted cannot be restored."""
    merged = {name: text for name, text in {**known, **changes}.items() if text}
    if not any(limit in merged for limit in BOUND_LIMITS) and any(limit in known for limit in BOUND_LIMITS):
        merged = {name: text for name, text in merged.items() if name not in BOUND_ATTRIBUTES}
    values = TopicAttributes.parse(merged)
    if values.cleanup_policy is not TopicAttributes.parse(known).cleanup_policy:
        raise InvalidArgumentError(
            f"topic {topic!r} was created with another {CLEANUP_POLICY} than {values.cleanup_policy}, which "
            "cannot be changed; create another topic, and copy the messages to it"
        )
    if values.queue_type is not TopicAttributes.parse(known).queue_type:
        raise InvalidArgumentError(
            f"topic {topic!r} was created with another {QUEUE_TYPE} than {values.queue_type}, which cannot be "
            "changed; create another topic, and copy the messages to it"
        )
    return merged


def _member(kind: type[E], name: str, text: str) -> E:
    try:
        return kind(text)
    except ValueError:
        raise InvalidArgumentError(f"{text!r} is not a {name}: write one of {', '.join(kind)}") from None


def _reserve_time_ms(text: str) -> int | None:
    number = text.removeprefix("-")
    if not (number.isascii() and number.isdecimal()) or int(text) < -1 or int(text) == 0:
        raise InvalidArgumentError(
            f"{text!r} is not a {RESERVE_TIME}: write a number of ms, or -1 for the store's retention time"
        )
    if int(text) > RESERVE_TIME_MAX_MS:
        raise InvalidArgumentError(
            f"a {RESERVE_TIME} of {text} ms is too long: at most {RESERVE_TIME_MAX_MS} ms (10 years) are allowed"
        )
    return None if int(text) == -1 else int(text)
