"""Requests to a broker about consumer groups, and the broker's answers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, TypedDict

from raymq.common.delay import DELAY_LEVELS_MS, parse_duration_ms
from raymq.common.errors import InvalidArgumentError
from raymq.common.message import TIMER_DELAY_MAX_MS, ConsumeFromWhere, MessageQueue
from raymq.common.numbers import POINT_IN_TIME_MS, NumberRange, bounded, check_fields, checked, number_in, shown
from raymq.common.protocol.attributes import MESSAGE_TYPE, TopicMessageType
from raymq.common.protocol.route import QUEUE_NUMS_MAX


@dataclass(frozen=True, slots=True)
class StartOffsetQuery:
    """A query for the start offset of a group that has no committed offset. `timestamp_ms` is used only with
    CONSUME_FROM_TIMESTAMP, which needs a time after 0. Raises InvalidArgumentError if a value is not valid. The error
    uses the names of the consumer's arguments, `consume_from` and `consume_timestamp_ms`."""

    where: ConsumeFromWhere = ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET
    timestamp_ms: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.where, ConsumeFromWhere):
            names = ", ".join(where.name for where in ConsumeFromWhere)
            raise InvalidArgumentError(
                f"consume_from must be a raymq.ConsumeFromWhere, not {shown(self.where)}; it has {names}"
            )
        at_ms = number_in("consume_timestamp_ms", self.timestamp_ms, POINT_IN_TIME_MS)
        if self.where is ConsumeFromWhere.CONSUME_FROM_TIMESTAMP and not at_ms:
            raise InvalidArgumentError(
                f"CONSUME_FROM_TIMESTAMP needs consume_timestamp_ms, a time in ms since 1970, not {at_ms!r}"
            )


RETRY_QUEUE_NUMS: Final = NumberRange(1, QUEUE_NUMS_MAX)
RETRY_MAX_TIMES: Final = NumberRange(0, 1000)
RETRY_INTERVAL_S: Final = NumberRange(0.1, TIMER_DELAY_MAX_MS / 1000)
"""Allowed range of one retry interval, in seconds."""
RETRY_INTERVALS_MAX: Final = 64
"""Maximum number of retry intervals of a group."""
RETRY_MULTIPLIER: Final = NumberRange(1.1, 100.0)
"""Allowed range of the factor between two intervals that grow exponentially."""
RETRY_INTERVALS_S: Final = tuple(delay_ms / 1000 for delay_ms in DELAY_LEVELS_MS[2:])
"""RocketMQ's retry intervals in seconds: 10 s, 30 s, 1 min and so on, up to 2 h. They are the delay levels 3 to 18."""

_EXPONENTIAL: Final = re.compile(r"([^*]+)\*\s*(\d{1,3}(?:\.\d{1,3})?)\s*\.\.(.+)", re.ASCII)

ORDERED: Final[Mapping[str, bool | None]] = {"yes": True, "no": False, "by-topic": None}
"""The values of a group's setting `ordered`, by the words that an operator writes for them."""


@dataclass(frozen=True, slots=True)
class GroupConfig:
    """The settings of a subscription group at a broker (spec/messaging.md §2.7).

    `consume_enable`: False stops all consumers of the group. `consume_broadcast_enable`: whether consumers may use
    BROADCASTING. `retry_queue_nums`: number of queues of the group's retry topic, per broker group. `retry_max_times`:
    number of retries before a message goes to the dead-letter topic. `retry_intervals_s`: the seconds before the first
    retry, the second retry and so on; the last value counts for all further retries. If it is empty, the delay levels
    from level 3 on count (RETRY_INTERVALS_S, unless the store's message_delay_level differs). `ordered`: True if simple
    consumers receive in order mode, False if they do not; with None they do in topics of message type FIFO. It counts
    for consumers that do not choose the mode themselves.
    """

    group: str
    consume_enable: bool = True
    consume_broadcast_enable: bool = True
    retry_queue_nums: int = 1
    retry_max_times: int = 16
    retry_intervals_s: tuple[float, ...] = ()
    ordered: bool | None = None

    def __post_init__(self) -> None:
        # JSON has no tuples, and a list would make equal configurations differ.
        if isinstance(self.retry_intervals_s, list):
            object.__setattr__(self, "retry_intervals_s", tuple(self.retry_intervals_s))


def is_ordered(config: GroupConfig, attributes: Mapping[str, str]) -> bool:
    """True if simple consumers of a group receive a topic in order mode, unless they choose the mode themselves.
    `attributes`: the topic's attributes."""
    fifo = attributes.get(MESSAGE_TYPE) == TopicMessageType.FIFO
    return fifo if config.ordered is None else config.ordered


def retry_interval_s(intervals_s: tuple[float, ...], failures: int) -> float:
    """Return the seconds from a message's failure until its next delivery, by a group's `retry_intervals_s`.
    `failures`: how often the message has failed, 1 or more."""
    intervals_s = intervals_s or RETRY_INTERVALS_S
    return intervals_s[min(max(failures, 1), len(intervals_s)) - 1]


@checked
@bounded(first_s=RETRY_INTERVAL_S, longest_s=RETRY_INTERVAL_S, multiplier=RETRY_MULTIPLIER)
def exponential_intervals(first_s: float, longest_s: float, multiplier: float = 2.0) -> tuple[float, ...]:
    """Return retry intervals that grow exponentially, for a group's `retry_intervals_s`.

    `first_s`: the seconds before the first retry. Each further interval is `multiplier` times as long (1.1 to 100), up
    to `longest_s`, which counts for all further retries. For example (1, 10, 2) makes 1, 2, 4, 8 and 10 s. Raises
    InvalidArgumentError if a value is out of its range, if `longest_s` is less than `first_s`, or if more than
    RETRY_INTERVALS_MAX intervals were needed.
    """
    if longest_s < first_s:
        raise InvalidArgumentError(
            f"longest_s of retry intervals must be at least first_s, {first_s:g}, not {longest_s:g}"
        )
    intervals_s = [first_s]
    while intervals_s[-1] < longest_s:
        intervals_s.append(min(longest_s, first_s * multiplier ** len(intervals_s)))
        if len(intervals_s) > RETRY_INTERVALS_MAX:
            raise InvalidArgumentError(
                f"the retry intervals from {first_s:g} to {longest_s:g} s are more than {RETRY_INTERVALS_MAX}: use a "
                f"larger multiplier than {multiplier:g}"
            )
    return tuple(round(one_s, 3) for one_s in intervals_s)


def check_group_config(config: GroupConfig) -> None:
    """Raise InvalidArgumentError if the settings in `config` are not allowed for a consumer group."""
    check_fields(config, {"retry_queue_nums": RETRY_QUEUE_NUMS, "retry_max_times": RETRY_MAX_TIMES})
    for name in ("consume_enable", "consume_broadcast_enable"):
        if not isinstance(getattr(config, name), bool):
            raise InvalidArgumentError(
                f"{name} of group {config.group!r} must be a bool, not {getattr(config, name)!r}"
            )
    if config.ordered is not None and not isinstance(config.ordered, bool):
        raise InvalidArgumentError(
            f"ordered of group {config.group!r} must be True, False or None, not {shown(config.ordered)}"
        )
    object.__setattr__(config, "retry_intervals_s", checked_intervals(config.retry_intervals_s))


def checked_intervals(intervals_s: object) -> tuple[float, ...]:
    """Return retry intervals in seconds, rounded to ms as the broker stores them."""
    if not isinstance(intervals_s, tuple) or len(intervals_s) > RETRY_INTERVALS_MAX:
        raise InvalidArgumentError(
            f"retry_intervals_s must be a tuple or list of at most {RETRY_INTERVALS_MAX} times in seconds, such as "
            f"(10, 30, 60), not {shown(intervals_s)}"
        )
    return tuple(round(number_in("retry_intervals_s", one, RETRY_INTERVAL_S), 3) for one in intervals_s)


def parse_intervals(text: str) -> tuple[float, ...]:
    """Parse the text of retry intervals into seconds: a list such as "10s,30s,5m", or intervals that grow
    exponentially, such as "1s*2..10m" (exponential_intervals). The word "default" means no intervals, so that the
    default counts. Raises InvalidArgumentError if a time is not valid."""
    if text.strip() == "default":
        return ()
    if (growing := _EXPONENTIAL.fullmatch(text)) is not None:
        first_ms, longest_ms = parse_duration_ms(growing[1]), parse_duration_ms(growing[3])
        return exponential_intervals(first_ms / 1000, longest_ms / 1000, float(growing[2]))
    return checked_intervals(tuple(parse_duration_ms(word) / 1000 for word in text.split(",")))


def intervals_text(intervals_s: tuple[float, ...]) -> str:
    """Return retry intervals in seconds as a text that `parse_intervals` reads, if they are whole seconds."""
    return ",".join(_interval_text(one) for one in intervals_s) or "default"


def _interval_text(interval_s: float) -> str:
    for unit, unit_s in (("d", 86_400), ("h", 3600), ("m", 60)):
        if interval_s % unit_s == 0:
            return f"{interval_s / unit_s:g}{unit}"
    return f"{interval_s:.10g}s"


class GroupChanges(TypedDict, total=False):
    """The keyword arguments of `Admin.update_group`. Each argument is a field of GroupConfig."""

    consume_enable: bool
    consume_broadcast_enable: bool
    retry_queue_nums: int
    retry_max_times: int
    retry_intervals_s: tuple[float, ...]
    ordered: bool | None


@dataclass(frozen=True, slots=True)
class QueueOffset:
    """A group's committed offset in a queue. `reset_version`: the number of times that the offset was reset."""

    queue_offset: int
    reset_version: int = 0


@dataclass(frozen=True, slots=True)
class OffsetCommit:
    """A member's request to commit `queue_offset`, the offset of the next message to consume.

    The commit takes effect only while the member owns the queue (`generation`, raymq.common.protocol.membership) and
    only if the offset was not reset (`reset_version`, from the broker's start offset). A commit moves an offset back
    only if `backwards` is True, after the program has called seek. If `queue_offset` is None, the request commits
    nothing. Its answer only tells the member if the queue was reset, fenced, deleted or stopped.
    """

    queue_offset: int | None
    generation: int
    reset_version: int
    backwards: bool = False


@dataclass(frozen=True, slots=True)
class CommitAnswer:
    """The broker's answer to commits. The commit of a queue succeeded if no field of the answer names the queue.

    `reset`: queues whose offsets were reset, with the new offsets. `fenced`: queues that another member has begun to
    read. `gone`: queues that no longer exist. `stopped`: queues that the group may not read now, with the reason.
    Commits in `stopped` queues take effect, but a consumer must not deliver messages of such a queue while answers name
    the queue as stopped.
    """

    reset: Mapping[MessageQueue, QueueOffset] = field(default_factory=dict)
    fenced: frozenset[MessageQueue] = frozenset()
    gone: frozenset[MessageQueue] = frozenset()
    stopped: Mapping[MessageQueue, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SendBackAnswer:
    """The number of sent-back messages that went to the retry topic, and the number of sent-back messages that went to
    the dead-letter topic."""

    retried: int
    dead: int


@dataclass(frozen=True, slots=True)
class GroupQueueProgress:
    """A group's progress in one queue.

    `committed`: the committed offset, None before the first commit. `lag_ms`: the age of the first uncommitted message,
    0 if all messages are committed. `in_flight`: number of messages after the committed offset that simple consumers
    hold under a lease.
    """

    group: str
    queue: MessageQueue
    committed: int | None
    min_offset: int
    max_offset: int
    lag_ms: int = 0
    in_flight: int = 0

    @property
    def lag(self) -> int:
        """The number of uncommitted messages in the queue. A committed offset beyond the queue's end counts as the end.
        A light queue can have such an offset after it was deleted."""
        return max(self.max_offset - max(self.committed or 0, self.min_offset), 0)


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """A group's progress in all its queues together.

    `lag`: number of messages that are not consumed. `lag_ms`: the age of the oldest of these messages. `retry_lag`:
    number of failed messages that are due for another attempt. `dead_letters`: number of messages in `%DLQ%group`.
    """

    group: str
    queues: tuple[GroupQueueProgress, ...]
    lag: int
    lag_ms: int
    retry_lag: int
    dead_letters: int
