"""Decides which messages consumers see: all messages in log order, up to a limit that only grows.

The limit is not on disk: after a restart consumers see everything that recovery kept.

The writer thread first writes a batch to the log, and then adds the batch to this object. In between, the batch may
already be on disk or on another replica. So the limit may lie after the batch before the batch is added. Consumers then
see the batch as soon as it is added. The batch's queue is kept for the thread that wakes the waiting fetches
(`take_late`).
"""

from __future__ import annotations

import threading
from collections import deque

from storage.queue.queue_table import AnyQueue

_Written = tuple[int, AnyQueue, int]
"""A batch that is written to the log: the physical offset at which the batch ends, its queue, and the queue's next
offset after the batch."""


class Visibility:
    """Batches that are written to the log but that consumers do not see yet. One thread adds batches. Another thread
    advances the log offset up to which consumers see messages. Initially consumers see nothing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._written: deque[_Written] = deque()
        self._late: list[AnyQueue] = []
        """Queues with a written batch that consumers may see at once. When the batch was added, it ended at or before
        `visible_offset`."""
        # Physical offset up to which consumers see the log.
        self.visible_offset = 0

    def add(self, end_offset: int, queue: AnyQueue, next_offset: int) -> None:
        """Add a batch that is written to the log but may not be visible yet. Once consumers may see the log up to
        `end_offset`, they also see the queue `queue` up to `next_offset`."""
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
        """Return the queues of the late batches since the last call. A batch is late if its bytes were already visible
        when it was added, so the batch became visible at once. Called by the thread that adds batches."""
        if not self._late:
            return []
        with self._lock:
            late, self._late = self._late, []
        return late
