"""The replica that a consumer should read from next (spec/storage.md §10, suggestPullingFromSlave).

    master   sends a reader of messages that are probably not in its memory any more to a slave in sync
    slave    sends a reader that has come to messages in memory, or that reads what the slave lacks, to the master

A slave that gets nothing from its master keeps its readers: there may be no other replica. It never answers that an
offset is out of range, for it may be behind, or begin later, and only the master knows the queue's bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from raymq.common.protocol.store import FetchRequest, FetchResult


@dataclass(frozen=True, slots=True)
class ReadRouting:
    """One replica's role, as its readers see it. `others`: the storage actors that they may be sent to."""

    is_master: bool
    others: Sequence[str] = ()

    def route(self, request: FetchRequest, result: FetchResult, *, in_memory: bool) -> FetchResult:
        """The answer to a consumer, with the storage actor to read from next; `in_memory`: its next message is in
        memory."""
        name = self.pull_from(
            request.queue_id, result.next_offset, result.min_offset, result.max_offset, in_memory=in_memory
        )
        return replace(result, pull_from=name) if name else result

    def pull_from(self, queue_id: int, next_offset: int, min_offset: int, max_offset: int, *, in_memory: bool) -> str:
        """The storage actor to read a queue from next, at `next_offset`; empty: this one. `in_memory`: its next message
        is in memory."""
        if not self.others:
            return ""
        if self.is_master:
            return "" if in_memory else self.others[queue_id % len(self.others)]
        in_range = min_offset <= next_offset <= max_offset
        return self.others[0] if in_memory or not in_range else ""
