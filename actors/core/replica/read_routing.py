"""Where a replica sends the consumers that read from it (spec/storage.md §10, suggestPullingFromSlave).

    master   whoever reads what is probably not in its memory any more goes to a slave in sync
    slave    whoever has come to what is in memory, or asks for what the slave does not have, goes to the master

A slave that does not hear its master keeps its readers: there may be nobody else. It never says that an offset is out
of range, for it may be behind, or begin later, and only the master knows the queue's bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from raymq.protocol.store import FetchRequest, FetchResult


@dataclass(frozen=True, slots=True)
class ReadRouting:
    """One replica's role, for its readers. `others`: the storage actors they may be sent to."""

    is_master: bool
    others: Sequence[str] = ()

    def guided(self, request: FetchRequest, result: FetchResult, *, in_memory: bool) -> FetchResult:
        """The answer to a consumer, whose next message is `in_memory` or not, with whom to ask next."""
        if not self.others:
            return result
        if self.is_master:
            return result if in_memory else replace(result, pull_from=self.others[request.queue_id % len(self.others)])
        in_range = result.min_offset <= result.next_offset <= result.max_offset
        return replace(result, pull_from=self.others[0]) if in_memory or not in_range else result
