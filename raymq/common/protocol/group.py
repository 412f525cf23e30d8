"""Questions to a broker about consumer groups, and its answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, TypedDict

from raymq.common.errors import InvalidArgumentError
from raymq.common.message import ConsumeFromWhere, MessageQueue
from raymq.common.numbers import NumberRange, check_fields
from raymq.common.protocol.route import QUEUE_NUMS_MAX


@dataclass(frozen=True, slots=True)
class StartOffsetQuery:
    """The start of a group without a committed offset. `timestamp_ms` only counts for CONSUME_FROM_TIMESTAMP."""

    where: ConsumeFromWhere = ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET
    timestamp_ms: int = 0


RETRY_QUEUE_NUMS: Final = NumberRange(1, QUEUE_NUMS_MAX)
RETRY_MAX_TIMES: Final = NumberRange(0, 1000)


@dataclass(frozen=True, slots=True)
class GroupConfig:
    """A subscription group as a broker holds it (spec/messaging.md §2.7).

    `consume_enable`: whether its consumers get anything at all; `consume_broadcast_enable`: whether they may consume in
    BROADCASTING. `retry_queue_nums`: queues of its retry topic per broker group. `retry_max_times`: deliveries after
    the first before a message goes to the dead-letter topic.
    """

    group: str
    consume_enable: bool = True
    consume_broadcast_enable: bool = True
    retry_queue_nums: int = 1
    retry_max_times: int = 16


def check_group_config(config: GroupConfig) -> None:
    """InvalidArgumentError unless a group may be configured so."""
    check_fields(config, {"retry_queue_nums": RETRY_QUEUE_NUMS, "retry_max_times": RETRY_MAX_TIMES})
    for name in ("consume_enable", "consume_broadcast_enable"):
        if not isinstance(getattr(config, name), bool):
            raise InvalidArgumentError(f"{name} of group {config.group!r} is a bool, not {getattr(config, name)!r}")


class GroupChanges(TypedDict, total=False):
    """The keyword arguments of `Admin.update_group`: fields of GroupConfig."""

    consume_enable: bool
    consume_broadcast_enable: bool
    retry_queue_nums: int
    retry_max_times: int


@dataclass(frozen=True, slots=True)
class QueueOffset:
    """A group's committed offset in a queue. `reset_version` counts how often somebody has reset it there."""

    queue_offset: int
    reset_version: int = 0


@dataclass(frozen=True, slots=True)
class OffsetCommit:
    """A member's wish to commit `queue_offset`, the next message to consume.

    It counts only while the member owns the queue (`generation`, raymq.common.protocol.membership) and nobody has reset
    the offset since (`reset_version`, as the broker gave it with the start offset). It never moves an offset back, but
    with `backwards`: where the program itself has sought back. `queue_offset` None commits nothing and only asks.
    """

    queue_offset: int | None
    generation: int
    reset_version: int
    backwards: bool = False


@dataclass(frozen=True, slots=True)
class CommitAnswer:
    """The outcome of commits. `reset`: queues somebody has reset meanwhile, which go on there; `fenced`: queues that
    another member has begun with; `gone`: queues that do not exist any more. The others are committed.

    `stopped`: queues that the group may not read now, with the reason. Their commits count, but no further message of
    them may be delivered until an answer does not name them any more."""

    reset: Mapping[MessageQueue, QueueOffset] = field(default_factory=dict)
    fenced: frozenset[MessageQueue] = frozenset()
    gone: frozenset[MessageQueue] = frozenset()
    stopped: Mapping[MessageQueue, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SendBackAnswer:
    """The numbers of messages of a send-back that went to the retry topic, and to the dead-letter topic."""

    retried: int
    dead: int


@dataclass(frozen=True, slots=True)
class GroupQueueProgress:
    """A group's progress in one queue. `committed` is None where it has not committed yet; `lag_ms` is the age of the
    first message that it has not committed, 0 where there is none. `in_flight` messages behind it are handed out to
    simple consumers, and neither acknowledged nor visible again."""

    group: str
    queue: MessageQueue
    committed: int | None
    min_offset: int
    max_offset: int
    lag_ms: int = 0
    in_flight: int = 0

    @property
    def lag(self) -> int:
        """Messages in the queue that the group has not committed. An offset behind the queue's end, as a group may have
        in a light queue that was swept, is as good as the end."""
        return max(self.max_offset - max(self.committed or 0, self.min_offset), 0)


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """A group's progress in all its queues: `lag` messages are not consumed yet, the first of them stored `lag_ms` ago.

    `retry_lag` more have failed and are to be tried again now (those that still wait for that do not count);
    `dead_letters` were given up and are in `%DLQ%group`.
    """

    group: str
    queues: tuple[GroupQueueProgress, ...]
    lag: int
    lag_ms: int
    retry_lag: int
    dead_letters: int
