"""How far consumers may read: messages are shown in the order of the log, up to a limit that only grows.

Nothing of this is on disk: after a restart everything that recovery kept is shown.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from storage.queue.queue_table import AnyQueue


class _Written(NamedTuple):
    end_offset: int
    queue: AnyQueue
    next_offset: int


class Visibility:
    """Batches that are written but not shown yet. One thread adds, one advances. Nothing is shown at the start."""

    def __init__(self) -> None:
        self._written: deque[_Written] = deque()
        self.visible_offset = 0

    def add(self, end_offset: int, queue: AnyQueue, next_offset: int) -> None:
        """A batch was written: once the log is shown up to `end_offset`, `queue` is up to `next_offset`."""
        self._written.append(_Written(end_offset, queue, next_offset))

    def advance(self, limit: int) -> list[AnyQueue]:
        """Show what ends at or before physical offset `limit`; returns the queues that have more now."""
        queues = []
        while self._written and self._written[0].end_offset <= limit:
            _, queue, next_offset = self._written.popleft()
            queue.visible_offset = next_offset
            queues.append(queue)
        self.visible_offset = max(self.visible_offset, limit)
        return queues
