"""What a broker is asked and says about consumer groups."""

from __future__ import annotations

from dataclasses import dataclass

from raymq.message import ConsumeFromWhere, MessageQueue


@dataclass(frozen=True, slots=True)
class StartOffsetQuery:
    """Where to start without a committed offset. `timestamp_ms` only counts for CONSUME_FROM_TIMESTAMP."""

    where: ConsumeFromWhere = ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET
    timestamp_ms: int = 0


@dataclass(frozen=True, slots=True)
class GroupQueueProgress:
    """How far a group is in one queue. `committed` is None where it has not committed yet."""

    group: str
    queue: MessageQueue
    committed: int | None
    min_offset: int
    max_offset: int

    @property
    def lag(self) -> int:
        """Messages in the queue that the group has not committed."""
        return self.max_offset - max(self.committed or 0, self.min_offset)
