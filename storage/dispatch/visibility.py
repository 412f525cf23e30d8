"""Visibility: consumers see messages in the order of the log, up to a limit that only grows.

The limit is not on disk: after a restart consumers see everything that recovery kept.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from storage.queue.queue_table import AnyQueue


class _Written(NamedTuple):
    """A batch that ends at `end_offset` of the log, with which `queue` ends at `next_offset`."""

    end_offset: int
    queue: AnyQueue
    next_offset: int


class Visibility:
    """The batches that are written and that consumers do not see yet. One thread adds, one advances. Consumers see
    nothing at the start."""

    def __init__(self) -> None:
        self._written: deque[_Written] = deque()
        # The end of what consumers see of the log.
        self.visible_offset = 0

    def add(self, end_offset: int, queue: AnyQueue, next_offset: int) -> None:
        """Note that a batch was written: once the log is visible up to `end_offset`, `queue` is up to `next_offset`."""
        self._written.append(_Written(end_offset, queue, next_offset))

    def advance(self, limit: int) -> list[AnyQueue]:
        """Let consumers see the batches that end at or before physical offset `limit`; returns their queues."""
        queues = []
        while self._written and self._written[0].end_offset <= limit:
            _, queue, next_offset = self._written.popleft()
            queue.visible_offset = next_offset
            queues.append(queue)
        self.visible_offset = max(self.visible_offset, limit)
        return queues
