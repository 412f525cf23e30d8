"""Decides which messages consumers see: all messages in log order, up to a limit that only grows.

The limit is not on disk: after a restart consumers see everything that recovery kept.

A batch is written to the log before the writer thread adds it here. In between, the disk or another replica may already
have the batch, so the limit may already lie after the batch. Consumers then see the batch as soon as it is added. The
batch's queue is kept for the thread that wakes the waiting fetches (`take_late`).
"""

from __future__ import annotations

import threading
from collections import deque

from storage.queue.queue_table import AnyQueue

_Written = tuple[int, AnyQueue, int]
"""A written batch: the physical offset of its end, its queue, and the queue's next offset after the batch."""


class Visibility:
    """Batches that are written to the log but that consumers do not see yet. One thread adds batches. Another thread
    advances the log offset up to which consumers see messages. Initially consumers see nothing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._written: deque[_Written] = deque()
        self._late: list[AnyQueue] = []
        """Queues whose written batch consumers may see at once, because the batch ended at or before `visible_offset`
        when it was added."""
        # Physical offset up to which consumers see the log.
        self.visible_offset = 0

    def add(self, end_offset: int, queue: AnyQueue, next_offset: int) -> None:
        """Add a written batch. Once consumers may see the log up to `end_offset`, they may see `queue` up to
        `next_offset`."""
        with self._lock:
            if end_offset <= self.visible_offset:
                queue.visible_offset = next_offset
                self._late.append(queue)
            else:
                self._written.append((end_offset, queue, next_offset))

    def advance(self, limit: int) -> list[AnyQueue]:
        """Make the batches that end at or before physical offset `limit` visible to consumers. Returns their
        queues."""
        queues, written = [], self._written
        with self._lock:
            while written and written[0][0] <= limit:
                _, queue, next_offset = written.popleft()
                queue.visible_offset = next_offset
                queues.append(queue)
            self.visible_offset = max(self.visible_offset, limit)
        return queues

    def take_late(self) -> list[AnyQueue]:
        """Return the queues of batches that were added late: their bytes were already visible at that time, so they
        became visible at once. Each call returns only the queues since the last call. Called by the thread that adds
        batches."""
        if not self._late:
            return []
        with self._lock:
            late, self._late = self._late, []
        return late
