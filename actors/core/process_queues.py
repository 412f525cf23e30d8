"""What a push-consumer instance has in its hands: the decisions of the Pull actor.

One `ProcessQueue` per held queue. Runs of messages arrive in order, are handed to the listener one batch per queue at a
time, and are committed when the listener has finished them, so that a crash redelivers and never skips. A failed batch
is delivered again, whole, after a growing pause; the queue does not go past it.

    fetch → [buffered runs] → one batch in flight → committed offset
              paused above the thresholds (spec/messaging.md §5.6)

A queue being revoked takes nothing new, finishes or drops its batch in flight, and is then released: only then may the
instance stop reporting it to the group (raymq.membership). Nothing here survives the process; offsets do, at the
broker.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from raymq.message import MessageQueue

RETRY_PAUSE_FIRST_S = 1.0
RETRY_PAUSE_MAX_S = 30.0


@dataclass(frozen=True, slots=True)
class Batch:
    """Messages of one queue for one listener call. `next_offset`: where the queue stands once they are consumed."""

    queue: MessageQueue
    records: bytes
    count: int
    next_offset: int
    attempt: int


@dataclass(slots=True)
class _Run:
    records: bytes
    count: int
    next_offset: int


@dataclass(slots=True)
class ProcessQueue:
    """One queue. `fetch_offset`: read next; `commit_offset`: everything before it is consumed."""

    queue: MessageQueue
    fetch_offset: int
    commit_offset: int
    committed_offset: int
    runs: deque[_Run] = field(default_factory=deque)
    buffered_bytes: int = 0
    buffered_count: int = 0
    in_flight: Batch | None = None
    attempts: int = 0
    retry_at_s: float = 0.0
    revoked: bool = False

    @property
    def idle(self) -> bool:
        return self.in_flight is None


class ProcessQueues:
    """All queues of one instance. Thresholds are per queue: messages and bytes that may wait for the listener."""

    def __init__(self, *, threshold_count: int, threshold_bytes: int) -> None:
        self._threshold_count = threshold_count
        self._threshold_bytes = threshold_bytes
        self._queues: dict[MessageQueue, ProcessQueue] = {}
        self._ending: dict[MessageQueue, Batch] = {}

    def add(self, queue: MessageQueue, start_offset: int) -> None:
        """Begin with a queue that was granted."""
        if queue not in self._queues:
            self._queues[queue] = ProcessQueue(queue, start_offset, start_offset, start_offset)

    def revoke(self, queue: MessageQueue) -> None:
        """Take no more of a queue; `released` names it once its batch in flight has ended."""
        held = self._queues.get(queue)
        if held is not None:
            held.revoked = True
            held.runs.clear()
            held.buffered_count = held.buffered_bytes = 0

    @property
    def holding(self) -> frozenset[MessageQueue]:
        return frozenset(self._queues)

    def drop(self, queue: MessageQueue) -> None:
        """Forget a released (or fenced) queue. If it is added again, it waits for the batch that is in flight now."""
        held = self._queues.pop(queue, None)
        if held is not None and held.in_flight is not None:
            self._ending[queue] = held.in_flight

    def wanted(self) -> dict[MessageQueue, int]:
        """Queue to fetch offset, for the queues that have room."""
        return {
            queue: held.fetch_offset
            for queue, held in self._queues.items()
            if not held.revoked
            and held.buffered_count < self._threshold_count
            and held.buffered_bytes < self._threshold_bytes
        }

    def fetched(self, queue: MessageQueue, from_offset: int, records: bytes, count: int, next_offset: int) -> None:
        """Messages from `from_offset` up to `next_offset` arrived. An answer to an outdated question is ignored."""
        held = self._queues.get(queue)
        if held is None or held.revoked or held.fetch_offset != from_offset or next_offset <= from_offset:
            return
        held.fetch_offset = next_offset
        if count:
            held.runs.append(_Run(records, count, next_offset))
            held.buffered_count += count
            held.buffered_bytes += len(records)
        elif held.idle and not held.runs:
            held.commit_offset = next_offset  # all filtered out: consumed without anyone seeing it

    def jump(self, queue: MessageQueue, from_offset: int, to_offset: int) -> None:
        """The store says `from_offset` is not in the queue (any more): go on at `to_offset`."""
        held = self._queues.get(queue)
        if held is None or held.revoked or held.fetch_offset != from_offset:
            return
        empty = held.idle and not held.runs
        if to_offset > from_offset or empty:
            held.fetch_offset = to_offset  # what waits here was read before its place was gone: it is delivered first
        if empty:
            held.commit_offset = to_offset

    def deliverable(self, now_s: float) -> list[Batch]:
        """The next batch of each queue that has one and is not busy; they are in flight on return."""
        batches = []
        for held in self._queues.values():
            if held.queue in self._ending:
                continue  # held before, too: the listener still has a batch of then
            if held.idle and held.runs and not held.revoked and now_s >= held.retry_at_s:
                run = held.runs[0]
                held.in_flight = Batch(held.queue, run.records, run.count, run.next_offset, held.attempts)
                batches.append(held.in_flight)
        return batches

    def next_retry_s(self) -> float | None:
        """When the earliest pause after a failure ends."""
        pauses = [held.retry_at_s for held in self._queues.values() if held.idle and held.runs and not held.revoked]
        return min(pauses, default=None)

    def consumed(self, batch: Batch) -> None:
        """The listener finished a batch."""
        held = self._ended(batch)
        if held is None:
            return
        held.attempts = 0
        held.commit_offset = batch.next_offset
        if held.runs and not held.revoked:
            run = held.runs.popleft()
            held.buffered_count -= run.count
            held.buffered_bytes -= len(run.records)
            if not held.runs:
                held.commit_offset = held.fetch_offset

    def failed(self, batch: Batch, now_s: float) -> None:
        """The listener raised, asked for a later delivery, or died: the same batch again after a pause."""
        held = self._ended(batch)
        if held is None:
            return
        held.attempts += 1
        held.retry_at_s = now_s + min(RETRY_PAUSE_FIRST_S * 2 ** min(held.attempts - 1, 10), RETRY_PAUSE_MAX_S)

    def _ended(self, batch: Batch) -> ProcessQueue | None:
        """The queue whose batch in flight this was; None if the queue was given up meanwhile."""
        if self._ending.get(batch.queue) is batch:
            del self._ending[batch.queue]
            return None
        held = self._queues.get(batch.queue)
        if held is None or held.in_flight is not batch:
            return None
        held.in_flight = None
        return held

    def uncommitted(self) -> dict[MessageQueue, int]:
        """Offsets that are further than what `committed` was told."""
        return {
            queue: held.commit_offset
            for queue, held in self._queues.items()
            if held.commit_offset != held.committed_offset
        }

    def committed(self, queue: MessageQueue, offset: int) -> None:
        """The broker has stored this offset."""
        held = self._queues.get(queue)
        if held is not None:
            held.committed_offset = offset

    def released(self) -> list[MessageQueue]:
        """Revoked queues with nothing in flight and everything committed: they may be let go."""
        return [
            queue
            for queue, held in self._queues.items()
            if held.revoked and held.idle and queue not in self._ending and held.commit_offset == held.committed_offset
        ]

    def lag_buffered(self) -> dict[MessageQueue, int]:
        """Messages waiting here per queue."""
        return {queue: held.buffered_count for queue, held in self._queues.items()}
