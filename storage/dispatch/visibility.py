"""Visibility: consumers see messages in the order of the log, up to a limit that only grows.

The limit is not on disk: after a restart consumers see everything that recovery kept.

A batch is in the log before it is announced here, so the limit may pass it first: the disk, or another replica, has it
while its writer has lost the processor. Such a batch is seen as soon as it is announced, and its queue is kept for
whoever wakes the fetches that wait (`take_late`).
"""

from __future__ import annotations

import threading
from collections import deque

from storage.queue.queue_table import AnyQueue

_Written = tuple[int, AnyQueue, int]
"""The end in the log of a batch that was written, its queue, and the queue's next offset behind it."""


class Visibility:
    """The batches that are written and that consumers do not see yet. One thread adds, one advances. Consumers see
    nothing at the start."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._written: deque[_Written] = deque()
        self._late: list[AnyQueue] = []
        """The queues of batches that the limit had passed before they were added."""
        # The end of what consumers see of the log.
        self.visible_offset = 0

    def add(self, end_offset: int, queue: AnyQueue, next_offset: int) -> None:
        """Note that a batch was written: once the log is visible up to `end_offset`, `queue` is up to `next_offset`."""
        with self._lock:
            if end_offset <= self.visible_offset:
                queue.visible_offset = next_offset
                self._late.append(queue)
            else:
                self._written.append((end_offset, queue, next_offset))

    def advance(self, limit: int) -> list[AnyQueue]:
        """Let consumers see the batches that end at or before physical offset `limit`; returns their queues."""
        queues, written = [], self._written
        with self._lock:
            while written and written[0][0] <= limit:
                _, queue, next_offset = written.popleft()
                queue.visible_offset = next_offset
                queues.append(queue)
            self.visible_offset = max(self.visible_offset, limit)
        return queues

    def take_late(self) -> list[AnyQueue]:
        """The queues with batches that were seen when they were added, since the last call. The adding thread asks."""
        if not self._late:
            return []
        with self._lock:
            late, self._late = self._late, []
        return late
