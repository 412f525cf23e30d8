"""AssignedMessageQueue is a queue of a pull consumer: its offsets, and the records that wait for a poll.

No threads, no clock, no calls: raymq.client.consumer.pull.subscription_state has all queues of a consumer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from raymq.client.consumer.assignment.assigned_queue import AssignedQueue, AssignmentState
from raymq.client.consumer.assignment.unfinished_offsets import UnfinishedOffsets
from raymq.client.consumer.pull.fetched_records import FetchedRecords, PolledRecords
from raymq.common.protocol.group import QueueOffset


@dataclass(slots=True)
class QueueFlags:
    """The state of one queue as SubscriptionState's tables have it."""

    tables: tuple[bool, ...] = ()
    """The tables that have the queue."""
    hungry_at: int = -1
    """The offset to fetch; -1 if it is not to be fetched."""
    news_at: int = -1
    """The offset from which new records are awaited; -1 if the queue is not read in place."""
    count: int = 0
    """The `buffered_count` and `buffered_bytes` that the totals have."""
    size_bytes: int = 0


@dataclass(slots=True, eq=False)
class AssignedMessageQueue(AssignedQueue):
    """One assignment of a queue, from its grant to its release. Its offsets: done ≤ position ≤ fetch_offset."""

    position: int = 0
    """The next offset that a poll returns."""
    done: int = 0
    """The program has finished with every message before it."""
    buffered: deque[FetchedRecords] = field(default_factory=deque)
    """The records that wait for a poll; none while the queue is paused or revoked."""
    buffered_count: int = 0
    buffered_bytes: int = 0
    noted: QueueFlags = field(default_factory=QueueFlags)
    """The state of this queue that the consumer's tables show."""
    mapped: bool = False
    """The queue is read in place, from mapped files of a storage actor on this node; else by fetches."""
    known_end: int = 0
    """The visible end of the queue, as last heard; for a queue that is read in place."""
    fetching: bool = False
    """A fetch from `fetch_offset` is under way, and its result is wanted."""
    settled: bool = True
    """The program has finished with everything that polls returned."""
    paused: bool = False
    unfinished: UnfinishedOffsets | None = None
    """The messages that polls returned and the program has not acknowledged; None unless it acknowledges each."""

    def start(self, start: QueueOffset) -> None:
        """Fetch from the start offset. Without a group no broker has stored the offset, so it must be committed."""
        AssignedQueue.start(self, start)
        self.position = self.done = start.queue_offset
        if not self.generation:
            self.committed = None

    def revoke(self, now_s: float) -> None:
        """Neither fetch nor return messages of the queue."""
        AssignedQueue.revoke(self, now_s)
        self.refetch_from(self.position)

    def hold_back(self) -> None:
        """Drop the buffered records: polls return nothing of the queue now."""
        self.refetch_from(self.position)

    @property
    def commit_offset(self) -> int:
        """The offset to commit: the program has finished with every message before it."""
        return self.done

    @property
    def silent(self) -> bool:
        """True if the queue is neither fetched from nor returned."""
        return self.paused or self.forbidden is not None or self.state is not AssignmentState.STARTED

    @property
    def unread(self) -> bool:
        """True if the mapped files have more of the queue than was found."""
        return self.mapped and not self.silent and self.fetch_offset < self.known_end

    def refetch_from(self, offset: int) -> None:
        """Drop the buffered records and the fetch under way, and fetch from `offset`, which polls return next."""
        self.fetch_offset = self.position = offset
        self.fetching = False
        self.buffered.clear()
        self.buffered_count = self.buffered_bytes = 0

    def seek(self, offset: int) -> None:
        """Continue at `offset`: earlier messages count as finished, later ones do not."""
        self.refetch_from(offset)
        self.done = offset
        self.forget_returned()

    def forget_returned(self) -> None:
        """Expect no acknowledgement of what polls have returned so far."""
        if self.unfinished is not None:
            self.unfinished = UnfinishedOffsets()

    def reset(self, start: QueueOffset) -> None:
        """Continue at the offset to which the group was reset."""
        self.seek(start.queue_offset)
        self.committed, self.reset_version = start.queue_offset, start.reset_version
        self.backwards, self.asked = False, None

    def expect(self, offsets: Sequence[int]) -> None:
        """Expect acknowledgements of messages that a poll returns."""
        if self.unfinished is not None and offsets:
            self.unfinished.add(offsets)

    def acknowledge(self, offsets: Collection[int]) -> None:
        """Count messages as finished. Messages that are not expected change nothing."""
        if self.unfinished is not None:
            self.unfinished.remove(offsets)

    def follow_acknowledgements(self) -> None:
        """Count every message before the first unacknowledged one as finished."""
        if self.unfinished is not None:
            self.settled = not len(self.unfinished)
            self.done = self.position if self.settled else self.unfinished.first

    def finish(self) -> None:
        """Count everything that polls returned as finished."""
        self.done = self.position
        self.settled = True

    def fetched(self, fetched: FetchedRecords) -> None:
        """Buffer the records that the fetch under way found; it may have found none, and skipped some."""
        self.fetching = False
        self.fetch_offset = fetched.next_offset
        if fetched.count:
            self.buffered.append(fetched)
            self.buffered_count += fetched.count
            self.buffered_bytes += fetched.size_bytes
        elif self.buffered:
            self.buffered[-1].next_offset = fetched.next_offset
        else:
            self.position = fetched.next_offset

    def returned(self, part: PolledRecords) -> None:
        """Take the records that a poll returns off the front of the buffer."""
        fetched = self.buffered[0]
        self.position = part.next_offset
        self.buffered_count -= part.count
        self.buffered_bytes -= part.size_bytes
        self.settled = False
        fetched.first += part.count
        if not fetched.count:
            self.buffered.popleft()
