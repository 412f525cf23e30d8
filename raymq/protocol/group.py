"""What a broker is asked and says about consumer groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from raymq.message import ConsumeFromWhere, MessageQueue


@dataclass(frozen=True, slots=True)
class StartOffsetQuery:
    """Where to start without a committed offset. `timestamp_ms` only counts for CONSUME_FROM_TIMESTAMP."""

    where: ConsumeFromWhere = ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET
    timestamp_ms: int = 0


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


@dataclass(frozen=True, slots=True)
class QueueOffset:
    """Where a group stands in a queue. `reset_version` counts how often somebody has reset it there."""

    queue_offset: int
    reset_version: int = 0


@dataclass(frozen=True, slots=True)
class OffsetCommit:
    """A member's wish to commit `queue_offset`, the next message to consume.

    It counts only while the member owns the queue (`generation`, raymq.protocol.membership) and nobody has reset the
    offset since (`reset_version`, as the broker gave it with the start offset). It never moves an offset back, but with
    `backwards`: where the program itself has sought back. `queue_offset` None commits nothing and only asks.
    """

    queue_offset: int | None
    generation: int
    reset_version: int
    backwards: bool = False


@dataclass(frozen=True, slots=True)
class CommitAnswer:
    """What became of commits. `reset`: queues somebody has reset meanwhile, which go on there; `fenced`: queues that
    another member has begun with; `gone`: queues whose topic does not exist any more. The others are committed."""

    reset: Mapping[MessageQueue, QueueOffset] = field(default_factory=dict)
    fenced: frozenset[MessageQueue] = frozenset()
    gone: frozenset[MessageQueue] = frozenset()


@dataclass(frozen=True, slots=True)
class SendBackAnswer:
    """How many messages of a send-back went to the retry topic, and how many to the dead-letter topic."""

    retried: int
    dead: int


@dataclass(frozen=True, slots=True)
class GroupQueueProgress:
    """How far a group is in one queue. `committed` is None where it has not committed yet; `lag_ms` is how long ago the
    first message was stored that it has not committed, 0 where there is none."""

    group: str
    queue: MessageQueue
    committed: int | None
    min_offset: int
    max_offset: int
    lag_ms: int = 0

    @property
    def lag(self) -> int:
        """Messages in the queue that the group has not committed."""
        return self.max_offset - max(self.committed or 0, self.min_offset)


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """How a group is doing: `lag` messages are not consumed yet, the first of them stored `lag_ms` ago.

    `retry_lag` more have failed and are to be tried again now (those that still wait for that do not count);
    `dead_letters` were given up and are in `%DLQ%group`.
    """

    group: str
    queues: tuple[GroupQueueProgress, ...]
    lag: int
    lag_ms: int
    retry_lag: int
    dead_letters: int
