"""Chooses the replica from which a consumer should read next (spec/storage.md §10, suggestPullingFromSlave).

    master   sends a reader of messages that are probably no longer in its memory to a slave in sync
    slave    sends a reader of messages in memory, or of messages that the slave lacks, to the master

A slave that gets no data from its master keeps its readers, because there may be no other replica. A slave never
answers that an offset is out of range: its log may end earlier, or begin later, than the master's log.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from raymq.common.protocol.store import FetchRequest, FetchResult


@dataclass(frozen=True, slots=True)
class ReadRouting:
    """Decides, by a replica's role, from which storage actor its readers read next. `others`: the storage actors to
    which readers may be sent."""

    is_master: bool
    others: Sequence[str] = ()

    def route(self, request: FetchRequest, result: FetchResult, *, in_memory: bool) -> FetchResult:
        """Add to a consumer's fetch result the storage actor to read from next, and return the result.

        `in_memory`: True if the consumer's next message is in memory.
        """
        name = self.pull_from(
            request.queue_id, result.next_offset, result.min_offset, result.max_offset, in_memory=in_memory
        )
        return replace(result, pull_from=name) if name else result

    def pull_from(self, queue_id: int, next_offset: int, min_offset: int, max_offset: int, *, in_memory: bool) -> str:
        """Return the storage actor from which a consumer should read a queue next, from `next_offset` on. Return an
        empty text if the consumer should continue to read from this actor.

        `in_memory`: True if the consumer's next message is in memory.
        """
        if not self.others:
            return ""
        if self.is_master:
            return "" if in_memory else self.others[queue_id % len(self.others)]
        in_range = min_offset <= next_offset <= max_offset
        return self.others[0] if in_memory or not in_range else ""
