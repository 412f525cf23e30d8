"""Visibility: consumers see messages in the order of the log, up to a limit that only grows.

The limit is not on disk: after a restart consumers see everything that recovery kept.
"""

from __future__ import annotations

from collections import deque

from storage.queue.queue_table import AnyQueue

_Written = tuple[int, AnyQueue, int]
"""The end in the log of a batch that was written, its queue, and the queue's next offset behind it."""


class Visibility:
    """The batches that are written and that consumers do not see yet. One thread adds, one advances. Consumers see
    nothing at the start."""

    def __init__(self) -> None:
        self._written: deque[_Written] = deque()
        # The end of what consumers see of the log.
        self.visible_offset = 0

    def add(self, end_offset: int, queue: AnyQueue, next_offset: int) -> None:
        """Note that a batch was written: once the log is visible up to `end_offset`, `queue` is up to `next_offset`."""
        self._written.append((end_offset, queue, next_offset))

    def advance(self, limit: int) -> list[AnyQueue]:
        """Let consumers see the batches that end at or before physical offset `limit`; returns their queues."""
        queues, written = [], self._written
        while written and written[0][0] <= limit:
            _, queue, next_offset = written.popleft()
            queue.visible_offset = next_offset
            queues.append(queue)
        self.visible_offset = max(self.visible_offset, limit)
        return queues
